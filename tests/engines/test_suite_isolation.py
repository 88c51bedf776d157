"""What one row holds never reaches another row, and no byte that nobody wrote reaches any.

Every run of the suite starts from a pool of NaN already; here the neighbours are changed, and
the outputs must stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from layout_core.step import plan_step
from tests.cases import (
    CAUSAL,
    LAYOUTS,
    PLAIN,
    POISON,
    Step,
    Tables,
    assign_blocks,
    nans,
    plan_of,
    room_for,
    steps,
)
from tests.engines.suite import DTYPES, ENGINE_KERNELS, draw, draw_queries, padded, run_step
from tests.tolerances import assert_same_bits, assert_same_bytes

LoadEngine = Callable[[str], Any]
CountCase = Callable[[str, str, str, str], None]

SHARED = {s.name: s for s in steps(4)}
NAMES = (
    "two CFG rows of unlike prefixes, the target one full span",
    "spans that differ, one row without any, one with an empty list",
    "causal window",
)


def run(engine: Any, layout: str, step: Step, dtype: str, kernel: str, dense: Any) -> Any:
    return run_step(
        engine,
        PLAIN,
        plan_of(PLAIN, layout, dtype),
        step,
        dense,
        assign_blocks(PLAIN, step.rows, np.random.default_rng(4)),
        dtype=dtype,
        kernel=kernel,
        num_heads=4,
        seed=1,
        room=room_for(4),
    )


@pytest.mark.parametrize(("engine", "kernel"), ENGINE_KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_changes_leaves_the_others_alone(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    layout: str,
    dtype: str,
) -> None:
    """Field case 17: also for two CFG branches of one request."""
    loaded = load_engine(engine)
    step = SHARED[NAMES[LAYOUTS.index(layout) % len(NAMES)]]
    dense = draw(PLAIN, step, dtype, seed=1)
    before = run(loaded, layout, step, dtype, kernel, dense)
    first = 0
    for changed in step.rows:
        other = draw(PLAIN, step, dtype, seed=2)
        mixed = {k: other[k] if k[0] == changed.identity else dense[k] for k in dense}
        after = run(loaded, layout, step, dtype, kernel, mixed)
        for layer in range(2):
            a, b = before.outputs[layer], after.outputs[layer]
            kept = np.r_[0:first, first + changed.query_len : len(a)]
            assert_same_bits(b[kept], a[kept], f"layer {layer}, {changed.identity} changed")
            mine = slice(first, first + changed.query_len)
            assert (a[mine] != b[mine]).any(), "the changed row must see its own change"
        first += changed.query_len
    count_case(engine, kernel, layout, dtype)


@pytest.mark.parametrize(("engine", "kernel"), ENGINE_KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_call_that_only_reads_leaves_every_byte(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, layout: str
) -> None:
    """``key = value = None``: the pool is as it was, and can be used again."""
    loaded = load_engine(engine)
    step = SHARED[NAMES[0]]
    plan = plan_of(PLAIN, layout, "float32")
    tables = assign_blocks(PLAIN, step.rows, np.random.default_rng(0))
    rng = np.random.default_rng(8)
    data = rng.standard_normal(plan.size_bytes // 4).astype(np.float32).tobytes()
    pool = loaded.load_bytes(plan, data)
    batch = loaded.prepare(
        plan, step.rows, tables, visibility=step.visibility, num_heads=4, spans=step.spans,
        kernel=kernel, bucket=room_for(4).bucket(4),
    )  # fmt: skip
    query = loaded.from_numpy(padded(draw_queries(step, 4, 32, "float32", 0), 48, 0.0))
    one, same = loaded.forward_paged(pool, 1, query, None, None, batch)
    two, same = loaded.forward_paged(pool, 1, query, None, None, batch)
    assert_same_bytes(loaded.pool_bytes(pool), data, "the pool that was read")
    assert_same_bytes(loaded.pool_bytes(same), data, "the pool that came back")
    assert_same_bits(loaded.to_numpy(two), loaded.to_numpy(one), "two reads")
    assert np.abs(loaded.to_numpy(one)).max() > 0
    count_case(engine, kernel, layout, "float32")


@pytest.mark.parametrize(("engine", "kernel"), ENGINE_KERNELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_field_case_10_a_warm_up_batch_writes_nothing(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, dtype: str
) -> None:
    """No rows in a bucket, K and V all NaN: every slot is -1, and not one byte changes."""
    loaded = load_engine(engine)
    bucket = room_for(4).bucket(4)
    plan = plan_of(PLAIN, "LBHNC", dtype)
    assert set(plan_step(plan, [], Tables(), visibility=CAUSAL, bucket=bucket).slots) == {-1}
    data = bytes([POISON ^ 0x5A]) * plan.size_bytes
    pool = loaded.load_bytes(plan, data)
    batch = loaded.prepare(
        plan, [], Tables(), visibility=CAUSAL, num_heads=4, kernel=kernel, bucket=bucket
    )
    key = loaded.from_numpy(nans((bucket.tokens, 2, 32), dtype))
    query = loaded.from_numpy(nans((bucket.tokens, 4, 32), dtype))
    output, pool = loaded.forward_paged(pool, 0, query, key, key, batch)
    assert_same_bytes(loaded.pool_bytes(pool), data, "after a warm-up batch")
    assert not np.asarray(loaded.to_numpy(output), np.float32).any()
    count_case(engine, kernel, "LBHNC", dtype)
