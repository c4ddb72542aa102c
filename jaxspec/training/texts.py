"""Documents for a draft's warm-up from a JSONL file of conversations."""

import json
from pathlib import Path

import numpy as np

from jaxspec.packing import Sample
from jaxspec.training.setup import Run


def read_samples(run: Run, path: str | Path) -> list[Sample]:
    """Reads samples, one JSON object a line: {"messages": [...]} or {"prompt": ..., "reply": ...}.

    What assistants say is trained; a conversation's first assistant turn begins the reply, and
    what others say after it is masked out. A prompt is one user message in the chat template.

    Args:
      run: whose tokenizer and row length apply.
      path: the file.

    Raises:
      ValueError: naming the line, for anything else, for no lines at all, and for a text longer
        than a row.
    """
    samples = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        ids, said = _tokens(run, line, where)
        if not said.any():
            raise ValueError(f"{where}: no assistant says anything")
        first = int(np.argmax(said))
        limit = run.experiment.packing.row_length
        if len(ids) > limit:
            raise ValueError(
                f"{where}: {len(ids)} tokens do not fit PackingConfig.row_length={limit}"
            )
        if first == 0:
            raise ValueError(f"{where}: there is no prompt before the reply")
        reply = ids[first:]
        samples.append(
            Sample(
                prompt=ids[:first],
                reply=reply,
                logprobs=np.zeros(len(reply), np.float32),
                advantage=0.0,
                mask=said[first:],
                group=len(samples),
            )
        )
    if not samples:
        raise ValueError(f"{path} holds no texts; write one JSON object a line")
    return samples


def _tokens(run: Run, line: str, where: str) -> tuple[np.ndarray, np.ndarray]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} is not a JSON object")
    if set(record) == {"prompt", "reply"}:
        user = {"role": "user", "content": record["prompt"]}
        prompt = run.tokenizer.encode(run.tokenizer.apply_chat_template([user]))
        reply = [*run.tokenizer.encode(record["reply"]), run.stop_ids[0]]
        said = np.arange(len(prompt) + len(reply)) >= len(prompt)
        return np.asarray([*prompt, *reply], np.int32), said
    if set(record) == {"messages"}:
        ids, said = run.tokenizer.assistant_mask(record["messages"])
        return np.asarray(ids, np.int32), np.asarray(said, bool)
    raise ValueError(
        f"{where} has the keys {sorted(record)}; expected 'messages', or 'prompt' and 'reply'"
    )
