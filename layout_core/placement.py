"""Where the layers of a plan lie: tensors from groups, a layout and a block count.

Groups overlay each other from byte 0, which is sound because a block id belongs to one group
at a time. With B outermost, every block repeats one packing of all layers of a group; with L
outermost, each layer has a region of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import lcm

from layout_core.errors import ConfigError
from layout_core.layouts import KVCacheLayout
from layout_core.legality import check_placement
from layout_core.specs import KVCacheSpec, UniformTypeKVCacheSpecs, round_up
from layout_core.strides import compute_layout_strides
from layout_core.tensors import KVCacheGroupSpec, KVCacheTensor


def spec_of_layer(group: KVCacheGroupSpec, layer_name: str) -> KVCacheSpec:
    """The spec of one layer of a group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        if layer_name not in spec.kv_cache_specs:
            raise ConfigError(
                f"kv_cache_groups: layer {layer_name!r} is in no entry of its group's specs"
            )
        return spec.kv_cache_specs[layer_name]
    return spec


def layers_by_spec(group: KVCacheGroupSpec) -> list[tuple[KVCacheSpec, list[str]]]:
    """The layers of a group collected by equal specs, both in order of first appearance."""
    spec = group.kv_cache_spec
    if not group.layer_names:  # a pipeline stage without a layer of this group
        return []
    if not isinstance(spec, UniformTypeKVCacheSpecs):
        return [(spec, list(group.layer_names))]
    if set(spec.kv_cache_specs) != set(group.layer_names):
        raise ConfigError(
            f"kv_cache_groups: a group names the layers {group.layer_names}, its specs are for "
            f"{list(spec.kv_cache_specs)}"
        )
    collected: dict[KVCacheSpec, list[str]] = {}
    for name, layer_spec in spec.kv_cache_specs.items():
        collected.setdefault(layer_spec, []).append(name)
    return list(collected.items())


def block_stride_of_page(spec: KVCacheSpec) -> int:
    """Bytes from one page to the next where L is outermost: the page, aligned."""
    return round_up(spec.page_size_bytes, spec.get_block_stride_alignment())


def pool_bytes_per_block(groups: Iterable[KVCacheGroupSpec], layout: KVCacheLayout) -> int:
    """Bytes of the allocation for each block: those of the largest group.

    Raises:
        ConfigError: no group has a layer.
    """
    largest, alignment = 0, 1
    for group in groups:
        total = 0
        for spec, names in layers_by_spec(group):
            if layout.is_block_outermost:
                total += spec.page_size_bytes * len(names)
                alignment = lcm(alignment, spec.get_block_stride_alignment())
            else:
                total += block_stride_of_page(spec) * len(names)
        largest = max(largest, total)
    if largest == 0:
        raise ConfigError("kv_cache_groups: expected at least one layer, got none")
    return round_up(largest, alignment)


def plan_tensors(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int, layout: KVCacheLayout
) -> list[KVCacheTensor]:
    """The placement of every layer, in the order of the groups and then of their specs.

    Raises:
        IllegalCombinationError: the layout cannot hold these groups.
        StrideError: a page that one stride cannot step over.
    """
    collected = [layers_by_spec(group) for group in groups]
    check_placement(layout, [[spec for spec, _ in parts] for parts in collected])
    per_block = pool_bytes_per_block(groups, layout)
    size = per_block * num_blocks
    tensors = []
    for parts in collected:
        offset = 0
        for spec, names in parts:
            fixed = per_block if layout.is_block_outermost else None
            aligned = block_stride_of_page(spec)
            if fixed is None and aligned != spec.page_size_bytes:
                fixed = aligned
            layer_stride, block_stride, _, _, _ = compute_layout_strides(
                spec, num_blocks, len(names), layout, fixed_strides=(None, fixed, None, None, None)
            )
            tensors.append(KVCacheTensor(size, names, layer_stride, block_stride, offset))
            step = spec.page_size_bytes if layout.is_block_outermost else layer_stride
            offset += len(names) * step
    return tensors
