import numpy as np
import pytest

from jaxspec.drafts.vocabulary import choose_vocabulary

COUNTS = np.array([0, 5, 2, 9, 2, 0, 2, 1])


def test_frequent_ids_win_and_ties_go_to_the_lower_id():
    ids, coverage = choose_vocabulary(COUNTS, 4)
    assert ids.tolist() == [1, 2, 3, 4] and ids.dtype == np.int32
    assert coverage == pytest.approx(18 / 21)


def test_kept_ids_come_first_and_are_counted_once():
    ids, coverage = choose_vocabulary(COUNTS, 3, always=[7, 5, 7])
    assert ids.tolist() == [3, 5, 7]
    assert coverage == pytest.approx(10 / 21)


def test_the_whole_vocabulary_covers_everything():
    ids, coverage = choose_vocabulary(COUNTS, 8, always=[0])
    assert ids.tolist() == list(range(8)) and coverage == 1.0


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="draft_vocab_size is 9.*1..8"):
        choose_vocabulary(COUNTS, 9)
    with pytest.raises(ValueError, match=r"\[8\].*vocabulary of 8"):
        choose_vocabulary(COUNTS, 3, always=[8])
    with pytest.raises(ValueError, match="holds 3 ids, more than draft_vocab_size=2"):
        choose_vocabulary(COUNTS, 2, always=[0, 1, 2])
    with pytest.raises(ValueError, match="at least one reply"):
        choose_vocabulary(np.zeros(4, np.int64), 2)
