"""Which layout a foreign tensor has, from its shape and strides: for pools made elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from layout_core.errors import LayoutConflictError, StrideError
from layout_core.layouts import KVCacheLayout


def recognise_layout(
    axes: str,
    shape: Sequence[int],
    strides: Sequence[int],
    *,
    declared: KVCacheLayout | str | None = None,
) -> KVCacheLayout:
    """The layout whose order of axes the strides follow.

    Args:
        axes: one letter for each axis of the tensor: ``L``, ``B``, ``H``, ``N`` as in the
            layouts (``B``, ``H`` and ``N`` once each), ``C`` for the content, and any other
            letter for an axis that no layout has (``K`` for a K/V pair outside the pages).
            Without an ``L`` the tensor is one layer, and L counts as outermost.
        shape: size of each axis.
        strides: stride of each axis, all in one unit.
        declared: the layout that the tensor's owner states; it wins where the strides allow
            it, and settles what they leave open.

    Raises:
        StrideError: malformed arguments, or strides that follow no layout, or several (an axis
            of size 1 has no order) with none declared.
        LayoutConflictError: the strides contradict the declared layout.
    """
    if not len(axes) == len(shape) == len(strides) or len(set(axes)) != len(axes):
        raise StrideError(
            f"axes: expected one distinct letter for each axis, got {axes!r} for shape "
            f"{tuple(shape)} and strides {tuple(strides)}"
        )
    for axis in "BHN":
        if axis not in axes:
            raise StrideError(f"axes: expected B, H and N, got {axes!r}")
    place = {axis: (shape[i], strides[i]) for i, axis in enumerate(axes)}
    candidates = [layout for layout in KVCacheLayout if "L" in place or layout.is_layer_compact]
    matches = [layout for layout in candidates if _follows(layout, place)]
    given = f"shape {tuple(shape)} and strides {tuple(strides)} of axes {axes}"
    if declared is not None:
        wanted = KVCacheLayout.parse(declared)
        if not _follows(wanted, place):
            raise LayoutConflictError(
                f"declared: {given} do not follow {wanted.name}; they follow "
                f"{', '.join(m.name for m in matches) or 'no layout'}"
            )
        return wanted
    if len(matches) != 1:
        found = ", ".join(m.name for m in matches) or "no layout"
        raise StrideError(f"declared: {given} follow {found}; expected one, so declare it")
    return matches[0]


def _follows(layout: KVCacheLayout, place: dict[str, tuple[int, int]]) -> bool:
    """Whether each axis steps over everything that the axes inside it reach."""
    reach = 0
    for position in reversed(layout.stride_order):
        size, stride = place.get("LBHNC"[position], (1, 0))
        if size > 1:
            if stride <= reach:
                return False
            reach += (size - 1) * stride
    return True
