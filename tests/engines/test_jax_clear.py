"""Clearing a JAX pool: zeros in the same memory, the old pool gone, prefixes forgotten first."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from backends.jax_gpu import JaxPool, create_engine
from layout_core.errors import PoolError
from layout_core.resolve import resolve_layout
from tests.cases import LAYOUTS, PLAIN, plan_of
from tests.manager import helpers

STRICT = create_engine(strict_donation=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_clear_keeps_the_memory_and_consumes_the_pool(layout: str) -> None:
    plan = plan_of(PLAIN, layout, "bfloat16")
    pool = STRICT.load_bytes(plan, b"\xff" * plan.size_bytes)
    place = pool.words.unsafe_buffer_pointer()
    new = STRICT.clear(pool)
    assert new.words.unsafe_buffer_pointer() == place
    assert not any(STRICT.pool_bytes(new))
    with pytest.raises(PoolError, match="pool: it was consumed by clear"):
        STRICT.clear(pool)


def test_a_pool_with_a_live_view_is_not_cleared_in_strict_mode() -> None:
    plan = plan_of(PLAIN, "LBNHC", "float32")
    pool = STRICT.load_bytes(plan, b"\x01" * plan.size_bytes)
    view = np.from_dlpack(pool.words)
    with pytest.raises(PoolError, match="clear copied it instead of changing it in place"):
        STRICT.clear(pool)
    assert view.all()
    assert STRICT.pool_bytes(pool) == b"\x01" * plan.size_bytes


def test_clear_works_inside_a_program() -> None:
    plan = plan_of(PLAIN, "LBNHC", "float16")

    def emptied(pool: JaxPool) -> JaxPool:
        return STRICT.clear(pool)

    pool = STRICT.load_bytes(plan, b"\x01" * plan.size_bytes)
    new = jax.jit(emptied, donate_argnums=0, keep_unused=True)(pool)
    assert not any(STRICT.pool_bytes(new))


def test_the_prefix_index_forgets_before_the_bytes_are_gone() -> None:
    engine = create_engine()
    plan = plan_of(PLAIN, "LBNHC", "float16")

    class Index:
        forgot = 0

        def reset_prefix_cache(self) -> int:
            assert any(engine.pool_bytes(pool))
            self.forgot += 1
            return 3

    index = Index()
    pool = engine.load_bytes(plan, b"\x01" * plan.size_bytes)
    new = engine.clear(pool, prefix_index=index)
    assert index.forgot == 1
    with pytest.raises(PoolError, match="consumed by clear"):
        engine.clear(pool, prefix_index=index)
    assert index.forgot == 1, "a call that fails forgets nothing"
    assert not any(engine.pool_bytes(new))


def test_a_cleared_pool_has_no_prefix_to_find() -> None:
    """With the manager itself as the index: what was published and freed is no hit any more."""
    the_manager, engine = helpers.manager(12), create_engine()
    pool = engine.allocate(resolve_layout(helpers.config(12)))
    for name, hit in (("a", 0), ("b", 8)):
        admitted = helpers.admit(the_manager, name, [helpers.row(name)])
        assert admitted.sequences[0].cached_prefix_len == hit
        the_manager.publish_request(name)
        the_manager.free_request(name)
    engine.clear(pool, prefix_index=the_manager)
    admitted = helpers.admit(the_manager, "c", [helpers.row("c")])
    assert admitted.sequences[0].cached_prefix_len == 0
