"""The one derivation of strides: from a spec, a layout and a block count to bytes.

Everything else that needs a stride, in the core, the engines, the tests and the tools, takes
it from here. Shapes and strides equal those of vLLM's functions of the same names.
"""

from __future__ import annotations

from math import prod
from typing import Protocol

from layout_core.errors import StrideError
from layout_core.layouts import DIM_B, DIM_L, KVCacheLayout

Strides5 = tuple[int, int, int, int, int]
Shape4 = tuple[int, int, int, int]


class PageShape(Protocol):
    """What a stride depends on: our specs have it, and vLLM's."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def state_content_size_bytes(self) -> int: ...

    def get_num_kernel_states(self, kernel_block_size: int) -> int: ...


def compute_layer_kv_cache_shape_bytes(
    spec: PageShape, num_blocks: int, kernel_block_size: int | None = None
) -> Shape4:
    """Logical shape ``(B, H, N, C)`` of one layer, C in bytes.

    Args:
        spec: what the layer stores.
        num_blocks: manager blocks; >= 0.
        kernel_block_size: tokens of a kernel block; B then counts kernel blocks. ``None``:
            manager blocks.

    Raises:
        StrideError: a kernel block size that does not divide the block size, or that holds
            no whole number of stored states.
    """
    kernel = spec.block_size if kernel_block_size is None else kernel_block_size
    if kernel < 1 or spec.block_size % kernel:
        raise StrideError(
            f"kernel_block_size: expected a divisor of the block size {spec.block_size}, "
            f"got {kernel}"
        )
    ratio = spec.block_size // kernel
    states = spec.get_num_kernel_states(kernel)
    if ratio > 1 and states * ratio != spec.get_num_kernel_states(spec.block_size):
        raise StrideError(
            f"kernel_block_size: {kernel} tokens hold {states} stored states, so {ratio} kernel "
            f"blocks do not make up the {spec.get_num_kernel_states(spec.block_size)} states of "
            f"a block of {spec.block_size} tokens"
        )
    return (num_blocks * ratio, spec.num_heads, states, spec.state_content_size_bytes)


def compute_layout_strides(
    spec: PageShape,
    num_blocks: int,
    num_layers: int,
    layout: KVCacheLayout | str,
    kernel_block_size: int | None = None,
    fixed_strides: tuple[int | None, ...] = (None,) * 5,
) -> Strides5:
    """Byte strides in logical ``[L, B, H, N, C]`` order.

    The axes are laid out densely in the layout's order, innermost first; a padded page
    (``page_size_padded``) widens the innermost of L and B, and a fixed stride replaces the
    computed one and carries on outwards.

    Args:
        spec: what each of the layers stores.
        num_blocks: manager blocks.
        num_layers: layers of this spec.
        layout: the physical order.
        kernel_block_size: see :func:`compute_layer_kv_cache_shape_bytes`.
        fixed_strides: a stride > 0 for an axis, or ``None`` to compute it.

    Raises:
        StrideError: malformed fixed strides, padding with a block split, or padding in a
            layout that puts H or N outside L or B.
    """
    layout = KVCacheLayout.parse(layout)
    if len(fixed_strides) != 5 or any(s is not None and s <= 0 for s in fixed_strides):
        raise StrideError(
            "fixed_strides: expected five strides > 0 or None, in [L, B, H, N, C] order, "
            f"got {fixed_strides!r}"
        )
    shape = (num_layers, *compute_layer_kv_cache_shape_bytes(spec, num_blocks, kernel_block_size))
    order = layout.stride_order
    padded: int | None = getattr(spec, "page_size_padded", None)
    page_axis = -1  # position in `order` of the innermost of L and B
    if padded is not None:
        if kernel_block_size is not None and kernel_block_size != spec.block_size:
            raise StrideError(
                f"kernel_block_size: a page of {prod(shape[2:])} bytes padded to {padded} cannot "
                f"be split into kernel blocks of {kernel_block_size} tokens: one stride does not "
                "step over the padding"
            )
        page_axis = max(order.index(DIM_L), order.index(DIM_B))
        outside = prod(shape[axis] for axis in order[: page_axis + 1])
        if outside != num_layers * num_blocks:
            raise StrideError(
                f"page_size_padded: {layout.name} puts an axis of a page outside L or B, so only "
                f"pages with H = 1 can be padded; got [H, N, C] = {shape[2:]}"
            )
    strides = [0] * 5
    current = 1
    for position in range(4, -1, -1):
        axis = order[position]
        if position == page_axis and padded is not None:
            current = max(current, padded)
            if current % padded:
                raise StrideError(
                    f"page_size_padded: a fixed inner stride makes the page {current} bytes, no "
                    f"multiple of the padded {padded}"
                )
        strides[axis] = fixed_strides[axis] or current
        current = strides[axis] * shape[axis]
    return (strides[0], strides[1], strides[2], strides[3], strides[4])


def canonical_unit_strides(shape: Shape4, strides: Shape4) -> Shape4:
    """``[B, H, N, C]`` strides with those of an H or N of size 1 made canonical.

    A stride along such an axis is never followed, so layouts differ in it by accident. The
    canonical one is the product of the sizes inside it, in logical order. B keeps its own.
    """
    block, head, token, content = strides
    if shape[2] == 1:
        token = shape[3]
    if shape[1] == 1:
        head = shape[2] * shape[3]
    return (block, head, token, content)
