"""The floors can fail a run, and a missing engine fails its tests: the guard is guarded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import LAYOUTS
from tests.conftest import CASE_FLOOR, FAULT_FLOOR, below_floor
from tests.engines.suite import DTYPES, ENGINE_KERNELS
from tests.engines.suite_dense import FEATURES

ROOT = Path(__file__).resolve().parents[2]

ENOUGH = {
    (engine, kernel, layout, dtype): CASE_FLOOR
    for engine, kernel in ENGINE_KERNELS
    for layout in LAYOUTS
    for dtype in DTYPES
}

EVERY = {
    (engine, f, dtype): 1 for engine, _ in ENGINE_KERNELS for f in FEATURES for dtype in DTYPES
}


def test_enough_of_everything_passes() -> None:
    assert below_floor(ENOUGH, EVERY, FAULT_FLOOR, []) == []


@pytest.mark.parametrize("missing", sorted(ENOUGH))
def test_one_combination_below_its_floor_is_named(missing: tuple[str, str, str, str]) -> None:
    line = f"{' '.join(missing)}: {CASE_FLOOR - 1} cases, floor {CASE_FLOOR}"
    assert below_floor(ENOUGH | {missing: CASE_FLOOR - 1}, EVERY, FAULT_FLOOR, []) == [line]


def test_a_dense_feature_that_never_ran_is_named() -> None:
    some = {key: n for key, n in EVERY.items() if key != ("jax_gpu", "causal", "float16")}
    line = "jax_gpu dense float16: never executed: causal"
    assert below_floor(ENOUGH, some, FAULT_FLOOR, []) == [line]


def test_too_few_faults_and_any_skip_are_named() -> None:
    assert below_floor(ENOUGH, EVERY, FAULT_FLOOR - 1, ["tests/engines/x.py::test_y"]) == [
        f"planted faults: {FAULT_FLOOR - 1} caught, floor {FAULT_FLOOR}",
        "skipped: tests/engines/x.py::test_y",
    ]


def run_pytest(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys, pytest\n{before}\nsys.exit(pytest.main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, "-q", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_a_run_below_its_floors_exits_with_1() -> None:
    """One test that passes, and no case executed: red all the same."""
    done = run_pytest(
        "--floors", "always", "tests/engines/test_suite_oracle.py::test_attention_by_hand"
    )
    assert "1 passed" in done.stdout, done.stdout
    assert done.returncode == 1
    assert "BELOW FLOOR: torch_cuda sdpa LBHNC float32: 0 cases, floor" in done.stdout


def test_an_engine_that_is_missing_fails_and_is_not_skipped() -> None:
    hide = "sys.modules['torch'] = None"  # as if it were not installed
    done = run_pytest(
        "tests/equivalence/test_bytes.py", "-k", "zero_and_of_the_planned and torch_cuda",
        before=hide,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "torch" in done.stdout
    assert "skipped" not in done.stdout
