"""One pool, two engines in one process: by DLPack without a copy, or a copy that was asked for.

JAX owns what is shared. Field case 29 (each layout, dense and padded, torch -> JAX -> torch) and
W8 (strided pools across DLPack), and their kinds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backends import load
from backends.torch_cuda.allocator import TorchPool, pool_on
from layout_core.errors import PoolError
from layout_core.views import ResolvedLayout
from tests.cases import (
    FULL,
    LAYOUTS,
    PADDED,
    PLAIN,
    PoolShape,
    Tables,
    legal,
    numbers,
    plan_of,
    row,
)
from tests.equivalence.test_bytes import STORED, hostile
from tests.tolerances import assert_close, assert_same_bytes

JAX, TORCH = load("jax_gpu"), load("torch_cuda")

SHAPES_AND_LAYOUTS = [pytest.param(*p, id=f"{p[0].name}-{p[1]}") for p in legal()]


def torch_pool_on(plan: ResolvedLayout, loan: Any) -> TorchPool:
    """A torch pool on lent memory: the words as bytes, and torch's own strided views on them."""
    return pool_on(plan, torch.from_dlpack(loan).view(torch.uint8).reshape(-1))


def random_bytes(plan: ResolvedLayout, seed: int) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, plan.size_bytes, np.uint8).tobytes()


@pytest.mark.parametrize(("shape", "layout"), SHAPES_AND_LAYOUTS)
@pytest.mark.parametrize("dtype", STORED)
def test_field_case_29_torch_to_jax_to_torch_is_bit_exact(
    shape: PoolShape, layout: str, dtype: str
) -> None:
    plan = plan_of(shape, layout, dtype)
    data = random_bytes(plan, 1)
    first = TORCH.load_bytes(plan, data)
    pool = JAX.import_pool(plan, first.storage, copy=True)
    first.storage.zero_()  # the import is JAX's own
    assert_same_bytes(JAX.pool_bytes(pool), data, f"torch to JAX, {shape.name} {layout}")
    place = pool.words.unsafe_buffer_pointer()
    loan = JAX.lend(pool)
    second = torch_pool_on(plan, loan)
    assert second.storage.data_ptr() == place, "JAX to torch makes no copy"
    assert_same_bytes(TORCH.pool_bytes(second), data, f"JAX to torch, {shape.name} {layout}")
    del second
    back = loan.take_back()
    assert back.words.unsafe_buffer_pointer() == place
    assert_same_bytes(JAX.pool_bytes(back), data, f"and back, {shape.name} {layout}")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", STORED[:3])
def test_w8_torch_writes_by_its_strides_what_jax_reads_by_its_rows(layout: str, dtype: str) -> None:
    """Both engines work on one memory in turn; each sees what the other wrote."""
    shape = PADDED if plan_can_hold(PADDED, layout) else PLAIN
    plan = plan_of(shape, layout, dtype)
    rng = np.random.default_rng(2)
    r, tables = row("a", 5, 9), Tables()
    tables.put(r, 0, [7, 3, 11])
    key, value, query = (numbers(rng, (9, 2, 32), dtype) for _ in "kvq")
    slots = np.array([28, 29, 30, 31, 12, 13, 14, 15, 44], np.int32)
    outputs = []
    with JAX.lend(JAX.allocate(plan)) as loan:
        pool = torch_pool_on(plan, loan)
        TORCH.write(
            pool, 1, *(TORCH.from_numpy(a[:4]) for a in (key, value)), TORCH.from_numpy(slots[:4])
        )
        del pool
    pool = loan.pool
    for engine in (JAX, TORCH):
        batch = engine.prepare(plan, [r], tables, visibility=FULL, num_heads=2)
        arrays = [engine.from_numpy(a[4:]) for a in (query, key, value)]
        if engine is TORCH:
            with JAX.lend(pool) as loan:
                lent = torch_pool_on(plan, loan)
                output, lent = TORCH.forward_paged(lent, 1, arrays[0], None, None, batch)
                outputs.append(TORCH.to_numpy(output))
                del lent, output
            pool = loan.pool
        else:
            output, pool = JAX.forward_paged(pool, 1, *arrays, batch)
            outputs.append(JAX.to_numpy(output))
    assert_close(outputs[1], outputs[0], "engines", dtype, f"{layout} {dtype}")
    assert np.asarray(outputs[0], np.float32).any()


def plan_can_hold(shape: PoolShape, layout: str) -> bool:
    return shape.can_lie_in(layout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_w8_views_of_layers_cross_only_where_they_are_compact(layout: str) -> None:
    """A layer's strided view is refused, or imported as what it says it is; never reordered."""
    plan = plan_of(PLAIN, layout, "float16")
    pool = TORCH.load_bytes(plan, random_bytes(plan, 3))
    key = pool.layers[0].key
    assert not key.is_contiguous()
    with pytest.raises(PoolError, match=r"exporter: expected .*uint8 \[49152\] or uint16"):
        JAX.import_pool(plan, key, copy=True)


def test_field_case_29_a_write_through_a_view_alters_no_jax_array() -> None:
    plan = plan_of(PLAIN, "LBNHC", "bfloat16")
    data = random_bytes(plan, 4)
    pool = JAX.load_bytes(plan, data)
    held = pool.words
    loan = JAX.lend(pool)
    storage = torch.from_dlpack(loan).view(torch.uint8).reshape(-1)
    storage.zero_()
    assert held.is_deleted()
    for use in (JAX.pool_bytes, JAX.lend):
        with pytest.raises(PoolError, match="it was consumed by lend"):
            use(pool)
    with pytest.raises(PoolError, match="a view of the pool's memory is alive"):
        loan.take_back()
    assert not storage.any(), "the loan goes on in the same memory"
    storage[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    del storage
    back = JAX.pool_bytes(loan.take_back())
    assert back[:5] == bytes([1, 2, 3, 4, 0])


def test_a_torch_pool_is_not_taken_over_in_silence() -> None:
    plan = plan_of(PLAIN, "LBNHC", "bfloat16")
    pool = TORCH.allocate(plan)
    with pytest.raises(PoolError, match=r"JAX would copy it at the first write.*copy=True"):
        JAX.import_pool(plan, pool.storage)
    with pytest.raises(PoolError, match=r"exporter: expected uint8 \[49152\].*got uint8 \[49148\]"):
        JAX.import_pool(plan, pool.storage[4:], copy=True)


@pytest.mark.parametrize("dtype", STORED)
def test_nan_payloads_written_by_torch_come_out_of_jax(dtype: str) -> None:
    plan = plan_of(PLAIN, "BHLNC", dtype)
    key, value = (hostile(np.random.default_rng(5), (4, 2, 32), dtype) for _ in "kv")
    slots = np.array([4, 95, 40, 21], np.int32)
    with JAX.lend(JAX.allocate(plan)) as loan:
        pool = torch_pool_on(plan, loan)
        TORCH.write(pool, 0, *(TORCH.from_numpy(a) for a in (key, value)), TORCH.from_numpy(slots))
        del pool
    own = JAX.write(
        JAX.allocate(plan), 0, JAX.from_numpy(key), JAX.from_numpy(value), JAX.from_numpy(slots)
    )
    assert_same_bytes(JAX.pool_bytes(loan.pool), JAX.pool_bytes(own), dtype)
