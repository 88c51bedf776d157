"""Everything that only a GPU can prove, in slices of under 10 minutes. Installs nothing.

    make gpu PYTHON=python3 [SLICE=bench-long]
    python3 tools/gpu.py [--slice NAME ...] [--dry-run] [--results bench/results]

The standard library alone: it must start wherever the packages under test are. Each slice is a
command of its own; what came of it is written as ``gpu-SLICE.json``, with device, versions, clocks
and date. What cannot run here (no device, a package or a tool that is not there, no time left) is
recorded with its reason, and makes the exit status 1, as a failure does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_SECONDS = 570
TAIL_CHARACTERS = 6000
PACKAGES = ("torch", "triton", "numpy", "ml_dtypes", "pytest", "hypothesis", "vllm", "jax")
PYTEST = ("pytest", "hypothesis", "numpy", "ml_dtypes")
CLOCKS = (
    "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
)
SUITES = (
    "steps", "blocks", "random", "isolation", "quantised", "field_cases", "contract", "refusals",
    "dense",
)  # fmt: skip
SUITE_PARTS = 6

OK, FAILED, NOT_RUN = "ok", "failed", "not run"


@dataclass(frozen=True, slots=True)
class Slice:
    """A command, and what it needs."""

    name: str
    what: str
    command: tuple[str, ...]  #: after the interpreter, unless it begins with a tool
    packages: tuple[str, ...] = ()  #: beside torch and triton
    tool: str | None = None  #: a program that starts the interpreter
    result: str | None = None  #: the option that takes a file for figures of its own


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a slice."""

    slice: str
    what: str
    command: str
    state: str  #: ``ok``, ``failed`` or ``not run``
    reason: str | None  #: why it was not run
    seconds: float
    output: str  #: its end
    figures: Any = None  #: what the command measured, if anything


@dataclass(frozen=True, slots=True)
class Machine:
    """Where it ran."""

    device: str | None
    capability: str | None
    python: str = field(default_factory=platform.python_version)
    system: str = field(default_factory=platform.platform)
    packages: dict[str, str | None] = field(default_factory=dict)
    clocks: dict[str, str] | None = None


def slices() -> tuple[Slice, ...]:
    """All of them, in the order in which they run."""
    on_device = ("-m", "tests.gpu.suite", "-q", "-o", "addopts=")
    files = tuple(f"tests/engines/test_suite_{name}.py" for name in SUITES)
    suite = tuple(
        Slice(
            f"suite-{part}",
            f"the shared suite on the device, part {part} of {SUITE_PARTS}",
            (*on_device, "--every", str(SUITE_PARTS), "--from", str(part - 1), *files),
            PYTEST,
        )
        for part in range(1, SUITE_PARTS + 1)
    )
    bench = tuple(
        Slice(
            f"bench-{part}",
            f"bench.gpu_attention {part}",
            ("-m", "bench.gpu_attention", part),
            ("numpy",),
            result="--json",
        )
        for part in ("long", "layouts", "few", "spans", "write")
    )
    return (
        Slice("steps", "kernels against the oracle at real sizes, poison, pools beyond 2^31",
              (*on_device, "tests/gpu/gpu_steps.py"), PYTEST),
        Slice("graphs", "CUDA graph replays and torch.compile",
              (*on_device, "tests/gpu/gpu_graphs.py"), PYTEST),
        *suite,
        Slice("memcheck", "compute-sanitizer memcheck over the kernels",
              (*on_device, "-x", "--every", "23", "--from", "1", "tests/gpu/gpu_steps.py"),
              PYTEST, tool="compute-sanitizer"),
        *bench,
    )  # fmt: skip


def machine() -> Machine:
    """Device, versions and clocks, each as it is found; asks torch in a process of its own."""
    device = capability = None
    if util.find_spec("torch") is not None:
        code = (
            "import json, torch; d = torch.cuda.is_available() and torch.cuda.get_device_properties"
            "(0); print(json.dumps([d.name, f'{d.major}.{d.minor}'] if d else [None, None]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode == 0:
            device, capability = json.loads(done.stdout.splitlines()[-1])
    return Machine(
        device, capability, packages={name: _version(name) for name in PACKAGES}, clocks=_clocks()
    )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _clocks() -> dict[str, str] | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    done = subprocess.run(
        [tool, f"--query-gpu={CLOCKS}", "--format=csv,noheader"], capture_output=True, text=True
    )
    if done.returncode != 0 or not done.stdout.strip():
        return None
    values = done.stdout.splitlines()[0].split(", ")
    return dict(zip(CLOCKS.split(","), values, strict=False))


def why_not(one: Slice, here: Machine) -> str | None:
    """Why a slice cannot run on a machine; ``None`` where it can."""
    if here.device is None:
        return "no CUDA device"
    missing = [p for p in ("torch", "triton", *one.packages) if util.find_spec(p) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if one.tool is not None and shutil.which(one.tool) is None:
        return f"{one.tool} is not on the PATH"
    return None


def command_of(one: Slice, figures: Path | None) -> list[str]:
    """The whole command line."""
    started_by = [] if one.tool is None else [one.tool, "--error-exitcode", "9"]
    own = [] if one.result is None or figures is None else [one.result, str(figures)]
    return [*started_by, sys.executable, *one.command, *own]


def run(one: Slice, here: Machine, scratch: Path) -> Outcome:
    """Run a slice, or say why not."""
    figures = scratch / f"{one.name}.figures.json"
    command = command_of(one, figures)
    shown = " ".join([*([] if one.tool is None else [one.tool]), "python", *one.command])
    reason = why_not(one, here)
    if reason is not None:
        return Outcome(one.name, one.what, shown, NOT_RUN, reason, 0.0, "")
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_SECONDS,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        output, failed = done.stdout + done.stderr, done.returncode != 0
    except subprocess.TimeoutExpired as error:
        output = f"{_text(error.stdout)}{_text(error.stderr)}\nstopped after {LIMIT_SECONDS} s"
        failed = True
    found = json.loads(figures.read_text()) if figures.exists() else None
    figures.unlink(missing_ok=True)
    return Outcome(
        one.name, one.what, shown, FAILED if failed else OK, None,
        round(time.monotonic() - started, 1), output[-TAIL_CHARACTERS:], found,
    )  # fmt: skip


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def record(outcome: Outcome, here: Machine) -> dict[str, Any]:
    """What is committed."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "machine": asdict(here), **asdict(outcome)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = {one.name: one for one in slices()}
    parser.add_argument("--slice", nargs="*", choices=sorted(known), default=None)
    parser.add_argument("--dry-run", action="store_true", help="list what would run, and why not")
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args(arguments)
    chosen = [known[name] for name in options.slice] if options.slice else list(known.values())
    here = machine()
    print(f"device: {here.device or 'no CUDA device'}", flush=True)
    if options.dry_run:
        for one in chosen:
            print(f"{one.name:<14} {why_not(one, here) or 'can run'}: {one.what}")
        return 0 if here.device else 1
    if here.device is None:
        print("nothing was run and nothing recorded: every slice needs a CUDA device")
        return 1
    options.results.mkdir(parents=True, exist_ok=True)
    good = True
    for one in chosen:
        outcome = run(one, here, options.results)
        good &= outcome.state == OK
        path = options.results / f"gpu-{one.name}.json"
        path.write_text(json.dumps(record(outcome, here), indent=1) + "\n")
        print(f"{one.name:<14} {outcome.state} {outcome.reason or ''} ({outcome.seconds} s)")
        if outcome.state == FAILED:
            print(outcome.output, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
