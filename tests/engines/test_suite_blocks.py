"""Blocks that are split into kernel blocks, and pools that hold no block back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from layout_core.errors import StrideError
from layout_core.layouts import KVCacheLayout
from layout_core.legality import LEGAL_COMBINATIONS
from layout_core.resolve import resolve_layout
from tests.cases import (
    CAUSAL,
    LAYOUTS,
    NUMPY_DTYPES,
    POISON,
    Cells,
    Group,
    PoolShape,
    Step,
    Tables,
    assign_blocks,
    config_of,
    plan_of,
    room_for,
    row,
    steps,
)
from tests.engines.suite import (
    ENGINE_KERNELS,
    compare_outputs,
    draw,
    expected_outputs,
    run_step,
)
from tests.equivalence.memory import memory_of
from tests.tolerances import assert_same_bytes

LoadEngine = Callable[[str], Any]
CountCase = Callable[[str, str, str, str], None]

engines = pytest.mark.parametrize(("engine", "kernel"), ENGINE_KERNELS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)

RATIO = 2


def split_shape(layers: int, kv_heads: int) -> PoolShape:
    return PoolShape("split", (Group((Cells(kv_heads, 32),) * layers, 4),), 24)


def may_split(layout: str, layers: int, kv_heads: int) -> bool:
    """By the library's table."""
    legal = LEGAL_COMBINATIONS[KVCacheLayout[layout]]
    if layers == 1:
        return legal.split_one_layer_one_head if kv_heads == 1 else legal.split_one_layer
    return legal.split_many_layers_one_head if kv_heads == 1 else legal.split_many_layers


@engines
@layouts
@pytest.mark.parametrize(("layers", "kv_heads"), [(2, 2), (1, 2), (2, 1), (1, 1)])
def test_manager_blocks_split_into_kernel_blocks(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    layout: str,
    layers: int,
    kv_heads: int,
) -> None:
    """Rows own manager blocks of 4 tokens, the views count blocks of 2: one table, other bytes."""
    shape = split_shape(layers, kv_heads)
    config = config_of(shape, layout, "float32")
    if not may_split(layout, layers, kv_heads):
        with pytest.raises(StrideError, match=f"layout {layout}.*ratio {RATIO}"):
            resolve_layout(config, kernel_block_sizes=[4 // RATIO])
        return
    plan = resolve_layout(config, kernel_block_sizes=[4 // RATIO])
    assert {v.blocks_per_manager_block for v in plan.layers} == {RATIO}
    loaded = load_engine(engine)
    step = steps(4)[3]
    dense = draw(shape, step, "float32", seed=6)
    tables = assign_blocks(shape, step.rows, np.random.default_rng(6))
    outcome = run_step(
        loaded, shape, plan, step, dense, tables, dtype="float32", kernel=kernel, num_heads=4,
        seed=6, room=room_for(4),
    )  # fmt: skip
    where = f"{engine} {layout} split"
    compare_outputs(
        outcome, expected_outputs(shape, step, dense, 4, "float32", 6), "float32", where
    )
    # kernel blocks 2b and 2b + 1 of 2 tokens stand for manager block b of 4
    halves = PoolShape("halves", (Group(shape.groups[0].layers, 2),), 48)
    memory = memory_of(halves, layout, 4, fill=POISON)
    for (identity, layer), (k, v) in dense.items():
        for p in range(len(k)):
            block = tables.blocks[identity, 0][p // 4]
            memory.put(layer, RATIO * block + p % 4 // 2, p % 2, k[p], v[p])
    assert_same_bytes(outcome.pool, memory.data.tobytes(), f"{where}: pool")
    pairs = [(3, 8), (5, 11)]
    start = np.random.default_rng(8).integers(0, 256, plan.size_bytes, dtype=np.uint8)
    memory.data[:] = start
    for source, target in pairs:
        for layer in range(layers):
            for part in range(RATIO):
                memory.copy_block(layer, RATIO * source + part, RATIO * target + part)
    pool = loaded.copy_blocks(loaded.load_bytes(plan, start.tobytes()), pairs)
    assert_same_bytes(loaded.pool_bytes(pool), memory.data.tobytes(), f"{where}: copied blocks")
    count_case(engine, kernel, layout, "float32")


@engines
@layouts
def test_case_11_without_a_null_block_slot_0_is_written(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, layout: str
) -> None:
    """4 blocks, none held back: block 0 belongs to a row like any other."""
    shape = PoolShape("case 11", (Group((Cells(2, 32),), 4),), 4)
    plan = resolve_layout(config_of(shape, layout, "float16"), null_block=False)
    loaded = load_engine(engine)
    step = Step("case 11", (row("a", 3, 7), row("b", 4, 4)), CAUSAL)
    dense = draw(shape, step, "float16", seed=1)
    tables = Tables()
    for r, ids in zip(step.rows, ([3, 0], [1])):
        tables.put(r, 0, ids)
    outcome = run_step(
        loaded, shape, plan, step, dense, tables, dtype="float16", kernel=kernel, num_heads=2,
        seed=1, room=room_for(4),
    )  # fmt: skip
    want = expected_outputs(shape, step, dense, 2, "float16", 1)
    compare_outputs(outcome, want, "float16", f"{engine} {layout}")
    memory = memory_of(shape, layout, NUMPY_DTYPES["float16"].itemsize, fill=POISON)
    for (identity, layer), (k, v) in dense.items():
        for p in range(len(k)):
            memory.put(layer, tables.blocks[identity, 0][p // 4], p % 4, k[p], v[p])
    assert_same_bytes(outcome.pool, memory.data.tobytes(), f"{engine} {layout}")
    count_case(engine, kernel, layout, "float16")


def test_with_a_null_block_block_0_is_never_written() -> None:
    from layout_core.errors import BlockTableError
    from layout_core.step import plan_step

    shape = PoolShape("case 11", (Group((Cells(2, 32),), 4),), 4)
    tables = Tables()
    r = row("a", 1, 1)
    tables.put(r, 0, [0])
    with pytest.raises(BlockTableError, match="null block"):
        plan_step(plan_of(shape, "LBNHC", "float16"), [r], tables, visibility=CAUSAL)
