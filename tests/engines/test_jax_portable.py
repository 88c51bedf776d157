"""Portable pools: one program of a caller's own serves every layout, with equal bytes."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from layout_core.errors import PoolError, StaleBatchError
from tests.cases import LAYOUTS
from tests.engines.test_jax_paged import (
    ENGINE,
    ROWS,
    Tables,
    batch_of,
    numbers,
    plan,
    step_arrays,
)


def test_one_program_serves_all_layouts() -> None:
    """Traced once; outputs and bytes equal those of the engine's own calls, layout by layout."""
    q, k, v = step_arrays()
    traced: list[int] = []

    def two_layers(pool: Any, batch: Any) -> Any:
        traced.append(1)
        outputs = []
        for layer in (0, 1):
            output, pool = ENGINE.forward_paged(pool, layer, q, k, v, batch)
            outputs.append(output)
        return outputs, pool

    program = jax.jit(two_layers, donate_argnums=0)
    seen = set()
    for layout in LAYOUTS:
        resolved = plan(layout)
        expected: list[Any] = []
        reference = ENGINE.allocate(resolved)
        for layer in (0, 1):
            output, reference = ENGINE.forward_paged(reference, layer, q, k, v, batch_of(resolved))
            expected.append(output)

        pool = ENGINE.allocate(resolved)
        places = pool.plan
        outputs, returned = program(pool.portable(), batch_of(resolved).portable())
        pool = returned.placed_as(places)
        assert pool.resolved is resolved
        data = ENGINE.pool_bytes(pool)
        assert data == ENGINE.pool_bytes(reference)
        for got, want in zip(outputs, expected):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
        seen.add(data)
    assert len(traced) == 1
    assert len(seen) == len(LAYOUTS)  # the layouts do differ: it was not one of them six times


def test_donating_a_portable_pool_consumes_its_origin() -> None:
    pool = ENGINE.allocate(plan())
    jax.jit(lambda p: p, donate_argnums=0)(pool.portable())
    with pytest.raises(PoolError, match="consumed by a program that it was donated to"):
        ENGINE.pool_bytes(pool)


def test_what_a_portable_pool_refuses() -> None:
    resolved = plan()
    pool, batch = ENGINE.allocate(resolved), batch_of(resolved)
    q, k, v = step_arrays()
    with pytest.raises(PoolError, match="a portable pool has no plan of its own"):
        _ = pool.portable().resolved
    with pytest.raises(PoolError, match="the pool is portable and the other is not"):
        ENGINE.forward_paged(pool.portable(), 0, q, k, v, batch)
    with pytest.raises(PoolError, match="the batch is portable and the other is not"):
        ENGINE.forward_paged(pool, 0, q, k, v, batch.portable())
    other = ENGINE.allocate(plan(dtype="float16"))
    with pytest.raises(PoolError, match="prepared for other layers, or a pool of another size"):
        ENGINE.forward_paged(other.portable(), 0, q, k, v, batch.portable())
    with pytest.raises(PoolError, match="plan: it has other layers"):
        pool.portable().placed_as(other.plan)
    assert ENGINE.pool_bytes(pool) == bytes(resolved.size_bytes)  # nothing was consumed


def test_a_stale_batch_is_refused_when_it_is_made_portable() -> None:
    tables = Tables({"a": [3, 7, 5], "b": [9, 2, 11, 4]})
    batch = batch_of(plan(), ROWS, tables)
    tables.version += 1
    with pytest.raises(StaleBatchError):
        batch.portable()


def test_portable_pools_write_and_copy_outside_of_programs_too() -> None:
    key, value = numbers(3, 2, 32), numbers(3, 2, 32, seed=1)
    slots = np.array([5, -1, 9], np.int32)
    pools = []
    for portable in (False, True):
        pool = ENGINE.allocate(plan("BHLNC"))
        places = pool.plan
        pool = pool.portable() if portable else pool
        pool = ENGINE.write(pool, 1, ENGINE.from_numpy(key), ENGINE.from_numpy(value), slots)
        pool = ENGINE.copy_blocks(pool, [(1, 6), (2, 7)])
        pools.append(ENGINE.pool_bytes(pool.placed_as(places) if portable else pool))
    assert pools[0] == pools[1]
    assert any(pools[0])
