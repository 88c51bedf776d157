"""What there is to measure, by name; a suite is loaded when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence

from diffusion_runner.bench.harness import Comparison
from diffusion_runner.bench.options import Bench
from diffusion_runner.bench.record import Growth, Memory, Results, machine
from diffusion_runner.errors import RunError

Found = Comparison | Growth | Memory

SUITES: dict[str, tuple[str, str]] = {
    "core": ("core_suite", "run"),
    "attention": ("attention_suite", "run"),
    "write": ("moving_suites", "write"),
    "copy": ("moving_suites", "copy"),
    "denoise": ("denoise_suite", "run"),
    "memory": ("memory_suite", "run"),
    "growth": ("growth_suite", "run"),
}
"""Name -> module of this package and function ``(bench) -> figures``."""


def suite(name: str) -> Callable[[Bench], Iterator[Found]]:
    """The function of a suite of :data:`SUITES`."""
    module, function = SUITES[name]
    found: Callable[[Bench], Iterator[Found]] = getattr(
        importlib.import_module(f"diffusion_runner.bench.{module}"), function
    )
    return found


def check_suites(names: Sequence[str]) -> tuple[str, ...]:
    """The suites of these names; all of them for none.

    Raises:
        RunError: no such suite.
    """
    for name in names:
        if name not in SUITES:
            raise RunError(f"suite: expected some of {', '.join(SUITES)}, got {name!r}")
    return tuple(names) or tuple(SUITES)


def measure(
    bench: Bench, names: Sequence[str], *, report: Callable[[str], None] = lambda line: None
) -> Results:
    """Run suites one after another.

    Args:
        report: told the name of each suite as it starts.
    """
    found: list[Found] = []
    for name in check_suites(names):
        report(name)
        found.extend(suite(name)(bench))
    device = next(iter(bench.engines.values())).device
    return Results(
        machine(device, bench.options.threads),
        tuple(x for x in found if isinstance(x, Comparison)),
        tuple(x for x in found if isinstance(x, Growth)),
        tuple(x for x in found if isinstance(x, Memory)),
    )
