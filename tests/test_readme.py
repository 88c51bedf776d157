"""The README's Python runs as it stands, on both engines."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize(("backend", "kernel"), [("torch_cuda", "sdpa"), ("jax_gpu", "xla")])
def test_the_example_runs_on_both_engines(
    capsys: pytest.CaptureFixture[str], backend: str, kernel: str
) -> None:
    (block,) = BLOCKS
    source = block.replace('"torch_cuda"', repr(backend))
    assert repr(backend) in source
    names: dict[str, object] = {}
    exec(compile(source, str(README), "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith(kernel)
    assert "84, 4, 64" in printed


def test_files_that_the_readme_names_are_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8"))
    assert links
    missing = [link for link in links if not (README.parent / link).exists()]
    assert missing == []


def test_figures_are_those_of_the_committed_results() -> None:
    done = subprocess.run(
        [sys.executable, str(README.parent / "tools" / "readme_figures.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
