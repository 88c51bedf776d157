"""The six physical layouts of a KV cache, and the names they go by.

The logical axes are always ``[L, B, H, N, C]``: layers, blocks, KV head slots, stored tokens
of a block, content of one cell. A layout is an order of them, outermost first; C is innermost
in all. Names, values and properties equal those of vLLM's ``KVCacheLayout``.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

from layout_core.errors import UnknownLayoutError

DIM_L: Final = 0
DIM_B: Final = 1
DIM_H: Final = 2
DIM_N: Final = 3
DIM_C: Final = 4


class KVCacheLayout(Enum):
    """A permutation of ``[L, B, H, N, C]``; the value lists logical axes in memory order."""

    LBHNC = (DIM_L, DIM_B, DIM_H, DIM_N, DIM_C)
    LBNHC = (DIM_L, DIM_B, DIM_N, DIM_H, DIM_C)
    LHBNC = (DIM_L, DIM_H, DIM_B, DIM_N, DIM_C)
    BLHNC = (DIM_B, DIM_L, DIM_H, DIM_N, DIM_C)
    BLNHC = (DIM_B, DIM_L, DIM_N, DIM_H, DIM_C)
    BHLNC = (DIM_B, DIM_H, DIM_L, DIM_N, DIM_C)

    @property
    def stride_order(self) -> tuple[int, ...]:
        """Logical axes ``[L, B, H, N, C]`` as 0..4, outermost in memory first."""
        return self.value

    @property
    def layer_view_order(self) -> tuple[int, ...]:
        """Memory order of one layer's logical ``[B, H, N, C]`` view, as 0..3."""
        return tuple(axis - 1 for axis in self.value if axis != DIM_L)

    @property
    def is_layer_compact(self) -> bool:
        """L is outermost: a layer is one region."""
        return self.value.index(DIM_L) == 0

    @property
    def is_block_contiguous(self) -> bool:
        """``[H, N, C]`` is innermost, in this order: a page is one run, head by head."""
        return self.value[-3:] == (DIM_H, DIM_N, DIM_C)

    @property
    def is_block_compact(self) -> bool:
        """L and B are outermost, in either order: a page is one run of bytes."""
        return set(self.value[:2]) == {DIM_L, DIM_B}

    @property
    def is_block_outermost(self) -> bool:
        """B is outermost: a block of all layers is one region."""
        return self.value.index(DIM_B) == 0

    @classmethod
    def parse(cls, layout: object) -> KVCacheLayout:
        """The member for a member, a name, an alias, or an object with a matching ``.name``.

        Aliases ``NHD`` and ``HND`` give ``LBNHC`` and ``LBHNC``. An object with a ``.name``
        is, for example, a member of vLLM's own enum.

        Raises:
            UnknownLayoutError: anything else; lists the valid names.
        """
        if isinstance(layout, cls):
            return layout
        name = layout if isinstance(layout, str) else getattr(layout, "name", None)
        if isinstance(name, str):
            name = LAYOUT_ALIASES.get(name, name)
            member = cls.__members__.get(name)
            if member is not None:
                return member
        raise UnknownLayoutError(
            f"layout: expected one of {', '.join(cls.__members__)} (or the aliases "
            f"{', '.join(f'{a} = {c}' for a, c in LAYOUT_ALIASES.items())}), got {layout!r}"
        )


LAYOUT_ALIASES: Final[dict[str, str]] = {"NHD": "LBNHC", "HND": "LBHNC"}
"""vLLM's older per-layer names, accepted everywhere and recorded under the canonical name."""
