"""Suite ``growth``: how each cost grows with keys, rows, blocks of the pool and layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from diffusion_runner.bench import core_suite
from diffusion_runner.bench.harness import Call, compare, fitted_exponent
from diffusion_runner.bench.options import Bench
from diffusion_runner.bench.record import Growth
from diffusion_runner.bench.workload import Geometry, PagedCall, Rows, random_data

SUITE = "growth"
LAYOUT = "LBNHC"
QUERIES = 128


def run(bench: Bench) -> Iterator[Growth]:
    """Attention over keys and over rows; the manager over blocks; planning over layers."""
    quick = bench.options.quick
    keys = (128, 256, 512) if quick else (512, 1024, 2048, 4096, 8192)
    rows = (1, 2, 4) if quick else (1, 2, 4, 8, 16, 32)
    for name in bench.engines:
        yield from _grow(
            bench, name, "S", keys, lambda s, name=name: _attention(bench, name, ((QUERIES, s),))
        )
        yield from _grow(
            bench,
            name,
            "rows",
            rows,
            lambda r, name=name: _attention(bench, name, ((QUERIES, 512),) * r),
        )
    blocks = (1_000, 10_000) if quick else (1_000, 10_000, 100_000, 1_000_000)
    for caching in (False, True):
        yield from _grow(
            bench,
            f"block manager, caching {'on' if caching else 'off'}",
            "blocks",
            blocks,
            lambda n, caching=caching: core_suite.manager_call(n, caching, 64),
        )
    layers = (8, 16) if quick else (8, 16, 32, 64, 128, 256)
    yield from _grow(bench, "specs to a plan", "layers", layers, _planning)


def _planning(layers: int) -> Call:
    specs = core_suite.model_specs(layers)
    return lambda: core_suite.plan(specs, 10_000, LAYOUT)


def _attention(bench: Bench, engine: str, shapes: tuple[tuple[int, int], ...]) -> Call:
    geometry, rows = Geometry(), Rows(shapes)
    data = random_data(rows, geometry)
    return PagedCall(bench.engines[engine], LAYOUT, geometry, rows, data)


def _grow(
    bench: Bench, name: str, axis: str, sizes: tuple[int, ...], make: Callable[[int], Call]
) -> Iterator[Growth]:
    """The same work at every size, interleaved."""
    calls = {str(size): make(size) for size in sizes}
    found = compare(SUITE, name, calls, base=str(sizes[0]), limits=bench.options.limits)
    seconds = [found.timing(str(size)).seconds.median for size in sizes]
    yield Growth(
        SUITE,
        name,
        axis,
        tuple(float(size) for size in sizes),
        tuple(seconds),
        fitted_exponent([float(s) for s in sizes], seconds),
    )
