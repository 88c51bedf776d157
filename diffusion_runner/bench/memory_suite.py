"""Suite ``memory``: one pool of pages beside dense caches, for mixed lengths and guidance.

Nothing is timed. The pool's bytes are those of the plan that the engines allocate, and its
blocks are counted by the block manager that hands them out.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from block_manager import DiffusionKVCacheManager, DiffusionKVRequest, cfg_rows
from diffusion_runner.bench.options import Bench
from diffusion_runner.bench.record import Memory
from diffusion_runner.bench.workload import Geometry
from layout_core import DType, FullAttentionSpec, resolve_layout, single_group_config

POOL = "pages, shared prompts once"
MAX_LEN = 8192
TARGET = 1024
NUM_LAYERS = 32


def run(bench: Bench) -> Iterator[Memory]:
    """Requests of one prompt length, of mixed lengths, and with guidance over shared prompts."""
    requests = 4 if bench.options.quick else 16
    lengths = np.random.default_rng(0).integers(32, MAX_LEN - TARGET, requests).tolist()
    for guidance in (1.0, 5.0):
        rows = cfg_rows(guidance)
        case = f"{requests} requests of 32 to {MAX_LEN - TARGET} prompt tokens, {rows} row(s) each"
        yield _held(case, [[n, 32][:rows] for n in lengths])
    yield _held(
        f"{requests} pictures of one prompt of 2,048 tokens, 2 rows each",
        [[2048, 32] for _ in range(requests)],
        same_prompts=True,
    )


def _held(case: str, requests: list[list[int]], *, same_prompts: bool = False) -> Memory:
    """Bytes that hold rows of prompts of these lengths, each followed by its target."""
    geometry = Geometry(block_size=64, dtype="bfloat16")
    spec = FullAttentionSpec(
        block_size=geometry.block_size,
        num_kv_heads=geometry.num_kv_heads,
        head_size=geometry.head_size,
        dtype=DType.parse(geometry.dtype),
    )
    names = [str(layer) for layer in range(NUM_LAYERS)]
    rows = [prompt for request in requests for prompt in request]
    most = sum(geometry.blocks(prompt + TARGET) for prompt in rows) + 1
    manager = DiffusionKVCacheManager(
        single_group_config(spec, most, names, "LBNHC"),
        max_model_len=MAX_LEN,
        scheduler_block_size=geometry.block_size,
        hash_block_size=geometry.block_size,
        enable_prefix_caching=True,
    )
    used: set[int] = set()
    for number, request in enumerate(requests):
        metadata = manager.reserve_request(
            str(number),
            [
                DiffusionKVRequest(
                    f"{number}/{sequence}",
                    sequence_id=sequence,
                    prefix_len=prompt,
                    target_len=TARGET,
                    seq_len=prompt + TARGET,
                    cache_token_ids=tuple(
                        range(start := 0 if same_prompts else number * MAX_LEN, start + prompt)
                    ),
                    cache_namespace=str(sequence),
                )
                for sequence, prompt in enumerate(request)
            ],
        )
        if metadata is None:
            raise RuntimeError("a pool that was sized for all rows refused one")
        manager.publish_request(str(number))
        for row in metadata.sequences:
            used.update(row.block_ids[0])
    pool = resolve_layout(single_group_config(spec, len(used) + 1, names, "LBNHC"))
    token = spec.page_size_bytes // geometry.block_size * NUM_LAYERS
    longest = max(prompt + TARGET for prompt in rows)
    return Memory(
        case,
        {
            POOL: pool.size_bytes,
            "dense, each row at its own length": token * sum(p + TARGET for p in rows),
            "dense, padded to the longest row": token * longest * len(rows),
            f"dense, reserved at {MAX_LEN:,} tokens a row": token * MAX_LEN * len(rows),
        },
        POOL,
    )
