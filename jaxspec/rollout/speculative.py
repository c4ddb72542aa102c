"""Generation: prefill, then draft, verify and commit until every row has ended.

The same code serves rollouts with and without a draft; with none, a verify checks no proposals and
draws one token, which is plain decoding.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key

from jaxspec import compat
from jaxspec.attention import blockwise, spec
from jaxspec.drafts.base import Draft, DraftWeights
from jaxspec.models import blocks, policy
from jaxspec.models.config import ModelConfig
from jaxspec.rollout.config import DRAFT, POLICY, RolloutConfig, RolloutResult
from jaxspec.rollout.processors import process_logits
from jaxspec.rollout.sampling import Purpose, draw, purpose_keys, row_keys
from jaxspec.rollout.verify import commit_block, verify

# Up to so many rows the head is the first operand of its product (see `blocks.decode_linear`).
_FEW_ROWS = 64


@flax.struct.dataclass
class SpecState:
    """What the loop carries, for b sequences.

    Attributes:
      result: replies so far.
      last_token: i32[b], the newest token; its keys and values are not in the cache yet.
      length: i32[b], rows in the policy's cache, which is the position of `last_token`.
      remaining: i32[b], tokens still to emit; 0 for rows that have ended.
      cache: per layer (keys, values), each [b, kv_heads, slots, head_dim].
      draft_state: the draft's own state, or None.
    """

    result: RolloutResult
    last_token: Any
    length: Any
    remaining: Any
    cache: Any
    draft_state: Any


@dataclasses.dataclass(frozen=True)
class Generation:
    """The two programs of a rollout and what is fixed in them.

    They are apart so that whatever the number of prompts, replies are decoded by one program.

    Attributes:
      model: the policy's shape.
      draft: the draft's functions; None decodes plainly.
      config: rollout settings.
      stop_ids: ids that end a reply.
      compute_dtype: dtype of matrix products and caches.
    """

    model: ModelConfig
    draft: Draft | None
    config: RolloutConfig
    stop_ids: tuple[int, ...]
    compute_dtype: str

    @property
    def taps(self) -> tuple[int, ...]:
        """The policy's layers that the draft reads."""
        return self.draft.tap_layers if self.draft else ()

    def prefill(
        self,
        policy_params: Any,
        draft_weights: DraftWeights | None,
        prompts: Int[Array, "prompts time"],
        prompt_lengths: Int[Array, " prompts"],
        row_ids: Int[Array, " batch"],
        budgets: Int[Array, " batch"],
        key: Key[Array, ""],
    ) -> SpecState:
        """Computes each prompt once and draws the first token of every sequence.

        Args:
          policy_params: the policy's parameters, whole.
          draft_weights: the draft, when there is one.
          prompts: ids, padded on the right.
          prompt_lengths: tokens in each prompt, at least 1.
          row_ids: what identifies each sequence's random draws, whatever its place in the batch;
            batch / prompts sequences for each prompt, in order.
          budgets: most tokens each sequence emits; 0 leaves a place unused.
          key: the rollout's key.
        """
        count, time = prompts.shape
        batch = row_ids.shape[0]
        each = batch // count
        model, draft, config, compute_dtype = (
            self.model,
            self.draft,
            self.config,
            self.compute_dtype,
        )
        slots = time + config.max_new_tokens + config.num_draft_tokens + 1
        positions = jnp.broadcast_to(jnp.arange(time), prompts.shape)
        inside = positions < prompt_lengths[:, None]
        intervals = spec.causal_intervals(inside.astype(jnp.int32), positions)
        output = policy.forward(
            policy_params,
            model,
            jnp.where(inside, prompts, 0),
            positions,
            lambda q, k, v: blockwise.attend(q, k, v, intervals)[0],
            taps=self.taps,
            compute_dtype=compute_dtype,
            keep_cache=True,
        )

        def to_slots(x):
            x = jnp.repeat(jnp.swapaxes(x, 1, 2), each, axis=0)
            return jnp.pad(x, ((0, 0), (0, 0), (0, slots - time), (0, 0))).astype(compute_dtype)

        cache = tuple(
            (to_slots(output.keys[i]), to_slots(output.values[i])) for i in range(model.num_layers)
        )
        last = prompt_lengths - 1
        repeat = lambda x: jnp.repeat(x, each, axis=0)  # noqa: E731
        hidden = repeat(_at(output.hidden, last))[:, None]
        k, n = config.num_draft_tokens if draft else 0, config.max_new_tokens
        taps = None if draft is None else repeat(_at(output.taps, last))[:, None]
        # `zero` differs between devices as the rows do, so every carry of the loop starts that way.
        zero = jnp.zeros_like(row_ids)
        ones = jnp.zeros((batch, n), jnp.int32) + zero[:, None]
        result = RolloutResult(
            tokens=ones,
            lengths=zero,
            logprobs=ones.astype(jnp.float32),
            raw_logprobs=ones.astype(jnp.float32),
            finished=zero > 0,
            origin=ones.astype(jnp.int8),
            rejected=ones - 1,
            verifies=zero,
            accepted=jnp.zeros((batch, k), jnp.int32) + zero[:, None],
        )
        draft_state = None
        if draft is not None:
            draft_state = draft.new_state(count, slots, compute_dtype)
            draft_state = compat.vary(draft_state, compat.varying_axes(prompt_lengths))
            draft_state = draft.commit(
                draft_weights,
                policy_params["embed"],
                draft_state,
                jnp.pad(prompts[:, 1:], ((0, 0), (0, 1))),
                output.taps,
                jnp.zeros_like(prompt_lengths),
                last,
                compute_dtype=compute_dtype,
            )
            draft_state = jax.tree.map(repeat, draft_state)
        state = SpecState(
            result=result,
            last_token=zero,
            length=repeat(last),
            remaining=jnp.minimum(budgets, n),
            cache=cache,
            draft_state=draft_state,
        )
        # The first token is a verify of no proposals; it is not counted as one.
        state = self._verify_and_commit(
            state,
            _logits(hidden, policy_params, compute_dtype),
            jnp.zeros((batch, 0), jnp.int32) + zero[:, None],
            None,
            taps,
            row_keys(key, row_ids, zero),
            draft_weights,
            policy_params["embed"],
        )
        return state.replace(result=state.result.replace(verifies=zero))

    def decode(
        self,
        prepared: policy.DecodeParams,
        draft_weights: DraftWeights | None,
        state: SpecState,
        row_ids: Int[Array, " batch"],
        key: Key[Array, ""],
    ) -> SpecState:
        """Drafts, verifies and commits until every sequence has ended; see `prefill`."""
        policy_params = prepared.params

        def body(state: SpecState) -> SpecState:
            keys = row_keys(key, row_ids, state.result.lengths)
            proposal, probs, draft_state = self._propose(draft_weights, policy_params, state, keys)
            with jax.named_scope("verify_forward"):
                block = jnp.concatenate([state.last_token[:, None], proposal], axis=1)
                output, cache = policy.decode(
                    prepared, self.model, block, state.length, state.cache, taps=self.taps
                )
                logits = _logits(output.hidden, policy_params, self.compute_dtype)
            return self._verify_and_commit(
                state.replace(cache=cache, draft_state=draft_state),
                logits,
                proposal,
                probs,
                output.taps,
                keys,
                draft_weights,
                policy_params["embed"],
            )

        return jax.lax.while_loop(lambda s: jnp.any(s.remaining > 0), body, state)

    def _propose(self, draft_weights, policy_params, state, keys):
        """Returns proposals [b, k], the distributions behind them, and the draft's state."""
        if self.draft is None:
            none = jnp.zeros((state.length.shape[0], 0), jnp.int32) + state.length[:, None]
            return none, None, None
        with jax.named_scope("draft"):
            proposal = self.draft.propose(
                draft_weights,
                policy_params["embed"],
                state.draft_state,
                state.length,
                self.config.num_draft_tokens,
                self.config.draft_temperature,
                lambda log_probs, place: draw(log_probs, purpose_keys(keys, Purpose.DRAFT, place)),
                compute_dtype=self.compute_dtype,
            )
        return proposal.tokens, proposal.probs, proposal.state

    def _verify_and_commit(
        self, state, logits, proposal, probs, taps, keys, draft_weights, embedding
    ):
        """Judges the proposals, appends what is emitted, and moves the draft onto the true taps."""
        log_probs = process_logits(logits, self.config.sampling)
        vocab_ids = draft_weights.buffers.get("vocab_ids") if draft_weights is not None else None
        verdict = verify(
            log_probs, proposal, probs, keys, vocab_ids=vocab_ids if probs is not None else None
        )
        commit = commit_block(
            proposal, verdict.num_accepted, verdict.next_token, state.remaining, self.stop_ids
        )
        active = state.remaining > 0
        result = _append(state.result, commit, verdict, logits, active, self.config)
        length = state.length + commit.counts
        draft_state = state.draft_state
        if self.draft is not None:
            with jax.named_scope("draft_commit"):
                draft_state = self.draft.commit(
                    draft_weights,
                    embedding,
                    draft_state,
                    commit.tokens,
                    taps,
                    state.length,
                    commit.counts,
                    compute_dtype=self.compute_dtype,
                )
        newest = _at(commit.tokens, jnp.maximum(commit.counts - 1, 0))
        return state.replace(
            result=result,
            last_token=jnp.where(commit.counts > 0, newest, state.last_token),
            length=length,
            remaining=jnp.where(commit.finished, 0, state.remaining - commit.counts),
            draft_state=draft_state,
        )


def _append(result, commit, verdict, logits, active, config):
    """Writes a block of emitted tokens behind what each row has; nothing lands past the end."""
    batch, width = commit.tokens.shape
    place = jnp.arange(width)
    emitted = place < commit.counts[:, None]
    rows = jnp.arange(batch)[:, None]
    size = result.tokens.shape[1]
    index = jnp.where(emitted, result.lengths[:, None] + place, size)

    def put(buffer, values):
        return buffer.at[rows, index].set(values.astype(buffer.dtype), mode="drop")

    sampling = config.sampling
    plain = sampling.temperature == 1 and not sampling.top_k and sampling.top_p == 1
    if plain and not sampling.min_p:
        raw = verdict.log_probs
    else:
        chosen = jnp.take_along_axis(logits, commit.tokens[..., None], axis=-1)[..., 0]
        raw = chosen - jax.nn.logsumexp(logits, axis=-1)
    accepted = place < commit.accepted[:, None]
    replaced = place == verdict.num_accepted[:, None]
    counted = jnp.arange(1, result.accepted.shape[1] + 1) <= commit.accepted[:, None]
    return RolloutResult(
        tokens=put(result.tokens, commit.tokens),
        lengths=result.lengths + commit.counts,
        logprobs=put(result.logprobs, verdict.log_probs),
        raw_logprobs=put(result.raw_logprobs, raw),
        finished=result.finished | commit.stopped,
        origin=put(result.origin, jnp.where(accepted, DRAFT, POLICY)),
        rejected=put(result.rejected, jnp.where(replaced, verdict.rejected[:, None], -1)),
        verifies=result.verifies + active,
        accepted=result.accepted + (counted & active[:, None]),
    )


def _logits(hidden, policy_params, compute_dtype):
    head = policy.head(policy_params).astype(compute_dtype)
    if hidden.shape[0] * hidden.shape[1] <= _FEW_ROWS:
        return blocks.decode_linear(hidden, head)
    return jnp.einsum(
        "btd,vd->btv", hidden.astype(compute_dtype), head, preferred_element_type=jnp.float32
    )


def _at(x, index):
    """x[b, index[b]]."""
    return jax.vmap(lambda row, i: row[i])(x, index)
