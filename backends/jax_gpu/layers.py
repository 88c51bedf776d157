"""From a layer as callers name it to its shape and place, and the checks that need a layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backends.jax_gpu.allocator import PoolWords
from backends.jax_gpu.paging import Address, CellShape, as_address
from layout_core.dtypes import DType
from layout_core.errors import BlockTableError, TensorError, UnsupportedError
from layout_core.protocols import Layer
from layout_core.rows import PAD_SLOT
from layout_core.serving import check_batch_layer, check_key_value, find_layer
from layout_core.views import LayerView

AnyLayer = Layer | jax.Array
"""A layer by index, name or view; or a traced index, for a ``scan`` over equal layers."""


def place_of(
    pool: PoolWords, layer: AnyLayer, group: int | None = None
) -> tuple[LayerView, CellShape, Address]:
    """A layer's view, shape and place. A traced one looks its place up inside the program.

    Args:
        group: the group that the layer must be of; ``None``: any.

    Returns:
        For a traced layer the view is that of an equal layer: only its shape counts.

    Raises:
        LayoutError: no such layer.
        PoolError: a view of another plan, or a layer of another group.
        UnsupportedError: a traced layer that may mean layers of unlike shapes.
    """
    plan = pool.plan
    if not isinstance(layer, jax.Array):
        index = find_layer(plan.resolved, layer)
        view = plan.resolved.layers[index]
        if group is not None:
            check_batch_layer(view, group)
        return view, plan.cells[index], Address(*pool.addresses[index])
    if layer.shape != () or not jnp.issubdtype(layer.dtype, jnp.integer):
        raise TensorError(f"layer: expected a scalar integer, got {layer.dtype}{list(layer.shape)}")
    allowed = range(len(plan.cells)) if group is None else plan.resolved.group_layers(group)
    shapes = {plan.cells[index] for index in allowed}
    if len(shapes) != 1:
        raise UnsupportedError(
            f"layer: a traced layer needs equal layers, and it may mean layers of {len(shapes)} "
            "unlike shapes here"
        )
    view = plan.resolved.layers[allowed[0]]
    return view, shapes.pop(), as_address(jnp.asarray(pool.addresses)[layer])


def check_stored(view: LayerView, tokens: int, key: Any, value: Any) -> None:
    """Raise unless K and V are what the layer stores; see :func:`check_key_value`."""
    check_key_value(
        view,
        tokens,
        key.shape,
        DType.parse(key.dtype),
        value.shape,
        DType.parse(value.dtype),
    )


def check_slots(view: LayerView, slots: Any) -> Any:
    """The slots as an array of integers; those that lie on the host are checked one by one.

    Raises:
        TensorError: no integers, or not one axis.
        BlockTableError: a slot past the layer's blocks, in slots that lie on the host.
    """
    on_host = not isinstance(slots, jax.Array)
    if on_host:
        slots = np.asarray(slots)
        if slots.size == 0:
            slots = slots.astype(np.int32)
    if slots.ndim != 1 or not jnp.issubdtype(slots.dtype, jnp.integer):
        raise TensorError(
            f"slots: layer {view.name!r} expects integers of shape [T], got "
            f"{slots.dtype}{list(slots.shape)}"
        )
    if not on_host:
        return slots
    limit = view.shape[0] * view.block_size
    wrong = (slots < PAD_SLOT) | (slots >= limit)
    if wrong.any():
        at = int(wrong.argmax())
        raise BlockTableError(
            f"slots[{at}]: layer {view.name!r} has slots in [0, {limit}), and −1 pads; "
            f"got {slots[at]}"
        )
    return slots.astype(np.int32)
