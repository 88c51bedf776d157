"""Our control plane beside vLLM's, in vLLM's environment: ``python -m bench.vllm_peers``.

Four ratios with their targets, as a table and as JSON (``--out``). Each figure is the median
of interleaved rounds, so that both sides see the same machine, in CPU time, so that a busy
machine changes little. The rounds themselves are those of ``core_bench`` and ``manager_bench``.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench.core_bench import NUM_BLOCKS, NUM_LAYERS, child_cpu_ms, model_specs, peer_plan, plan
from bench.manager_bench import (
    BLOCKS_PER_ROW,
    ROWS,
    Peer,
    Round,
    build_round,
    make_manager,
    our_round,
)

POOL_BLOCKS = 100_000


@dataclass(frozen=True)
class Figure:
    """One comparison: medians in µs of CPU time, and the ratio that is asked for."""

    name: str
    ours_us: float
    vllm_us: float
    target: float

    @property
    def ratio(self) -> float:
        return self.vllm_us / self.ours_us

    @property
    def met(self) -> bool:
        return self.ratio >= self.target


def medians(ours: Round, theirs: Round, rounds: int) -> tuple[float, float]:
    """Median µs of each, the rounds alternating; no collector run inside a round."""
    samples: tuple[list[int], list[int]] = ([], [])
    for work in (ours, theirs):  # what a first call pays once
        work()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for into, work in zip(samples, (ours, theirs)):
                into.append(work())
            gc.collect(0)
    finally:
        gc.enable()
    return median(samples[0]) / 1e3, median(samples[1]) / 1e3


def timed(work: Callable[[], object]) -> Round:
    """The CPU time of one call, in ns."""

    def one() -> int:
        start = time.thread_time_ns()
        work()
        return time.thread_time_ns() - start

    return one


def imports(rounds: int) -> tuple[float, float]:
    """CPU time above a bare interpreter of importing our core and vLLM's interface."""
    bare, ours, theirs = [], [], []
    for _ in range(rounds):
        bare.append(child_cpu_ms("pass", 1))
        ours.append(child_cpu_ms("import layout_core", 1))
        theirs.append(child_cpu_ms("import vllm.v1.kv_cache_interface", 1))
    return (median(ours) - median(bare)) * 1e3, (median(theirs) - median(bare)) * 1e3


def figures(rounds: int) -> list[Figure]:
    """All of them; the slow ones with fewer rounds."""
    import_figure = Figure(
        "import layout_core / vllm.v1.kv_cache_interface", *imports(min(rounds, 3)), 50
    )
    specs = model_specs()
    peer = Peer()
    found = [
        import_figure,
        Figure(
            f"specs and memory to a ResolvedLayout / get_kv_cache_configs alone, {NUM_LAYERS} "
            f"layers, {NUM_BLOCKS:,} blocks",
            *medians(timed(lambda: plan(specs, NUM_BLOCKS, "LBNHC")), timed(peer_plan()), rounds),
            5,
        ),
    ]
    for caching in (False, True):
        found.append(
            Figure(
                f"reserve, publish, free {ROWS} rows x {BLOCKS_PER_ROW} blocks, caching "
                f"{'on' if caching else 'off'}",
                *medians(our_round(POOL_BLOCKS, caching), peer.round(POOL_BLOCKS, caching), rounds),
                3,
            )
        )
    found.append(
        Figure(
            f"building a manager over {POOL_BLOCKS:,} blocks",
            *medians(
                build_round(lambda: make_manager(POOL_BLOCKS, True)),
                build_round(lambda: peer.manager(POOL_BLOCKS, True)),
                min(rounds, 5),
            ),
            5,
        )
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    try:
        import vllm
    except ModuleNotFoundError as error:
        print(f"this benchmark needs vLLM in its environment: {error}", file=sys.stderr)
        return 2
    found = figures(options.rounds)
    print(f"vLLM {vllm.__version__}, python {platform.python_version()}, {platform.machine()}")
    print(f"{'ours, us':>12} {'vLLM, us':>12} {'times':>8} {'asked':>6}")
    for figure in found:
        print(
            f"{figure.ours_us:12.1f} {figure.vllm_us:12.1f} {figure.ratio:8.1f} "
            f"{figure.target:6.0f}  {'' if figure.met else 'MISSED: '}{figure.name}"
        )
    if options.out is not None:
        record = {
            "vllm": vllm.__version__.split("+")[0],
            "python": platform.python_version(),
            "machine": platform.machine(),
            "rounds": options.rounds,
            "clock": "CPU time, median",
            "figures": [
                asdict(figure) | {"ratio": round(figure.ratio, 1), "met": figure.met}
                for figure in found
            ],
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(figure.met for figure in found) else 1


if __name__ == "__main__":
    sys.exit(main())
