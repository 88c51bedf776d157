"""Which figures reach what was aimed at: ``python -m bench.targets [RESULTS.json ...]``.

Reads records of ``pagestride bench``, by default the committed ones, prints ``ok`` or ``MISSED``
for each aim, and exits with 1 where one was missed. An aim without a figure is no miss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from diffusion_runner.bench.harness import Comparison
from diffusion_runner.bench.record import Results, load

RESULTS = Path(__file__).resolve().parent / "results"
COMMITTED = (RESULTS / "cpu.json", RESULTS / "vllm-0.29.0.json")

VLLM_KERNEL = "vLLM's CPU kernel"
JAX_DENSE = "jax.nn.dot_product_attention"


@dataclass(frozen=True, slots=True)
class Aim:
    """A figure of some comparisons and its bound."""

    suite: str
    case: str  #: how the case's name begins
    what: str
    figure: Callable[[Comparison], float | None]  #: ``None`` where a candidate was not timed
    at_most: float = float("inf")
    at_least: float = 0.0


def _of(comparison: Comparison, engine: str) -> list[float]:
    return [t.ratio.median for t in comparison.timings if t.name.startswith(f"{engine} ")]


def slowest(engine: str) -> Callable[[Comparison], float | None]:
    """The slowest layout's time in that of the base."""
    return lambda c: max(_of(c, engine), default=None)


def layouts_apart(engine: str) -> Callable[[Comparison], float | None]:
    """The slowest layout in the fastest."""

    def figure(comparison: Comparison) -> float | None:
        ratios = _of(comparison, engine)
        return max(ratios) / min(ratios) if ratios else None

    return figure


def faster_than(peer: str, engine: str) -> Callable[[Comparison], float | None]:
    """How many times faster the slowest layout is than a peer."""

    def figure(comparison: Comparison) -> float | None:
        theirs = [t.ratio.median for t in comparison.timings if t.name == peer]
        ours = _of(comparison, engine)
        return theirs[0] / max(ours) if theirs and ours else None

    return figure


def share(engine: str) -> Callable[[Comparison], float | None]:
    """The slowest layout's share of the base's bandwidth."""

    def figure(comparison: Comparison) -> float | None:
        ratios = _of(comparison, engine)
        return 1 / max(ratios) if ratios else None

    return figure


def candidate(name: str) -> Callable[[Comparison], float | None]:
    """One candidate's time in that of the base."""
    return lambda c: next((t.ratio.median for t in c.timings if name in t.name), None)


LONG, FEW, RAGGED = "T=1024, S=2048", "T=32", "8 ragged rows"
AIMS = (
    Aim("attention", LONG, "torch paged / dense", slowest("torch_cuda"), at_most=1.05),
    Aim("attention", FEW, "torch paged / dense", slowest("torch_cuda"), at_most=1.3),
    Aim("attention", RAGGED, "torch paged / dense parts", slowest("torch_cuda"), at_most=1.1),
    Aim("attention", "", "torch, layouts apart", layouts_apart("torch_cuda"), at_most=1.1),
    Aim(
        "attention",
        LONG,
        "vLLM's CPU kernel / torch paged",
        faster_than(VLLM_KERNEL, "torch_cuda"),
        at_least=2.0,
    ),
    Aim("attention", LONG, "JAX paged / torch dense", slowest("jax_gpu"), at_most=1.25),
    Aim(
        "attention",
        "T=1024, S=1126",
        "JAX paged / torch dense, 55 % of the bucket",
        slowest("jax_gpu"),
        at_most=2.0,
    ),
    Aim(
        "attention",
        "T=1024",
        "jax.nn.dot_product_attention / JAX paged",
        faster_than(JAX_DENSE, "jax_gpu"),
        at_least=2.5,
    ),
    Aim("write", "4096 cells, float32", "JAX share of memcpy", share("jax_gpu"), at_least=0.4),
    Aim("write", "4096 cells, bfloat16", "JAX share of memcpy", share("jax_gpu"), at_least=0.2),
    Aim(
        "denoise",
        "10 digits",
        "JAX / torch, prefix reused",
        candidate("jax_gpu, prefix reused"),
        at_most=1.0,
    ),
    Aim("core", "import", "vLLM / ours", candidate("vllm."), at_least=50),
    Aim("core", "specs", "vLLM / ours", candidate("vLLM"), at_least=5),
    Aim("core", "reserve", "vLLM / ours", candidate("vLLM"), at_least=3),
    Aim("core", "building", "vLLM / ours", candidate("vLLM"), at_least=5),
)


def judge(results: Results) -> Iterator[tuple[bool, str]]:
    """For each figure that has an aim whether it reaches it, and a line that says so."""
    for aim in AIMS:
        for comparison in results.comparisons:
            if comparison.suite != aim.suite or not comparison.case.startswith(aim.case):
                continue
            figure = aim.figure(comparison)
            if figure is None:
                continue
            met = aim.at_least <= figure <= aim.at_most
            bound = f"at least {aim.at_least:g}" if aim.at_least else f"at most {aim.at_most:g}"
            yield met, f"{aim.what}, {comparison.case}: {figure:.2f}, {bound}"


def main(paths: list[Path]) -> int:
    missed = 0
    for path in paths:
        print(path.name)
        found = list(judge(load(path)))
        for met, line in found:
            print(f"  {'ok    ' if met else 'MISSED'}  {line}")
        if not found:
            print("  no figure here has an aim")
        missed += sum(not met for met, _ in found)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]] or list(COMMITTED)))
