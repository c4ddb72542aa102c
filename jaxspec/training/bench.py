"""Benchmarks behind `launch/bench`: everything is timed in turns, so that ratios hold."""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxspec.compat import vary
from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.eagle3_config import Eagle3Config
from jaxspec.inference import load_generator
from jaxspec.io.policy import load_policy
from jaxspec.mesh import MeshConfig, make_mesh
from jaxspec.models import policy
from jaxspec.models.config import ModelConfig
from jaxspec.packing import PackingConfig, Sample
from jaxspec.params import count_params, partition_specs, place_params
from jaxspec.rl.forward import score
from jaxspec.rl.losses import LossConfig
from jaxspec.rl.optimizers import OptimizerConfig, make_optimizer
from jaxspec.rl.state import init_state
from jaxspec.rl.step import StepConfig, make_rl_step
from jaxspec.tasks import comparison
from jaxspec.training import environment, peers
from jaxspec.training.batches import build_microbatches
from jaxspec.training.console import Progress
from jaxspec.training.setup import probe_compute_dtype

Rows = list[dict[str, Any]]


def show(rows: Rows, path: str = "") -> None:
    """Prints rows as a table and writes them, with versions, as JSON."""
    progress = Progress(0)
    for row in rows:
        name = row["name"]
        cells = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()}
        cells.pop("name")
        progress.summary(name, cells)
    if path:
        record = {"rows": rows, "versions": environment.versions()}
        Path(path).write_text(json.dumps(record, indent=1))


def in_turns(runs: dict[str, Callable[[int], float]], trials: int) -> dict[str, list[float]]:
    """Calls each function once to warm up, then `trials` times in turns; returns what they give."""
    values: dict[str, list[float]] = {name: [] for name in runs}
    with Progress(0) as progress:
        for trial in range(trials + 1):
            names = list(runs) if trial % 2 else list(runs)[::-1]
            for name in names:
                progress.phase(f"timing {name}" if trial else f"warming up {name}", trial, trials)
                value = runs[name](trial)
                if trial:
                    values[name].append(value)
    return values


def bench_rollout(
    policy_source: str,
    draft_source: str,
    *,
    batch_sizes: Sequence[int],
    new_tokens: int,
    draft_lengths: Sequence[int],
    trials: int,
    peer: bool,
) -> Rows:
    """Times rollouts; every row has tokens a second and the ratio to our plain rollout."""
    plain = load_generator(policy_source, max_new_tokens=new_tokens)
    # What `configs/smollm2_135m_arithmetic.gin` asks, in prompts of one length: the peer would pay
    # for padding.
    numbers = np.random.default_rng(0).integers(10, 100, (64, 2))
    texts = [
        plain.tokenizer.apply_chat_template(
            [
                {"role": "system", "content": comparison.SYSTEM},
                {"role": "user", "content": comparison.QUESTION.format(a, b)},
            ]
        )
        for a, b in numbers
    ]
    prompts = [np.asarray(plain.tokenizer.encode(text), np.int32) for text in texts]
    length = statistics.mode(len(p) for p in prompts)
    prompts = [p for p in prompts if len(p) == length]
    rows = []
    model, dtype = plain.sampler.model, plain.sampler.compute_dtype
    torch_models = {}
    if peer and peers.available():
        torch_models = {
            d: peers.load_peer(model, plain.policy.params, d) for d in ("float32", "bfloat16")
        }
    for size in batch_sizes:
        part = (prompts * (size // len(prompts) + 1))[:size]
        runs = {"plain": functools.partial(_our_rate, _resized(plain, size), part)}
        if draft_source:
            for k in draft_lengths:
                drafted = load_generator(
                    policy_source,
                    draft_source,
                    max_new_tokens=new_tokens,
                    num_draft_tokens=k,
                    compute_dtype=dtype,
                )
                runs[f"draft, {k} tokens"] = functools.partial(
                    _our_rate, _resized(drafted, size), part
                )
        for d, torch_model in torch_models.items():
            runs[f"transformers generate, {d}"] = functools.partial(
                _peer_rate, torch_model, part, new_tokens
            )
        rates = in_turns(runs, trials)
        base = rates["plain"]
        for name, values in rates.items():
            ratios = [v / b for v, b in zip(values, base, strict=True)]
            rows.append(
                {
                    "name": f"batch {size}: {name}",
                    "compute dtype": dtype if "transformers" not in name else name.split()[-1],
                    "tokens a second": statistics.median(values),
                    "ratio to plain": statistics.median(ratios),
                    "ratio, lowest": min(ratios),
                    "ratio, highest": max(ratios),
                }
            )
    return rows


def _resized(generator: Any, size: int) -> Any:
    """The same generator for another batch size, with stop tokens off."""
    sampler = generator.sampler
    config = dataclasses.replace(sampler.config, batch_size=size)
    return dataclasses.replace(
        generator, sampler=dataclasses.replace(sampler, config=config, stop_ids=())
    )


def _our_rate(generator: Any, prompts: Sequence[np.ndarray], trial: int) -> float:
    start = time.perf_counter()
    result = generator.sampler(
        generator.policy, generator.draft_weights, prompts, jax.random.key(trial)
    )
    return int(result.lengths.sum()) / (time.perf_counter() - start)


def _peer_rate(peer: Any, prompts: Sequence[np.ndarray], new_tokens: int, trial: int) -> float:
    seconds, tokens = peers.time_generate(peer, prompts, new_tokens, trial)
    return tokens / seconds


def _matmul_rate(
    model: ModelConfig, rows: int, dtype: str, seconds: float = 1.0
) -> Callable[[int], float]:
    """Returns a function that gives the FLOP/s of the policy's MLP product, kept up for seconds.

    A single call can be a third faster than what the machine keeps up; `best` on the function is
    the rate of the fastest one.
    """
    x = jnp.ones((rows, model.hidden_size), dtype)
    w = jnp.ones((model.hidden_size, model.intermediate_size), dtype)
    multiply = jax.jit(functools.partial(jnp.dot, preferred_element_type=jnp.float32))
    flops = 2.0 * rows * model.hidden_size * model.intermediate_size

    def run(_: int) -> float:
        multiply(x, w).block_until_ready()
        calls: list[float] = []
        while sum(calls) < seconds:
            start = time.perf_counter()
            multiply(x, w).block_until_ready()
            calls.append(time.perf_counter() - start)
        run.best = max(run.best, flops / min(calls))
        return flops * len(calls) / sum(calls)

    run.best = 0.0
    return run


def bench_step(
    policy_source: str,
    *,
    groups: int,
    samples_per_prompt: int,
    prompt_tokens: int,
    reply_tokens: int,
    row_length: int,
    rows_per_microbatch: int,
    trials: int,
    peer: bool,
) -> Rows:
    """Times updates on the same documents; ratios to our own with shared prompts and no draft."""
    loaded = load_policy(policy_source)
    model, mesh = loaded.config, make_mesh(MeshConfig())
    dtype = probe_compute_dtype(model)
    samples = _documents(model, groups, samples_per_prompt, prompt_tokens, reply_tokens)
    draft = Eagle3(
        Eagle3Config.from_policy(model, num_passes=3, draft_vocab_size=min(4096, model.vocab_size))
    )
    packing = PackingConfig(row_length=row_length, rows_per_microbatch=rows_per_microbatch)
    runs: dict[str, Callable[[int], float]] = {}
    tokens: dict[str, int] = {}
    name = "forward and backward alone"
    runs[name], tokens[name] = _our_gradient(loaded, mesh, dtype, samples, packing)
    for name, share, with_draft in (
        ("update", True, None),
        ("update with the draft", True, draft),
        ("update, prompts not shared", False, None),
    ):
        runs[name], tokens[name] = _our_update(
            loaded,
            mesh,
            dtype,
            samples,
            dataclasses.replace(packing, share_prompts=share),
            with_draft,
        )
    if peer and peers.available():
        torch_model = peers.load_peer(model, loaded.params, "float32")
        update = peers.PeerUpdate(torch_model, learning_rate=1e-6, rows=8)
        runs["transformers update, float32"] = lambda _: update(samples)
        tokens["transformers update, float32"] = sum(len(s.prompt) + len(s.reply) for s in samples)
    product = _matmul_rate(model, row_length * rows_per_microbatch, dtype)
    rates: dict[str, list[float]] = {name: [] for name in runs}

    def between_products(name: str, trial: int) -> float:
        before = product(trial)
        value = runs[name](trial)
        if trial:
            rates[name].append((before + product(trial)) / 2)
        return value

    seconds = in_turns({name: functools.partial(between_products, name) for name in runs}, trials)
    embedding = model.vocab_size * model.hidden_size
    layers = count_params(policy.param_table(model)) - embedding
    labels = sum(len(s.reply) for s in samples)
    rows = []
    for name, values in seconds.items():
        flops = 6.0 * (layers * tokens[name] + embedding * labels)
        ratios = [v / b for v, b in zip(values, seconds["update"], strict=True)]
        row = {
            "name": name,
            "seconds": statistics.median(values),
            "time as a ratio to ours": statistics.median(ratios),
            "tokens computed": tokens[name],
        }
        if "draft" not in name:
            shares = [flops / v / r for v, r in zip(values, rates[name], strict=True)]
            row["share of the matmul rate"] = statistics.median(shares)
        rows.append(row)
    rate = statistics.median(value for values in rates.values() for value in values)
    row = {"name": f"matrix product alone, {dtype}", "GFLOP/s": rate / 1e9}
    rows.append(row | {"GFLOP/s, best call": product.best / 1e9})
    return rows


def _documents(model, groups, each, prompt_tokens, reply_tokens) -> list[Sample]:
    rng = np.random.default_rng(0)
    samples = []
    for group in range(groups):
        prompt = rng.integers(0, model.vocab_size, prompt_tokens)
        for _ in range(each):
            size = int(rng.integers(reply_tokens * 3 // 4, reply_tokens * 5 // 4 + 1))
            samples.append(
                Sample(
                    prompt=prompt,
                    reply=rng.integers(0, model.vocab_size, size),
                    logprobs=np.full(size, -5.0, np.float32),
                    advantage=float(rng.normal()),
                    group=group,
                )
            )
    return samples


def _our_gradient(loaded, mesh, dtype, samples, packing):
    """Returns a function that takes the policy's gradient and gives its seconds, and the tokens."""
    model = loaded.config
    table = policy.param_table(model)
    specs, rows = partition_specs(table, mesh), PartitionSpec("data")

    def loss(params, batch):
        scored = score(
            params, specs, batch, model, taps=(), compute_dtype=dtype, remat=StepConfig().remat
        )
        return scored.logprobs.logprobs.sum()

    def local(params, batch):
        # One gradient a device, as a step accumulates them before it sums over devices.
        return jax.tree.map(lambda g: g[None], jax.grad(loss)(vary(params, ("data",)), batch))

    gradient = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(specs, rows), out_specs=rows))
    params = place_params(table, loaded.params, mesh)
    made = build_microbatches(samples, packing, num_ahead=1, capacity=1, mesh=mesh)
    parts = [jax.tree.map(lambda x: x[i], made.batch) for i in range(made.used)]  # noqa: B023

    def run(_: int) -> float:
        start = time.perf_counter()
        for part in parts:
            jax.block_until_ready(gradient(params, part))
        return time.perf_counter() - start

    return run, made.stats.used


def _our_update(loaded, mesh, dtype, samples, packing, draft):
    """Returns a function that takes one update and gives its seconds, and the tokens it stores."""
    model = loaded.config
    table = policy.param_table(model)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-6))
    params = place_params(table, loaded.params, mesh)
    draft_fields = {}
    if draft is not None:
        ids = np.arange(draft.config.draft_vocab_size, dtype=np.int32)
        weights = draft.init(jax.random.key(0), params, ids, mesh)
        draft_fields = {
            "draft_weights": weights,
            "draft_table": draft.param_table(),
            "draft_optimizer": optimizer,
        }
    holder = {
        "state": init_state(jax.random.key(0), params, table, optimizer, mesh, **draft_fields)
    }
    del params
    batch = build_microbatches(
        samples,
        packing,
        num_ahead=draft.num_ahead if draft else 1,
        capacity=len(samples),
        mesh=mesh,
    )
    step = make_rl_step(
        model,
        draft,
        StepConfig(loss=LossConfig(kind="dapo", importance_cap=None)),
        optimizer,
        optimizer if draft else None,
        mesh,
        compute_dtype=dtype,
    )
    labels = jnp.float32(sum(len(s.reply) for s in samples))

    def run(_: int) -> float:
        start = time.perf_counter()
        state, metrics = step(
            holder["state"], batch.batch, jnp.asarray(batch.used, jnp.int32), labels
        )
        jax.block_until_ready((state.policy.params, metrics))
        holder["state"] = state
        return time.perf_counter() - start

    return run, batch.stats.used
