import jax.numpy as jnp
import pytest

from jaxspec.rollout.metrics import acceptance_metrics, count_by_position


def test_every_meaning_of_acceptance_has_its_number():
    counts = jnp.array([0, 2, 4, 1])
    accepted = count_by_position(counts, 4)
    assert accepted.tolist() == [3, 2, 1, 1]
    metrics = acceptance_metrics(4, accepted.tolist(), int(counts.sum()) + 4)
    assert metrics == pytest.approx(
        {
            "acceptance_length": 2.75,
            "acceptance_rate": 7 / 16,
            "acceptance_position_1": 0.75,
            "acceptance_position_2": 0.5,
            "acceptance_position_3": 0.25,
            "acceptance_position_4": 0.25,
            "acceptance_conditional_1": 0.75,
            "acceptance_conditional_2": 2 / 3,
            "acceptance_conditional_3": 0.5,
            "acceptance_conditional_4": 1.0,
        }
    )


def test_shares_of_nothing_and_impossible_totals():
    assert set(acceptance_metrics(0, [0, 0], 0).values()) == {0.0}
    assert acceptance_metrics(4, [3, 1], 8, drafted=5)["acceptance_rate"] == 0.8
    with pytest.raises(ValueError, match="exceed 2 verifies"):
        acceptance_metrics(2, [3], 5)
    with pytest.raises(ValueError, match="rise"):
        acceptance_metrics(4, [1, 2], 7)
