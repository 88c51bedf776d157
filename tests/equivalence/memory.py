"""Where each byte of a pool must lie, by NumPy's axis order alone.

No stride is computed here: a region is an array whose axes are named by the layout's letters,
outermost first, holding its own byte numbers, and NumPy transposes it to ``[L, B, H, N, C]``.
So an error in the library's strides, which both engines would share, cannot hide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.cases import Array, Cells, PoolShape

Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Memory:
    """A pool's bytes, and for each layer the byte numbers of its cells ``[B, H, N, C]``."""

    data: npt.NDArray[np.uint8]
    index: tuple[Index, ...]

    def put(self, layer: int, block: int, token: int, key: Array, value: Array) -> None:
        """Store ``key [H, D]`` and ``value [H, Dv]`` of one token as ``K ‖ V`` of each head."""
        cell = np.concatenate([_bytes(key), _bytes(value)], axis=-1)
        self.data[self.index[layer][block, :, token, :]] = cell

    def copy_block(self, layer: int, source: int, target: int) -> None:
        """Copy one layer's page."""
        self.data[self.index[layer][target]] = self.data[self.index[layer][source]]


def _bytes(array: Any) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8).reshape(*array.shape[:-1], -1)


def _page(cells: Cells, block_size: int, itemsize: int) -> tuple[int, int]:
    """Payload and pitch of a page in bytes."""
    payload = cells.page_elements(block_size) * itemsize
    return payload, payload + cells.padding * itemsize


def _ordered(numbers: Index, letters: str, sizes: dict[str, int], target: str) -> Index:
    """``numbers`` seen as an array with axes ``letters`` in memory, transposed to ``target``."""
    array = numbers.reshape([sizes[a] for a in letters])
    return array.transpose([letters.index(a) for a in target])


def memory_of(shape: PoolShape, layout: str, itemsize: int, *, fill: int = 0) -> Memory:
    """A pool in ``layout`` (five letters, outermost first) with all bytes ``fill``.

    Layers of one group with the same cells form a region; regions lie one after another, in
    each block where B is outermost and in the whole pool otherwise. Groups start at byte 0.
    """
    pitch = max(
        sum(_page(c, g.block_size, itemsize)[1] for c in g.layers) for g in shape.groups
    )  # bytes of one block over all layers of the largest group
    blocks = shape.num_blocks
    index: list[Index] = []
    for group in shape.groups:
        of_layer: dict[int, Index] = {}
        offset = 0  # in bytes of one block
        for cells in dict.fromkeys(group.layers):
            places = [i for i, c in enumerate(group.layers) if c == cells]
            payload, page = _page(cells, group.block_size, itemsize)
            sizes = {
                "L": len(places),
                "B": blocks,
                "H": cells.kv_heads,
                "N": group.block_size,
                "C": (cells.head_size + cells.value_size) * itemsize,
            }
            region = len(places) * page  # bytes of one block in this region
            inner = layout.replace("B", "")
            if layout[0] == "B":
                block = np.arange(region, dtype=np.int64)
                if page != payload:  # pages stand apart: cut the padding off each
                    block = block.reshape(len(places), page)[:, :payload]
                    inner = "L" + inner.replace("L", "")  # legal only if nothing lies outside L
                one = _ordered(block, inner, sizes, "LHNC")
                base = np.arange(blocks, dtype=np.int64) * pitch + offset
                numbers = one[:, None] + base[None, :, None, None, None]
            else:
                whole = np.arange(region * blocks, dtype=np.int64) + offset * blocks
                letters = layout
                if page != payload:
                    whole = whole.reshape(len(places), blocks, page)[..., :payload]
                    letters = "LB" + layout.replace("L", "").replace("B", "")
                numbers = _ordered(whole, letters, sizes, "LBHNC")
            for at, place in enumerate(places):
                of_layer[place] = numbers[at]
            offset += region
        index.extend(of_layer[place] for place in range(len(group.layers)))
    return Memory(np.full(pitch * blocks, fill, np.uint8), tuple(index))
