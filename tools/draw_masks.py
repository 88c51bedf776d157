"""Draw ``docs/images/masks.png`` from the visibility rules: ``python -m tools.draw_masks``."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from layout_core import PagedAttentionRow, Visibility, row_intervals

KEYS = 16
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "masks.png"
SEEN, UNSEEN, LINE = "#3b6fb6", "#f1f3f6", "#ffffff"

RULES: tuple[tuple[str, Visibility, list[tuple[int, int]] | None], ...] = (
    ("non-causal", Visibility(causal=False), None),
    ("causal", Visibility(causal=True), None),
    ("causal, full spans [3, 7) and [10, 16)", Visibility(causal=True), [(3, 7), (10, 16)]),
    ("causal window, left 4", Visibility(causal=True, window_left=4), None),
    ("window, left 3, right 2", Visibility(causal=False, window_left=3, window_right=2), None),
    ("chunks of 5", Visibility(causal=True, chunk=5), None),
)


def mask(rule: Visibility, spans: list[tuple[int, int]] | None) -> np.ndarray:
    """Which of :data:`KEYS` queries sees which key: bool ``[queries, keys]``."""
    row = PagedAttentionRow("r", query_len=KEYS, seq_len=KEYS, sequence_id=0)
    lo, hi = (np.array(x)[:, None] for x in row_intervals(row, rule, spans))
    keys = np.arange(KEYS)
    return np.asarray((keys >= lo) & (keys < hi))


def draw(path: Path) -> None:
    """Six masks in two lines."""
    with mpl.rc_context({"font.size": 10, "font.family": "DejaVu Sans"}):
        figure = Figure(figsize=(9.6, 6.6), layout="constrained")
        for axis, (title, rule, spans) in zip(figure.subplots(2, 3).flat, RULES, strict=True):
            axis.pcolormesh(
                mask(rule, spans),
                cmap=ListedColormap([UNSEEN, SEEN]),
                vmin=0,
                vmax=1,
                edgecolors=LINE,
                linewidth=1,
            )
            axis.invert_yaxis()
            axis.set_aspect("equal")
            axis.set_title(title, fontsize=10, loc="left")
            ticks = range(0, KEYS, 5)
            for side, name in ((axis.xaxis, "key"), (axis.yaxis, "query")):
                side.set_ticks([t + 0.5 for t in ticks], [str(t) for t in ticks])
                side.set_label_text(name, color="#555555", fontsize=9)
            axis.tick_params(length=0, labelsize=8, colors="#555555")
            axis.spines[:].set_visible(False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
