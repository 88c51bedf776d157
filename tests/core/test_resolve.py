"""From a config to views: mixed pages, groups, offsets, kernel blocks, and edited configs."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from layout_core import (
    BlockGranularity,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    LayerView,
    MLAAttentionSpec,
    ModelConfig,
    ResolvedLayout,
    RunConfig,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    build_kv_cache_tensor,
    get_kv_cache_groups,
    make_config,
    plan_tensors,
    pool_bytes_per_block,
    resolve_layout,
    row_geometry,
    single_group_config,
    unify_kv_cache_spec_page_size,
)
from layout_core.checks import Extent, check_cells, check_tensors_apart
from layout_core.errors import (
    ConfigError,
    IllegalCombinationError,
    LayoutError,
    OverlapError,
    StrideError,
    UnresolvedLayoutError,
)
from tests.core.brute import owners_of_bytes

LAYOUTS = [layout.name for layout in KVCacheLayout]


def page(h: int, n: int, c: int, **changes: Any) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=n, num_kv_heads=h, head_size=c // 2, dtype="uint8", **changes
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_says_everything_an_engine_needs(layout: str) -> None:
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=8, head_size_v=4, dtype="float16"
    )
    resolved = resolve_layout(single_group_config(spec, 5, ["x", "y"], layout), null_block=False)
    assert resolved.layout is KVCacheLayout[layout]
    assert (resolved.num_blocks, resolved.null_block) == (5, False)
    assert resolved.size_bytes == 2 * 5 * 2 * 16 * 24
    view = resolved.layer("y")
    assert view is resolved.layer(1)
    assert (view.name, view.group, view.shape) == ("y", 0, (5, 2, 16, 24))
    assert (view.num_kv_heads, view.head_size, view.head_size_v) == (2, 8, 4)
    assert (view.key_bytes, view.value_bytes) == (16, 8)
    assert (view.block_size, view.granularity) == (16, BlockGranularity.MANAGER)
    assert view.strides[3] == 1
    assert resolved.groups[0].specs == (spec, spec)
    assert resolved.groups[0].block_size == 16


@pytest.mark.parametrize("layout", LAYOUTS)
def test_byte_ranges_are_exact(layout: str) -> None:
    resolved = resolve_layout(single_group_config(page(2, 4, 6), 3, ["x", "y"], layout))
    for view in resolved.layers:
        reached = {
            view.cell_offset(b, h, n) + i
            for b in range(3)
            for h in range(2)
            for n in range(4)
            for i in range(6)
        }
        assert view.byte_range == (min(reached), max(reached) + 1)
        for bad in ((3, 0, 0), (0, 2, 0), (0, 0, 4), (-1, 0, 0)):
            with pytest.raises(LayoutError, match=r"is outside \[0, "):
                view.cell_offset(*bad)


def mixed_groups() -> tuple[dict[str, FullAttentionSpec], RunConfig]:
    # vllm#45207: pages of 4096 and 6144 bytes
    specs = {"small": page(2, 16, 128), "large": page(3, 16, 128)}
    return specs, RunConfig(ModelConfig(64))


@pytest.mark.parametrize(("layout", "pitches"), [("LBNHC", {4096, 6144}), ("BLNHC", {10240})])
def test_pages_mixed_in_one_group(layout: str, pitches: set[int]) -> None:
    specs, config = mixed_groups()
    config.cache_config.kv_cache_layout = layout
    (group,) = get_kv_cache_groups(config, specs)
    assert isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs)
    assert group.kv_cache_spec.block_size == 16
    resolved = resolve_layout(make_config([group], 3, layout))
    assert {view.strides[0] for view in resolved.layers} == pitches
    assert {view.block_size for view in resolved.layers} == {16}
    assert not owners_of_bytes(resolved)[0]


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_pages_mixed_in_two_groups_are_brought_to_one_size(layout: str) -> None:
    specs = unify_kv_cache_spec_page_size(mixed_groups()[0])
    assert {name: spec.page_size_bytes for name, spec in specs.items()} == {
        "small": 6144,
        "large": 6144,
    }
    assert {spec.block_size for spec in specs.values()} == {16}
    groups = [KVCacheGroupSpec([name], spec) for name, spec in specs.items()]
    resolved = resolve_layout(make_config(groups, 3, layout))
    assert [view.strides[0] for view in resolved.layers] == [6144, 6144]
    assert not owners_of_bytes(resolved)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_of_unlike_heads_and_block_sizes_in_one_pool(layout: str) -> None:
    # LMCache#3106: (16 tokens, 8 heads, 256) and (64, 1, 512): equal pages, unlike (H, N, C)
    wide = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="uint8")
    tall = FullAttentionSpec(block_size=64, num_kv_heads=1, head_size=256, dtype="uint8")
    assert wide.page_size_bytes == tall.page_size_bytes == 32768
    groups = [KVCacheGroupSpec(["w0", "w1"], wide), KVCacheGroupSpec(["t0", "t1"], tall)]
    if layout == "LHBNC":
        with pytest.raises(IllegalCombinationError, match=r"unlike \(H, N, C\)"):
            make_config(groups, 2, layout)
        return
    resolved = resolve_layout(make_config(groups, 2, layout))
    assert [view.block_size for view in resolved.layers] == [16, 16, 64, 64]
    assert resolved.size_bytes == 2 * 2 * 32768
    assert not owners_of_bytes(resolved)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_overlay_from_byte_zero(layout: str) -> None:
    groups = [KVCacheGroupSpec([f"{g}{i}" for i in range(2)], page(2, 4, 8)) for g in "ab"]
    resolved = resolve_layout(make_config(groups, 3, layout))
    assert [v.offset for v in resolved.layers[:2]] == [v.offset for v in resolved.layers[2:]]
    assert resolved.group_layers(1) == (2, 3)


def test_a_block_split_into_kernel_blocks() -> None:
    # vllm#54272: a page of 884,736 bytes in 12 kernel blocks
    spec = page(9, 192, 512)
    assert spec.page_size_bytes == 884_736
    config = single_group_config(spec, 2, ["x", "y"], "LBNHC")
    resolved = resolve_layout(config, kernel_block_sizes=[16])
    view = resolved.layers[1]
    assert (view.granularity, view.blocks_per_manager_block) == (BlockGranularity.KERNEL, 12)
    assert (view.block_size, view.shape) == (16, (24, 9, 16, 512))
    assert view.strides[0] == 73_728
    pieces = [(view.cell_offset(b, 0, 0), view.cell_offset(b, 8, 15) + 512) for b in range(12, 24)]
    assert all(end - start == 73_728 for start, end in pieces)
    assert all(a[1] == b[0] for a, b in pairwise(pieces))
    assert sum(end - start for start, end in pieces) == 884_736
    assert pieces[-1][1] == resolved.size_bytes


def test_a_split_that_one_stride_cannot_address_is_refused() -> None:
    padded = single_group_config(page(2, 8, 4, page_size_padded=80), 3, ["x"], "LBHNC")
    with pytest.raises(
        StrideError,
        match=r"group 0, layer 'x': .*pitch is 80 bytes, the payload .* 64, the ratio 2",
    ):
        resolve_layout(padded, kernel_block_sizes=[4])
    dense = single_group_config(page(2, 8, 4), 3, ["x"], "LBHNC")
    with pytest.raises(StrideError, match=r"expected a divisor of the block size 8, got 3"):
        resolve_layout(dense, kernel_block_sizes=[3])
    with pytest.raises(ConfigError, match=r"one entry for each of 1 groups, got 2"):
        resolve_layout(dense, kernel_block_sizes=[4, 4])
    assert resolve_layout(dense, kernel_block_sizes=[8]) == resolve_layout(dense)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("field", ["size", "layer_stride", "block_stride", "offset"])
@pytest.mark.parametrize("delta", [-8, 8])
def test_an_edited_tensor_is_refused(layout: str, field: str, delta: int) -> None:
    groups = [KVCacheGroupSpec(["a", "b"], page(2, 4, 8)), KVCacheGroupSpec(["c"], page(2, 4, 8))]
    config = make_config(groups, 3, layout)
    tensor = config.kv_cache_tensors[1]
    setattr(tensor, field, getattr(tensor, field) + delta)
    with pytest.raises(ConfigError, match=rf"kv_cache_tensors\[1\].{field}: layout {layout}, 3"):
        resolve_layout(config)


def test_other_edits_are_refused_too() -> None:
    def config(**changes: Any) -> KVCacheConfig:
        return replace(single_group_config(page(2, 4, 8), 3, ["a", "b"], "LBNHC"), **changes)

    with pytest.raises(UnresolvedLayoutError, match=r"expected the resolved layout's name"):
        resolve_layout(config(kv_cache_layout=None))
    with pytest.raises(ConfigError, match=r"layer_stride: layout BLNHC"):
        resolve_layout(config(kv_cache_layout="BLNHC"))
    with pytest.raises(ConfigError, match=r"num_blocks: expected an int >= 1, got 0"):
        resolve_layout(config(num_blocks=0))
    with pytest.raises(ConfigError, match=r"4 blocks and the specs give"):
        resolve_layout(config(num_blocks=4))
    with pytest.raises(ConfigError, match=r"give 1 tensors, got 0"):
        resolve_layout(config(kv_cache_tensors=[]))
    with pytest.raises(ConfigError, match=r"expected none, as no group has a layer, got 1"):
        resolve_layout(config(kv_cache_groups=[]))
    swapped = config()
    swapped.kv_cache_tensors[0].layers.reverse()
    with pytest.raises(ConfigError, match=r"layers: .* give \['a', 'b'\], got \['b', 'a'\]"):
        resolve_layout(swapped)
    twice = config(
        kv_cache_groups=[
            KVCacheGroupSpec(["a"], page(2, 4, 8)),
            KVCacheGroupSpec(["a"], page(2, 4, 8)),
        ]
    )
    with pytest.raises(ConfigError, match=r"kv_cache_groups\[1\]: layer 'a' is in group 0 too"):
        resolve_layout(twice)


def test_an_alias_and_a_base_offset_are_no_edits() -> None:
    config = single_group_config(page(2, 4, 8), 3, ["a", "b"], "LBNHC")
    plain = resolve_layout(config)
    assert resolve_layout(replace(config, kv_cache_layout="NHD")) == plain
    tensor = build_kv_cache_tensor(page(2, 4, 8), 3, ["a", "b"], offset=64)
    moved = resolve_layout(replace(config, kv_cache_tensors=[tensor]))
    assert [v.offset for v in moved.layers] == [v.offset + 64 for v in plain.layers]
    assert moved.size_bytes == plain.size_bytes + 64


def test_no_groups_resolve_to_nothing() -> None:
    resolved = resolve_layout(KVCacheConfig(1, kv_cache_layout="LBNHC"))
    assert (resolved.layers, resolved.groups, resolved.size_bytes) == ((), (), 0)
    with pytest.raises(LayoutError, match=r"has no layers, so it has no row geometry"):
        row_geometry(resolved)


def test_a_group_without_layers_keeps_its_index() -> None:
    spec = page(2, 4, 8)
    resolved = resolve_layout(
        make_config([KVCacheGroupSpec([], spec), KVCacheGroupSpec(["a"], spec)], 2, "LBNHC")
    )
    assert [view.group for view in resolved.layers] == [1]
    assert resolved.groups[0].layer_names == ()


def test_the_cell_check_sees_overlap_and_overrun() -> None:
    tensor = KVCacheTensor(64, ["a"], 64, 32)
    shape, strides = (2, 2, 2, 8), (64, 32, 16, 8, 1)
    check_cells(KVCacheLayout.LBHNC, shape, strides, tensor, "here")
    with pytest.raises(OverlapError, match=r"here: cells share bytes: axis H steps 8 .* reach 16"):
        check_cells(KVCacheLayout.LBHNC, shape, (64, 32, 8, 8, 1), tensor, "here")
    with pytest.raises(OverlapError, match=r"bytes \[8, 72\), outside the allocation of 64"):
        check_cells(KVCacheLayout.LBHNC, shape, strides, replace(tensor, offset=8), "here")


def test_tensors_of_one_group_lie_apart() -> None:
    regions = [Extent("one", 0, 8, 64, 16), Extent("two", 64, 8, 64, 16)]
    check_tensors_apart(KVCacheLayout.LBNHC, regions)
    with pytest.raises(OverlapError, match=r"two: starts at byte 63, and one reaches byte 63$"):
        check_tensors_apart(KVCacheLayout.LBNHC, [regions[0], replace(regions[1], offset=63)])
    sides = [Extent("one", 0, 8, 200, 16), Extent("two", 8, 8, 200, 16)]
    check_tensors_apart(KVCacheLayout.BLNHC, sides)
    with pytest.raises(OverlapError, match=r"two: .* one reaches byte 7 of each block"):
        check_tensors_apart(KVCacheLayout.BLNHC, [sides[0], replace(sides[1], offset=7)])
    with pytest.raises(OverlapError, match=r"two: reaches byte 16 of a block, past .* of 16"):
        check_tensors_apart(KVCacheLayout.BLNHC, [sides[0], replace(sides[1], in_block=9)])


def test_mla_and_packed_pages_resolve() -> None:
    mla = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16")
    view = resolve_layout(single_group_config(mla, 3, ["x"], "LBNHC")).layers[0]
    assert (view.shape, view.head_size_v, view.value_bytes) == ((3, 1, 64, 1152), 0, 0)
    packed = page(4, 8, 16, num_head_slots=2, state_content_bytes=10)
    view = resolve_layout(single_group_config(packed, 3, ["x"], "BHLNC")).layers[0]
    assert (view.shape, view.num_kv_heads) == ((3, 2, 8, 10), 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_index_limits_are_the_last_block_that_fits(layout: str) -> None:
    spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    resolved = resolve_layout(single_group_config(spec, 40_000, ["x", "y"], layout))

    def last_element(view: LayerView, block: int) -> int:
        return (view.cell_offset(block, 7, 15) + view.shape[3] - 1) // 2

    for view in resolved.layers:
        limit = view.max_block_for_index_bits()
        if limit >= 0:
            assert last_element(view, limit) < 2**31
        if limit + 1 < 40_000:
            assert last_element(view, limit + 1) >= 2**31
        assert view.max_block_for_index_bits(64) == 39_999


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("padded", [None, 8 * 3 * 10 + 6])
def test_row_geometry_addresses_the_same_bytes(layout: str, padded: int | None) -> None:
    h = 1 if padded and layout in ("LHBNC", "BHLNC") else 2
    spec = FullAttentionSpec(
        block_size=12,
        num_kv_heads=h,
        head_size=3,
        head_size_v=2,
        dtype="float16",
        page_size_padded=padded and padded * h,
    )
    resolved = resolve_layout(single_group_config(spec, 3, ["x", "y"], layout))
    geometry = row_geometry(resolved)
    assert geometry.num_rows * geometry.row_bytes == resolved.size_bytes
    assert geometry.words_per_row * geometry.word_bits == geometry.row_bytes * 8
    assert geometry.word_bits == 16
    memory = np.arange(resolved.size_bytes).reshape(geometry.num_rows, geometry.row_bytes)
    for view, rows in zip(resolved.layers, geometry.layers):
        for b, head, token in np.ndindex(*view.shape[:3]):
            first = (
                rows.offset
                + b * rows.block_stride
                + head * rows.head_stride
                + token * rows.token_stride
            )
            content = memory[first : first + rows.rows_per_cell].ravel()
            start = view.cell_offset(b, head, token)
            assert content.tolist() == list(range(start, start + view.shape[3]))


def test_a_view_for_another_layer_is_a_copy_with_two_fields_changed() -> None:
    view = resolve_layout(single_group_config(page(2, 4, 8), 3, ["a"], "LBNHC")).layers[0]
    other = view.at("z", 99)
    assert other == replace(view, name="z", offset=99)
    assert (view.name, view.offset) == ("a", 0)
    with pytest.raises(AttributeError):
        other.offset = 1  # type: ignore[misc]


def test_lookups_name_what_is_missing() -> None:
    resolved = resolve_layout(single_group_config(page(2, 4, 8), 3, ["a", "b"], "LBNHC"))
    with pytest.raises(LayoutError, match=r"layer: 'z' is not in this plan; it has \['a', 'b'\]"):
        resolved.layer("z")
    with pytest.raises(LayoutError, match=r"layer: expected an index in \[0, 2\), got 2"):
        resolved.layer(2)
    with pytest.raises(LayoutError, match=r"group: expected an index in \[0, 1\), got 1"):
        resolved.group(1)


def test_plans_are_values_and_travel() -> None:
    config = single_group_config(page(2, 4, 8), 3, ["a", "b"], "BLHNC")
    resolved = resolve_layout(config)
    copy = pickle.loads(pickle.dumps(resolved))
    assert isinstance(copy, ResolvedLayout)
    assert copy == resolved
    assert hash(copy) == hash(resolved)
    assert copy.layer("b") == resolved.layer("b")


def test_windows_in_a_group_of_their_own_share_the_pool() -> None:
    full = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float16")
    window = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype="float16", sliding_window=32
    )
    groups = [KVCacheGroupSpec(["f"], full), KVCacheGroupSpec(["w0", "w1"], window)]
    layout = KVCacheLayout.LBNHC
    assert pool_bytes_per_block(groups, layout) == 2 * full.page_size_bytes
    tensors = plan_tensors(groups, 4, layout)
    assert [t.offset for t in tensors] == [0, 0]
    assert {t.size for t in tensors} == {8 * full.page_size_bytes}
