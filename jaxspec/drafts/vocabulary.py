"""Which part of the target's vocabulary a draft speaks."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


def choose_vocabulary(
    counts: Int[np.ndarray, " vocab"], size: int, always: Sequence[int] = ()
) -> tuple[Int[np.ndarray, " size"], float]:
    """Chooses the ids that replies use most.

    Args:
      counts: how often each id of the target's vocabulary occurs in the counted replies.
      size: ids to choose; among equally frequent ids the lower ones win.
      always: ids chosen whatever their count (those that end a reply, for instance).

    Returns:
      The ids, int32 and ascending; and the share of the counted tokens that they cover, 0..1.

    Raises:
      ValueError: nothing was counted, or `size` and `always` do not fit the vocabulary.
    """
    vocab = len(counts)
    if not 1 <= size <= vocab:
        raise ValueError(
            f"draft_vocab_size is {size}; it must lie in 1..{vocab}, the size of the target's "
            "vocabulary"
        )
    kept = np.unique(np.asarray(always, np.int64))
    outside = kept[(kept < 0) | (kept >= vocab)]
    if len(outside):
        raise ValueError(f"always holds {outside.tolist()}, outside the vocabulary of {vocab}")
    if len(kept) > size:
        raise ValueError(
            f"always holds {len(kept)} ids, more than draft_vocab_size={size}; raise "
            "draft_vocab_size"
        )
    if counts.min() < 0 or counts.sum() == 0:
        raise ValueError(
            f"counts sum to {counts.sum()} with a least count of {counts.min()}; count the tokens "
            "of at least one reply"
        )
    first = np.zeros(vocab, bool)
    first[kept] = True
    # lexsort sorts by its last key first: kept ids, then frequent ones, then low ones.
    order = np.lexsort((np.arange(vocab), -counts, ~first))
    ids = np.sort(order[:size]).astype(np.int32)
    return ids, float(counts[ids].sum() / counts.sum())
