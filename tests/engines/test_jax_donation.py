"""Donation, checked: in every layout and dtype, with planted programs that copy the pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from backends.jax_gpu import JaxBatch, JaxPool, check_donation
from backends.jax_gpu.compiled import check_in_place, pool_sized_copies, program_memory
from backends.jax_gpu.donation import Donation, run_donated
from layout_core.errors import PoolError
from tests.cases import LAYOUTS, NUMPY_DTYPES, PLAIN, Cells, Group, PoolShape, plan_of
from tests.engines.test_jax_paged import ENGINE, STRICT, batch_of, numbers, plan, step_arrays

PADDED = PoolShape("padded", (Group((Cells(2, 32, 32, padding=64),) * 2, 4),), 24)
HEADS_APART = ("LHBNC", "BHLNC")
"""Layouts that hold no padding behind pages of several heads."""
SLOTS = np.arange(4, 20)


def stored(dtype: str, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    """K and V of 16 tokens in the pool's dtype."""
    kind = NUMPY_DTYPES[dtype]
    key, value = (ENGINE.from_numpy(numbers(16, 2, 32, seed=seed + i, dtype=kind)) for i in (0, 1))
    return key, value


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_strict_calls_change_the_pool_in_place(layout: str, dtype: str) -> None:
    """Each call is compiled, looked at, run, and the pool given is gone; the memory stays."""
    resolved = plan(layout, dtype)
    key, value = stored(dtype)
    query = step_arrays()[0]
    pool = STRICT.allocate(resolved)
    address = pool.words.unsafe_buffer_pointer()
    calls: list[Callable[[JaxPool], JaxPool]] = [
        lambda pool: STRICT.write(pool, 1, key, value, SLOTS),
        lambda pool: STRICT.copy_blocks(pool, [(1, 6)]),
        lambda pool: STRICT.forward_paged(pool, 0, query, key, value, batch_of(resolved))[1],
    ]
    for call in calls:
        old, pool = pool, call(pool)
        assert pool.words.unsafe_buffer_pointer() == address
        with pytest.raises(PoolError, match="pool: it was consumed by"):
            ENGINE.pool_bytes(old)
    assert any(ENGINE.pool_bytes(pool))


@pytest.mark.parametrize(
    ("shape", "layout"),
    [(PLAIN, x) for x in LAYOUTS] + [(PADDED, x) for x in LAYOUTS if x not in HEADS_APART],
    ids=lambda x: getattr(x, "name", x),
)
def test_a_write_of_ones_own_program_aliases_the_pool(shape: PoolShape, layout: str) -> None:
    """Field case 27: the aliased bytes are the pool's size, dense and padded."""
    resolved = plan_of(shape, layout, "bfloat16")
    pool = ENGINE.allocate(resolved)
    key, value = stored("bfloat16")
    program = jax.jit(lambda pool: ENGINE.write(pool, 0, key, value, SLOTS), donate_argnums=0)
    compiled = program.lower(pool).compile()
    check_donation(compiled, pool)
    memory = program_memory(compiled)
    assert memory.aliased == resolved.size_bytes
    assert memory.temporaries < resolved.size_bytes
    assert memory.peak == memory.arguments + memory.outputs - memory.aliased + memory.temporaries


def whole_copy(pool: JaxPool) -> Any:
    return jnp.transpose(pool.words)


def widened(pool: JaxPool) -> Any:
    """What XLA does to a bfloat16 pool around a scatter, done on purpose."""
    return pool.words.astype(jnp.float32)


def flat_copy(pool: JaxPool) -> Any:
    return lax.bitcast_convert_type(pool.words.reshape(-1), ml_dtypes.bfloat16).astype(jnp.float32)


@pytest.mark.parametrize("plant", [whole_copy, widened, flat_copy])
def test_planted_copies_of_the_pool_are_found(plant: Callable[[JaxPool], Any]) -> None:
    pool = ENGINE.allocate(plan(dtype="bfloat16"))
    key, value = stored("bfloat16")

    def program(pool: JaxPool) -> Any:
        new = ENGINE.write(pool, 0, key, value, SLOTS)
        return new, plant(new)

    compiled = jax.jit(program, donate_argnums=0).lower(pool).compile()
    with pytest.raises(PoolError, match=r"has \d+ copies of the pool's size, the first is"):
        check_donation(compiled, pool)


def test_a_planted_program_that_does_not_donate_is_found() -> None:
    """In the engine's own strict mode: the call is refused before it runs."""
    pool = STRICT.allocate(plan())
    keeps = jax.jit(lambda words, _, more: (words + more,), static_argnums=1)
    with pytest.raises(PoolError, match=r"aliases 0 bytes, the pool has \d+; was it donated"):
        Donation(strict=True).run("write", keeps, pool, pool.words, (None, jnp.uint32(1)))
    assert not any(STRICT.pool_bytes(pool)), "still there and usable"


def test_copies_are_told_from_what_is_smaller_and_from_work_in_place() -> None:
    text = """
  %a = u16[100,64]{1,0} copy(%p)
  %b = f32[6400]{0} convert(%p)
  %c = u16[10,64]{1,0} copy(%q)
  %d = u16[100,64]{1,0} scatter(%p, %i, %u)
  %e = (u16[100,64]{1,0}, u16[100,64]{1,0}, u32[]) copy-start(%p)
  %f = u16[100,64]{1,0} fusion(%p), calls=%copy_fusion
"""
    found = [line.split()[0] for line in pool_sized_copies(text, (100, 64))]
    assert found == ["%a", "%b", "%e"]


@pytest.mark.parametrize("view", ["numpy", "dlpack"])
def test_a_program_of_ones_own_behind_a_live_view_is_refused(view: str) -> None:
    """JAX would copy in silence; then the same without the view, and who consumed it."""
    pool = ENGINE.load_bytes(plan(), bytes([7]) * plan().size_bytes)
    _, key, value = step_arrays()
    program = jax.jit(lambda pool: ENGINE.write(pool, 0, key, value, SLOTS), donate_argnums=0)
    held = np.asarray(pool.words) if view == "numpy" else np.from_dlpack(pool.words)
    with pytest.raises(PoolError, match="pool: my write copied it instead of changing it in pla"):
        run_donated("my write", program, pool)
    assert held.view(np.uint8).min() == held.view(np.uint8).max() == 7
    fresh = ENGINE.load_bytes(plan(), ENGINE.pool_bytes(pool))
    new = run_donated("my write", program, fresh)
    assert ENGINE.pool_bytes(new) != ENGINE.pool_bytes(pool)
    with pytest.raises(PoolError, match="consumed by my write"):
        ENGINE.pool_bytes(fresh)


def test_a_loops_temporaries_do_not_grow_with_the_pool() -> None:
    """Two steps of two layers, on a pool of 24 blocks and on one of 4,096: as many bytes."""
    q, k, v = step_arrays()

    def loop(pool: JaxPool, batch: JaxBatch) -> tuple[Any, JaxPool]:
        def one_step(carry: tuple[Any, JaxPool], _: Any) -> tuple[tuple[Any, JaxPool], None]:
            query, pool = carry

            def one_layer(pool: JaxPool, layer: jax.Array) -> tuple[JaxPool, Any]:
                out, pool = ENGINE.forward_paged(pool, layer, query, k, v, batch)
                return pool, out

            pool, outputs = lax.scan(one_layer, pool, jnp.arange(2, dtype=jnp.int32))
            return (query + outputs.sum(0), pool), None

        carry, _ = lax.scan(one_step, (q, pool), None, length=2)
        return carry

    found = []
    for blocks in (24, 4096):
        resolved = plan_of(PoolShape("grown", PLAIN.groups, blocks), "BLNHC", "bfloat16")
        pool = ENGINE.allocate(resolved)
        k, v = stored("bfloat16")
        program = jax.jit(loop, donate_argnums=0)
        compiled = program.lower(pool, batch_of(resolved)).compile()
        check_in_place(compiled, pool.plan.shape, resolved.size_bytes)
        found.append((program_memory(compiled).temporaries, resolved.size_bytes))
    (small, _), (large, pool_bytes) = found
    assert large - small < pool_bytes / 20
