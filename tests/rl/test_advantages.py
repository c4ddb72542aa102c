"""Advantages and aggregation against values worked out by hand."""

import numpy as np
import pytest

from jaxspec.rl.advantages import aggregation_weights, drop_zero_variance, group_advantages


def test_close_rewards_keep_their_distance():
    # Groups of two, about 1e-5 apart: |advantage| = 0.5e-5 / (1e-5 / sqrt(2) + 1e-6).
    rewards = np.array([1.0, 1.00001, 2.0, 2.00001], np.float32)
    groups = np.array([0, 0, 1, 1])
    got = group_advantages(rewards, groups, ddof=1, eps=1e-6).values
    np.testing.assert_allclose(got, [-0.6196, 0.6196, -0.6196, 0.6196], atol=3e-5)
    # The fault this guards against: a variance as the difference of means in float32.
    r = rewards[:2]
    variance = np.maximum((r * r).mean(dtype=np.float32) - r.mean(dtype=np.float32) ** 2, 0)
    faulty = (r - r.mean()) / (np.sqrt(variance * 2) + 1e-6)
    assert abs(abs(faulty[1]) - 0.6196) > 0.05


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_matches_the_formula_group_by_group(kind, ddof):
    rng = np.random.default_rng(0)
    groups = rng.permutation(np.repeat([7, 3, 11], 5))
    rewards = rng.normal(size=15)
    got = group_advantages(rewards, groups, kind=kind, ddof=ddof, eps=1e-4)
    for group in (3, 7, 11):
        r = rewards[groups == group]
        want = r - r.mean()
        if kind == "grpo":
            want = want / (r.std(ddof=ddof) + 1e-4)
        np.testing.assert_allclose(got.values[groups == group], want, rtol=1e-12)
    assert (got.groups, got.zero_variance, got.invalid) == (3, 0, 0)


def test_equal_rewards_give_exact_zeros_and_are_counted():
    # 0.1 has no exact mean of three in binary: the zero must not come from subtraction.
    rewards = np.array([0.1, 0.1, 0.1, 1.0, 0.0, 0.5])
    groups = np.array([0, 0, 0, 1, 1, 2])
    got = group_advantages(rewards, groups, ddof=1)
    assert got.values[[0, 1, 2, 5]].tolist() == [0.0] * 4
    assert (got.groups, got.zero_variance) == (3, 2)
    assert got.keep.tolist() == [False] * 3 + [True] * 2 + [False]
    alone = group_advantages(rewards[3:5], groups[3:5], ddof=1)
    np.testing.assert_array_equal(alone.values, got.values[3:5])


def test_invalid_samples_do_not_touch_their_group():
    rewards = np.array([1.0, np.nan, 0.0, 5.0, 5.0])
    valid = np.array([True, False, True, False, False])
    groups = np.array([0, 0, 0, 1, 1])
    got = group_advantages(rewards, groups, valid=valid)
    without = group_advantages(rewards[[0, 2]], groups[[0, 2]])
    np.testing.assert_array_equal(got.values, [without.values[0], 0, without.values[1], 0, 0])
    assert got.weights.tolist() == [1, 0, 1, 0, 0]
    assert (got.groups, got.zero_variance, got.invalid) == (1, 0, 3)
    with pytest.raises(ValueError, match="mark its sample invalid"):
        group_advantages(rewards, groups)


def test_order_of_samples_does_not_matter():
    rng = np.random.default_rng(1)
    rewards, groups = rng.normal(size=12), np.repeat([0, 1, 2], 4)
    order = rng.permutation(12)
    first = group_advantages(rewards, groups).values
    second = group_advantages(rewards[order], groups[order]).values
    np.testing.assert_allclose(first[order], second, rtol=1e-12)


def test_dropped_groups_leave_the_denominators():
    # Eight groups of two, three of no variance; lengths tell the groups apart.
    rewards = np.array([[0, 1], [1, 1], [0, 1], [0, 0], [1, 0], [1, 1], [0, 1], [1, 0]], float)
    groups, lengths = np.repeat(np.arange(8), 2), np.repeat(np.arange(1, 9), 2)
    keep = drop_zero_variance(rewards.ravel(), groups)
    assert len(np.unique(groups[keep])) == 5
    weights, denominator = aggregation_weights("token", lengths, 10, keep)
    assert denominator == 2 * (1 + 3 + 5 + 7 + 8)
    assert not weights[~keep].any()
    assert aggregation_weights("sequence", lengths, 10, keep)[1] == 10
    assert aggregation_weights("constant", lengths, 10, keep)[1] == 100


def test_nothing_left_is_an_empty_selection_not_a_crash():
    keep = drop_zero_variance(np.ones(4), np.array([0, 0, 1, 1]))
    assert keep.dtype == bool and not keep.any()
    for kind in ("token", "sequence", "constant"):
        weights, denominator = aggregation_weights(kind, np.array([3, 4, 5, 6]), 8, keep)
        assert not weights.any() and denominator == 0.0
    none = group_advantages(np.zeros(0), np.zeros(0, int))
    assert none.values.shape == (0,) and none.groups == 0


@pytest.mark.parametrize(
    ("kind", "ratio", "denominator"), [("sequence", 1, 2), ("token", 4, 10), ("constant", 4, 32)]
)
def test_length_bias_of_each_aggregation(kind, ratio, denominator):
    # Lengths 2 and 8, equal advantage: the long reply's share of the loss against the short's.
    lengths = np.array([2, 8])
    weights, total = aggregation_weights(kind, lengths, 16)
    shares = weights * lengths / total
    assert shares[1] / shares[0] == pytest.approx(ratio)
    assert total == denominator
    if kind != "constant":
        assert shares.sum() == pytest.approx(1)


def test_untrained_replies_do_not_count():
    weights, total = aggregation_weights("sequence", np.array([0, 4]), 8)
    assert weights.tolist() == [0, 0.25] and total == 1


def test_errors_name_what_is_known():
    with pytest.raises(ValueError, match="'gae' is unknown"):
        group_advantages(np.zeros(1), np.zeros(1, int), kind="gae")
    with pytest.raises(ValueError, match="'mean' is unknown"):
        aggregation_weights("mean", np.ones(1, int), 4)
    with pytest.raises(ValueError, match="reply of 9 tokens.*max_length=4"):
        aggregation_weights("constant", np.array([9]), 4)
