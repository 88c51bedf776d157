"""From a config to the frozen plan that engines execute.

``resolve_layout`` derives every placement again from the config's layout, groups and block
count, and refuses a config that says anything else, so an edited or damaged config never
becomes an address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from layout_core.checks import Extent, check_cells, check_tensors_apart
from layout_core.errors import ConfigError, StrideError, UnresolvedLayoutError
from layout_core.foreign import as_config
from layout_core.layouts import KVCacheLayout
from layout_core.legality import LEGAL_COMBINATIONS
from layout_core.placement import plan_tensors, spec_of_layer
from layout_core.specs import AttentionSpec, KVCacheSpec
from layout_core.strides import (
    Shape4,
    canonical_unit_strides,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
)
from layout_core.tensors import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from layout_core.views import BlockGranularity, GroupPlan, LayerView, ResolvedLayout


def resolve_layout(
    config: KVCacheConfig,
    *,
    kernel_block_sizes: Sequence[int | None] | None = None,
    null_block: bool = True,
) -> ResolvedLayout:
    """The plan of one worker's allocation.

    Args:
        config: a config with its layout recorded.
        kernel_block_sizes: for each group, the tokens of a kernel block that its manager
            blocks are split into, or ``None``; views of a split group count kernel blocks.
        null_block: whether block 0 is held back and never written.

    Raises:
        UnresolvedLayoutError: the config carries no layout.
        ConfigError: tensors that do not follow from the layout, the groups and the block
            count, naming the tensor, the field, what was expected and what came.
        IllegalCombinationError: the layout cannot hold these groups.
        StrideError: a block split that one stride cannot address, naming pitch, payload and
            ratio.
        OverlapError: cells that share a byte, or lie outside the allocation.
    """
    config = as_config(config)
    layout = _layout_of(config)
    groups = config.kv_cache_groups
    if kernel_block_sizes is not None and len(kernel_block_sizes) != len(groups):
        raise ConfigError(
            f"kernel_block_sizes: expected one entry for each of {len(groups)} groups, "
            f"got {len(kernel_block_sizes)}"
        )
    check_config(config)
    num_blocks = config.num_blocks
    cursor = iter(config.kv_cache_tensors)  # check_config has them in the order of the groups
    layers: list[LayerView] = []
    plans: list[GroupPlan] = []
    for index, group in enumerate(groups):
        kernel = None if kernel_block_sizes is None else kernel_block_sizes[index]
        views: list[LayerView] = []
        specs: list[KVCacheSpec] = []
        extents: list[Extent] = []
        while len(views) < len(group.layer_names):
            tensor = next(cursor)
            spec = spec_of_layer(group, tensor.layers[0])
            where = f"group {index}, layer {tensor.layers[0]!r}"
            view = _view_of_tensor(spec, num_blocks, layout, tensor, kernel, where)
            first = _view_of_first_layer(view, tensor, index)
            start, step = tensor.offset, tensor.layer_stride
            views += [first.at(name, start + i * step) for i, name in enumerate(tensor.layers)]
            specs += [spec] * len(tensor.layers)
            extents.append(view.extent)
        check_tensors_apart(layout, extents)
        if len(extents) > 1:  # tensors collect layers by spec; a plan keeps the group's order
            order = {view.name: at for at, view in enumerate(views)}
            places = [order[name] for name in group.layer_names]
            views, specs = [views[at] for at in places], [specs[at] for at in places]
        layers += views
        plans.append(
            GroupPlan(tuple(group.layer_names), group.kv_cache_spec.block_size, tuple(specs))
        )
    size = config.kv_cache_tensors[0].size if config.kv_cache_tensors else 0
    return ResolvedLayout(layout, size, num_blocks, tuple(layers), tuple(plans), null_block)


@dataclass(frozen=True, slots=True)
class _TensorView:
    """What all layers of one tensor share."""

    spec: AttentionSpec
    shape: Shape4
    strides: Shape4
    ratio: int  # kernel blocks of a manager block
    extent: Extent


def _view_of_first_layer(view: _TensorView, tensor: KVCacheTensor, group: int) -> LayerView:
    spec, ratio = view.spec, view.ratio
    return LayerView(
        name=tensor.layers[0],
        group=group,
        offset=tensor.offset,
        shape=view.shape,
        strides=view.strides,
        dtype=spec.dtype,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        head_size_v=spec.head_size_v,
        block_size=spec.block_size // ratio,
        granularity=BlockGranularity.MANAGER if ratio == 1 else BlockGranularity.KERNEL,
        blocks_per_manager_block=ratio,
    )


def _view_of_tensor(
    spec: KVCacheSpec,
    num_blocks: int,
    layout: KVCacheLayout,
    tensor: KVCacheTensor,
    kernel_block_size: int | None,
    where: str,
) -> _TensorView:
    if not isinstance(spec, AttentionSpec):
        raise ConfigError(f"{where}: expected an attention spec, got {type(spec).__name__}")
    shape = compute_layer_kv_cache_shape_bytes(spec, num_blocks, kernel_block_size)
    ratio = 1 if kernel_block_size is None else spec.block_size // kernel_block_size
    block_stride = tensor.block_stride
    if ratio > 1:
        _check_split(spec, layout, tensor, ratio, where)
        block_stride //= ratio
    strides = compute_layout_strides(
        spec,
        num_blocks,
        len(tensor.layers),
        layout,
        kernel_block_size,
        fixed_strides=(tensor.layer_stride, block_stride, None, None, None),
    )
    extent = check_cells(layout, shape, strides, tensor, where)
    _, b, h, n, c = strides
    return _TensorView(spec, shape, canonical_unit_strides(shape, (b, h, n, c)), ratio, extent)


def _check_split(
    spec: AttentionSpec,
    layout: KVCacheLayout,
    tensor: KVCacheTensor,
    ratio: int,
    where: str,
) -> None:
    """Raise unless ``ratio`` equal pieces of a block lie one constant stride apart."""
    payload = spec.unpadded_page_size_bytes
    numbers = (
        f"the block pitch is {tensor.block_stride} bytes, the payload of a block {payload}, "
        f"the ratio {ratio}"
    )
    if tensor.block_stride != payload or spec.page_size_padded is not None:
        raise StrideError(
            f"{where}: layout {layout.name} cannot split a block into {ratio} kernel blocks of "
            f"{spec.block_size // ratio} tokens, as one stride does not reach them all: "
            f"{numbers}; expected a pitch equal to the payload, without padding"
        )
    row = LEGAL_COMBINATIONS[layout]
    if spec.num_heads > 1 and not row.split_one_layer:
        raise StrideError(
            f"{where}: layout {layout.name} keeps the {spec.num_heads} heads of a block apart, "
            f"so the cells of {ratio} kernel blocks of {spec.block_size // ratio} tokens would "
            f"lie in each other's bytes: {numbers}"
        )


def check_config(config: KVCacheConfig, *, layout: KVCacheLayout | None = None) -> None:
    """Raise unless a config's tensors follow from its layout, groups and block count.

    A base offset common to all tensors is allowed, and counts towards the size. ``layout``
    stands in for the one that the config carries.

    Raises:
        UnresolvedLayoutError, ConfigError, IllegalCombinationError, StrideError.
    """
    if layout is None:
        layout = _layout_of(config)
    groups = config.kv_cache_groups
    if type(config.num_blocks) is not int or config.num_blocks < 1:
        raise ConfigError(f"config.num_blocks: expected an int >= 1, got {config.num_blocks!r}")
    seen: dict[str, int] = {}
    for index, group in enumerate(groups):
        for name in group.layer_names:
            if name in seen:
                raise ConfigError(
                    f"config.kv_cache_groups[{index}]: layer {name!r} is in group {seen[name]} too"
                )
            seen[name] = index
    if not seen:
        if config.kv_cache_tensors:
            raise ConfigError(
                f"config.kv_cache_tensors: expected none, as no group has a layer, got "
                f"{len(config.kv_cache_tensors)}"
            )
        return
    expected = plan_tensors(groups, config.num_blocks, layout)
    got = config.kv_cache_tensors
    if got == expected:
        return
    if len(got) != len(expected):
        raise ConfigError(
            f"config.kv_cache_tensors: layout {layout.name} and {len(groups)} groups give "
            f"{len(expected)} tensors, got {len(got)}"
        )
    base = max(0, got[0].offset - expected[0].offset)
    for index, (have, want) in enumerate(zip(got, expected)):
        for item in fields(KVCacheTensor):
            value, right = getattr(have, item.name), getattr(want, item.name)
            if item.name in ("size", "offset"):
                right += base
            if value != right:
                raise ConfigError(
                    f"config.kv_cache_tensors[{index}].{item.name}: layout {layout.name}, "
                    f"{config.num_blocks} blocks and the specs give {right!r}, got {value!r}"
                )


def _layout_of(config: KVCacheConfig) -> KVCacheLayout:
    if config.kv_cache_layout is None:
        raise UnresolvedLayoutError(
            "config.kv_cache_layout: expected the resolved layout's name, got None"
        )
    return KVCacheLayout.parse(config.kv_cache_layout)


def make_config(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int, layout: KVCacheLayout | str
) -> KVCacheConfig:
    """The config of these groups, with its layout recorded: no memory, no workers.

    Raises:
        ConfigError: ``num_blocks`` below 1, no layer, or a layer in two groups.
        IllegalCombinationError: the layout cannot hold these groups.
    """
    layout = KVCacheLayout.parse(layout)
    if type(num_blocks) is not int or num_blocks < 1:
        raise ConfigError(f"num_blocks: expected an int >= 1, got {num_blocks!r}")
    tensors = plan_tensors(groups, num_blocks, layout)
    config = KVCacheConfig(num_blocks, tensors, list(groups), kv_cache_layout=layout.name)
    check_config(config)
    return config


def single_group_config(
    spec: KVCacheSpec, num_blocks: int, layer_names: Sequence[str], layout: KVCacheLayout | str
) -> KVCacheConfig:
    """The config of one group of layers that all store ``spec``."""
    return make_config([KVCacheGroupSpec(list(layer_names), spec)], num_blocks, layout)
