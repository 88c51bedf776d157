"""Figures of a bench as one PNG: ratios as bars, growth on logarithmic axes."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from diffusion_runner.bench.harness import Comparison
from diffusion_runner.bench.record import Growth, Results
from diffusion_runner.errors import RunError

WIN, LOSS, BASE = "#0072b2", "#d55e00", "#8a8a8a"  # told apart by every kind of eye
LINES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def save_plot(results: Results, path: Path) -> None:
    """One panel for each comparison, and one for each axis of growth.

    Raises:
        RunError: nothing to draw.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_axis: dict[str, list[Growth]] = defaultdict(list)
    for growth in results.growths:
        by_axis[growth.axis].append(growth)
    compared = [c for c in results.comparisons if len(c.timings) > 1]
    panels: list[Comparison | list[Growth]] = [*compared, *by_axis.values()]
    if not panels:
        raise RunError("plot: these suites compare nothing; there is nothing to draw")
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    heights = [
        max(_height(panel) for panel in panels[row * columns : (row + 1) * columns])
        for row in range(lines)
    ]
    figure, axes = pyplot.subplots(
        lines,
        columns,
        figsize=(7.2 * columns, sum(heights)),
        squeeze=False,
        gridspec_kw={"height_ratios": heights},
        layout="constrained",
    )
    for axis, panel in zip(axes.flat, panels):
        if isinstance(panel, Comparison):
            _bars(axis, panel)
        else:
            _curves(axis, panel)
    for axis in list(axes.flat)[len(panels) :]:
        axis.set_visible(False)
    where = results.machine
    figure.suptitle(
        f"{where.device}, {where.processor}, {where.cores} cores, torch threads {where.threads}, "
        f"{where.date}",
        fontsize=9,
        color="#555555",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _height(panel: Comparison | list[Growth]) -> float:
    return 1.1 + 0.24 * len(panel.timings) if isinstance(panel, Comparison) else 3.6


def _bars(axis: Any, comparison: Comparison) -> None:
    """The ratio of each candidate to the base, with the tenth and ninetieth percentile."""
    timings = comparison.timings[::-1]
    ratios = [t.ratio.median for t in timings]
    colours = [
        BASE if t.name == comparison.base else WIN if t.ratio.median <= 1 else LOSS for t in timings
    ]
    spreads = [
        [max(t.ratio.median - t.ratio.p10, 0) for t in timings],
        [max(t.ratio.p90 - t.ratio.median, 0) for t in timings],
    ]
    axis.barh(range(len(timings)), ratios, color=colours, height=0.7)
    axis.errorbar(ratios, range(len(timings)), xerr=spreads, fmt="none", ecolor="#333333", lw=0.8)
    axis.set_yticks(range(len(timings)), [t.name for t in timings], fontsize=7.5)
    for at, (ratio, timing) in enumerate(zip(ratios, timings, strict=True)):
        axis.annotate(
            f" {ratio:.2f}", (timing.ratio.p90, at), va="center", fontsize=7, color="#333333"
        )
    if max(ratios) / min(ratios) > 20:
        axis.set_xscale("log")
    else:
        axis.set_xlim(0, 1.15 * max(t.ratio.p90 for t in timings))
    axis.axvline(1, color="#333333", lw=0.8, ls=":")
    axis.set_title(f"{comparison.suite}: {comparison.case}", fontsize=9, loc="left")
    axis.set_xlabel(f"time / {comparison.base}", fontsize=8)
    axis.tick_params(axis="x", labelsize=7.5)
    axis.spines[["top", "right"]].set_visible(False)


def _curves(axis: Any, growths: list[Growth]) -> None:
    """Milliseconds over one size; the fitted exponent stands in the legend."""
    for growth, colour in zip(growths, LINES * len(growths)):
        axis.loglog(
            growth.sizes,
            [1e3 * s for s in growth.seconds],
            marker="o",
            ms=4,
            lw=1.4,
            color=colour,
            label=f"{growth.name}: exponent {growth.exponent:.2f}",
        )
    sizes = growths[0].sizes
    axis.set_xticks(sizes, [f"{size:,.0f}" for size in sizes])
    axis.xaxis.minorticks_off()
    times = [1e3 * s for growth in growths for s in growth.seconds]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    axis.set_ylim(10.0**low, 10.0 ** max(high, low + 1))
    decades = [10.0**power for power in range(low, max(high, low + 1) + 1)]
    axis.set_yticks(decades, [f"{decade:g}" for decade in decades])
    axis.yaxis.minorticks_off()
    axis.set_title(f"growth with {growths[0].axis}", fontsize=9, loc="left")
    axis.set_xlabel(growths[0].axis, fontsize=8)
    axis.set_ylabel("ms", fontsize=8)
    axis.tick_params(labelsize=7.5)
    axis.grid(True, which="major", lw=0.4, color="#dddddd")
    axis.legend(fontsize=7.5, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
