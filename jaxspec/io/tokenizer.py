"""Text to ids and back: Hugging Face folders, GGUF files, and character tokenizers for toys."""

import datetime
import json
import pathlib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import numpy as np
import tokenizers
from jaxtyping import Bool
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxspec.io.policy import PACKAGE, package_gguf

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")

# Noncharacters of Unicode: no text holds them, so they can mark what a template calls generated.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# `tokenizer.ggml.pre` -> the patterns that cut a text one after the other before byte-level BPE
# (the models' own tokenizer.json files; "default" as in llama.cpp's llama-vocab.cpp).
GGUF_PATTERNS = {
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_WORDS % "{1,3}",),
    "qwen2": (_WORDS % "",),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
}
_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType

CHARACTER_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


class Tokenizer:
    """A `tokenizers` tokenizer with its special tokens and its chat template.

    Attributes:
      backend: the tokenizer of the `tokenizers` library.
      chat_template: Jinja source that renders a conversation, or None.
      special_tokens: text of "bos_token", "eos_token", "unk_token" and "pad_token" where set.
      eos_token_ids: ids that end a reply; the first is that of `eos_token`.
      vocab_size: one more than the largest id.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
    ):
        """Wraps a backend.

        Args:
          backend: the tokenizer of the `tokenizers` library.
          special_tokens: text of the special tokens by name.
          chat_template: Jinja source, if any.
          eos_token_ids: further ids that end a reply.

        Raises:
          ValueError: if a special token or id is not in the vocabulary.
        """
        self.backend = backend
        self.chat_template = chat_template
        self.special_tokens = dict(special_tokens)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values()) + 1
        for name, text in self.special_tokens.items():
            if name not in SPECIAL_NAMES:
                raise ValueError(f"special token {name!r}; known names are {SPECIAL_NAMES}")
            if text not in vocab:
                raise ValueError(f"{name} is {text!r}, which the vocabulary does not hold")
        eos = self._special_id("eos_token")
        ids = ([] if eos is None else [eos]) + [int(i) for i in eos_token_ids]
        self.eos_token_ids = tuple(dict.fromkeys(ids))
        bad = [i for i in self.eos_token_ids if not 0 <= i < self.vocab_size]
        if bad:
            raise ValueError(f"eos_token_ids {bad} lie outside the vocabulary of {self.vocab_size}")
        self._missing_bytes = _missing_bytes(backend, vocab)
        self._marks = bool(chat_template and re.search(r"\{%[-+]?\s*generation\b", chat_template))
        self._compiled: jinja2.Template | None = None

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self.backend.token_to_id(text)

    @property
    def bos_token_id(self) -> int | None:
        """Id that starts a document, if any."""
        return self._special_id("bos_token")

    @property
    def pad_token_id(self) -> int | None:
        """Id that fills a row, if any."""
        return self._special_id("pad_token")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Returns the ids of a text; special tokens written in it become their ids.

        Bytes for which the vocabulary has no token are dropped, as `transformers` does, with a
        warning that names them.

        Args:
          text: any text.
          add_special_tokens: also add what the tokenizer puts around a document (a BOS).

        Raises:
          ValueError: if the text holds a character that a character tokenizer does not know.
        """
        dropped = self._missing_bytes.intersection(text.encode()) if self._missing_bytes else ()
        if dropped:
            names = ", ".join(f"0x{b:02x}" for b in sorted(dropped))
            warnings.warn(f"no token for the bytes {names}; they are dropped", stacklevel=2)
        if isinstance(self.backend.model, models.WordLevel):
            self._check_characters(text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _check_characters(self, text: str) -> None:
        for special in self.special_tokens.values():
            text = text.replace(special, "")
        unknown = sorted({c for c in text if self.backend.token_to_id(c) is None})
        if unknown:
            raise ValueError(f"characters {unknown} are not in the tokenizer's alphabet")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Returns the text of ids.

        Ids at or above `vocab_size` (the padding rows of an embedding) read as U+FFFD.

        Args:
          ids: token ids.
          skip_special_tokens: leave special tokens out.

        Raises:
          ValueError: if an id is negative.
        """
        pieces: list[list[int]] = [[]]
        for i in map(int, ids):
            if i < 0:
                raise ValueError(f"cannot decode id {i}; cut padding off before decoding")
            if i < self.vocab_size:
                pieces[-1].append(i)
            else:
                pieces.append([])
        return "\ufffd".join(
            self.backend.decode(p, skip_special_tokens=skip_special_tokens) for p in pieces
        )

    def apply_chat_template(
        self, messages: Sequence[dict], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """Renders a conversation as the text that the policy reads.

        Args:
          messages: dicts with "role" and "content".
          add_generation_prompt: end with the opening of an assistant's turn.
          **variables: further variables of the template (such as `enable_thinking`).

        Raises:
          ValueError: if there is no template, it is malformed, or it refuses the conversation.
        """
        text = self._render(messages, add_generation_prompt, variables)
        return text.replace(_OPEN, "").replace(_CLOSE, "") if self._marks else text

    def assistant_mask(
        self, messages: Sequence[dict], **variables: Any
    ) -> tuple[list[int], Bool[np.ndarray, " tokens"]]:
        """Tokenizes a conversation and marks what its assistants said.

        A turn counts from the end of its generation prompt up to and with the stop token. Prompts
        and replies are encoded one by one, as a rollout sees them: no token spans the boundary.

        Args:
          messages: dicts with "role" and "content".
          **variables: further variables of the template.

        Returns:
          The ids, and True where an assistant's token stands.

        Raises:
          ValueError: if the template does not render a turn as its prompt followed by a reply.
        """
        text, spans = self._assistant_spans(messages, variables)
        ids: list[int] = []
        mask: list[bool] = []
        cuts = [0, *(c for span in spans for c in span), len(text)]
        for index, (start, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
            piece = self.encode(text[start:end])
            ids += piece
            mask += [index % 2 == 1] * len(piece)
        if self.decode(ids) != self.decode(self.encode(text)):
            raise ValueError(
                "the tokenizer reads a reply after its prompt differently from one on its own, "
                "so the assistants' tokens cannot be told apart"
            )
        return ids, np.array(mask, bool)

    def _assistant_spans(
        self, messages: Sequence[dict], variables: dict
    ) -> tuple[str, list[tuple[int, int]]]:
        text = self._render(messages, False, variables)
        spans: list[tuple[int, int]] = []
        if self._marks:  # the template says itself what is generated
            plain, opened = "", 0
            for part in text.replace(_CLOSE, _OPEN).split(_OPEN):
                opened = not opened
                if not opened:
                    spans.append((len(plain), len(plain) + len(part)))
                plain += part
            return plain, spans
        stops = [self.backend.id_to_token(i) for i in self.eos_token_ids]
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._render(messages[:turn], True, variables)
            whole = self._render(messages[: turn + 1], False, variables)
            if not text.startswith(prompt):
                raise ValueError(
                    f"message {turn}: the chat template does not render the conversation as the "
                    "prompt of this turn followed by a reply"
                )
            # Some templates rewrite earlier turns (thoughts removed); then only a stop token ends
            # the turn.
            reply = (whole if text.startswith(whole) else text)[len(prompt) :]
            ends = [reply.index(s) + len(s) for s in stops if s in reply]
            if not ends and not text.startswith(whole):
                raise ValueError(
                    f"message {turn}: the chat template rewrites this turn in a longer "
                    "conversation and ends it with no stop token"
                )
            spans.append((len(prompt), len(prompt) + min(ends, default=len(reply))))
        return text, spans

    def _render(self, messages: Sequence[dict], add_generation_prompt: bool, more: dict) -> str:
        if self.chat_template is None:
            raise ValueError(
                "the tokenizer has no chat template; give a prompt as plain text, or put "
                "chat_template in tokenizer_config.json"
            )
        for index, message in enumerate(messages):
            if not isinstance(message.get("role"), str) or "content" not in message:
                raise ValueError(f"message {index} needs a role and a content; got {message}")
        written = json.dumps(list(messages), ensure_ascii=False, default=str) if self._marks else ""
        if _OPEN in written or _CLOSE in written:
            raise ValueError("a message holds the noncharacter U+FDD0 or U+FDD1; remove it")
        try:
            if self._compiled is None:
                self._compiled = _environment().from_string(self.chat_template)
            return self._compiled.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.special_tokens, **more},
            )
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, TypeError) as error:
            roles = [m["role"] for m in messages]
            raise ValueError(f"chat template, for the roles {roles}: {error}") from error

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes a folder that `load_tokenizer` and `transformers.AutoTokenizer` read.

        Args:
          folder: made if absent; other files in it are left alone.
        """
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **self.special_tokens,
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        if len(self.eos_token_ids) > 1:
            config["eos_token_ids"] = list(self.eos_token_ids)
        self.backend.save(str(folder / "tokenizer.json"))
        for name, value in (
            ("tokenizer_config.json", config),
            ("special_tokens_map.json", self.special_tokens),
        ):
            (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def load_tokenizer(source: str) -> Tokenizer:
    """Loads a tokenizer.

    Args:
      source: a Hugging Face folder with tokenizer.json, a .gguf file, or "package:NAME" for the
        one .gguf file inside an installed Python package (which is not imported).

    Raises:
      ValueError: if nothing readable is there, naming what was looked for.
    """
    if source.startswith(PACKAGE):
        return _load_gguf(package_gguf(source.removeprefix(PACKAGE)))
    path = pathlib.Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ValueError(f"no tokenizer: {path} is not a file")
        return _load_gguf(path)
    return _load_folder(path)


def character_tokenizer(alphabet: str) -> Tokenizer:
    """Makes a tokenizer with one id per character, for toy runs.

    Ids 0, 1, 2 are <pad>, <eos>, <bos>; the characters follow in the order given. The chat template
    puts contents one after the other, with <eos> behind an assistant's.

    Args:
      alphabet: the characters, each once.

    Raises:
      ValueError: if the alphabet is empty or repeats a character.
    """
    repeated = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if not alphabet or repeated:
        raise ValueError(f"the alphabet {alphabet!r} must be non-empty; repeated: {repeated}")
    special = ["<pad>", "<eos>", "<bos>"]
    vocab = {token: i for i, token in enumerate([*special, *alphabet])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    return Tokenizer(
        backend,
        special_tokens={"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>"},
        chat_template=CHARACTER_TEMPLATE,
    )


def _load_folder(folder: pathlib.Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"no tokenizer: {file} is absent (a folder needs tokenizer.json)")
    backend = tokenizers.Tokenizer.from_file(str(file))
    config = _read_json(folder / "tokenizer_config.json")
    special_map = _read_json(folder / "special_tokens_map.json")
    special = {}
    for name in SPECIAL_NAMES:
        value = config.get(name) or special_map.get(name)
        if value is not None:  # a string, or an AddedToken written out
            special[name] = value["content"] if isinstance(value, dict) else value
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {t["name"]: t["template"] for t in template}.get("default")
    jinja_file = folder / "chat_template.jinja"
    if jinja_file.is_file():
        template = jinja_file.read_text()
    stops = _read_json(folder / "generation_config.json").get("eos_token_id") or []
    stops = [stops] if isinstance(stops, int) else stops
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=template,
        eos_token_ids=[*config.get("eos_token_ids", []), *stops],
    )


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    return json.loads(file.read_text()) if file.is_file() else {}


def _load_gguf(path: pathlib.Path) -> Tokenizer:
    import gguf  # slow to import, and of no use to a folder

    fields = gguf.GGUFReader(path).fields

    def get(key: str, default: Any = None) -> Any:
        return fields[key].contents() if key in fields else default

    model, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "default")
    if model != "gpt2":
        raise ValueError(f"{path.name}: tokenizer.ggml.model is {model!r}; only 'gpt2' is read")
    if pre not in GGUF_PATTERNS:
        known = sorted(GGUF_PATTERNS)
        raise ValueError(f"{path.name}: tokenizer.ggml.pre is {pre!r}; known are {known}")
    tokens = get("tokenizer.ggml.tokens")
    backend = _byte_level_bpe(tokens, get("tokenizer.ggml.merges"), pre)
    for text, kind in zip(tokens, get("tokenizer.ggml.token_type"), strict=True):
        if kind == _CONTROL:
            backend.add_special_tokens([AddedToken(text, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            backend.add_tokens([AddedToken(text, special=False, normalized=False)])
    ids = {
        "bos_token": get("tokenizer.ggml.bos_token_id"),
        "eos_token": get("tokenizer.ggml.eos_token_id"),
        "unk_token": get("tokenizer.ggml.unknown_token_id"),
        "pad_token": get("tokenizer.ggml.padding_token_id"),
    }
    special = {name: tokens[i] for name, i in ids.items() if i is not None}
    around = ["$A"]
    if get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") and "bos_token" in special:
        around.insert(0, special["bos_token"])
    if get("tokenizer.ggml.add_eos_token", False) and "eos_token" in special:
        around.append(special["eos_token"])
    if len(around) > 1:
        pairs = [(t, tokens.index(t)) for t in dict.fromkeys(around) if t != "$A"]
        backend.post_processor = processors.TemplateProcessing(
            single=around, pair=None, special_tokens=pairs
        )
    eot = get("tokenizer.ggml.eot_token_id")
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=get("tokenizer.chat_template"),
        eos_token_ids=[] if eot is None else [eot],
    )


def _byte_level_bpe(tokens: list[str], merges: list[str], pre: str) -> tokenizers.Tokenizer:
    pairs = [tuple(m.split(" ")) for m in merges]
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes a whole word that is in the vocabulary without merging its way there.
    bpe = models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre == "llama-bpe")
    backend = tokenizers.Tokenizer(bpe)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    split = [pre_tokenizers.Split(Regex(p), "isolated") for p in GGUF_PATTERNS[pre]]
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_])
    backend.decoder = decoders.ByteLevel()
    return backend


def _missing_bytes(backend: tokenizers.Tokenizer, vocab: Mapping[str, int]) -> frozenset[int]:
    if not isinstance(backend.decoder, decoders.ByteLevel):
        return frozenset()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    # GPT-2's byte alphabet: printable bytes are themselves, the others count up from U+0100.
    letter = {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(hidden)}
    return frozenset(b for b, c in letter.items() if c not in vocab)


class _Generation(jinja2.ext.Extension):
    """The block `{% generation %}` of `transformers`: its text is marked as the assistant's."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        """Wraps the block's text in marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return _OPEN + caller() + _CLOSE


def _environment() -> ImmutableSandboxedEnvironment:
    """Returns the sandbox in which `transformers` renders chat templates."""

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        x: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def strftime_now(form: str) -> str:
        return datetime.datetime.now().strftime(form)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment
