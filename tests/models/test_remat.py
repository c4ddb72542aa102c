"""What the backward pass computes again changes what is stored, not the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import blockwise, spec
from jaxspec.models import policy
from jaxspec.models.config import ModelConfig
from jaxspec.params import init_params
from jaxspec.rl.step import StepConfig

MODEL = ModelConfig(
    family="qwen3",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=40,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=1e4,
    qk_norm=True,
    tie_word_embeddings=True,
    max_position_embeddings=64,
)
ROWS, TIME = 2, 24


@functools.cache
def params():
    return init_params(policy.param_table(MODEL), jax.random.key(0))


def loss(params, remat):
    tokens = jnp.arange(ROWS * TIME).reshape(ROWS, TIME) % MODEL.vocab_size
    positions = jnp.broadcast_to(jnp.arange(TIME), tokens.shape)
    intervals = spec.causal_intervals(jnp.ones_like(positions), positions)
    output = policy.forward(
        params,
        MODEL,
        tokens,
        positions,
        lambda q, k, v: blockwise.attend(q, k, v, intervals)[0],
        remat=remat,
    )
    return (output.hidden * jnp.arange(MODEL.hidden_size)).sum()


def test_every_kind_gives_the_same_gradient_and_stores_less_and_less():
    gradients, stored = {}, {}
    for remat in policy.REMAT:
        run = functools.partial(loss, remat=remat)
        gradients[remat] = jax.jit(jax.grad(run))(params())
        kept = jax.eval_shape(lambda p, run=run: jax.vjp(run, p)[1], params())
        stored[remat] = sum(x.size for x in jax.tree.leaves(kept))
    for remat in policy.REMAT:
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5),
            gradients[remat],
            gradients["none"],
        )
    assert stored["none"] > stored["products"] > stored["layer"]


def test_an_unknown_kind_is_refused():
    for build in (functools.partial(StepConfig, remat="all"), lambda: loss(params(), "all")):
        with pytest.raises(ValueError, match=r"remat='all'.*products.*StepConfig.remat"):
            build()
