"""Paged attention in the Triton interpreter against the float64 oracle.

Run by :mod:`tests.kernels.test_interpreter` in a process of its own. Every pool is full of NaN
but for what valid tokens wrote.
"""

from __future__ import annotations

from array import array
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from backends.triton_kernels.configs import TileShape, is_uniform
from backends.triton_kernels.memory import decode_e4m3, decode_e5m2
from backends.triton_kernels.tiles import query_tiles
from layout_core.step import StepPlan, plan_step
from tests import cases
from tests.cases import LAYOUTS, Array, Cells, Group, PoolShape, Step, plan_of
from tests.engines.suite import draw, draw_queries, expected_memory, mask_of, shape_layer
from tests.kernels import host
from tests.oracle import dense_attention
from tests.tolerances import assert_close

SMALL = PoolShape("small", (Group((Cells(2, 32),) * 2, 4),), 24)


def compare(
    shape: PoolShape,
    layout: str,
    step: Step,
    dtype: str,
    *,
    num_heads: int = 4,
    layer: int = 1,
    tile: TileShape | None = None,
    bucket: bool = False,
    scales: tuple[float, float] = (1.0, 1.0),
    query_dtype: str | None = None,
    operation: str = "attention",
    strided: bool = False,
    **options: Any,
) -> None:
    """One step of one layer: outputs and LSE against the oracle, padded queries against zero."""
    query_dtype = query_dtype or dtype
    resolved = plan_of(shape, layout, dtype)
    group, place = shape_layer(shape, layer)
    cells = shape.groups[group].layers[place]
    dense = draw(shape, step, dtype, seed=layer)
    tables = cases.assign_blocks(shape, step.rows, np.random.default_rng(layer))
    if options.get("extents"):  # rows side by side, in order
        after = 1
        for key, ids in tables.blocks.items():
            tables.blocks[key] = array("i", range(after, after + len(ids)))
            after += len(ids)
    memory = expected_memory(shape, layout, dtype, dense, tables)
    plan = plan_step(
        resolved,
        step.rows,
        tables,
        visibility=step.visibility,
        group=group,
        spans=step.spans,
        bucket=cases.room_for(shape.groups[group].block_size).bucket(4) if bucket else None,
    )
    query = draw_queries(step, num_heads, cells.head_size, query_dtype, seed=layer)
    expected, sums = _oracle(step, dense, layer, query, scales, options)
    packed = np.full((plan.num_tokens, *query.shape[1:]), np.nan, query.dtype)
    packed[: len(query)] = query
    given = host.tensor(packed, query_dtype)
    if strided:  # a view of a packed projection: the heads of K and V lie between tokens
        room = torch.full((plan.num_tokens, num_heads + 3, cells.head_size), float("nan"))
        room = room.to(given.dtype)
        room[:, 1 : 1 + num_heads] = given
        given = room[:, 1 : 1 + num_heads]
    got, lse = host.attend(
        torch.from_numpy(memory.data),
        resolved.layers[layer],
        given,
        plan,
        tile or host.small_shape(num_heads // cells.kv_heads),
        k_scale=scales[0],
        v_scale=scales[1],
        **options,
    )
    real = plan.num_real_tokens
    where = f"{step.name}, {layout}"
    assert_close(got[:real], expected, operation, query_dtype, where)
    if query_dtype == "float32" and operation == "attention":
        assert_close(lse[:real], sums, "lse", "float32", where)
    else:
        assert (np.isneginf(lse[:real]) == np.isneginf(sums)).all(), where
    assert not got[real:].any(), f"{where}: padded queries"
    assert np.isneginf(lse[real:]).all(), f"{where}: padded queries"


def _oracle(
    step: Step,
    dense: Any,
    layer: int,
    query: Array,
    scales: tuple[float, float],
    options: dict[str, Any],
) -> tuple[Array, Array]:
    outputs, sums, first = [], [], 0
    for index, r in enumerate(step.rows):
        k, v = (np.asarray(x, np.float64) for x in dense[r.identity, layer])
        part = query[first : first + r.query_len]
        out, lse = dense_attention(
            part,
            k * scales[0],
            v * scales[1],
            mask_of(step, index),
            scale=options.get("softmax_scale"),
            softcap=options.get("softcap", 0.0),
        )
        outputs.append(out)
        sums.append(lse)
        first += r.query_len
    return np.concatenate(outputs), np.concatenate(sums)


STEPS = cases.steps(4)


LAYOUT_STEPS = [
    pytest.param(layout, number, id=f"{layout}-{step.name}")
    for at, layout in enumerate(LAYOUTS)
    for number, step in enumerate(STEPS)
    if layout in ("LBNHC", "BHLNC") or (number + at) % 3 == 0
]
"""Every rule in two layouts, and every layout with a third of the rules."""


@pytest.mark.parametrize(("layout", "number"), LAYOUT_STEPS)
def test_layouts_and_rules(layout: str, number: int) -> None:
    tile = host.small_shape(2, block_m=32 if number % 2 else 16)
    compare(SMALL, layout, STEPS[number], "float32", tile=tile)


@pytest.mark.parametrize("number", range(len(STEPS)), ids=[s.name for s in STEPS])
def test_16_bit_dtypes(number: int) -> None:
    layout, dtype = LAYOUTS[number % len(LAYOUTS)], ("float16", "bfloat16")[number % 2]
    tile = host.small_shape(2, block_m=32)
    compare(SMALL, layout, STEPS[number], dtype, tile=tile, upcast=dtype == "bfloat16")


GEOMETRIES = [(Cells(2, 64), 4, 32), *cases.GEOMETRIES]
"""Pages larger than a tile of 16 keys, equal to it, smaller, and no divisor of it."""


@pytest.mark.parametrize("number", range(len(GEOMETRIES)))
def test_head_sizes_and_block_sizes(number: int) -> None:
    cells, num_heads, block_size = GEOMETRIES[number]
    shape = PoolShape("one", (Group((cells,) * 2, block_size),), 24)
    step = cases.steps(block_size)[number % len(STEPS)]
    compare(shape, LAYOUTS[number % len(LAYOUTS)], step, "float32", num_heads=num_heads)


@pytest.mark.parametrize(
    ("shape", "layout"), [pytest.param(s, x, id=f"{s.name}-{x}") for s, x in cases.legal()]
)
def test_every_legal_pool(shape: PoolShape, layout: str) -> None:
    """Padded pages, groups that overlay each other, layers of unlike pages: their last layer."""
    layer = sum(len(g.layers) for g in shape.groups) - 1
    group, _ = shape_layer(shape, layer)
    step = cases.steps(shape.groups[group].block_size)[1]
    dtype = ("float32", "float16")[LAYOUTS.index(layout) % 2]
    group_size = 4 // shape.groups[group].layers[-1].kv_heads
    tile = host.small_shape(group_size, block_m=32)
    compare(shape, layout, step, dtype, layer=layer, tile=tile)


@pytest.mark.parametrize(("number", "splits"), [(3, 2), (4, 3), (9, 2), (10, 7)])
def test_splits_merge_to_the_same(number: int, splits: int) -> None:
    """More shares than tiles of keys too: those see nothing."""
    layout = LAYOUTS[(splits + number) % len(LAYOUTS)]
    compare(SMALL, layout, STEPS[number], "float32", splits=splits)


@pytest.mark.parametrize("splits", [1, 2])
def test_buckets_and_spare_tiles(splits: int) -> None:
    tile = host.small_shape(2, block_m=32)
    options: dict[str, Any] = {"bucket": True, "spare_tiles": True, "splits": splits}
    compare(SMALL, "LBNHC", STEPS[3], "float32", tile=tile, **options)


UNIFORM = [
    layout
    for layout in LAYOUTS
    for view in [plan_of(SMALL, layout, "float32").layers[1]]
    if is_uniform(view.strides[0], view.strides[2], view.block_size)
]


def test_layouts_with_a_uniform_token_stride() -> None:
    assert UNIFORM == ["LBNHC", "LHBNC"]


@pytest.mark.parametrize("layout", UNIFORM)
@pytest.mark.parametrize("number", [0, 3, 7])
def test_extents_are_read_as_one_stretch(layout: str, number: int) -> None:
    compare(SMALL, layout, STEPS[number], "float32", extents=True, splits=1 + number % 2)


def test_numbers_as_arrays_and_narrow_places() -> None:
    """What JAX passes: scales in memory, places of 32 bits."""
    compare(
        SMALL, "BLHNC", STEPS[1], "float32", in_memory=True, wide_place=False,
        softcap=3.0, softmax_scale=0.3, scales=(0.5, 2.5),
    )  # fmt: skip


def test_views_of_a_packed_projection() -> None:
    compare(SMALL, "LHBNC", STEPS[2], "float32", strided=True)


@pytest.mark.parametrize(("num_heads", "heads"), [(2, 1), (6, 3), (14, 7), (14, 4), (40, 16)])
def test_groups_of_heads(num_heads: int, heads: int) -> None:
    """Groups of 1, 3, 7 and 20; in chunks that divide them and that do not."""
    tile = host.small_shape(num_heads // 2, heads=heads)
    compare(SMALL, "BLNHC", STEPS[11], "float32", num_heads=num_heads, tile=tile)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_softcap(softcap: float) -> None:
    compare(SMALL, "LBHNC", STEPS[1], "float32", softcap=softcap, softmax_scale=1.0)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("query_dtype", ["float32", "bfloat16"])
def test_8_bit_storage(query_dtype: str, capability: tuple[int, int]) -> None:
    """Decoded by hand and by the hardware's instruction, with both scales."""
    compare(
        SMALL, "LBNHC", STEPS[2], "float8_e4m3fn", query_dtype=query_dtype,
        capability=capability, scales=(0.5, 2.5), operation="attention over 8 bits",
        upcast=query_dtype == "bfloat16",
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["LBHNC", "BLNHC"])
@pytest.mark.parametrize("seed", range(2))
def test_rows_of_many_tiles(layout: str, seed: int) -> None:
    """Blocks of 16 tokens, tiles of 32 by 16 and 16 by 32: full tiles with masked ones around."""
    step = cases.steps(16)[(5, 12)[seed]]
    shape = PoolShape("long", (Group((Cells(2, 32),) * 2, 16),), 24)
    tile = host.small_shape(2, *((32, 16), (16, 32))[seed % 2])
    compare(shape, layout, step, "float32", tile=tile)


TWO_ROWS = Step(
    "two rows", (cases.row("a", 20, 40), cases.row("b", 9, 20)), cases.Visibility(causal=True)
)
FIELDS = {"row": 1, "first query": 1, "queries": -1, "lo_min": 17, "hi_max": -1, "hi_min": 16}


@pytest.mark.parametrize("fault", ["none", *FIELDS])
def test_a_work_list_that_is_wrong_is_found(fault: str) -> None:
    """Each number of a tile matters: one that is off changes the result."""
    tile = host.small_shape(2)
    names = ("row", "first query", "queries", "lo_min", "hi_max", "lo_max", "hi_min")

    def tiles(plan: StepPlan) -> Any:
        found = query_tiles(plan.cu_seqlens, plan.num_tokens, plan.lo, plan.hi, tile.queries)
        if fault != "none":
            found[names.index(fault)] += FIELDS[fault]
        return found

    if fault == "none":
        compare(SMALL, "LBNHC", TWO_ROWS, "float32", tile=tile, tiles=tiles)
    else:
        with pytest.raises(AssertionError):
            compare(SMALL, "LBNHC", TWO_ROWS, "float32", tile=tile, tiles=tiles)


PLACE = ("offset", "block stride", "head stride", "token stride")


@pytest.mark.parametrize("fault", PLACE)
@pytest.mark.parametrize("layout", ["LBNHC", "BHLNC"])
def test_a_place_that_is_wrong_is_found(
    fault: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = host.place_of

    def changed(view: Any, wide: bool = True) -> host.Place:
        place = original(view, wide)
        place.numbers[PLACE.index(fault)] -= 1
        return place

    monkeypatch.setattr(host, "place_of", changed)
    with pytest.raises(AssertionError):
        compare(SMALL, layout, TWO_ROWS, "float32")


@triton.jit
def decode_kernel(source, e4m3, e5m2):  # type: ignore[no-untyped-def]
    at = tl.arange(0, 256)
    bits = tl.load(source + at)
    tl.store(e4m3 + at, decode_e4m3(bits))
    tl.store(e5m2 + at, decode_e5m2(bits))


def test_every_8_bit_float_is_decoded_exactly() -> None:
    every = np.arange(256, dtype=np.uint8)
    got = [torch.zeros(256, dtype=torch.float16) for _ in range(2)]
    decode_kernel[(1,)](torch.from_numpy(every), *got)
    for found, kind in zip(got, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)):
        np.testing.assert_array_equal(found.numpy(), every.view(kind).astype(np.float16))
