"""Which layouts can hold what: one table, which the checks enforce and suites iterate over.

The rule behind it: for block ids ``b != b'``, no cell of any group in ``b`` shares a byte with
any group's in ``b'``; and one stride on each axis reaches every cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from layout_core.errors import IllegalCombinationError
from layout_core.layouts import KVCacheLayout
from layout_core.specs import KVCacheSpec, round_up


@dataclass(frozen=True, slots=True)
class Legality:
    """What one layout can hold beside dense, unsplit pages of one size in one group."""

    page_padding: bool  #: pages padded, H > 1 (with H = 1 every layout can)
    mixed_pages_one_group: bool  #: page sizes mixed in one group
    mixed_pages_groups: bool  #: page sizes mixed over several groups
    unlike_overlay: bool  #: several groups of one page size but unlike (H, N, C)
    aligned_blocks: bool  #: ``block_stride_alignment`` that widens a block
    split_one_layer: bool  #: kernel blocks where no group has two layers, H > 1
    split_one_layer_one_head: bool  #: the same with H = 1
    split_many_layers: bool  #: kernel blocks where a group has more layers, H > 1
    split_many_layers_one_head: bool  #: the same with H = 1


_L = Legality(
    page_padding=True,
    mixed_pages_one_group=True,
    mixed_pages_groups=False,
    unlike_overlay=True,
    aligned_blocks=True,
    split_one_layer=True,
    split_one_layer_one_head=True,
    split_many_layers=True,
    split_many_layers_one_head=True,
)
_B = Legality(
    page_padding=True,
    mixed_pages_one_group=True,
    mixed_pages_groups=True,
    unlike_overlay=True,
    aligned_blocks=True,
    split_one_layer=True,
    split_one_layer_one_head=True,
    split_many_layers=False,
    split_many_layers_one_head=False,
)

LEGAL_COMBINATIONS: Final[dict[KVCacheLayout, Legality]] = {
    KVCacheLayout.LBHNC: _L,
    KVCacheLayout.LBNHC: _L,
    # H lies outside B: a page is H pieces, and a block of another shape cuts them elsewhere
    KVCacheLayout.LHBNC: Legality(
        page_padding=False,
        mixed_pages_one_group=False,
        mixed_pages_groups=False,
        unlike_overlay=False,
        aligned_blocks=False,
        split_one_layer=False,
        split_one_layer_one_head=True,
        split_many_layers=False,
        split_many_layers_one_head=True,
    ),
    KVCacheLayout.BLHNC: _B,
    KVCacheLayout.BLNHC: _B,
    # H lies outside L: a page is H pieces inside its block
    KVCacheLayout.BHLNC: Legality(
        page_padding=False,
        mixed_pages_one_group=False,
        mixed_pages_groups=False,
        unlike_overlay=True,
        aligned_blocks=True,
        split_one_layer=False,
        split_one_layer_one_head=True,
        split_many_layers=False,
        split_many_layers_one_head=False,
    ),
}
"""Checked against brute force over bytes in ``tests/core/test_legality.py``."""


def legal_layouts(field: str) -> tuple[KVCacheLayout, ...]:
    """The layouts for which a field of :class:`Legality` is true."""
    return tuple(layout for layout, row in LEGAL_COMBINATIONS.items() if getattr(row, field))


def _names(field: str) -> str:
    return ", ".join(layout.name for layout in legal_layouts(field))


def check_placement(layout: KVCacheLayout, groups: Sequence[Sequence[KVCacheSpec]]) -> None:
    """Raise unless ``layout`` can hold these groups, each given by its distinct specs.

    Raises:
        IllegalCombinationError: names what is mixed, the layout, and the layouts that can.
    """
    row = LEGAL_COMBINATIONS[layout]
    specs = [spec for group in groups for spec in group]
    num_groups = len(groups)
    page_sizes = sorted({spec.page_size_bytes for spec in specs})
    if len(page_sizes) > 1:
        field = "mixed_pages_one_group" if num_groups == 1 else "mixed_pages_groups"
        if not getattr(row, field):
            where = "one group" if num_groups == 1 else f"{num_groups} groups"
            raise IllegalCombinationError(
                f"layout {layout.name}: cannot hold pages of {page_sizes} bytes in {where}; "
                f"expected pages of one size, or one of {_names(field)}"
            )
    for spec in specs:
        padded = getattr(spec, "page_size_padded", None)
        if padded is not None and spec.num_heads > 1 and not row.page_padding:
            raise IllegalCombinationError(
                f"layout {layout.name}: cannot pad a page of {spec.num_heads} heads to {padded} "
                f"bytes, as its heads lie apart; expected H = 1, or one of "
                f"{_names('page_padding')}"
            )
        if not row.aligned_blocks and spec.page_size_bytes % spec.get_block_stride_alignment():
            raise IllegalCombinationError(
                f"layout {layout.name}: cannot align blocks of {spec.page_size_bytes} bytes to "
                f"{spec.get_block_stride_alignment()}; expected one of "
                f"{_names('aligned_blocks')}"
            )
    if num_groups > 1 and layout.is_layer_compact:
        pitches = {round_up(s.page_size_bytes, s.get_block_stride_alignment()) for s in specs}
        if len(pitches) > 1:
            raise IllegalCombinationError(
                f"layout {layout.name}: groups whose blocks lie {sorted(pitches)} bytes apart "
                "cannot overlay each other, as block b of one shares bytes with another block of "
                "the next; expected one block_stride_alignment, or a layout with B outermost"
            )
    if num_groups > 1 and not row.unlike_overlay:
        shapes = {(s.num_heads, s.num_states, s.state_content_size_bytes) for s in specs}
        if len(shapes) > 1:
            raise IllegalCombinationError(
                f"layout {layout.name}: groups of unlike (H, N, C) {sorted(shapes)} cannot "
                "overlay each other, as block b of one shares bytes with another block of the "
                f"next; expected equal shapes, or one of {_names('unlike_overlay')}"
            )
