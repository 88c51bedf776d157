"""What both engines check before they touch a byte, so that they accept and refuse alike.

Shapes arrive as tuples and dtypes as :class:`~layout_core.dtypes.DType`: no framework here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from layout_core.errors import (
    BlockTableError,
    PoolError,
    StaleBatchError,
    TensorError,
    UnsupportedError,
)
from layout_core.quant import KVQuantMode
from layout_core.rows import NULL_BLOCK_ID
from layout_core.specs import AttentionSpec, MLAAttentionSpec, SlidingWindowMLASpec
from layout_core.views import LayerView, ResolvedLayout

if TYPE_CHECKING:
    from layout_core.dtypes import DType
    from layout_core.step import StepPlan

SERVED_QUANT_MODES = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)
"""Modes whose cells are plain ``K ‖ V`` elements, scaled by one number for each tensor."""


def check_servable(resolved: ResolvedLayout, *, decode_context_parallel_size: int = 1) -> None:
    """Raise unless every layer is dense ``K ‖ V``, which is what an engine reads and writes.

    The core sizes and lays out more than that: MLA, head slots, packed content, compressed
    states, sharded contexts. An engine refuses them by name until it declares them.

    Raises:
        UnsupportedError: names layer, group and field.
    """
    if decode_context_parallel_size != 1:
        raise UnsupportedError(
            "decode_context_parallel_size: an engine serves 1, got "
            f"{decode_context_parallel_size}; a sharded context is laid out by the core only"
        )
    for index, group in enumerate(resolved.groups):
        for name, spec in zip(group.layer_names, group.specs, strict=True):
            where = f"layer {name!r} of group {index}: {type(spec).__name__}"
            if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
                raise UnsupportedError(
                    f"{where} stores one latent vector for each state; an engine serves K and V"
                )
            if not isinstance(spec, AttentionSpec):
                raise UnsupportedError(f"{where} is no attention spec; an engine serves K and V")
            for field, served in (
                ("num_head_slots", None),
                ("state_content_bytes", None),
                ("tokens_per_state", 1),
            ):
                value = getattr(spec, field)
                if value != served:
                    raise UnsupportedError(
                        f"{where}.{field}: an engine serves {served}, got {value}"
                    )
            if spec.head_size_v < 1:
                raise UnsupportedError(
                    f"{where}.head_size_v: an engine serves >= 1, got {spec.head_size_v}"
                )
            if spec.kv_quant_mode not in SERVED_QUANT_MODES:
                raise UnsupportedError(
                    f"{where}.kv_quant_mode: an engine serves "
                    f"{', '.join(mode.name for mode in SERVED_QUANT_MODES)}, "
                    f"got {spec.kv_quant_mode.name}"
                )


def find_layer(resolved: ResolvedLayout, layer: int | str | LayerView) -> int:
    """Index into ``resolved.layers`` of a layer given by index, name or view.

    Raises:
        LayoutError: no such layer.
        PoolError: a view of another plan.
    """
    if isinstance(layer, LayerView):
        index = resolved.layer_index(layer.name)
        own = resolved.layers[index]
        if own is not layer and own != layer:
            raise PoolError(f"layer: the view of {layer.name!r} belongs to another plan")
        return index
    return resolved.layer_index(layer)


def check_same_plan(pool: ResolvedLayout, batch: ResolvedLayout) -> None:
    """Raise unless a batch was prepared for the plan of the pool.

    Raises:
        PoolError: two different plans.
    """
    if pool is not batch and pool != batch:
        raise PoolError(
            "batch: it was prepared for another plan than the pool's "
            f"({batch.layout.name}, {batch.num_blocks} blocks, {batch.size_bytes} bytes; the pool "
            f"has {pool.layout.name}, {pool.num_blocks} blocks, {pool.size_bytes} bytes)"
        )


def check_fresh(plan: StepPlan, version: int) -> None:
    """Raise unless the block tables are still those that the batch was prepared from.

    Raises:
        StaleBatchError: names both versions.
    """
    if plan.version != version:
        raise StaleBatchError(
            f"batch: prepared under version {plan.version} of the block tables, which are now at "
            f"{version}; call update or prepare again"
        )


def check_batch_layer(view: LayerView, group: int) -> None:
    """Raise unless a layer is of the group that a batch was prepared for.

    Raises:
        PoolError: another group, whose block table differs.
    """
    if view.group != group:
        raise PoolError(
            f"layer {view.name!r}: it belongs to group {view.group}, the batch was prepared for "
            f"group {group}"
        )


def check_num_heads(resolved: ResolvedLayout, group: int, num_heads: int) -> None:
    """Raise unless the query heads are a multiple of every layer's KV heads.

    Raises:
        TensorError: names the layer.
    """
    if type(num_heads) is not int or num_heads < 1:
        raise TensorError(f"num_heads: expected an int >= 1, got {num_heads!r}")
    for index in resolved.group_layers(group):
        view = resolved.layers[index]
        if num_heads % view.num_kv_heads:
            raise TensorError(
                f"num_heads: expected a multiple of the {view.num_kv_heads} KV heads of layer "
                f"{view.name!r}, got {num_heads}"
            )


def check_array(
    name: str,
    layer: str,
    shape: Sequence[int],
    dtype: DType,
    *,
    expected_shape: Sequence[int],
    expected_dtype: DType | None,
) -> None:
    """Raise unless an array has exactly this shape and, where one is given, this dtype.

    Raises:
        TensorError: names the argument, the layer, what was expected and what came.
    """
    if tuple(shape) != tuple(expected_shape):
        raise TensorError(
            f"{name}: layer {layer!r} expects shape {list(expected_shape)}, got {list(shape)}"
        )
    if expected_dtype is not None and dtype != expected_dtype:
        raise TensorError(
            f"{name}: layer {layer!r} expects dtype {expected_dtype}, got {dtype}; nothing is "
            "cast in silence"
        )


def check_key_value(
    view: LayerView,
    num_tokens: int,
    key_shape: Sequence[int],
    key_dtype: DType,
    value_shape: Sequence[int],
    value_dtype: DType,
) -> None:
    """Raise unless K is ``[T, Hkv, D]`` and V ``[T, Hkv, Dv]``, both of the pool's dtype.

    Raises:
        TensorError: see :func:`check_array`.
    """
    for name, shape, dtype, size in (
        ("key", key_shape, key_dtype, view.head_size),
        ("value", value_shape, value_dtype, view.head_size_v),
    ):
        check_array(
            name,
            view.name,
            shape,
            dtype,
            expected_shape=(num_tokens, view.num_kv_heads, size),
            expected_dtype=view.dtype,
        )


def check_copy_pairs(
    resolved: ResolvedLayout, pairs: Sequence[tuple[int, int]], group: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sources and destinations of a block copy, checked.

    Returns:
        ``(sources, destinations)`` as manager block ids, in the order given.

    Raises:
        BlockTableError: an id out of range, a destination that repeats, is also a source, or
            is the null block.
        LayoutError: no such group.
    """
    resolved.group(group)
    for at, pair in enumerate(pairs):
        if len(pair) != 2:
            raise BlockTableError(f"pairs[{at}]: expected (source, destination), got {pair!r}")
        for name, block in zip(("source", "destination"), pair, strict=True):
            if type(block) is not int or not 0 <= block < resolved.num_blocks:
                raise BlockTableError(
                    f"pairs[{at}]: {name} {block!r} of group {group} is outside "
                    f"[0, {resolved.num_blocks})"
                )
    sources = tuple(pair[0] for pair in pairs)
    destinations = tuple(pair[1] for pair in pairs)
    origin = set(sources)
    seen: set[int] = set()
    for at, block in enumerate(destinations):
        if resolved.null_block and block == NULL_BLOCK_ID:
            raise BlockTableError(
                f"pairs[{at}]: destination {block} is the null block, which is never written"
            )
        if block in seen:
            raise BlockTableError(f"pairs[{at}]: destination {block} is given twice")
        if block in origin:
            raise BlockTableError(f"pairs[{at}]: destination {block} is also a source")
        seen.add(block)
    return sources, destinations


def check_scalars(
    softmax_scale: float | None, softcap: float, k_scale: float, v_scale: float
) -> None:
    """Raise unless the scalars of an attention call are in range.

    Raises:
        TensorError: a softmax scale that is not finite, a softcap below 0 or not finite, a
            storage scale that is not finite and positive.
    """
    if softmax_scale is not None and not abs(softmax_scale) < float("inf"):
        raise TensorError(f"softmax_scale: expected a finite number, got {softmax_scale!r}")
    if not 0 <= softcap < float("inf"):
        raise TensorError(f"softcap: expected 0 (off) or a finite number > 0, got {softcap!r}")
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not 0 < value < float("inf"):
            raise TensorError(f"{name}: expected a finite number > 0, got {value!r}")
