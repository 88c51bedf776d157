"""Runs the interpreted suites, each in a process that has the interpreter on from its start.

Triton decides when a kernel's module is imported whether it is interpreted, so this cannot be
done in a process that compiles.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PARTS = "16_bit or sizes or 8_bit or groups_of_heads"
SUITES = {
    "attention: layouts and rules": ("interpreted_attention.py", "layouts_and_rules", 44),
    "attention: shapes and dtypes": ("interpreted_attention.py", PARTS, 33),
    "attention: pools, splits, faults": (
        "interpreted_attention.py",
        f"not (layouts_and_rules or {PARTS})",
        70,
    ),
    "cells": ("interpreted_cells.py", "", 110),
    "far": ("interpreted_far.py", "", 1),
}
"""File, selection, and how many tests there are at least: a suite that shrank is not green."""


@pytest.mark.parametrize("name", SUITES)
def test_interpreted(name: str) -> None:
    file, selection, floor = SUITES[name]
    command = [sys.executable, "-m", "pytest", "-q", "--floors", "never", "-p", "no:cacheprovider"]
    command += [f"tests/kernels/{file}", "-k", selection, "--tb=short"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=590,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout[-2000:]
    assert int(passed[1]) >= floor, f"{passed[1]} tests passed, floor {floor}"
    print(f"{name}: {passed[1]} interpreted tests")
