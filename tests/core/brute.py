"""Addresses by other means than the core's: NumPy transposes, and sets of bytes.

Nothing here calls a stride function of the core.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from math import prod

import numpy as np
import numpy.typing as npt

from layout_core.views import LayerView, ResolvedLayout

AXES = "LBHNC"


def transposed_offsets(layout: str, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Byte offset of every element of a dense ``[L, B, H, N, C]`` array stored in ``layout``."""
    order = [AXES.index(letter) for letter in layout]
    physical = np.arange(prod(shape)).reshape([shape[axis] for axis in order])
    return physical.transpose([order.index(axis) for axis in range(5)])


def cells(view: LayerView) -> Iterable[tuple[tuple[int, int, int], range]]:
    """Every cell of a view with its bytes, from the view's numbers alone."""
    blocks, heads, tokens, content = view.shape
    for b, h, n in product(range(blocks), range(heads), range(tokens)):
        start = view.offset + b * view.strides[0] + h * view.strides[1] + n * view.strides[2]
        yield (b, h, n), range(start, start + content)


def owners_of_bytes(resolved: ResolvedLayout) -> tuple[list[str], bool]:
    """What breaks the two rules of a plan, in words, and whether any cell was seen.

    No two cells of one group share a byte, and no byte belongs to two manager block ids.
    """
    faults: list[str] = []
    in_group: dict[tuple[int, int], str] = {}
    block_of: dict[int, tuple[int, str]] = {}
    seen = False
    for view in resolved.layers:
        for (b, h, n), content in cells(view):
            seen = True
            block = b // view.blocks_per_manager_block
            label = f"{view.name}[{b},{h},{n}]"
            for byte in content:
                if not 0 <= byte < resolved.size_bytes:
                    faults.append(f"{label} lies outside, at {byte}")
                if (view.group, byte) in in_group:
                    faults.append(f"{label} shares {byte} with {in_group[view.group, byte]}")
                in_group[view.group, byte] = label
                other = block_of.setdefault(byte, (block, label))
                if other[0] != block:
                    faults.append(f"{label} shares {byte} with another block, {other[1]}")
    return faults, seen
