"""Intervals say what they should, and wrong ones are refused with their numbers."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import spec
from jaxspec.attention.blockwise import attend

SEGMENTS = np.array([[1, 1, 1, 2, 2, 3, 0], [4, 5, 5, 5, 5, 0, 0]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 0, 0]], np.int32)


def brute_force(segments, positions, window):
    """Visibility from its definition: same document, not later, inside the window."""
    same = (segments[:, :, None] == segments[:, None]) & (segments[:, :, None] > 0)
    distance = positions[:, :, None] - positions[:, None]
    return same & (distance >= 0) & (distance < (window or 10**6))


@pytest.mark.parametrize("window", [None, 1, 2, 10])
def test_causal_intervals_are_the_definition(window):
    intervals = spec.causal_intervals(SEGMENTS, POSITIONS, window=window)
    spec.check_intervals(intervals, SEGMENTS.shape[1])
    expected = brute_force(SEGMENTS, POSITIONS, window)
    np.testing.assert_array_equal(spec.to_mask(intervals, 7), expected)
    assert (intervals[SEGMENTS == 0] == 0).all()
    on_device = spec.causal_intervals(jnp.asarray(SEGMENTS), jnp.asarray(POSITIONS), window=window)
    np.testing.assert_array_equal(on_device, intervals)
    np.testing.assert_array_equal(spec.to_mask(on_device, 7), expected)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 4, 6])
def test_a_shared_prefix_reads_as_the_documents_it_stands_for(window):
    # Row 0 stores prefix 1 (3 tokens) continued by 2 and 3; row 1 has its prefix last.
    segments = np.array([[1, 1, 1, 2, 2, 3, 3, 3, 0], [5, 5, 6, 6, 6, 4, 4, 0, 0]], np.int32)
    prefixes = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 0], [4, 4, 0, 0, 0, 0, 0, 0, 0]], np.int32)
    positions = np.array([[0, 1, 2, 3, 4, 3, 4, 5, 0], [2, 3, 0, 1, 2, 0, 1, 0, 0]], np.int32)
    intervals = spec.shared_prefix_intervals(segments, prefixes, window=window)
    spec.check_intervals(intervals, 9)
    related = (segments[:, :, None] == segments[:, None]) | (
        prefixes[:, :, None] == segments[:, None]
    )
    related &= (segments[:, :, None] > 0) & (segments[:, None] > 0)
    distance = positions[:, :, None] - positions[:, None]
    expected = related & (distance >= 0) & (distance < (window or 10**6))
    np.testing.assert_array_equal(spec.to_mask(intervals, 9), expected)


def test_a_window_below_one_is_refused():
    with pytest.raises(ValueError, match="window is 0"):
        spec.causal_intervals(SEGMENTS, POSITIONS, window=0)


@pytest.mark.parametrize(
    ("segments", "prefixes", "message"),
    [
        ([[1, 2, 1]], [[0, 0, 0]], "2 tokens spread over 3 places"),
        ([[2, 2, 3]], [[1, 1, 0]], "prefix segment 1 is not among"),
        ([[1, 2, 3]], [[0, 1, 2]], "prefix segment 2 of row 0 continues another"),
    ],
)
def test_a_malformed_prefix_is_refused(segments, prefixes, message):
    with pytest.raises(ValueError, match=message):
        spec.shared_prefix_intervals(np.array(segments), np.array(prefixes))


@pytest.mark.parametrize(
    ("intervals", "message"),
    [
        (np.array([[[[0, 5]]]], np.int32), r"query \(0, 0\) is \[0, 5\), outside the 4 keys"),
        (np.array([[[[-1, 2]]]], np.int32), r"\[-1, 2\), outside"),
        (np.array([[[[0, 3], [2, 4]]]], np.int32), r"overlap: \[0, 3\] and \[2, 4\]"),
        (np.array([[[[0, 3]]]], np.int64), "int64; expected int32"),
        (np.zeros((1, 1, 2), np.int32), r"shape \(1, 1, 2\)"),
    ],
)
def test_wrong_intervals_are_refused(intervals, message):
    with pytest.raises(ValueError, match=message):
        spec.check_intervals(intervals, 4)


def test_touching_and_empty_ranges_do_not_overlap():
    spec.check_intervals(np.array([[[[0, 2], [2, 4]], [[3, 1], [0, 4]]]], np.int32), 4)


def test_arguments_that_do_not_fit_are_refused():
    q, kv = jnp.zeros((1, 4, 3, 8)), jnp.zeros((1, 4, 2, 8))
    intervals = jnp.zeros((1, 4, 1, 2), jnp.int32)
    with pytest.raises(ValueError, match="3 query heads are not a multiple of 2"):
        attend(q, kv, kv, intervals)
    one = kv[:, :, :1]
    with pytest.raises(ValueError, match="together"):
        attend(q, one, one, intervals, branch_k=one[:, :, None])
    with pytest.raises(ValueError, match="query_tile 0"):
        attend(q, one, one, intervals, query_tile=0)
    with pytest.raises(ValueError, match="do not fit queries"):
        spec.check_arguments(q, one, one, intervals[:, :3], None, None)
    with pytest.raises(ValueError, match="do not fit queries"):
        spec.check_arguments(q, one[..., :4], one[..., :4], intervals, None, None)
