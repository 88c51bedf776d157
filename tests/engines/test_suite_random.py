"""Random rows, spans, rules and block tables on every engine, kernel, layout and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cases import LAYOUTS, PLAIN, POOLS, PoolShape, Step, legal, random_steps, room_for
from tests.engines.suite import DTYPES, ENGINE_KERNELS, check_step

LoadEngine = Callable[[str], Any]
CountCase = Callable[[str, str, str, str], None]

# one room for all draws: an engine that compiles does it once
ROOM = room_for(4)


@pytest.mark.parametrize(("engine", "kernel"), ENGINE_KERNELS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(step=random_steps(block_size=4, max_rows=4, max_blocks=5), seed=st.integers(0, 2**16))
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_step(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    layout: str,
    dtype: str,
    step: Step,
    seed: int,
) -> None:
    check_step(
        load_engine(engine),
        PLAIN,
        layout,
        step,
        dtype=dtype,
        kernel=kernel,
        num_heads=4,
        seed=seed,
        room=ROOM,
    )
    count_case(engine, kernel, layout, dtype)


@pytest.mark.parametrize(("engine", "kernel"), ENGINE_KERNELS)
@pytest.mark.parametrize("shape", POOLS[1:], ids=lambda shape: shape.name)
@given(data=st.data(), seed=st.integers(0, 2**16))
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_random_step_in_any_pool(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    shape: PoolShape,
    data: st.DataObject,
    seed: int,
) -> None:
    """Several groups, padded and mixed pages, unlike groups: a layout that holds them, drawn."""
    layout = data.draw(st.sampled_from([x for s, x in legal((shape,))]), label="layout")
    step = data.draw(random_steps(block_size=4, max_rows=3, max_blocks=5), label="step")
    dtype = DTYPES[POOLS.index(shape) % len(DTYPES)]
    check_step(
        load_engine(engine),
        shape,
        layout,
        step,
        dtype=dtype,
        kernel=kernel,
        num_heads=4,
        seed=seed,
        room=ROOM,
    )
    count_case(engine, kernel, layout, dtype)
