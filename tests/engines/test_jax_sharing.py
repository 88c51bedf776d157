"""A pool's memory lent by DLPack: consumed while it is lent, one memory throughout, ended once.

The consumer here is NumPy; torch is in ``tests/equivalence/test_sharing.py``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backends.jax_gpu import create_engine, import_pool, lend
from layout_core.errors import PoolError
from tests.cases import PLAIN, plan_of

ENGINE = create_engine()
PLAN = plan_of(PLAIN, "BLNHC", "bfloat16")


def address(words: jax.Array) -> int:
    return words.unsafe_buffer_pointer()


def test_a_loan_is_the_same_memory_and_comes_back() -> None:
    data = np.random.default_rng(0).integers(0, 256, PLAN.size_bytes, np.uint8).tobytes()
    pool = ENGINE.load_bytes(PLAN, data)
    held, place = pool.words, address(pool.words)
    loan = lend(pool)
    view = np.from_dlpack(loan)
    assert view.ctypes.data == place
    assert view.tobytes() == data
    del view
    back = loan.take_back()
    assert address(back.words) == place, "no copy was made"
    assert loan.pool is back
    assert held.is_deleted(), "an array that was held before the loan cannot see what was written"
    assert ENGINE.pool_bytes(back) == data


def test_a_lent_pool_cannot_be_used() -> None:
    pool = ENGINE.allocate(PLAN)
    loan = ENGINE.lend(pool)
    with pytest.raises(PoolError, match="pool: it was consumed by lend"):
        ENGINE.pool_bytes(pool)
    with pytest.raises(PoolError, match="loan: its memory is still lent; call take_back"):
        _ = loan.pool
    loan.take_back()
    with pytest.raises(PoolError, match="loan: it has ended; lend the pool again"):
        loan.take_back()
    with pytest.raises(PoolError, match="loan: it has ended"):
        np.from_dlpack(loan)


def test_a_view_that_is_alive_keeps_the_loan_open() -> None:
    """Taking back would copy: it raises, nothing is lost, and works once the view is gone."""
    loan = lend(ENGINE.allocate(PLAN))
    view = np.from_dlpack(loan)
    with pytest.raises(PoolError, match=r"a view of the pool's memory is alive.*drop the view"):
        loan.take_back()
    place = view.ctypes.data
    del view
    assert address(loan.take_back().words) == place


def test_a_pool_with_a_live_view_is_not_lent_and_stays_usable() -> None:
    pool = ENGINE.allocate(PLAN)
    view = np.from_dlpack(pool.words)
    with pytest.raises(PoolError, match=r"a NumPy or DLPack view of it is alive.*unchanged and us"):
        lend(pool)
    assert not any(ENGINE.pool_bytes(pool))
    del view
    lend(pool).take_back()


def test_leaving_the_context_takes_the_memory_back() -> None:
    with lend(ENGINE.allocate(PLAN)) as loan:
        pass
    assert not any(ENGINE.pool_bytes(loan.pool))
    with pytest.raises(ZeroDivisionError), lend(loan.pool) as other:
        raise ZeroDivisionError
    with pytest.raises(PoolError, match="still lent"):
        _ = other.pool
    other.take_back()


def test_a_pool_in_a_program_has_no_memory() -> None:
    pool = ENGINE.allocate(PLAN)
    with pytest.raises(PoolError, match="inside a program it has no memory"):
        jax.jit(lend)(pool)
    assert not any(ENGINE.pool_bytes(pool))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_bytes_and_words_are_imported_as_a_copy(dtype: str) -> None:
    plan = plan_of(PLAIN, "LHBNC", dtype)
    data = np.random.default_rng(1).integers(0, 256, plan.size_bytes, np.uint8)
    shape = ENGINE.allocate(plan).plan.shape
    words = data.view(f"u{ {'float32': 4, 'bfloat16': 2}.get(dtype, 1) }").reshape(shape).copy()
    before = data.tobytes()
    for exporter in (data, words):
        pool = ENGINE.import_pool(plan, exporter, copy=True)
        assert address(pool.words) != exporter.ctypes.data
        exporter[...] = 0  # what the exporter writes later is not seen
        assert ENGINE.pool_bytes(pool) == before
        donated = ENGINE.copy_blocks(pool, [(1, 2)])
        assert donated is not pool


def test_an_import_without_a_copy_says_why_not() -> None:
    device = jax.devices("cpu")[0]
    data = np.zeros(PLAN.size_bytes, np.uint8)
    with pytest.raises(PoolError, match=r"copy: the memory belongs to its exporter.*copy=True"):
        import_pool(PLAN, data, device)
    size = PLAN.size_bytes
    for wrong in (data[1:], data.view(np.uint32), jnp.zeros(size // 4, jnp.float32)):
        with pytest.raises(PoolError, match=rf"expected uint8 \[{size}\] or uint16 .*, got "):
            import_pool(PLAN, wrong, device, copy=True)
    for refused in (np.zeros(2 * size, np.uint8)[::2], object()):
        with pytest.raises(PoolError, match=rf"expected compact uint8 \[{size}\] .* by DLPack \("):
            import_pool(PLAN, refused, device, copy=True)
