"""The import rules hold over the whole tree, and the check of them can fail."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.layering.rules import RULES, Rule, files_of, imports_of, violations

ROOT = Path(__file__).resolve().parents[2]

REQUIRED = ("layout_core", "block_manager", "backends", "backends/torch_cuda", "backends/jax_gpu")


def loaded_by(statement: str, *flags: str) -> set[str]:
    """Top-level modules that ``statement`` loads beyond what a bare interpreter has."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); before = set(sys.modules)\n"
        f"{statement}\n"
        "print('\\n'.join(sorted({m.split('.')[0] for m in set(sys.modules) - before})))"
    )
    done = subprocess.run(
        [sys.executable, *flags, "-c", code, str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def foreign(modules: set[str], own: tuple[str, ...]) -> set[str]:
    """Of ``modules``, those that are neither standard library nor one of ``own``."""
    return {m for m in modules if m not in sys.stdlib_module_names and m not in own}


def submodules(package: str) -> list[str]:
    """Dotted names of all modules of a package, from its files."""
    names = []
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def test_no_file_breaks_a_rule() -> None:
    found = violations(ROOT)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", REQUIRED)
def test_the_rules_govern_files_that_are_there(path: str) -> None:
    """An empty folder would keep every rule."""
    rule = next(r for r in RULES if r.path == path)
    assert files_of(ROOT, rule), f"{path}: no Python file found"


def test_every_shipped_package_has_a_rule() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(shipped) >= {"layout_core", "block_manager", "backends"}
    governed = {rule.path for rule in RULES}
    assert set(shipped) <= governed
    folders = {f"backends/{p.parent.name}" for p in (ROOT / "backends").glob("*/__init__.py")}
    assert folders <= governed, "an engine without a rule would be held to the registry's"


def test_layout_core_loads_nothing_third_party() -> None:
    everything = "import " + ", ".join(submodules("layout_core"))
    assert foreign(loaded_by(everything), ("layout_core",)) == set()


def test_block_manager_loads_nothing_third_party() -> None:
    everything = "import " + ", ".join(submodules("block_manager"))
    assert foreign(loaded_by(everything), ("block_manager", "layout_core")) == set()


def test_the_pure_packages_need_no_site_packages() -> None:
    """With ``-S`` nothing that is installed can be imported at all."""
    names = submodules("layout_core") + submodules("block_manager")
    assert "layout_core" in loaded_by("import " + ", ".join(names), "-S")


def test_layout_core_loads_its_submodules_lazily() -> None:
    statement = (
        "import layout_core\n"
        "early = sorted(m for m in sys.modules if m.startswith('layout_core.'))\n"
        "assert not early, early\n"
        "layout_core.KVCacheLayout\n"
        "assert 'layout_core.layouts' in sys.modules"
    )
    assert "layout_core" in loaded_by(statement)


def test_every_public_name_of_the_core_is_there() -> None:
    statement = (
        "import layout_core\n"
        "missing = [n for n in layout_core.__all__ if not hasattr(layout_core, n)]\n"
        "assert layout_core.__all__ and not missing, missing"
    )
    assert foreign(loaded_by(statement), ("layout_core",)) == set()


def test_the_registry_loads_no_framework() -> None:
    assert not loaded_by("import backends, backends.registry") & {"torch", "jax", "numpy", "triton"}


@pytest.mark.parametrize(
    ("name", "framework", "other"),
    [("torch_cuda", "torch", "jax"), ("jax_gpu", "jax", "torch")],
)
def test_an_engine_loads_one_framework(name: str, framework: str, other: str) -> None:
    loaded = loaded_by(f"import backends; backends.load({name!r}, device='cpu')")
    assert framework in loaded
    assert other not in loaded


# --- the test of the test ---------------------------------------------------------------------

PLANTED = [
    ("layout_core/a.py", "import numpy\n", "layout_core must not import numpy"),
    ("layout_core/a.py", "def f():\n    import torch.nn\n", "must not import torch.nn"),
    ("layout_core/a.py", "from backends import registry\n", "must not import backends.registry"),
    ("layout_core/sub/a.py", "from ...block_manager import x\n", "must not import"),
    (
        "layout_core/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import jax\n",
        "must not import jax",
    ),
    ("layout_core/a.py", "try:\n    import numpy\nexcept ImportError:\n    raise\n", "numpy"),
    ("layout_core/a.py", "import importlib\nimportlib.import_module('jax')\n", "import jax"),
    ("layout_core/a.py", "x = __import__('torch')\n", "must not import torch"),
    ("block_manager/a.py", "import backends\n", "block_manager must not import backends"),
    ("block_manager/a.py", "class A:\n    from numpy import array\n", "import numpy.array"),
    ("backends/registry.py", "import torch\n", "backends must not import torch"),
    ("backends/__init__.py", "from backends.jax_gpu import engine\n", "backends.jax_gpu.engine"),
    ("backends/torch_cuda/a.py", "import jax\n", "backends/torch_cuda must not import jax"),
    ("backends/torch_cuda/a.py", "from ..jax_gpu import engine\n", "backends.jax_gpu.engine"),
    ("backends/torch_cuda/k/a.py", "from backends import jax_gpu\n", "backends.jax_gpu"),
    ("backends/torch_cuda/a.py", "import numpy\n", "allowed inside functions alone"),
    ("backends/jax_gpu/a.py", "def f():\n    from torch import nn\n", "must not import torch.nn"),
    ("backends/jax_gpu/a.py", "import backends.torch_cuda.paged\n", "backends.torch_cuda.paged"),
    ("backends/triton_kernels/a.py", "import layout_core\n", "must not import layout_core"),
    ("backends/torch_cuda/a.py", "import vllm\n", "must not import vllm"),
    ("diffusion_runner/a.py", "def f():\n    import vllm_omni.x\n", "must not import vllm_omni.x"),
    ("diffusion_runner/a.py", "import torch\ndef f():\n    import jax.numpy\n", "jax and torch"),
    ("examples/a.py", "from diffusers import DDIMScheduler\n", "must not import diffusers"),
    ("examples/diffusers_runner.py", "import vllm\n", "must not import vllm"),
]


@pytest.mark.parametrize(("path", "source", "message"), PLANTED)
def test_a_planted_violation_is_caught(
    tmp_path: Path, path: str, source: str, message: str
) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source, encoding="utf-8")
    found = violations(tmp_path)
    assert len(found) == 1, found
    assert path in found[0]
    assert message in found[0]


ALLOWED = [
    ("layout_core/a.py", "import sys\nfrom . import b\nfrom layout_core.c import d\n"),
    ("block_manager/a.py", "from layout_core import KVCacheLayout\n"),
    ("backends/registry.py", "from layout_core.errors import DeviceError\nimport importlib\n"),
    ("backends/torch_cuda/a.py", "import torch\ndef f():\n    import ml_dtypes\n"),
    (
        "backends/torch_cuda/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy as np\n",
    ),
    ("backends/torch_cuda/k/a.py", "from ..device import x\nimport layout_core.step\n"),
    ("backends/jax_gpu/a.py", "import jax, numpy\nfrom jax.experimental import pallas\n"),
    ("diffusion_runner/a.py", "import jax\nimport typer\n"),
    ("integrations/a.py", "import vllm\n"),
    ("examples/diffusers_runner.py", "import diffusers\n"),
]


@pytest.mark.parametrize(("path", "source"), ALLOWED)
def test_a_legal_import_passes(tmp_path: Path, path: str, source: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.write_text(source, encoding="utf-8")
    assert violations(tmp_path) == []


def test_the_subprocess_check_can_fail(tmp_path: Path) -> None:
    """A module that loads NumPy is seen, and one that is missing fails the run."""
    assert "numpy" in foreign(loaded_by("import numpy"), ("layout_core",))
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        loaded_by("import numpy", "-S")


def test_the_longest_path_governs_a_file(tmp_path: Path) -> None:
    inner = tmp_path / "backends" / "torch_cuda" / "a.py"
    inner.parent.mkdir(parents=True)
    inner.write_text("import torch\n", encoding="utf-8")
    assert files_of(tmp_path, next(r for r in RULES if r.path == "backends")) == []
    assert files_of(tmp_path, Rule("backends", ()), (Rule("backends", ()),)) == [inner]


def test_imports_are_found_with_line_and_nesting() -> None:
    source = "import a.b as c\ndef f():\n    from .x import y\n    return lambda: __import__('z')\n"
    found = [(i.module, i.line, i.nested) for i in imports_of(source, "p.q")]
    assert found == [("a.b", 1, False), ("p.q.x.y", 3, True), ("z", 4, True)]
