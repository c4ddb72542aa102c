"""Packing against brute force: every property is read off the rows, none off the packer."""

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.packing import PackingConfig, Sample, pack, split_microbatches
from jaxspec.packing.pack import _place


def make(prompt: int, reply: int, *, group: int = 0, start: int = 1, trained=None, **kwargs):
    """A sample whose token ids count up from `start`."""
    ids = np.arange(start, start + prompt + reply, dtype=np.int32)
    return Sample(
        prompt=ids[:prompt],
        reply=ids[prompt:],
        logprobs=-np.arange(1, reply + 1, dtype=np.float32),
        advantage=kwargs.pop("advantage", 1.0),
        mask=trained,
        group=group,
        **kwargs,
    )


@st.composite
def sample_lists(draw):
    """Groups of replies to one prompt each; token ids name group, sample and position."""
    samples = []
    for group in range(draw(st.integers(1, 4))):
        prompt = draw(st.integers(1, 7))
        for number in range(draw(st.integers(1, 4))):
            reply = draw(st.integers(0, 8))
            tag = (len(samples) + 1) * 100
            samples.append(
                Sample(
                    prompt=10_000 * (group + 1) + np.arange(prompt, dtype=np.int32),
                    reply=(tag + np.arange(reply)).astype(np.int32),
                    logprobs=-(tag + np.arange(reply)).astype(np.float32),
                    advantage=float(tag),
                    mask=np.array(
                        draw(st.lists(st.booleans(), min_size=reply, max_size=reply)), bool
                    ),
                    group=group,
                    weight=number + 0.5,
                )
            )
    return samples


def documents(batch):
    """Reads documents back: for each reply segment, {position: column} with its shared prompt.

    Only ids and positions are used: a segment that doesn't start at position 0 continues the
    prompt segment before it whose positions end where its own start.
    """
    found = []
    for row in range(batch.tokens.shape[0]):
        ids, positions = batch.segment_ids[row], batch.positions[row]
        prompt = {}
        for segment in range(1, ids.max() + 1):
            columns = np.flatnonzero(ids == segment)
            assert (np.diff(columns) == 1).all()
            here = {int(positions[c]): int(c) for c in columns}
            assert sorted(here) == list(range(min(here), min(here) + len(here)))
            if min(here) == 0 and is_prompt(batch, row, segment):
                prompt = here
                continue
            if min(here) > 0:
                assert max(prompt) + 1 == min(here)
                here = prompt | here
            found.append((row, segment, here))
    return found


def is_prompt(batch, row, segment):
    """Whether the next segment of the row continues this one."""
    after = np.flatnonzero(batch.segment_ids[row] == segment + 1)
    return len(after) > 0 and batch.positions[row, after[0]] > 0


def text_of(sample):
    return tuple(np.concatenate([sample.prompt, sample.reply]).tolist())


def check(samples, batch, num_ahead):
    """All invariants of a batch, by loops over documents."""
    by_text = {}
    for sample in samples:
        by_text.setdefault(text_of(sample), []).append(sample)
    labels = Counter()
    for row, segment, columns in documents(batch):
        text = tuple(int(batch.tokens[row, columns[i]]) for i in range(len(columns)))
        sample = by_text[text].pop()
        p, n = len(sample.prompt), len(text)
        for position, column in columns.items():
            spans = batch.intervals[row, column]
            seen = sorted(c for lo, hi in spans for c in range(lo, hi))
            assert seen == sorted(columns[i] for i in range(position + 1))
            own = batch.segment_ids[row, column] == segment
            for d in range(1, num_ahead + 1):
                exists = position + d < n
                token = text[position + d] if exists else 0
                assert batch.ahead_tokens[row, column, d - 1] == token
                learned = exists and position + d >= p and bool(sample.mask[position + d - p])
                assert batch.ahead_mask[row, column, d - 1] == learned
                if learned:
                    assert own
                    assert all(columns[position + e] == column + e for e in range(d))
            if batch.ahead_mask[row, column, 0]:
                at = position + 1 - p
                labels[token_key(sample, at)] += 1
                assert batch.behaviour_logprobs[row, column] == sample.logprobs[at]
                assert batch.advantages[row, column] == sample.advantage
                assert batch.token_weights[row, column] == sample.weight
            else:
                for name in ("behaviour_logprobs", "advantages", "token_weights"):
                    assert getattr(batch, name)[row, column] == 0
    assert not any(by_text.values())
    expected = Counter(token_key(s, i) for s in samples for i in np.flatnonzero(s.mask))
    assert labels == expected
    padding = batch.segment_ids == 0
    for name in ("tokens", "positions", "intervals", "ahead_tokens", "ahead_mask"):
        assert not getattr(batch, name)[padding].any()


def token_key(sample, index):
    return (text_of(sample), int(index))


LAYOUTS = [{}, {"share_prompts": False}, {"packed": False}]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(sample_lists(), st.integers(1, 5), st.integers(0, 12), st.sampled_from(LAYOUTS))
def test_every_invariant_holds(samples, num_ahead, room, layout):
    length = max(len(s.prompt) + len(s.reply) for s in samples) + room
    batch, stats = pack(samples, row_length=length, num_ahead=num_ahead, rows_multiple=3, **layout)
    check(samples, batch, num_ahead)
    assert batch.tokens.shape == (stats.rows + stats.padding_rows, length)
    assert batch.tokens.shape[0] % 3 == 0
    assert stats.rows <= len(samples)
    held = (batch.segment_ids > 0).sum(1)
    assert stats.used == held.sum() and (held > 0).sum() == stats.rows
    assert stats.saved == sum(len(s.prompt) + len(s.reply) for s in samples) - held.sum() >= 0
    assert stats.waste == pytest.approx(1 - stats.used / (stats.rows * length))
    assert stats.trained == sum(s.mask.sum() for s in samples)
    if layout.get("packed", True):
        held = np.sort(held[held > 0])
        assert len(held) < 2 or held[0] + held[1] > length
        assert stats.rows < 2 or stats.waste < 0.5


def trained_views(batch):
    """For every trained look-ahead: the (text, position) keys that its row sees, and its values."""
    views = Counter()
    for row, _, columns in documents(batch):
        text = tuple(int(batch.tokens[row, columns[i]]) for i in range(len(columns)))
        where = {c: (text, i) for i, c in columns.items()}
        for position, column in columns.items():
            seen = [c for lo, hi in batch.intervals[row, column] for c in range(lo, hi)]
            keys = tuple(sorted(where.get(c, ("other",)) for c in seen))
            for d in np.flatnonzero(batch.ahead_mask[row, column]):
                views[
                    text,
                    position,
                    int(d),
                    int(batch.ahead_tokens[row, column, d]),
                    float(batch.behaviour_logprobs[row, column]),
                    float(batch.advantages[row, column]),
                    keys,
                ] += 1
    return views


@settings(max_examples=25, deadline=None, derandomize=True)
@given(sample_lists(), st.integers(1, 5), st.integers(0, 30))
def test_sharing_a_prompt_changes_nothing_that_is_trained(samples, num_ahead, room):
    length = max(len(s.prompt) + len(s.reply) for s in samples) + room
    shared, _ = pack(samples, row_length=length, num_ahead=num_ahead)
    apart, _ = pack(samples, row_length=length, num_ahead=num_ahead, share_prompts=False)
    assert trained_views(shared) == trained_views(apart)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_do_not_depend_on_the_order_of_samples(layout):
    rng = np.random.default_rng(0)
    samples = [
        make(6, int(r), group=i // 4, start=100 * (i // 4))
        for i, r in enumerate(rng.permutation(40)[:16] + 1)
    ]
    first, _ = pack(samples, row_length=64, num_ahead=2, **layout)
    order = rng.permutation(16)
    second, _ = pack([samples[i] for i in order], row_length=64, num_ahead=2, **layout)
    for name in ("tokens", "segment_ids", "positions", "intervals", "behaviour_logprobs"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_the_worked_example_has_5_5_4_valid_rows():
    # Eight tokens, the reply from 3 on, three passes: pass d trains entry d.
    batch, _ = pack([make(3, 5)], row_length=8, num_ahead=4, share_prompts=False)
    assert batch.ahead_mask[0, :, 1:].sum(0).tolist() == [5, 5, 4]
    assert np.flatnonzero(batch.ahead_mask[0, :, 1]).tolist() == [1, 2, 3, 4, 5]
    assert np.flatnonzero(batch.ahead_mask[0, :, 0]).tolist() == [2, 3, 4, 5, 6]
    # Row 2, pass 1: embeds x_3, is checked against x_4, sees rows 0..2.
    assert batch.ahead_tokens[0, 2, :2].tolist() == [4, 5]
    assert batch.intervals[0, 2, 0].tolist() == [0, 3]


def test_a_longer_prompt_keeps_every_pass_whole_when_shared():
    samples = [make(9, 5), make(9, 5)]
    batch, stats = pack(samples, row_length=32, num_ahead=4)
    # Three passes, each with as many valid rows as trained tokens in each reply.
    assert batch.ahead_mask[0].sum(0).tolist() == [10, 10, 10, 10]
    assert stats.prompt_copies == 1 and stats.used == 5 + 2 * 9
    assert batch.intervals[0, 5].tolist() == [[5, 6], [0, 5]]
    # The last shared row looks at the four prompt tokens that each reply holds a copy of.
    assert batch.ahead_tokens[0, 4].tolist() == [6, 7, 8, 9]
    assert not batch.ahead_mask[0, :5].any()


def test_passes_beyond_a_short_reply_are_empty():
    batch, _ = pack([make(2, 2)], row_length=16, num_ahead=8)
    assert batch.ahead_mask[0].sum(0).tolist() == [2, 2, 1, 0, 0, 0, 0, 0]


def test_nothing_wraps_around_the_ends_of_a_row():
    # The last row of the batch is poisoned; the first document must not read any of it.
    first = make(1, 2, start=5, advantage=2.0)
    last = make(2, 2, start=900, advantage=7.0, group=1)
    batch, _ = pack([first, last], row_length=4, num_ahead=6)
    row = int(np.flatnonzero((batch.tokens == 5).any(1))[0])
    assert batch.ahead_tokens[row, 0].tolist() == [6, 7, 0, 0, 0, 0]
    assert not batch.ahead_tokens[row, 2:].any()
    assert set(np.unique(batch.advantages[row])) == {0.0, 2.0}


def test_forty_tiny_documents_share_a_row():
    samples = [make(1, i % 2, group=i, start=10 * i + 10) for i in range(40)]
    batch, stats = pack(samples, row_length=64, num_ahead=3)
    assert stats.rows == 1 and batch.segment_ids.max() == 40
    check(samples, batch, 3)


def test_a_group_too_long_for_a_row_is_split_with_a_prompt_copy_each():
    samples = [make(10, 8, start=1) for _ in range(6)]
    batch, stats = pack(samples, row_length=30, num_ahead=2)
    # Eight shared tokens and two replies of 2 + 8 fill 28 of a row's 30.
    assert (stats.rows, stats.prompt_copies) == (3, 3)
    check(samples, batch, 2)


def test_no_samples_give_rows_of_padding():
    batch, stats = pack([], row_length=8, num_ahead=2, rows_multiple=4)
    assert batch.tokens.shape == (4, 8) and not batch.segment_ids.any()
    assert (stats.rows, stats.waste) == (0, 0.0)


def test_errors_name_both_numbers_and_the_setting():
    with pytest.raises(ValueError, match=r"9 tokens.*row of 8.*PackingConfig\.row_length"):
        pack([make(4, 5)], row_length=8, num_ahead=1)
    with pytest.raises(ValueError, match="different prompts.*share_prompts"):
        pack([make(4, 1), make(5, 1)], row_length=8, num_ahead=1)
    pack([make(4, 1), make(5, 1)], row_length=8, num_ahead=1, share_prompts=False)
    with pytest.raises(ValueError, match="num_ahead is 0"):
        pack([], row_length=8, num_ahead=0)
    with pytest.raises(ValueError, match="PackingConfig.row_length is 0"):
        PackingConfig(row_length=0)
    with pytest.raises(ValueError, match="Sample.prompt is empty"):
        make(0, 2)
    with pytest.raises(ValueError, match="Sample.mask has 1 entries for a reply of 2"):
        make(1, 2, trained=np.ones(1, bool))
    with pytest.raises(ValueError, match="not finite"):
        make(1, 2, advantage=float("nan"))


def test_microbatches_keep_rows_in_order():
    batch, _ = pack(
        [make(1, 3, group=i) for i in range(4)], row_length=4, num_ahead=2, rows_multiple=2
    )
    split = split_microbatches(batch, 2)
    assert split.ahead_mask.shape == (2, 2, 4, 2)
    np.testing.assert_array_equal(split.tokens.reshape(4, 4), batch.tokens)
    with pytest.raises(ValueError, match="4 rows.*microbatches of 3.*rows_per_microbatch"):
        split_microbatches(batch, 3)


@pytest.mark.parametrize(
    "fault",
    ["label_of_next_document", "prompt_range_lost", "sees_next_token", "label_twice"],
)
def test_the_checks_see_planted_faults(fault):
    samples = [make(6, 4, start=1), make(6, 3, start=1), make(2, 5, start=50, group=1)]
    batch, _ = pack(samples, row_length=32, num_ahead=3)
    check(samples, batch, 3)
    if fault == "label_of_next_document":
        end = int(np.flatnonzero(batch.segment_ids[0] == 2)[-1])
        batch.ahead_mask[0, end, 0] = True
    elif fault == "prompt_range_lost":
        batch.intervals[0, :, 1] = 0
    elif fault == "sees_next_token":
        batch.intervals[0, 0, 0, 1] += 1
    else:
        batch.ahead_mask[0, 2, 0] = True  # a shared row that trains as well
    with pytest.raises(AssertionError):
        check(samples, batch, 3)


def test_splits_go_where_most_is_free():
    prefixes, groups = np.full(5, 2), np.array([0, 0, 1, 1, 1])
    segments, rows = _place(prefixes, np.array([9, 6, 4, 4, 4]), groups, 20)
    assert rows == 2 and [s[0] for s in segments] == [0, 0, 0, 1, 1, 1, 1]


def test_packs_512_samples_quickly():
    rng = np.random.default_rng(1)
    samples = [make(64, int(rng.integers(8, 128)), group=i // 8, start=1) for i in range(512)]
    best = np.inf
    for _ in range(3):
        start = time.process_time()
        pack(samples, row_length=1024, num_ahead=5)
        best = min(best, time.process_time() - start)
    assert best < 0.1
