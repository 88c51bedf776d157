"""Offsets past 2^31 elements: a pool of 4 GiB of address space, of which few pages are touched.

Run by :mod:`tests.kernels.test_interpreter` in a process of its own. An offset that wrapped
would lie before the pool, and the process would not live to compare anything.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import torch

from backends.triton_kernels.plans import plan_attention, plan_copy_blocks, plan_gather, plan_write
from tests.kernels import host
from tests.oracle import dense_attention
from tests.tolerances import assert_close, assert_same_bits

UNIT = 8
BLOCK_SIZE, HEADS, SIZE = 16, 2, 32
BLOCK_STRIDE = 2**30 + 4096  #: elements: block 2 starts past 2^31
OFFSET = 64
ELEMENTS = 2**31 + 2**20
PLACE = host.integers(
    [n // UNIT for n in (OFFSET, BLOCK_STRIDE, BLOCK_SIZE * 2 * SIZE, 2 * SIZE)], torch.int64
)
LAYER: dict[str, Any] = {
    "kv_heads": HEADS, "head_size": SIZE, "head_size_v": SIZE, "block_size": BLOCK_SIZE,
    "dtype": "float16", "unit": UNIT,
}  # fmt: skip


def test_write_copy_gather_and_attention() -> None:
    space = mmap.mmap(-1, 2 * ELEMENTS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pool = torch.frombuffer(space, dtype=torch.uint8)
    rng = np.random.default_rng(0)
    tokens = 2 * BLOCK_SIZE
    key, value = (rng.standard_normal((tokens, HEADS, SIZE)).astype(np.float16) for _ in "kv")
    slots = [*range(BLOCK_SIZE), *range(2 * BLOCK_SIZE, 3 * BLOCK_SIZE)]  # blocks 0 and 2
    common = {"pool": pool, "place": PLACE}

    host.run(
        plan_write(num_tokens=tokens, **LAYER),
        {
            **common,
            "key": torch.from_numpy(key),
            "value": torch.from_numpy(value),
            "slots": host.integers(slots, torch.int64),
        },
    )
    last = OFFSET + 2 * BLOCK_STRIDE + (BLOCK_SIZE + BLOCK_SIZE - 1) * 2 * SIZE  # head 1, token 15
    found = pool[2 * last : 2 * (last + 2 * SIZE)].view(torch.float16).numpy()
    assert last > 2**31
    assert_same_bits(found, np.concatenate([key[-1, 1], value[-1, 1]]))

    host.run(  # the far block to block 1
        plan_copy_blocks(num_pairs=1, num_layers=1, **LAYER),
        {
            "pool": pool,
            "places": PLACE[None],
            "source": host.integers([2]),
            "destination": host.integers([1]),
        },
    )
    buffers: dict[str, Any] = {
        **common,
        "block_table": host.integers([2, 1]),
        "first_key": host.integers([0]),
        "cu_keys": host.integers([0, tokens]),
    }
    host.run(
        plan_gather(num_rows=1, max_keys=tokens, total_keys=tokens, table_width=2, **LAYER), buffers
    )
    far = key[BLOCK_SIZE:]
    assert_same_bits(buffers["key_out"].numpy(), np.concatenate([far, far]))

    query = rng.standard_normal((3, HEADS, SIZE)).astype(np.float16)
    shape = host.small_shape(1)
    launches = plan_attention(
        shape=shape, num_tokens=3, num_tiles=1, query_heads=HEADS, table_width=2,
        query_dtype="float16", **LAYER,
    )  # fmt: skip
    buffers = {
        **common,
        "query": torch.from_numpy(query),
        "tiles": host.integers([0, 0, 3, 0, tokens, 0, tokens, 0]),
        "lo": host.integers([0] * 3),
        "hi": host.integers([tokens] * 3),
        "block_table": host.integers([0, 2]),
    }
    for launch in launches:
        host.run(launch, buffers, {"score_scale": SIZE**-0.5, "value_scale": 1.0, "softcap": 0.0})
    expected, _ = dense_attention(query, key, value, np.ones((3, tokens), np.bool_))
    assert_close(buffers["out"].numpy(), expected, "attention", "float16")
