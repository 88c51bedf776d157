"""From slots and positions to rows of a layer's flat view: the integers that torch indexes by.

Every number comes from a :class:`~layout_core.views.LayerView`. torch selects and stores rows
of a 2-D view far faster than it permutes pages, so a layer is seen as rows of cells, whose
distance is the greatest common divisor of the strides; rows may overlap, cells never do.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from layout_core.errors import UnsupportedError
from layout_core.rows import PAD_SLOT
from layout_core.views import LayerView


@dataclass(frozen=True, slots=True)
class PageGeometry:
    """How blocks, heads and tokens of a layer become row numbers; its offset is not in it.

    Equal layers have equal geometries, so that one index serves all layers of a group.
    All numbers count elements of the layer's dtype, or rows.
    """

    block_size: int  #: tokens of a block, as the view counts blocks
    num_kv_heads: int
    cell_pitch: int  #: elements between rows of the view of cells ``[rows, D + Dv]``
    cell_steps: tuple[int, int, int]  #: rows from block to block, head to head, token to token
    cell_rows: int
    token_pitch: int  #: elements between rows of the view of tokens ``[rows, H, D]``
    token_steps: tuple[int, int]  #: rows from block to block, token to token
    token_rows: int
    head_stride: int  #: elements


def page_geometry(view: LayerView) -> PageGeometry:
    """The geometry of a layer.

    Raises:
        UnsupportedError: an offset or a stride that is no whole number of elements, which no
            typed tensor can have.
    """
    size = view.dtype.itemsize
    blocks, heads, tokens, _ = view.shape
    used = [  # strides of axes of size 1 multiply an index that is always 0
        stride if length > 1 else 0
        for length, stride in zip(view.shape[:3], view.strides[:3], strict=True)
    ]
    for name, value in zip(("offset", "B", "H", "N"), (view.offset, *used), strict=True):
        if value % size:
            what = name if name == "offset" else f"stride of {name}"
            raise UnsupportedError(
                f"layer {view.name!r}: its {what} is {value} bytes, no multiple of the {size} "
                f"bytes of {view.dtype}, so torch_cuda cannot view it; pad the page to a "
                "multiple"
            )
    b, h, n = (stride // size for stride in used)
    cell_pitch = gcd(b, h, n) or 1
    token_pitch = gcd(b, n) or 1
    return PageGeometry(
        block_size=view.block_size,
        num_kv_heads=heads,
        cell_pitch=cell_pitch,
        cell_steps=(b // cell_pitch, h // cell_pitch, n // cell_pitch),
        cell_rows=((blocks - 1) * b + (heads - 1) * h + (tokens - 1) * n) // cell_pitch + 1,
        token_pitch=token_pitch,
        token_steps=(b // token_pitch, n // token_pitch),
        token_rows=((blocks - 1) * b + (tokens - 1) * n) // token_pitch + 1,
        head_stride=h,
    )


def token_rows(geometry: PageGeometry, slots: torch.Tensor) -> torch.Tensor:
    """Rows of the view of tokens for slots; none of them may be a padded one.

    Args:
        geometry: the layer's.
        slots: int64 ``[T]``. A slot means the same whether blocks are split or not.
    """
    block_step, token_step = geometry.token_steps
    blocks = torch.div(slots, geometry.block_size, rounding_mode="floor")
    return blocks * block_step + (slots - blocks * geometry.block_size) * token_step


def cell_rows(
    geometry: PageGeometry, block_ids: torch.Tensor, first: int, last: int
) -> torch.Tensor:
    """Rows of the view of cells for the keys ``[first, last)`` of one row, head by head.

    Args:
        geometry: the layer's.
        block_ids: ``[blocks]`` ids of the row, in position order, as the view counts blocks.
        first, last: positions; half-open.

    Returns:
        int64 ``[H * (last - first)]``: all keys of KV head 0, then those of head 1, ...
    """
    block_step, head_step, token_step = geometry.cell_steps
    positions = torch.arange(first, last, dtype=torch.int64, device=block_ids.device)
    entries = torch.div(positions, geometry.block_size, rounding_mode="floor")
    blocks = block_ids.to(torch.int64).index_select(0, entries)
    rows = blocks * block_step + (positions - entries * geometry.block_size) * token_step
    heads = torch.arange(geometry.num_kv_heads, dtype=torch.int64, device=block_ids.device)
    return (heads[:, None] * head_step + rows[None, :]).reshape(-1)


def written_tokens(slots: torch.Tensor) -> torch.Tensor:
    """Indices of the tokens that are written: those whose slot is not −1."""
    return torch.nonzero(slots != PAD_SLOT).reshape(-1)
