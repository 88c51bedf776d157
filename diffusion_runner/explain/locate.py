"""Where a cell lies, and what lies at a byte, in words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from diffusion_runner.errors import RunError
from layout_core import NULL_BLOCK_ID, OwnedByte, ResolvedLayout, owners_of_byte


@dataclass(frozen=True, slots=True)
class CellQuery:
    """A cell as it is typed: layer of the plan, manager block, head slot, token of the block."""

    layer: int
    block: int
    head: int
    token: int

    @property
    def key(self) -> str:
        return f"{self.layer} {self.block} {self.head} {self.token}"


@dataclass(frozen=True, slots=True)
class CellPlace:
    """Where one plan keeps a cell."""

    indices: tuple[int, int, int, int]  #: layer, and block, head, token of its view
    name: str
    start: int
    key_bytes: int  #: of K at the start of the cell
    size: int
    null: bool

    @property
    def stop(self) -> int:
        return self.start + self.size

    def as_dict(self) -> dict[str, Any]:
        return {
            "layer_name": self.name,
            "start": self.start,
            "stop": self.stop,
            "value_start": self.start + self.key_bytes,
            "null_block": self.null,
        }


def parse_cell(text: str) -> CellQuery:
    """``"l b h n"``, separated by blanks or commas.

    Raises:
        RunError: anything but four integers >= 0.
    """
    parts = re.split(r"[\s,]+", text.strip())
    if len(parts) != 4 or not all(part.isdecimal() for part in parts):
        raise RunError(f"cell: expected four integers 'l b h n', got {text!r}")
    layer, block, head, token = map(int, parts)
    return CellQuery(layer, block, head, token)


def parse_address(text: str) -> int:
    """A byte of the allocation: ``0x1F400``, ``128000``, ``128_000``.

    Raises:
        RunError: no integer >= 0.
    """
    try:
        value = int(text.strip(), 0)
    except ValueError:
        value = -1
    if value < 0:
        raise RunError(f"address: expected a byte such as 0x1F400 or 128000, got {text!r}")
    return value


def find_cell(plan: ResolvedLayout, cell: CellQuery) -> CellPlace:
    """Where a plan keeps a cell.

    Raises:
        RunError: an index out of range, naming the axis.
    """
    _check("layer", cell.layer, len(plan.layers))
    view = plan.layers[cell.layer]
    ratio = view.blocks_per_manager_block
    _, heads, tokens, content = view.shape
    _check("block", cell.block, plan.num_blocks)
    _check("head", cell.head, heads)
    _check("token", cell.token, ratio * tokens)
    piece, token = divmod(cell.token, tokens)
    block = cell.block * ratio + piece
    packed = view.key_bytes + view.value_bytes != content
    return CellPlace(
        (cell.layer, block, cell.head, token),
        view.name,
        view.cell_offset(block, cell.head, token),
        content if packed else view.key_bytes,
        content,
        plan.null_block and cell.block == NULL_BLOCK_ID,
    )


def _check(name: str, value: int, limit: int) -> None:
    if not 0 <= value < limit:
        raise RunError(f"cell: expected a {name} in [0, {limit}), got {value}")


def describe_byte(plan: ResolvedLayout, byte: int) -> str:
    """Who owns a byte of a plan, in one sentence.

    Raises:
        LayoutError: a byte outside of the allocation.
    """
    said = owners_of_byte(plan, byte)
    if said.is_padding:
        return _padding(plan, said.before, said.distance, byte)
    cells = "; and ".join(_owner(plan, owner) for owner in said.owners)
    first = said.owners[0]
    if len(said.owners) > 1:
        cells += f" (groups overlay each other: block {first.block} belongs to one at a time)"
    if first.null:
        cells += "; block 0 is the null block: held back, never written"
    return cells


def _owner(plan: ResolvedLayout, owner: OwnedByte) -> str:
    view = plan.layers[owner.layer]
    group = f", group {owner.group}" if len(plan.groups) > 1 else ""
    block = f"block {owner.block}"
    if view.blocks_per_manager_block > 1:
        block += f" (kernel block {owner.kernel_block})"
    if owner.element < 0:
        part = f"byte {owner.offset} of its {owner.size}"
    else:
        part = f"{owner.part}[{owner.element}], byte {owner.offset} of its {owner.size}"
    return (
        f"layer {owner.layer} ({owner.name}{group}), {block}, head {owner.head}, "
        f"token {owner.token}: {part}"
    )


def _padding(
    plan: ResolvedLayout, before: tuple[OwnedByte, ...], distance: int | None, byte: int
) -> str:
    if not before:
        return f"padding before the first cell, which starts {distance:,} bytes on"
    last = max(before, key=lambda owner: owner.start)
    gone = byte - last.start - last.size
    text = (
        f"padding, {gone:,} bytes past layer {last.layer} ({last.name}), block {last.block}, head "
        f"{last.head}, token {last.token}"
    )
    if distance is None:
        return f"{text}; no cell follows"
    return f"{text}; the next cell starts {distance:,} bytes on"


def byte_record(plan: ResolvedLayout, byte: int) -> dict[str, Any]:
    """The same as JSON carries it."""
    said = owners_of_byte(plan, byte)
    return {
        "byte": byte,
        "padding": said.is_padding,
        "null_block": any(owner.null for owner in said.owners),
        "text": describe_byte(plan, byte),
        "owners": [
            {
                "layer": owner.layer,
                "layer_name": owner.name,
                "group": owner.group,
                "block": owner.block,
                "kernel_block": owner.kernel_block,
                "head": owner.head,
                "token": owner.token,
                "cell_start": owner.start,
                "byte_in_cell": owner.offset,
                "part": owner.part,
                "element": None if owner.element < 0 else owner.element,
            }
            for owner in said.owners
        ],
    }
