"""The policy's verdict on a draft's proposals: the one place on which losslessness rests.

Speculative sampling (Leviathan et al. 2023, Chen et al. 2023): a token d drawn from q is accepted
with probability min(1, p(d) / q(d)); the first one refused is replaced by a draw from
norm(max(p - q, 0)), and when all are accepted one more token is drawn from p. The output then
follows p for any q, provided that q is the distribution the token was really drawn from and that
the three draws are independent.
"""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxspec.rollout.sampling import Purpose, purpose_keys, sample, uniforms

RESIDUAL_FLOOR = 1e-8
"""Residual mass at or below which p and q are the same up to rounding."""


@flax.struct.dataclass
class VerifyResult:
    """One verify of k proposals in each of b rows.

    Attributes:
      num_accepted: [b] leading proposals accepted, 0 to k.
      next_token: [b] what the policy emits after them: the correction or the bonus token.
      rejected: [b] the proposal in whose place `next_token` stands, -1 for a bonus token.
      log_probs: [b, k+1] log p of the accepted proposals and of `next_token`, 0 after it.
    """

    num_accepted: Any
    next_token: Any
    rejected: Any
    log_probs: Any


@flax.struct.dataclass
class Commit:
    """What one verify adds to each of b rows.

    Attributes:
      tokens: [b, k+1] emitted tokens, 0 from `counts` on.
      counts: [b] emitted tokens, the stop token included.
      accepted: [b] how many of them are accepted proposals; they come first.
      stopped: [b] whether the last emitted token is a stop id.
      finished: [b] whether the row emits nothing more: it stopped or its budget is used up.
    """

    tokens: Any
    counts: Any
    accepted: Any
    stopped: Any
    finished: Any


def acceptance_probabilities(
    target_log_probs: Float[Array, "b k1 v"],
    draft_tokens: Int[Array, "b k"],
    draft_probs: Float[Array, "b k d"] | None = None,
    *,
    vocab_ids: Int[Array, " d"] | None = None,
    num_drafted: Int[Array, " b"] | None = None,
) -> Float[Array, "b k"]:
    """Returns min(1, p(d) / q(d)) for each proposal d.

    Args:
      target_log_probs: log p at the k proposed positions (further positions are not read).
      draft_tokens: proposals, as ids of the policy's vocabulary.
      draft_probs: the distribution each was drawn from; None when each was chosen outright, which
        is a draw from the one-hot distribution at the token.
      vocab_ids: ascending policy ids of the draft's vocabulary; None when it is the policy's.
      num_drafted: leading proposals that exist in each row; all k when None.

    Returns:
      float32 probabilities, 0 where there is no proposal. A token that q gives no mass cannot have
      been drawn and gets 0 too.
    """
    k = draft_tokens.shape[1]
    # Tokens are padded rather than the positions sliced: a slice would copy [b, k, v].
    padding = ((0, 0), (0, target_log_probs.shape[1] - k))
    log_p = _gather(target_log_probs, jnp.pad(draft_tokens, padding))[:, :k]
    if draft_probs is None:
        accept = jnp.exp(jnp.minimum(log_p, 0.0))
    else:
        places = _draft_places(draft_tokens, vocab_ids)
        q = _gather(draft_probs, places).astype(jnp.float32)
        if vocab_ids is not None:
            q = jnp.where(vocab_ids[places] == draft_tokens, q, 0.0)
        log_q = jnp.log(jnp.where(q > 0, q, 1.0))
        accept = jnp.where(q > 0, jnp.exp(jnp.minimum(log_p - log_q, 0.0)), 0.0)
    if num_drafted is None:
        return accept
    return jnp.where(jnp.arange(k) < num_drafted[:, None], accept, 0.0)


def residual(p: Float[Array, "*rows v"], q: Float[Array, "*rows v"]) -> Float[Array, "*rows v"]:
    """Returns norm(max(p - q, 0)), the distribution of the token that replaces a refused one.

    Where its mass is at most `RESIDUAL_FLOOR` the two agree up to rounding and p is returned.
    """
    excess = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(excess, axis=-1, keepdims=True)
    empty = mass <= RESIDUAL_FLOOR
    return jnp.where(empty, p, excess / jnp.where(empty, 1.0, mass))


def next_distribution(
    target_log_probs: Float[Array, "b k1 v"],
    draft_tokens: Int[Array, "b k"],
    draft_probs: Float[Array, "b k d"] | None,
    num_accepted: Int[Array, " b"],
    *,
    vocab_ids: Int[Array, " d"] | None = None,
    num_drafted: Int[Array, " b"] | None = None,
) -> Float[Array, "b v"]:
    """Returns the distribution of the token after the accepted ones.

    The residual where a proposal was refused, p itself where there was none left to refuse. Only
    the one position of p and of q is expanded to the vocabulary.

    Args:
      target_log_probs: as in `verify`.
      draft_tokens: as in `verify`.
      draft_probs: as in `verify`.
      num_accepted: leading proposals accepted.
      vocab_ids: as in `verify`.
      num_drafted: as in `verify`.
    """
    k, vocab = draft_tokens.shape[1], target_log_probs.shape[2]
    p = jnp.exp(_row(target_log_probs, num_accepted))
    if k == 0:
        return p
    at = jnp.minimum(num_accepted, k - 1)
    if draft_probs is None:
        q = jax.nn.one_hot(_row(draft_tokens, at), vocab, dtype=jnp.float32)
    else:
        q = _row(draft_probs, at).astype(jnp.float32)
        if vocab_ids is not None:
            q = jnp.zeros_like(p).at[:, vocab_ids].set(q, unique_indices=True)
    refused = num_accepted < (k if num_drafted is None else num_drafted)
    return jnp.where(refused[:, None], residual(p, q), p)


def verify(
    target_log_probs: Float[Array, "b k1 v"],
    draft_tokens: Int[Array, "b k"],
    draft_probs: Float[Array, "b k d"] | None,
    keys: Key[Array, " b"],
    *,
    vocab_ids: Int[Array, " ids"] | None = None,
    num_drafted: Int[Array, " b"] | None = None,
) -> VerifyResult:
    """Accepts a prefix of the proposals and draws the token that follows it.

    Args:
      target_log_probs: log-probabilities of the policy's processed distribution, the one plain
        decoding would draw from, at the k proposed positions and the one after. One-hot rows
        (greedy) need no special case.
      draft_tokens: k proposals a row, as ids of the policy's vocabulary. k = 0 is plain decoding.
      draft_probs: the distribution each proposal was really drawn from, after the draft's own
        temperature and truncation; None when the proposals were chosen outright (arg-max).
      keys: one key a row from `row_keys` at the position of the first proposal. The draft's draws
        come from the same keys under `Purpose.DRAFT`; those made here use the other purposes.
      vocab_ids: ascending policy ids of the draft's vocabulary; None when it is the policy's.
      num_drafted: leading proposals that exist in each row, all k when None. It may depend on
        anything known before the proposal it leaves out was drawn, never on that proposal.

    Returns:
      Accepted counts and the next token; 1 to k+1 tokens a row in all.

    Raises:
      ValueError: the arrays disagree on k or on the vocabularies.
    """
    _check(target_log_probs, draft_tokens, draft_probs, vocab_ids)
    k = draft_tokens.shape[1]
    with jax.named_scope("verify"):
        accept = acceptance_probabilities(
            target_log_probs,
            draft_tokens,
            draft_probs,
            vocab_ids=vocab_ids,
            num_drafted=num_drafted,
        )
        good = uniforms(purpose_keys(keys, Purpose.ACCEPT), k) < accept
        num_accepted = jnp.sum(jnp.cumprod(good.astype(jnp.int32), axis=1), axis=1)
        probs = next_distribution(
            target_log_probs,
            draft_tokens,
            draft_probs,
            num_accepted,
            vocab_ids=vocab_ids,
            num_drafted=num_drafted,
        )
        next_token = sample(probs, uniforms(purpose_keys(keys, Purpose.EMIT), 2))
        block = _block(draft_tokens, num_accepted, next_token)
        log_probs = _gather(target_log_probs, block)
        emitted = jnp.arange(k + 1) <= num_accepted[:, None]
        refused = num_accepted < (k if num_drafted is None else num_drafted)
        padded = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
        rejected = jnp.where(refused, _row(padded, num_accepted), -1)
    return VerifyResult(
        num_accepted=num_accepted,
        next_token=next_token,
        rejected=rejected,
        log_probs=jnp.where(emitted, log_probs, 0.0),
    )


def commit_block(
    draft_tokens: Int[Array, "b k"],
    num_accepted: Int[Array, " b"],
    next_token: Int[Array, " b"],
    remaining: Int[Array, " b"],
    stop_ids: tuple[int, ...],
) -> Commit:
    """Turns a verdict into the tokens that each row emits.

    The block ends at its first stop token, which is emitted and counted once, or where the budget
    is used up; what was accepted beyond is dropped and counted nowhere.

    Args:
      draft_tokens: the proposals.
      num_accepted: leading proposals accepted.
      next_token: the policy's token after them.
      remaining: tokens each row may still emit; 0 for rows that already finished.
      stop_ids: tokens that end a row.
    """
    k = draft_tokens.shape[1]
    place = jnp.arange(k + 1)
    block = _block(draft_tokens, num_accepted, next_token)
    stop = jnp.zeros_like(block, dtype=bool)
    for stop_id in stop_ids:
        stop |= block == stop_id
    through_stop = jnp.min(jnp.where(stop, place + 1, k + 1), axis=1)
    counts = jnp.minimum(jnp.minimum(num_accepted + 1, through_stop), jnp.maximum(remaining, 0))
    emitted = place < counts[:, None]
    stopped = jnp.any(stop & emitted, axis=1)
    return Commit(
        tokens=jnp.where(emitted, block, 0),
        counts=counts,
        accepted=jnp.minimum(num_accepted, counts),
        stopped=stopped,
        finished=stopped | (counts >= remaining),
    )


def _block(draft_tokens, num_accepted, next_token):
    """[b, k+1]: the accepted proposals, then the next token (repeated to the end)."""
    drafts = jnp.pad(draft_tokens, ((0, 0), (0, 1)))
    accepted = jnp.arange(drafts.shape[1]) < num_accepted[:, None]
    return jnp.where(accepted, drafts, next_token[:, None])


def _draft_places(tokens, vocab_ids):
    """Places of policy ids in the draft's vocabulary; those that it lacks get a wrong one."""
    if vocab_ids is None:
        return tokens
    return jnp.minimum(jnp.searchsorted(vocab_ids, tokens), vocab_ids.shape[0] - 1)


def _gather(values, ids):
    """values[b, n, ids[b, n]]."""
    return jnp.take_along_axis(values, ids[..., None], axis=-1)[..., 0]


def _row(values, index):
    """values[b, index[b]]."""
    return jax.vmap(lambda row, i: row[i])(values, index)


def _check(target_log_probs, draft_tokens, draft_probs, vocab_ids):
    positions, vocab = target_log_probs.shape[1:]
    k = draft_tokens.shape[1]
    if positions != k + 1:
        raise ValueError(
            f"target_log_probs has {positions} positions for {k} draft tokens; it needs one for "
            f"each and one after, {k + 1}"
        )
    if draft_probs is None:
        return
    size = draft_probs.shape[2]
    if vocab_ids is None and size != vocab:
        raise ValueError(
            f"draft_probs covers {size} tokens and target_log_probs {vocab}; pass vocab_ids for a "
            "draft with a vocabulary of its own"
        )
    if vocab_ids is not None and vocab_ids.shape[0] != size:
        raise ValueError(f"vocab_ids has {vocab_ids.shape[0]} ids for {size} draft_probs")
