"""Runs the comparisons of each kind, counts what they compared, and enforces the floors."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.conformance.differences import undocumented
from tests.conformance.tally import EQUAL, Disagreement, Floor, Tally, floor_failures

ALL_LAYOUTS = tuple(f"layout {n}" for n in ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"))


@dataclass(frozen=True)
class Kind:
    """One kind of comparison.

    Args:
        module: the module under ``tests.conformance`` with the two functions.
        cases: the strategy's name; called without arguments. It may give a list instead,
            which is compared as a whole.
        compare: the comparison's name; takes a case and the tally, returns the outcome.
        share: share of the cases asked for.
        floor: the least that must have been compared.
    """

    module: str
    cases: str
    compare: str
    share: float  # 0 for a list
    floor: Floor

    def load(self) -> tuple[Any, Callable[[Any, Tally], str]]:
        module = import_module(f"tests.conformance.{self.module}")
        return getattr(module, self.cases)(), getattr(module, self.compare)


KINDS: dict[str, Kind] = {
    "strides": Kind(
        "geometry",
        "stride_cases",
        "compare_strides",
        0.25,
        Floor(0.4, 0.05, (*ALL_LAYOUTS, "kernel blocks", "fixed strides", "padded"), 0.03),
    ),
    "views": Kind(
        "geometry",
        "view_cases",
        "compare_views",
        0.25,
        Floor(
            0.3,
            0.1,
            (*ALL_LAYOUTS, "several groups", "mixed pages", "filled and read", "kernel blocks"),
            0.01,
        ),
    ),
    "groups": Kind(
        "sizing",
        "group_cases",
        "compare_groups",
        0.15,
        Floor(0.5, 0.02, (*ALL_LAYOUTS, "several groups", "mixed pages in a group"), 0.03),
    ),
    "configs": Kind(
        "sizing",
        "config_cases",
        "compare_configs",
        0.15,
        Floor(
            0.2,
            0.2,
            (
                *ALL_LAYOUTS,
                "pipeline stages",
                "several ranks",
                "num_gpu_blocks_override",
                "auto-fitted length",
                "several groups",
                "too little memory",
            ),
            0.005,  # few models fit BHLNC or LHBNC
        ),
    ),
    "native": Kind(
        "control",
        "native_cases",
        "compare_native",
        0.04,
        Floor(
            0.2,
            0.1,
            (
                "pinned before",
                "implied",
                "edited size",
                "edited offset",
                "edited block_stride",
                "edited layer_stride",
            ),
            0.01,
        ),
    ),
    "memory": Kind(
        "sizing",
        "memory_cases",
        "compare_memory",
        0.06,
        Floor(
            0.5,
            0.02,
            (
                "context parallel",
                "length that fits: none",
                "length that fits: part",
                "length that fits: all",
            ),
            0.05,
        ),
    ),
    "block sizes": Kind(
        "sizing",
        "block_size_cases",
        "compare_block_sizes",
        0.06,
        Floor(0.4, 0.05, ("several groups", "finer hashing"), 0.1),
    ),
    "resolution": Kind(
        "resolution",
        "resolution_cases",
        "compare_resolution",
        0.08,
        Floor(0.3, 0.05, (*ALL_LAYOUTS, "pinned", "requested", "preferred", "mixed shapes"), 0.01),
    ),
    "managers": Kind(
        "management",
        "manager_cases",
        "compare_managers",
        0.1,
        Floor(
            0.95,
            0.0,
            (
                "caching",
                "no caching",
                "one group",
                "several groups",
                "with hits",
                "with refusals",
                "never",
            ),
            0.08,
        ),
    ),
    "pools": Kind(
        "management",
        "pool_cases",
        "compare_pools",
        0.04,
        Floor(0.2, 0.1, ("freed twice",), 0.05),
    ),
    "merges": Kind(
        "merging", "merge_cases", "compare_merges", 0.06, Floor(0.2, 0.1, ("merged",), 0.03)
    ),
    "adoption": Kind("resolution", "adoption_cases", "compare_adoption", 0, Floor(0.2, 0.2)),
    "quantisation": Kind("merging", "quant_cases", "compare_quant", 0, Floor(1.0)),
}


PLANTED_CASES = 60
"""Cases that a planted fault has to survive to count as missed; up to three such runs."""

BATCHES = 40
"""Hypothesis runs at most, for one kind: each counts only cases that no earlier one had."""


def run_kind(name: str, cases: int, seed: int, *, keep_going: bool = False) -> Tally:
    """``cases`` distinct cases of one kind. Stops at the first disagreement, shrunk.

    Args:
        keep_going: note every disagreement instead, as it came.
    """
    strategy, compare = KINDS[name].load()
    tally = Tally()
    seen: set[Any] = set()
    started = time.perf_counter()
    if isinstance(strategy, list):
        for case in strategy:
            try:
                tally.outcomes[compare(case, tally)] += 1
            except Disagreement as disagreement:
                tally.disagreements.append(str(disagreement))
        return tally
    for batch in range(BATCHES):
        left = cases - len(seen)
        if left <= 0 or (tally.disagreements and not keep_going):
            break
        # small batches start afresh more often: one long run varies its own earlier cases
        one_batch = min(max(left, 50), 400)
        _run_batch(strategy, compare, tally, seen, one_batch, seed + batch, keep_going)
    tally.seconds = time.perf_counter() - started
    return tally


def _run_batch(
    strategy: Any,
    compare: Callable[[Any, Tally], str],
    tally: Tally,
    seen: set[Any],
    cases: int,
    seed: int,
    keep_going: bool,
) -> None:
    import hypothesis
    from hypothesis import HealthCheck, Phase, given, settings

    @hypothesis.seed(seed)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @given(strategy)
    def compare_one(case: Any) -> None:
        if case in seen:
            return
        try:
            outcome = compare(case, tally)
        except Disagreement as disagreement:
            if not keep_going:
                raise
            tally.disagreements.append(str(disagreement))
            outcome = "disagreement"
        seen.add(case)
        tally.outcomes[outcome] += 1

    try:
        compare_one()
    except Exception as error:
        # reported, counted, and the run fails; the other kinds still say what they find
        tally.disagreements.append("".join(traceback.format_exception(error, limit=-4)))


def run_planted() -> list[str]:
    """Plants each fault and returns those that no comparison noticed."""
    from tests.conformance.planted import PLANTED

    missed = []
    for fault, (kind, plant) in PLANTED.items():
        with plant():
            caught = 0
            for seed in (1, 2, 3):
                caught += len(run_kind(kind, PLANTED_CASES, seed, keep_going=True).disagreements)
                if caught:
                    break
        print(f"planted fault, {kind}: {fault}: {'caught' if caught else 'MISSED'}", flush=True)
        if not caught:
            missed.append(f"planted fault {fault!r} went unnoticed by {kind}")
    return missed


def report(name: str, tally: Tally) -> None:
    print(f"\n{name}: {tally.cases} cases, {tally.equal} equal, {tally.seconds:.1f} s")
    for outcome, count in sorted(tally.outcomes.items()):
        if outcome != EQUAL:
            print(f"    {count:6}  {outcome}")
    for label, count in sorted(tally.labels.items()):
        print(f"    {count:6}  [{label}]")
    for text in tally.disagreements:
        print(f"  DISAGREEMENT\n{text}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__)
    parser.add_argument("--cases", type=int, default=3000, help="cases in all (default 3000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", action="append", choices=[*KINDS], help="only these kinds")
    parser.add_argument("--out", type=Path, help="write the counts as JSON")
    parser.add_argument(
        "--keep-going", action="store_true", help="list every disagreement, none of them shrunk"
    )
    parser.add_argument("--version", help="the vLLM version that must be the one installed")
    options = parser.parse_args(arguments)
    try:
        from tests.conformance import peers
    except ModuleNotFoundError as error:
        print(f"conformance needs vLLM in this environment: {error}", file=sys.stderr)
        return 2
    if options.version not in (None, peers.VERSION):
        print(f"expected vLLM {options.version}, got {peers.VERSION}", file=sys.stderr)
        return 2
    print(f"vLLM {peers.VERSION}, {options.cases} cases, seed {options.seed}", flush=True)
    names = options.kind or list(KINDS)
    whole = sum(KINDS[name].share for name in names) or 1
    failures = [f"differences: {name!r} is not in the document" for name in undocumented()]
    tallies: dict[str, Tally] = {}
    for index, name in enumerate(names):
        kind = KINDS[name]
        asked = round(options.cases * kind.share / whole) if kind.share else len(kind.load()[0])
        tally = tallies[name] = run_kind(
            name, asked, options.seed + index * 10_000, keep_going=options.keep_going
        )
        report(name, tally)
        sys.stdout.flush()
        if tally.disagreements:
            failures.append(f"{name}: disagrees with vLLM {peers.VERSION}")
        if not tally.disagreements:
            failures += floor_failures(name, tally, KINDS[name].floor, asked)
    if options.kind is None:
        failures += run_planted()
    total = sum(tally.cases for tally in tallies.values())
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(as_json(options, tallies, failures), indent=1) + "\n")
    print(f"\n{total} cases compared with vLLM {peers.VERSION}")
    for failure in failures:
        print(f"FAILED {failure}")
    return 1 if failures else 0


def as_json(
    options: argparse.Namespace, tallies: dict[str, Tally], failures: list[str]
) -> dict[str, object]:
    """The committed record of a run."""
    from tests.conformance import peers

    return {
        "vllm": peers.VERSION,
        "torch": peers.torch.__version__,
        "python": platform.python_version(),
        "seed": options.seed,
        "cases": sum(tally.cases for tally in tallies.values()),
        "equal": sum(tally.equal for tally in tallies.values()),
        "disagreements": sum(len(tally.disagreements) for tally in tallies.values()),
        "failures": failures,
        "kinds": {
            name: {
                "cases": tally.cases,
                "outcomes": dict(sorted(tally.outcomes.items())),
                "labels": dict(sorted(tally.labels.items())),
                "seconds": round(tally.seconds, 1),
            }
            for name, tally in tallies.items()
        },
    }
