"""One engine against the other: the same step, within the tolerance for two results.

Each was compared with the oracle first (the shared suite); this says how far apart they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from tests.cases import LAYOUTS, PLAIN, STEP_NAMES, assign_blocks, plan_of, room_for, steps
from tests.engines.suite import DTYPES, ENGINE_KERNELS, draw, run_step
from tests.tolerances import assert_close, assert_same_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("at", [1, 3, 8])
def test_engines_agree(load_engine: Callable[[str], Any], layout: str, dtype: str, at: int) -> None:
    step = steps(4)[(at + LAYOUTS.index(layout)) % len(STEP_NAMES)]
    dense = draw(PLAIN, step, dtype, seed=at)
    tables = assign_blocks(PLAIN, step.rows, np.random.default_rng(at))
    outcomes = {
        (engine, kernel): run_step(
            load_engine(engine), PLAIN, plan_of(PLAIN, layout, dtype), step, dense, tables,
            dtype=dtype, kernel=kernel, num_heads=4, seed=at, room=room_for(4),
        )
        for engine, kernel in ENGINE_KERNELS
    }  # fmt: skip
    assert len(outcomes) >= 2
    for one, other in combinations(outcomes, 2):
        where = f"{one} against {other}, {layout} {step.name!r}"
        a, b = outcomes[one], outcomes[other]
        for got, want in zip(a.outputs, b.outputs):
            assert_close(got, want, "engines", dtype, where)
        assert_same_bytes(a.pool, b.pool, where)
