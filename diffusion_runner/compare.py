"""Both engines in all six layouts from the same noise: do the pictures agree?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

import backends
from diffusion_runner.pictures import save_grid
from diffusion_runner.run import Runner, RunResult, progress_bar
from diffusion_runner.settings import PICTURE_TOLERANCE, RunSettings
from layout_core import KVCacheLayout

COMPARED_BACKENDS = ("torch_cuda", "jax_gpu")


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """One run and its largest pixel difference to the first."""

    result: RunResult
    max_abs_diff: float

    @property
    def agrees(self) -> bool:
        # written so that a NaN counts as a difference
        return self.max_abs_diff <= PICTURE_TOLERANCE


@dataclass(frozen=True, eq=False)
class Comparison:
    """All runs, engine after engine, and within an engine layout after layout."""

    runs: tuple[ComparedRun, ...]

    @property
    def agrees(self) -> bool:
        return all(run.agrees for run in self.runs)


def compare_all(base: RunSettings, *, console: Console) -> Comparison:
    """Run ``base`` with both engines in every layout.

    The weights are loaded and each engine's programs are compiled once.
    """
    runs: list[ComparedRun] = []
    first: NDArray[np.float32] | None = None
    layouts = list(KVCacheLayout)
    with progress_bar(console) as progress:
        task = progress.add_task("comparing", total=len(COMPARED_BACKENDS) * len(layouts))
        for name in COMPARED_BACKENDS:
            runner = Runner(backends.load(name, device=base.device))
            for layout in layouts:
                progress.update(task, description=f"{name} {layout.name}")
                result = runner.generate(replace(base, backend=name, layout=layout))
                first = result.images if first is None else first
                difference = float(np.max(np.abs(result.images - first)))
                runs.append(ComparedRun(result, difference))
                progress.advance(task)
    return Comparison(tuple(runs))


def save_comparison(comparison: Comparison, path: Path) -> None:
    """One line of pictures for each run."""
    save_grid(
        path,
        [run.result.images for run in comparison.runs],
        [f"{run.result.settings.backend}  {run.result.layout.name}" for run in comparison.runs],
        title=f"the same noise through both engines and all six layouts "
        f"(largest difference {max(run.max_abs_diff for run in comparison.runs):.1e})",
    )
