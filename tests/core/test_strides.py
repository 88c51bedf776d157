"""Strides: golden numbers, NumPy transposes, and every cell in a place of its own."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_core import (
    FullAttentionSpec,
    KVCacheLayout,
    build_kv_cache_tensor,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
    resolve_layout,
    single_group_config,
)
from layout_core.errors import StrideError
from tests.core.brute import transposed_offsets

LAYOUTS = [layout.name for layout in KVCacheLayout]


def spec(h: int, n: int, c: int, padded: int | None = None) -> FullAttentionSpec:
    """A spec whose page is [h, n, c] bytes; c is even."""
    return FullAttentionSpec(
        block_size=n, num_kv_heads=h, head_size=c // 2, dtype="uint8", page_size_padded=padded
    )


# vllm#39668: [L, B, H, N, C] = [3, 5, 2, 4, 8], and with B = 10**9
AT_FIVE = {
    "LBHNC": (320, 64, 32, 8, 1),
    "LBNHC": (320, 64, 8, 16, 1),
    "LHBNC": (320, 32, 160, 8, 1),
    "BLHNC": (64, 192, 32, 8, 1),
    "BLNHC": (64, 192, 8, 16, 1),
    "BHLNC": (32, 192, 96, 8, 1),
}
AT_A_BILLION = AT_FIVE | {
    "LBHNC": (64 * 10**9, 64, 32, 8, 1),
    "LBNHC": (64 * 10**9, 64, 8, 16, 1),
    "LHBNC": (64 * 10**9, 32, 32 * 10**9, 8, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_golden_strides(layout: str) -> None:
    assert compute_layout_strides(spec(2, 4, 8), 5, 3, layout) == AT_FIVE[layout]
    assert compute_layout_strides(spec(2, 4, 8), 10**9, 3, layout) == AT_A_BILLION[layout]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_unit_axes_take_the_product_of_the_sizes_inside(layout: str) -> None:
    # vllm#40737, flashinfer#2232
    resolved = resolve_layout(single_group_config(spec(1, 16, 8), 5, ["a", "b"], layout))
    assert resolved.layers[0].strides == (128, 128, 8, 1)


def test_a_unit_token_axis_is_canonical_too() -> None:
    for layout in LAYOUTS:
        resolved = resolve_layout(single_group_config(spec(4, 1, 8), 5, ["a", "b"], layout))
        assert resolved.layers[0].strides[2] == 8


@pytest.mark.parametrize(("layout", "element"), [("LBHNC", 32), ("LBNHC", 4)])
def test_the_cell_of_head_one_token_zero(layout: str, element: int) -> None:
    # vllm#49012: H = N = 8, C = 4 elements of one byte
    view = resolve_layout(single_group_config(spec(8, 8, 4), 2, ["a"], layout)).layers[0]
    memory = np.zeros(2 * 8 * 8 * 4, dtype=np.uint8)
    start = view.cell_offset(0, 1, 0)
    memory[start : start + 4] = 7
    assert np.flatnonzero(memory).tolist() == list(range(element, element + 4))


sizes = st.tuples(*[st.integers(1, 4)] * 4, st.sampled_from([2, 4, 6]))


@given(st.sampled_from(LAYOUTS), sizes)
@settings(deadline=None)
def test_strides_equal_numpy_transposes(layout: str, shape: tuple[int, ...]) -> None:
    num_layers, num_blocks, h, n, c = shape
    names = [f"layer.{i}" for i in range(num_layers)]
    resolved = resolve_layout(single_group_config(spec(h, n, c), num_blocks, names, layout))
    expected = transposed_offsets(layout, shape)
    for index, view in enumerate(resolved.layers):
        got = view.offset + sum(
            np.arange(size).reshape([-1 if axis == i else 1 for i in range(4)]) * stride
            for axis, (size, stride) in enumerate(zip(view.shape, view.strides))
        )
        assert np.array_equal(np.broadcast_to(got, view.shape), expected[index])
    assert resolved.size_bytes == prod(shape)


@given(st.sampled_from(LAYOUTS), sizes, st.integers(0, 40), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_cells_and_bytes_are_a_bijection(
    layout: str, shape: tuple[int, ...], padding: int, offset: int
) -> None:
    num_layers, num_blocks, h, n, c = shape
    if layout in ("LHBNC", "BHLNC"):
        h = 1 if padding else h
    page = h * n * c
    padded = page + padding if padding else None
    tensor = build_kv_cache_tensor(
        spec(h, n, c, padded),
        num_blocks,
        [f"l{i}" for i in range(num_layers)],
        layout=layout,
        offset=offset,
    )
    config = single_group_config(
        spec(h, n, c, padded), num_blocks, [f"l{i}" for i in range(num_layers)], layout
    )
    config.kv_cache_tensors = [tensor]
    resolved = resolve_layout(config)
    assert resolved.size_bytes == offset + (page + padding) * num_layers * num_blocks
    starts = sorted(
        view.cell_offset(b, i, j)
        for view in resolved.layers
        for b in range(num_blocks)
        for i in range(h)
        for j in range(n)
    )
    assert all(later - earlier >= c for earlier, later in pairwise(starts))
    assert len(starts) == num_layers * num_blocks * h * n
    assert starts[0] >= offset
    assert starts[-1] + c <= resolved.size_bytes
    if not padding:  # dense: every byte is a cell's
        assert starts == list(range(offset, resolved.size_bytes, c))


@given(st.sampled_from(LAYOUTS), sizes)
@settings(deadline=None)
def test_block_addresses_rise_with_the_block(layout: str, shape: tuple[int, ...]) -> None:
    num_layers, num_blocks, h, n, c = shape
    names = [f"l{i}" for i in range(num_layers)]
    resolved = resolve_layout(single_group_config(spec(h, n, c), num_blocks, names, layout))
    for view in resolved.layers:
        starts = [view.cell_offset(b, 0, 0) for b in range(num_blocks)]
        assert starts == sorted(set(starts))
        steps = {later - earlier for earlier, later in pairwise(starts)}
        assert steps <= {view.strides[0]}


def test_kernel_blocks_count_in_the_shape() -> None:
    shape = compute_layer_kv_cache_shape_bytes
    assert shape(spec(2, 16, 8), 5) == (5, 2, 16, 8)
    assert shape(spec(2, 16, 8), 5, 4) == (20, 2, 4, 8)
    with pytest.raises(StrideError, match=r"expected a divisor of the block size 16, got 5"):
        shape(spec(2, 16, 8), 5, 5)
    compressed = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype="uint8", tokens_per_state=8
    )
    assert shape(compressed, 1, 8) == (2, 1, 1, 16)
    with pytest.raises(StrideError, match=r"4 tokens hold 0 stored states, so 4 kernel blocks"):
        shape(compressed, 1, 4)
    pooled = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype="uint8", tokens_per_state=Fraction(1, 2)
    )
    assert shape(pooled, 3, 8) == (6, 1, 16, 16)


def test_fixed_strides_carry_on_outwards() -> None:
    strides = compute_layout_strides(
        spec(2, 4, 8), 5, 3, "LBHNC", fixed_strides=(None, 100, None, None, None)
    )
    assert strides == (500, 100, 32, 8, 1)
    for bad in ((None,) * 4, (None, 0, None, None, None), (None, -1, None, None, None)):
        with pytest.raises(StrideError, match=r"fixed_strides: expected five strides > 0 or None"):
            compute_layout_strides(spec(2, 4, 8), 5, 3, "LBHNC", fixed_strides=bad)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding(layout: str) -> None:
    padded = spec(2, 4, 8, padded=70)
    if layout in ("LHBNC", "BHLNC"):
        with pytest.raises(StrideError, match=rf"{layout} puts an axis of a page outside L or B"):
            compute_layout_strides(padded, 5, 3, layout)
    else:
        layer, block = compute_layout_strides(padded, 5, 3, layout)[:2]
        assert (layer, block) == ((350, 70) if layout[0] == "L" else (70, 210))
    with pytest.raises(StrideError, match=r"padded to 70 cannot be split into kernel blocks of 2"):
        compute_layout_strides(padded, 5, 3, layout, kernel_block_size=2)
