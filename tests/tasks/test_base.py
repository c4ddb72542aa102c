"""Orders of prompts: complete, disjoint, seeded and free of state."""

import numpy as np
import pytest

from jaxspec.tasks.base import shuffled, split


@pytest.mark.parametrize("size", [1, 13, 100])
def test_every_epoch_holds_each_prompt_once(size):
    for epoch in (-1, 0, 1, 5):
        drawn = [shuffled(epoch * size + i, size, 3) for i in range(size)]
        assert sorted(drawn) == list(range(size))


def test_steps_share_an_epoch_without_skew():
    # 13 prompts in steps of 8: after 13 steps each has been drawn 8 times.
    drawn = [shuffled(step * 8 + i, 13, 0) for step in range(13) for i in range(8)]
    assert np.bincount(drawn).tolist() == [8] * 13


def test_the_shuffle_shuffles_by_seed_and_epoch():
    def order(seed, epoch):
        return [shuffled(epoch * 50 + i, 50, seed) for i in range(50)]

    assert order(0, 0) != list(range(50))
    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(s, e)) for s in range(4) for e in range(4)}) == 16
    # No prompt stays where it was more often than chance has it (1 in 50).
    first, second = (np.array([order(s, e) for s in range(40)]) for e in (0, 1))
    assert np.mean(first == second) < 0.06


def test_a_draw_depends_on_nothing_drawn_before():
    ahead = shuffled(1_000_007, 97, 5)
    for index in range(0, 500, 7):
        shuffled(index, 97, 5)
    assert shuffled(1_000_007, 97, 5) == ahead


def test_order_is_pinned():
    # A resumed run must not see another order after an upgrade.
    assert [shuffled(i, 10, 1) for i in range(10)] == [2, 5, 8, 9, 1, 4, 6, 0, 3, 7]


@pytest.mark.parametrize(("size", "held"), [(12501, 2500), (12501, 2501), (7, 0), (2, 1)])
def test_a_split_is_disjoint_and_complete(size, held):
    train, out = split(size, held, 0)
    assert len(out) == held and len(train) == size - held
    assert sorted([*train, *out]) == list(range(size))


def test_errors_name_the_numbers():
    with pytest.raises(ValueError, match="held_out=5 of 5"):
        split(5, 5, 0)
    with pytest.raises(ValueError, match="0 prompts"):
        shuffled(0, 0, 0)
