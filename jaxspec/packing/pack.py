"""Documents packed into rows of one length, every shift made on the host.

A device never needs a neighbour's tokens: row i carries the ids and masks of the tokens ahead of
it, shifted inside its own document. Replies to one prompt may share a stored copy of it.
"""

from collections.abc import Sequence

import jax
import numpy as np

from jaxspec.packing.batch import PackedBatch, PackStats, Sample

# One run of a document's tokens: (row, sample, first position, end position, is shared prompt).
_Segment = tuple[int, int, int, int, bool]


def _place(
    prefixes: np.ndarray, tails: np.ndarray, groups: np.ndarray, row_length: int
) -> tuple[list[_Segment], int]:
    """Assigns samples to rows, group by group, best fit, largest first.

    A group goes whole into the fullest open row that takes it. Failing that its largest replies
    go where most is free, with one more copy of the prompt, and a row is opened only for a reply
    that fits nowhere. Hence any two rows hold more than `row_length` tokens together, so that less
    than half of the rows' tokens is padding as soon as there are two, whatever the lengths.

    Args:
      prefixes: tokens that each sample's group stores once.
      tails: tokens of each sample that are its own.
      groups: group number of each sample.
      row_length: tokens in a row.

    Returns:
      The segments in order of column for each row, and the number of rows.
    """
    members: dict[int, list[int]] = {}
    for sample in np.lexsort((-tails, groups)):
        members.setdefault(int(groups[sample]), []).append(int(sample))
    cost = {g: int(prefixes[m[0]] + tails[m].sum()) for g, m in members.items()}

    free = np.full(len(tails), -1, np.int64)  # -1: not opened
    segments: list[_Segment] = []
    rows = 0
    for group in sorted(members, key=lambda g: (-cost[g], g)):
        waiting = members[group]
        prefix = int(prefixes[waiting[0]])
        while waiting:
            whole = prefix + int(tails[waiting].sum())
            fits = np.flatnonzero(free[:rows] >= whole)
            if len(fits):
                row = int(fits[np.argmin(free[fits])])
            elif rows and free[:rows].max() >= prefix + tails[waiting[0]]:
                row = int(np.argmax(free[:rows]))
            else:
                row, free[rows], rows = rows, row_length, rows + 1
            if prefix:
                segments.append((row, waiting[0], 0, prefix, True))
                free[row] -= prefix
            left = []
            for sample in waiting:
                if tails[sample] <= free[row]:
                    segments.append((row, sample, prefix, prefix + int(tails[sample]), False))
                    free[row] -= tails[sample]
                else:
                    left.append(sample)
            waiting = left
    return segments, rows


def _check(samples: Sequence[Sample], row_length: int, share: bool) -> None:
    prompts: dict[int, np.ndarray] = {}
    for sample in samples:
        length = len(sample.prompt) + len(sample.reply)
        if length > row_length:
            raise ValueError(
                f"a document of {length} tokens (prompt {len(sample.prompt)}, reply "
                f"{len(sample.reply)}) does not fit a row of {row_length}; raise "
                "PackingConfig.row_length or shorten prompts and replies"
            )
        first = prompts.setdefault(sample.group, sample.prompt)
        if share and not np.array_equal(first, sample.prompt):
            raise ValueError(
                f"group {sample.group} holds different prompts (of {len(first)} and "
                f"{len(sample.prompt)} tokens); give each prompt its own group or set "
                "PackingConfig.share_prompts to False"
            )


def pack(
    samples: Sequence[Sample],
    *,
    row_length: int,
    num_ahead: int,
    share_prompts: bool = True,
    rows_multiple: int = 1,
    packed: bool = True,
) -> tuple[PackedBatch, PackStats]:
    """Packs samples into rows; neither rows nor their order depend on the order of samples.

    (Samples of one group and one length may trade places.) There are never more rows than samples.

    With shared prompts, all but the last `num_ahead` tokens of a prompt are stored once for the
    replies to it in a row, and each reply begins with a copy of the rest: pass d of a draft trains
    the rows from p - d - 1 on, where p is the prompt's length, and these look ahead into the reply.
    A prompt of `num_ahead` tokens or fewer is copied whole.

    Args:
      samples: documents to pack; none gives `rows_multiple` rows of padding.
      row_length: tokens in a row.
      num_ahead: tokens that each row looks ahead: K + 1 for a draft of K training passes, 1
        without a draft. It is the last axis of `ahead_tokens`.
      share_prompts: whether samples of one group share their prompt.
      rows_multiple: empty rows are added until their number is a multiple of this.
      packed: False gives every document a row of its own and shares nothing.

    Returns:
      The batch in numpy arrays, and what packing cost.

    Raises:
      ValueError: a document is longer than a row, a shared group has two prompts, or a setting
        is below 1.
    """
    for name, value in (("num_ahead", num_ahead), ("rows_multiple", rows_multiple)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    share = share_prompts and packed
    _check(samples, row_length, share)
    prompts = np.array([len(s.prompt) for s in samples], np.int64)
    lengths = prompts + np.array([len(s.reply) for s in samples], np.int64)
    groups = np.array([s.group for s in samples], np.int64)
    prefixes = np.maximum(prompts - num_ahead, 0) if share else np.zeros_like(prompts)
    if packed:
        # Unshared, a sample still sorts by its group, but each is placed alone.
        order = np.lexsort((groups, -lengths))
        alone = np.empty_like(groups)
        alone[order] = np.arange(len(order))
        segments, rows = _place(
            prefixes, lengths - prefixes, groups if share else alone, row_length
        )
    else:
        order = np.lexsort((groups, -lengths))
        segments = [(r, int(s), 0, int(lengths[s]), False) for r, s in enumerate(order)]
        rows = len(samples)
    total = max(-(-rows // rows_multiple), 1) * rows_multiple
    batch = _fill(samples, segments, lengths, total, row_length, num_ahead, 2 if share else 1)
    used = sum(end - start for _, _, start, end, _ in segments)
    stats = PackStats(
        samples=len(samples),
        rows=rows,
        padding_rows=total - rows,
        row_length=row_length,
        used=used,
        saved=int(lengths.sum()) - used,
        trained=int(batch.ahead_mask[..., 0].sum()),
        prompt_copies=sum(shared for *_, shared in segments),
    )
    return batch, stats


def _fill(
    samples: Sequence[Sample],
    segments: list[_Segment],
    lengths: np.ndarray,
    rows: int,
    row_length: int,
    num_ahead: int,
    ranges: int,
) -> PackedBatch:
    """Writes the arrays for all segments at once."""
    # Per token of all samples on end, with one entry after the last that stands for padding.
    text = np.zeros(int(lengths.sum()) + 1, np.int32)
    trained = np.zeros(len(text), bool)
    logprobs = np.zeros(len(text), np.float32)
    if samples:
        text[:-1] = np.concatenate([part for s in samples for part in (s.prompt, s.reply)])
        trained[:-1] = np.concatenate(
            [part for s in samples for part in (np.zeros(len(s.prompt), bool), s.mask)]
        )
        logprobs[trained] = np.concatenate([s.logprobs[s.mask] for s in samples])
    document = np.repeat(np.arange(len(samples) + 1), np.r_[lengths, 1])
    ahead_tokens = np.zeros((len(text), num_ahead), np.int32)
    ahead_mask = np.zeros((len(text), num_ahead), bool)
    for d in range(1, min(num_ahead, len(text) - 1) + 1):
        same = document[d:] == document[:-d]
        ahead_tokens[:-d, d - 1] = text[d:] * same
        ahead_mask[:-d, d - 1] = trained[d:] & same
    label = ahead_mask[:, 0]
    behaviour = np.zeros_like(logprobs)
    behaviour[:-1] = logprobs[1:] * label[:-1]
    advantages = np.array([s.advantage for s in samples] + [0.0], np.float32)[document] * label
    weights = np.array([s.weight for s in samples] + [0.0], np.float32)[document] * label

    # Per segment. Stable, so that a shared prompt stays right before the replies placed with it.
    table = np.array(sorted(segments, key=lambda s: s[0]), np.int64).reshape(-1, 5)
    row, sample, first, end, shared = table.T
    index = np.arange(len(row))
    size = end - first
    begin = np.cumsum(size) - size
    opens = np.diff(row, prepend=-1) > 0
    opener = np.maximum.accumulate(np.where(opens, index, 0))
    column = begin - begin[opener]
    # A reply that doesn't start at position 0 sees the last shared prompt before it.
    prompt = np.maximum.accumulate(np.where(shared, index, 0))
    borrows = first > 0
    seen = np.stack([column[prompt], column[prompt] + size[prompt]], -1) * borrows[:, None]

    # Per slot of the rows: the token it holds, or the one after the last.
    at = np.repeat(index, size)
    offset = np.arange(len(at)) - begin[at]
    slot = (row * row_length + column)[at] + offset
    source = np.full(rows * row_length, len(text) - 1)
    source[slot] = (np.cumsum(lengths) - lengths)[sample[at]] + first[at] + offset
    learns = np.ones(rows * row_length, bool)
    learns[slot] = shared[at] == 0
    segment_ids = np.zeros(rows * row_length, np.int32)
    segment_ids[slot] = (index - opener + 1)[at]
    positions = np.zeros(rows * row_length, np.int32)
    positions[slot] = first[at] + offset
    intervals = np.zeros((rows * row_length, ranges, 2), np.int32)
    intervals[slot, 0, 0] = column[at]
    intervals[slot, 0, 1] = column[at] + offset + 1
    if ranges == 2:
        intervals[slot, 1] = seen[at]

    batch = PackedBatch(
        tokens=text[source],
        segment_ids=segment_ids,
        positions=positions,
        intervals=intervals,
        ahead_tokens=ahead_tokens[source],
        ahead_mask=ahead_mask[source] & learns[:, None],
        behaviour_logprobs=behaviour[source] * learns,
        advantages=advantages[source] * learns,
        token_weights=weights[source] * learns,
    )
    return jax.tree.map(lambda x: x.reshape(rows, row_length, *x.shape[1:]), batch)
