"""Paged attention and writes of the JAX engine on the CPU, against torch's dense SDPA and memcpy.

Every round runs all candidates once, one after another, and a ratio is the median of the rounds'
ratios to the base of the same round, so that a machine that slows down slows both.

    python -m bench.jax_attention [--rounds 15] [--threads 2] [--json out.json]
    python -m bench.jax_attention --clock cpu      # on a machine that is busy
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from backends.jax_gpu import JaxEngine, create_engine
from layout_core.layouts import KVCacheLayout
from layout_core.resolve import resolve_layout, single_group_config
from layout_core.rows import Bucket, PagedAttentionRow
from layout_core.specs import FullAttentionSpec
from layout_core.views import ResolvedLayout
from layout_core.visibility import Visibility

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BUCKET_KEYS = 16, 8, 128, 32, 2048
FULL = Visibility(causal=False)

Calls = dict[str, Callable[[], Any]]


class Tables:
    """One row of shuffled blocks, which never changes."""

    version = 0

    def __init__(self, blocks: int) -> None:
        order = np.random.default_rng(0).permutation(blocks) + 1
        self.row = array("i", order.tolist())

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        return self.row[: -(-row.seq_len // BLOCK_SIZE)]


def plan(layout: str, dtype: str, num_blocks: int) -> ResolvedLayout:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=dtype
    )
    return resolve_layout(single_group_config(spec, num_blocks, ["0", "1"], layout))


def interleaved(calls: Calls, rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each call in each round; one round runs each once, after two to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            start = clock()
            call()
            if number >= 2:
                seconds[name].append(clock() - start)
    return seconds


def ratios(seconds: dict[str, list[float]], base: str) -> dict[str, float]:
    """Median over the rounds of each call's time in that of ``base``."""
    return {
        name: statistics.median(a / b for a, b in zip(times, seconds[base], strict=True))
        for name, times in seconds.items()
    }


def random(*shape: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def attention(
    engine: JaxEngine, tokens: int, keys: int, dtype: str, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """``tokens`` queries of one row over ``keys`` keys, in a bucket of BUCKET_KEYS."""
    q, k, v = (
        random(n, h, HEAD_SIZE, seed=i)
        for i, (n, h) in enumerate(((tokens, HEADS), (keys, KV_HEADS), (keys, KV_HEADS)))
    )
    tq, tk, tv = (
        torch.from_numpy(x).to(getattr(torch, dtype)).transpose(0, 1)[None].contiguous()
        for x in (q, k, v)
    )
    jq, jk, jv = (jnp.asarray(x).astype(dtype) for x in (q, k, v))
    dense = jax.jit(jax.nn.dot_product_attention)
    calls: Calls = {
        "torch dense": lambda: scaled_dot_product_attention(tq, tk, tv, enable_gqa=True),
        "jax.nn.dot_product_attention": lambda: dense(
            jq[None], jk[None], jv[None]
        ).block_until_ready(),
    }
    expected = calls["torch dense"]()[0].transpose(0, 1).float().numpy()
    blocks = BUCKET_KEYS // BLOCK_SIZE
    for layout in ("LBNHC", "LBHNC", "BHLNC"):
        resolved = plan(layout, dtype, blocks + 1)
        tables = Tables(blocks)
        pool = engine.allocate(resolved)
        slots = [
            int(tables.row[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE for p in range(keys)
        ]
        pool = engine.write(pool, 1, jk, jv, slots)
        row = PagedAttentionRow("r", tokens, keys, keys - tokens, sequence_id=0)
        batch = engine.prepare(
            resolved,
            [row],
            tables,
            visibility=FULL,
            num_heads=HEADS,
            bucket=Bucket(tokens, 1, blocks),
        )

        def call(pool: Any = pool, batch: Any = batch) -> Any:
            return engine.forward_paged(pool, 1, jq, None, None, batch)[0].block_until_ready()

        error = float(np.abs(np.asarray(call(), np.float32) - expected).max())
        if error > (1e-4 if dtype == "float32" else 2e-2):
            raise SystemExit(f"{layout} {dtype}: paged and dense differ by {error}")
        calls[layout] = call
    seconds = interleaved(calls, rounds, clock)
    result = ratios(seconds, "torch dense")
    fill = keys / BUCKET_KEYS
    print(
        f"T={tokens:<5} keys={keys:<5} ({fill:4.0%} of the bucket) {dtype:<9} torch dense "
        f"{statistics.median(seconds['torch dense']) * 1e3:8.2f} ms; times in its time:"
    )
    print("    " + "  ".join(f"{n} {r:.2f}" for n, r in result.items() if n != "torch dense"))
    slowest = max(result[name] for name in KVCacheLayout.__members__ if name in result)
    print(
        "    jax.nn.dot_product_attention / slowest layout: "
        f"{result['jax.nn.dot_product_attention'] / slowest:.2f}"
    )
    return {"tokens": tokens, "keys": keys, "dtype": dtype, "ratio": result}


def writing(
    engine: JaxEngine, dtype: str, rounds: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """4,096 cells (512 tokens of 8 heads) into a pool, against a memcpy of as many bytes."""
    tokens = 4096 // KV_HEADS
    num_blocks = 4 * tokens // BLOCK_SIZE + 1
    k, v = (
        jnp.asarray(random(tokens, KV_HEADS, HEAD_SIZE, seed=i)).astype(dtype) for i in range(2)
    )
    order = np.random.default_rng(1).permutation(4 * tokens // BLOCK_SIZE) + 1
    positions = np.arange(tokens)
    slots = jnp.asarray(
        order[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE, jnp.int32
    )
    source = np.ones(k.nbytes + v.nbytes, np.uint8)
    target = np.zeros_like(source)
    calls: Calls = {"memcpy": lambda: np.copyto(target, source)}
    for layout in ("LBNHC", "LBHNC", "BHLNC"):
        cell = [engine.allocate(plan(layout, dtype, num_blocks))]

        def call(cell: list[Any] = cell) -> Any:
            cell[0] = engine.write(cell[0], 1, k, v, slots)
            return cell[0].words.block_until_ready()

        calls[layout] = call
    seconds = interleaved(calls, rounds, clock)
    result = {name: 1 / ratio for name, ratio in ratios(seconds, "memcpy").items()}
    print(
        f"write 4096 cells {dtype:<9} memcpy {source.nbytes / 2**20:.0f} MiB "
        f"{statistics.median(seconds['memcpy']) * 1e3:.2f} ms; bandwidth in memcpy's:"
    )
    print("    " + "  ".join(f"{n} {r:.2f}" for n, r in result.items() if n != "memcpy"))
    return {"cells": 4096, "dtype": dtype, "bandwidth_ratio": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="of torch; JAX takes the cores")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: time of the whole process on one core, for a machine that is busy",
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 32])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.clock == "cpu":  # one core, so that no thread burns time waiting for another
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
        options.threads = 1
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    torch.set_num_threads(options.threads)
    setting = {
        "jax": jax.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "torch_threads": options.threads,
        "clock": options.clock,
        "rounds": options.rounds,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "block_size": BLOCK_SIZE,
    }
    print(json.dumps(setting))
    engine = create_engine("cpu")  # after the cores were chosen: XLA counts them once
    cases: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        for tokens in options.tokens:
            for keys in (BUCKET_KEYS, int(0.55 * BUCKET_KEYS)):
                cases.append(attention(engine, tokens, keys, dtype, options.rounds, clock))
        cases.append(writing(engine, dtype, 4 * options.rounds, clock))
    if options.json:
        options.json.write_text(json.dumps({"setting": setting, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
