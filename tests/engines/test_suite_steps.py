"""Every engine, kernel, legal layout and dtype on every step: outputs, bytes, padded queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from layout_core.resolve import make_config, resolve_layout
from layout_core.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from layout_core.tensors import KVCacheGroupSpec
from tests.cases import (
    CAUSAL,
    FULL,
    GEOMETRIES,
    LAYOUTS,
    PLAIN,
    POOLS,
    STEP_NAMES,
    Group,
    PoolShape,
    Step,
    assign_blocks,
    legal,
    plan_of,
    room_for,
    row,
    steps,
)
from tests.engines.suite import (
    DTYPES,
    ENGINE_KERNELS,
    check_step,
    compare_outputs,
    draw,
    expected_outputs,
    run_step,
)

LoadEngine = Callable[[str], Any]
CountCase = Callable[[str, str, str, str], None]

STEPS = {s.name: s for s in steps(4)}

engines = pytest.mark.parametrize(("engine", "kernel"), ENGINE_KERNELS)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@engines
@layouts
@dtypes
@pytest.mark.parametrize("name", STEP_NAMES)
def test_step(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    layout: str,
    dtype: str,
    name: str,
) -> None:
    check_step(
        load_engine(engine),
        PLAIN,
        layout,
        STEPS[name],
        dtype=dtype,
        kernel=kernel,
        num_heads=4,
        seed=STEP_NAMES.index(name),
        room=room_for(4),
    )
    count_case(engine, kernel, layout, dtype)


@engines
@pytest.mark.parametrize(
    ("shape", "layout"), [pytest.param(*p, id=f"{p[0].name}-{p[1]}") for p in legal()]
)
def test_pool_shape(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    shape: PoolShape,
    layout: str,
) -> None:
    """Several groups, padded pages, mixed page sizes, unlike groups, in all that can hold them."""
    at = POOLS.index(shape)
    dtype = DTYPES[at % len(DTYPES)]
    for index in range(3):
        step = STEPS[STEP_NAMES[(5 * LAYOUTS.index(layout) + at + index) % len(STEP_NAMES)]]
        check_step(
            load_engine(engine),
            shape,
            layout,
            step,
            dtype=dtype,
            kernel=kernel,
            num_heads=4,
            seed=11 + index,
            room=room_for(4),
        )
        count_case(engine, kernel, layout, dtype)


@engines
@pytest.mark.parametrize("at", range(len(GEOMETRIES)))
def test_geometry(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, at: int
) -> None:
    """Head sizes 32 to 256, 1, 2, 4 and 7 query heads for a KV head, D != Dv, other block sizes."""
    cells, num_heads, n = GEOMETRIES[at]
    layout, dtype = LAYOUTS[at % len(LAYOUTS)], DTYPES[(at + at // len(LAYOUTS)) % len(DTYPES)]
    shape = PoolShape("geometry", (Group((cells, cells), n),), 20)
    step = steps(n)[(3 * at + 1) % len(STEP_NAMES)]
    check_step(
        load_engine(engine),
        shape,
        layout,
        step,
        dtype=dtype,
        kernel=kernel,
        num_heads=num_heads,
        seed=at,
        room=room_for(n),
    )
    count_case(engine, kernel, layout, dtype)


@engines
@pytest.mark.parametrize("layout", ["LBNHC", "BHLNC"])
@pytest.mark.parametrize("name", STEP_NAMES[:4])
def test_step_without_a_bucket(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, layout: str, name: str
) -> None:
    check_step(
        load_engine(engine),
        PLAIN,
        layout,
        STEPS[name],
        dtype="float32",
        kernel=kernel,
        num_heads=2,
        seed=5,
    )
    count_case(engine, kernel, layout, "float32")


@engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("scale", "softcap"), [(0.5, 0.0), (None, 2.0), (-0.25, 0.0), (0.0, 0.0), (1.0, 0.75)]
)
def test_scale_and_softcap(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    dtype: str,
    scale: float | None,
    softcap: float,
) -> None:
    for layout in ("LHBNC", "BLNHC"):
        check_step(
            load_engine(engine),
            PLAIN,
            layout,
            STEPS["two CFG rows of unlike prefixes, the target one full span"],
            dtype=dtype,
            kernel=kernel,
            num_heads=4,
            seed=2,
            room=room_for(4),
            scale=scale,
            softcap=softcap,
        )
        count_case(engine, kernel, layout, dtype)


@engines
@pytest.mark.parametrize("scale", [-0.25, 0.0])
def test_a_causal_row_under_any_scale(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, scale: float
) -> None:
    """A row that is causal from its first token to its last, as no step above is for long."""
    step = Step("causal", (row("a", 24, 24),), CAUSAL)
    for dtype in DTYPES:
        check_step(
            load_engine(engine), PLAIN, "LBNHC", step, dtype=dtype, kernel=kernel, num_heads=4,
            room=room_for(4), scale=scale,
        )  # fmt: skip
        count_case(engine, kernel, "LBNHC", dtype)


CELLS = PLAIN.groups[0].layers[0]

LONG_POOL = PoolShape("long", (Group((CELLS,) * 2, 16), Group((CELLS,) * 2, 16)), 620)
"""Four layers in two groups, for rows of thousands of tokens in each."""

LONG = Step(
    "thousands of tokens",
    (row("a", 333, 3001), row("b", 40, 1029, 700)),
    CAUSAL,
    (((2668, 3001),), None),
)


@engines
@layouts
def test_thousands_of_tokens(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, layout: str
) -> None:
    """In all layouts; each dtype in two of them."""
    dtype = DTYPES[LAYOUTS.index(layout) % len(DTYPES)]
    check_step(
        load_engine(engine), LONG_POOL, layout, LONG, dtype=dtype, kernel=kernel, num_heads=2
    )
    count_case(engine, kernel, layout, dtype)


KINDS: tuple[tuple[type[AttentionSpec], dict[str, int], Step], ...] = (
    (
        FullAttentionSpec,
        {},
        STEPS["spans that differ, one row without any, one with an empty list"],
    ),
    (SlidingWindowSpec, {"sliding_window": 6}, STEPS["causal window"]),
    (
        ChunkedLocalAttentionSpec,
        {"attention_chunk_size": 5},
        STEPS["chunks that are no multiple of a block"],
    ),
    (CrossAttentionSpec, {}, STEPS["contexts read by several rows, more queries than keys"]),
)
"""What an engine serves: a spec with its own fields, and a step of a layer of that kind."""


@engines
@layouts
@dtypes
def test_groups_of_unlike_kinds_in_one_pool(
    load_engine: LoadEngine,
    count_case: CountCase,
    engine: str,
    kernel: str,
    layout: str,
    dtype: str,
) -> None:
    """Full with spans, window, chunk and cross attention: a group each, eight layers."""
    shape = PoolShape("kinds", (Group((CELLS,) * 2, 4),) * len(KINDS), 120)
    groups = [
        KVCacheGroupSpec(
            [f"{kind.__name__}.{place}" for place in range(2)],
            kind(block_size=4, num_kv_heads=2, head_size=32, dtype=dtype, **own),  # type: ignore[arg-type]
        )
        for kind, own, _ in KINDS
    ]
    plan = resolve_layout(make_config(groups, shape.num_blocks, layout))
    assert [view.group for view in plan.layers] == [0, 0, 1, 1, 2, 2, 3, 3]
    loaded = load_engine(engine)
    for group, (_, _, step) in enumerate(KINDS):
        dense = draw(shape, step, dtype, seed=group)
        layers = plan.group_layers(group)
        outcome = run_step(
            loaded, shape, plan, step, dense,
            assign_blocks(shape, step.rows, np.random.default_rng(group)),
            dtype=dtype, kernel=kernel, num_heads=4, seed=group, room=room_for(4), layers=layers,
        )  # fmt: skip
        want = expected_outputs(shape, step, dense, 4, dtype, group)
        compare_outputs(outcome, [want[i] for i in layers], dtype, f"{layout} {step.name}")
    count_case(engine, kernel, layout, dtype)


@engines
def test_auto_names_the_kernel_that_runs(load_engine: LoadEngine, engine: str, kernel: str) -> None:
    loaded = load_engine(engine)
    step = STEPS[STEP_NAMES[0]]
    check_step(
        loaded, PLAIN, "LBHNC", step, dtype="float32", kernel="auto", num_heads=2, seed=9,
        room=room_for(4),
    )  # fmt: skip
    batch = loaded.prepare(
        plan_of(PLAIN, "LBHNC", "float32"),
        step.rows,
        assign_blocks(PLAIN, step.rows, np.random.default_rng(0)),
        visibility=FULL,
        num_heads=2,
    )
    assert batch.kernel == kernel, "on the CPU 'auto' picks the one kernel that there is"


def test_every_pool_shape_is_refused_where_the_table_says_no() -> None:
    from layout_core.errors import IllegalCombinationError

    held = {(s.name, x) for s, x in legal()}
    refused = 0
    for shape in POOLS:
        for layout in LAYOUTS:
            if (shape.name, layout) not in held:
                with pytest.raises(IllegalCombinationError, match=f"layout {layout}: "):
                    plan_of(shape, layout, "float32")
                refused += 1
    assert refused == 7, "the shapes were chosen so that each rule of the table refuses some"
