"""RMSNorm's own backward pass is the derivative of its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import compat
from jaxspec.models import blocks


def formula(x, weight, eps):
    return x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def gradients(norm):
    keys = jax.random.split(jax.random.key(0), 3)
    x, grad = (jax.random.normal(k, (2, 5, 12), jnp.float64) for k in keys[:2])
    weight = jax.random.normal(keys[2], (12,), jnp.float64)
    out, pull = jax.vjp(lambda x, w: norm(x, w, 0.1), x, weight)
    return out, *pull(grad)


def assert_equal_to_formula():
    with jax.enable_x64(True):
        for got, expected in zip(gradients(blocks.rms_norm), gradients(formula), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_values_and_gradients_are_those_of_the_formula():
    assert_equal_to_formula()


def test_a_forgotten_term_is_seen(monkeypatch):
    def inverse_held_fixed(a, b):
        return compat.sum_of_products(a, b) * jnp.all(a == b)

    monkeypatch.setattr(blocks, "sum_of_products", inverse_held_fixed)
    with pytest.raises(AssertionError):
        assert_equal_to_formula()


def test_input_keeps_its_dtype_and_sums_are_wide():
    x = jnp.full((1, 4096), 0.1, jnp.bfloat16)
    out = blocks.rms_norm(x, jnp.ones(4096), 0.0)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, jnp.ones_like(out))


def test_sums_are_those_of_the_library():
    with jax.enable_x64(True):
        a, b = (jax.random.normal(jax.random.key(i), (3, 1, 7), jnp.float64) for i in range(2))
        np.testing.assert_allclose(compat.sum_of_products(a, b), (a * b).sum(-1), rtol=1e-13)
        np.testing.assert_allclose(compat.row_sum(a), a.sum(-1), rtol=1e-13)
