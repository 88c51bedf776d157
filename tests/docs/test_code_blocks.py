"""Every code block of the documentation runs as it stands.

The Python blocks of a page run one after another in one fresh interpreter, as a reader would type
them. The commands of a ``bash`` block run one after another in an empty folder. Blocks marked
``text`` or ``toml`` show, and are not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
RUN = {"python", "bash"}
SHOWN = {"text", "toml"}


def blocks(page: Path, language: str) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [body for kind, body in FENCE.findall(text) if kind == language]


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def environment() -> dict[str, str]:
    scripts = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": os.pathsep.join([scripts, os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_python_runs(page: Path, tmp_path: Path) -> None:
    source = tmp_path / "page.py"  # a name that hides no package
    source.write_text("\n\n".join(blocks(page, "python")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(source)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "bash")], ids=name_of)
def test_commands_run(page: Path, tmp_path: Path) -> None:
    for body in blocks(page, "bash"):
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", body],
            cwd=tmp_path,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, f"{body}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    kinds = {kind for kind, _ in FENCE.findall(page.read_text(encoding="utf-8"))}
    assert kinds <= RUN | SHOWN, f"{kinds - RUN - SHOWN}: neither run nor marked as shown"


def test_a_block_that_fails_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n", encoding="utf-8")
    assert blocks(page, "python") == ["x = 1\n", "assert x == 2\n"]
    with pytest.raises(AssertionError, match="AssertionError"):
        test_python_runs(page, tmp_path)
