"""Suite ``core``: import, planning, the block manager and the row table, beside vLLM's if there.

The base is always ours, so that a peer above 1 is slower. Only the standard library runs here,
and the time is that of one thread.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from block_manager import DiffusionKVCacheManager, DiffusionKVRequest, RowTable
from diffusion_runner.bench.harness import Call, Comparison, Timed, compare
from diffusion_runner.bench.options import Bench, installed
from layout_core import (
    CacheConfig,
    DType,
    FullAttentionSpec,
    ModelConfig,
    ResolvedLayout,
    RunConfig,
    get_kv_cache_configs,
    resolve_layout,
)

SUITE = "core"
ROOT = Path(__file__).resolve().parents[2]
NUM_LAYERS = 128
NUM_BLOCKS = 1_000_000
BLOCK_SIZE = 16
ROWS, BLOCKS_PER_ROW = 8, 256
POOL_BLOCKS = 100_000


def run(bench: Bench) -> Iterator[Comparison]:
    """Import, plan, manager with and without caching, building, row table."""
    peers = _peers()
    limits = bench.options.limits
    imports: dict[str, Call] = {
        "layout_core": _child("import layout_core"),
        "a bare interpreter": _child("pass"),
    }
    if peers is not None:
        imports["vllm.v1.kv_cache_interface"] = _child("import vllm.v1.kv_cache_interface")
    yield compare(SUITE, "import", imports, base="layout_core", limits=limits)

    specs = model_specs()
    plans: dict[str, Call] = {
        f"plan, {layout}": (lambda layout=layout: plan(specs, NUM_BLOCKS, layout))  # type: ignore[misc]
        for layout in ("LBNHC", "LHBNC", "BLNHC", "BHLNC")
    }
    if peers is not None:
        plans["vLLM's get_kv_cache_configs alone"] = peers.plan_call(NUM_LAYERS, NUM_BLOCKS)
    case = f"specs and memory to a plan, {NUM_LAYERS} layers, {NUM_BLOCKS:,} blocks"
    yield compare(SUITE, case, plans, base="plan, LBNHC", limits=limits)

    for caching in (False, True):
        calls: dict[str, Call] = {"block manager": manager_call(POOL_BLOCKS, caching)}
        if peers is not None:
            calls["vLLM's KVCacheManager"] = peers.manager_call(POOL_BLOCKS, caching, prompts)
        case = (
            f"reserve, publish, free {ROWS} rows x {BLOCKS_PER_ROW} blocks, caching "
            f"{'on' if caching else 'off'}"
        )
        yield compare(SUITE, case, calls, base="block manager", limits=limits)

    build: dict[str, Call] = {"block manager": lambda: make_manager(POOL_BLOCKS, True)}
    if peers is not None:
        build["vLLM's KVCacheManager"] = peers.build_call(POOL_BLOCKS)
    case = f"building a manager over {POOL_BLOCKS:,} blocks"
    yield compare(SUITE, case, build, base="block manager", limits=limits)

    case = f"installing {ROWS} rows x {BLOCKS_PER_ROW} blocks"
    yield compare(SUITE, case, {"row table": table_call()}, base="row table", limits=limits)


def _peers() -> Any | None:
    if not installed("vllm"):
        return None
    from integrations import vllm_bench

    return vllm_bench


def _child(code: str) -> Call:
    return lambda: subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def model_specs(num_layers: int = NUM_LAYERS) -> dict[str, Any]:
    """Equal layers, each with a spec object of its own, as workers report them."""
    return {
        f"model.layers.{i}.attn": FullAttentionSpec(
            block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=DType.parse("bfloat16")
        )
        for i in range(num_layers)
    }


def plan(specs: dict[str, Any], num_blocks: int, layout: str) -> ResolvedLayout:
    """From specs and memory to the plan that an engine executes."""
    page = next(iter(specs.values())).page_size_bytes
    config = RunConfig(ModelConfig(4096), CacheConfig(kv_cache_layout=layout))
    memory = page * len(specs) * num_blocks
    return resolve_layout(get_kv_cache_configs(config, [specs], [memory])[0])


def _config(num_blocks: int) -> Any:
    """The attributes of a KV cache config that a block manager reads."""
    spec = SimpleNamespace(block_size=BLOCK_SIZE)
    return SimpleNamespace(
        num_blocks=num_blocks, kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]
    )


def make_manager(num_blocks: int, caching: bool) -> DiffusionKVCacheManager:
    """A manager of one group."""
    return DiffusionKVCacheManager(
        _config(num_blocks),
        max_model_len=1 << 20,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_prefix_caching=caching,
    )


def prompts(numbers: count[int], blocks: int) -> list[tuple[int, ...]]:
    """One new prompt for each row, so that no round finds its keys made."""
    length = blocks * BLOCK_SIZE
    return [
        tuple(range(start * length, (start + 1) * length)) for _, start in zip(range(ROWS), numbers)
    ]


def _rows(tokens: list[tuple[int, ...]], caching: bool) -> list[DiffusionKVRequest]:
    return [
        DiffusionKVRequest(
            f"row-{index}",
            sequence_id=index,
            prefix_len=len(row) - BLOCK_SIZE,
            target_len=BLOCK_SIZE,
            seq_len=len(row),
            cache_token_ids=row if caching else (),  # those of the prefix are keyed
        )
        for index, row in enumerate(tokens)
    ]


def manager_call(
    num_blocks: int, caching: bool, blocks: int = BLOCKS_PER_ROW
) -> Callable[[], Timed]:
    """One request of :data:`ROWS` rows: reserve, publish, free.

    Requests are made before; with caching in the timed part, since that packs their tokens.
    """
    manager, numbers = make_manager(num_blocks, caching), count()

    def call() -> Timed:
        tokens = prompts(numbers, blocks)
        rows = _rows(tokens, False)
        start = time.thread_time_ns()
        if caching:
            rows = _rows(tokens, True)
        if manager.reserve_request("request", rows) is None:
            raise RuntimeError("the request was not admitted")
        manager.publish_request("request")
        manager.free_request("request")
        return Timed((time.thread_time_ns() - start) / 1e9)

    return call


def table_call() -> Callable[[], Timed]:
    """A worker's row table installing one request."""
    manager = make_manager(POOL_BLOCKS, False)
    table = RowTable(_config(POOL_BLOCKS), max_model_len=1 << 20)
    metadata = manager.reserve_request("request", _rows(prompts(count(), BLOCKS_PER_ROW), False))
    if metadata is None:
        raise RuntimeError("the request was not admitted")

    def call() -> Timed:
        start = time.thread_time_ns()
        table.install(metadata)
        spent = time.thread_time_ns() - start
        table.remove(["request"])
        return Timed(spent / 1e9)

    return call
