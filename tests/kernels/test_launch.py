"""Launch descriptions: they fit the kernels' signatures, and both engines can launch them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from backends.triton_kernels.configs import TileShape
from backends.triton_kernels.launch import Buffer, Launch, Scalar
from backends.triton_kernels.plans import plan_attention, plan_copy_blocks, plan_gather, plan_write
from tests.kernels.variants import variants

LAYER: dict[str, Any] = {
    "kv_heads": 2, "head_size": 64, "head_size_v": 32, "block_size": 16, "dtype": "bfloat16",
    "unit": 8,
}  # fmt: skip
SHAPE = TileShape(128, 64, 32, 4, 1, 8, 3, 1)


def attention(**changes: Any) -> tuple[Launch, ...]:
    return plan_attention(
        **{
            "shape": SHAPE,
            "num_tokens": 100,
            "num_tiles": 5,
            "query_heads": 8,
            "table_width": 7,
            "query_dtype": "bfloat16",
            **LAYER,
            **changes,
        }
    )


def test_every_launch_fits_its_kernel() -> None:
    """Names in the signature's order; inputs, outputs, constants; no output before an input."""
    for variant in variants():
        launch = variant.launch()
        names = [p.name for p in launch.parameters]
        assert [*names, *launch.constexprs] == launch.kernel.arg_names, variant.name
        roles = [isinstance(p, Buffer) and p.role == "out" for p in launch.parameters]
        assert roles == sorted(roles), variant.name
        assert launch.outputs, variant.name


def test_every_runtime_number_stays_data() -> None:
    """No kernel is compiled again because a number was 1, or a multiple of 16."""
    for variant in variants():
        launch = variant.launch()
        numbers = {p.name for p in launch.parameters if isinstance(p, Scalar) and p.kind == "int"}
        assert numbers <= set(launch.kernel.do_not_specialize), variant.name


def test_the_pool_is_changed_in_place() -> None:
    write = plan_write(num_tokens=9, **LAYER)
    assert write.aliases == {0: 0}
    assert [o.buffer for o in write.outputs] == ["pool"]
    copy = plan_copy_blocks(num_pairs=2, num_layers=3, **LAYER)
    assert copy.aliases == {0: 0}
    assert attention()[0].aliases == {}


def test_splits_hand_their_parts_to_the_merge() -> None:
    first, second = attention(num_splits=3)
    assert [(o.buffer, o.shape, o.dtype) for o in first.outputs] == [
        ("partial_out", (3, 100, 8, 32), "float32"),
        ("partial_lse", (3, 100, 8), "float32"),
    ]
    assert [p.buffer for p in second.inputs if isinstance(p, Buffer)] == [
        "partial_out",
        "partial_lse",
    ]
    whole = attention()
    assert len(whole) == 1
    assert (
        [(o.buffer, o.shape, o.dtype) for o in whole[0].outputs]
        == [(o.buffer, o.shape, o.dtype) for o in second.outputs]
        == [("out", (100, 8, 32), "bfloat16"), ("lse", (100, 8), "float32")]
    )


def test_the_grid() -> None:
    chunks = attention(shape=replace(SHAPE, heads=2, head_chunks=2), num_splits=3)[0]
    assert chunks.grid == (5, 4, 3)
    assert not chunks.is_empty
    assert attention(num_tiles=0)[0].is_empty
    assert plan_write(num_tokens=0, **LAYER).is_empty
    assert plan_copy_blocks(num_pairs=0, num_layers=1, **LAYER).is_empty
    gather = plan_gather(num_rows=3, max_keys=0, total_keys=0, table_width=1, **LAYER)
    assert gather.is_empty


def test_bind_gives_arguments_in_order_and_names_what_is_missing() -> None:
    launch = attention()[0]
    buffers = {p.buffer: p.buffer for p in launch.parameters if isinstance(p, Buffer)}
    numbers = {"score_scale": 0.5, "value_scale": 2.0, "softcap": 0.0}
    bound = launch.bind(buffers, numbers)
    assert len(bound) == len(launch.parameters)
    assert bound[:3] == ["pool", "place", "query"]
    assert bound[7:10] == [0.5, 2.0, 0.0]
    with pytest.raises(KeyError, match="value_scale"):
        launch.bind(buffers, {"score_scale": 0.5})
    del buffers["tiles"]
    with pytest.raises(KeyError, match="tiles"):
        launch.bind(buffers, numbers)


def test_scales_in_memory_are_arrays() -> None:
    launch = attention(scalars_in_memory=True)[0]
    arrays = {p.name: p.dtype for p in launch.parameters if isinstance(p, Buffer)}
    assert {arrays[n] for n in ("score_scale", "value_scale", "softcap")} == {"float32"}
    assert launch.bind({p.buffer: 0 for p in launch.parameters if isinstance(p, Buffer)})


@pytest.mark.parametrize("strides", [(3072, 128, 1), (1027, 128, 1), (2048, 130, 2)])
def test_query_strides_are_kept_whatever_divides_them(strides: tuple[int, int, int]) -> None:
    launch = attention(query_strides=strides)[0]
    numbers = {p.name: p.value for p in launch.parameters if isinstance(p, Scalar)}
    unit = launch.constexprs["QUERY_UNIT"]
    assert isinstance(unit, int)
    assert numbers["query_stride_t"] * unit == strides[0]  # type: ignore[operator]
    assert numbers["query_stride_h"] * unit == strides[1]  # type: ignore[operator]
    assert launch.constexprs["QUERY_STEP"] == strides[2]


def test_variants_are_named_apart() -> None:
    names = sorted(v.name for v in variants())
    assert all(a != b for a, b in pairwise(names))
