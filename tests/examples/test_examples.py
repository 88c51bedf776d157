"""The examples run as a user runs them, and end with the result that they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BACKENDS = ("torch_cuda", "jax_gpu")


def run(name: str, *arguments: str) -> str:
    """Output of an example; one that fails raises with its own message."""
    done = subprocess.run(
        [sys.executable, f"examples/{name}", *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("backend", BACKENDS)
def test_minimal_runner(backend: str) -> None:
    said = run("minimal_runner.py", "--backend", backend)
    found = re.fullmatch(rf"{backend}: 8 guided steps, (\S+) from dense attention", said)
    assert found, said
    assert float(found[1]) < 1e-5


def test_minimal_runner_is_small() -> None:
    source = (ROOT / "examples" / "minimal_runner.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 80
    assert not re.search(r"\b(torch|jax)\.", source)


def test_an_unknown_backend_ends_the_example() -> None:
    with pytest.raises(AssertionError, match=r"expected one of torch_cuda, jax_gpu.* 'cpu'"):
        run("minimal_runner.py", "--backend", "cpu")


@pytest.mark.parametrize("backend", BACKENDS)
def test_diffusers_runner(backend: str) -> None:
    said = run("diffusers_runner.py", "--backend", backend)
    found = re.fullmatch(
        rf"{backend}: 20 steps, pictures (\S+) apart, the prompt's K projected 4 times instead "
        r"of 80, \d+\.\d+ of the time",
        said,
    )
    assert found, said
    assert float(found[1]) < 1e-3
