"""PNG grids of generated digits.

Figures are drawn through matplotlib's object interface with the Agg canvas, so no display, no
pyplot state and no global settings are involved.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

_CELL_INCHES = 0.62
_LABEL_INCHES = 2.1


def save_grid(
    path: Path,
    rows: Sequence[NDArray[np.float32]],
    labels: Sequence[str],
    *,
    title: str,
) -> None:
    """Write one row of pictures for each label.

    Args:
        path: the PNG to write; its folder is made if it is missing.
        rows: for each label, pictures ``[count, height, width]`` in [0, 1], 0 black.
        labels: text to the left of each row.
        title: one line above.
    """
    columns = max(len(row) for row in rows)
    width = _LABEL_INCHES + columns * _CELL_INCHES
    height = 0.45 + len(rows) * _CELL_INCHES
    figure = Figure(figsize=(max(width, 5.0), height), facecolor="white")
    FigureCanvasAgg(figure)
    left = _LABEL_INCHES / max(width, 5.0)
    cell_w, cell_h = _CELL_INCHES / max(width, 5.0), _CELL_INCHES / height
    figure.text(0.02, 1 - 0.28 / height, title, fontsize=9, va="center", color="#333333")
    for r, (row, label) in enumerate(zip(rows, labels)):
        bottom = 1 - 0.45 / height - (r + 1) * cell_h
        figure.text(left - 0.012, bottom + cell_h / 2, label, fontsize=8, ha="right", va="center")
        for c, picture in enumerate(row):
            axes = figure.add_axes(
                (left + c * cell_w, bottom + 0.04 * cell_h, 0.92 * cell_w, 0.92 * cell_h)
            )
            axes.imshow(picture, cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
            axes.set_axis_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, format="png")
