"""Without vLLM: the module imports, every name says what to install, and nothing is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def without_vllm(code: str) -> str:
    """Standard output of ``code`` in a process in which no module ``vllm`` can be found."""
    hide = (
        "import sys\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'vllm' or name.startswith('vllm.'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
        "import importlib.util\n"
        "real = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda n, *a: None if n == 'vllm' else real(n, *a)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", hide + code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_public_name_says_what_to_install() -> None:
    code = (
        "import integrations.vllm as module\n"
        "from layout_core import MissingPackageError\n"
        "for name in module.__all__:\n"
        "    try:\n"
        "        getattr(module, name)\n"
        "    except MissingPackageError as error:\n"
        "        print(name, '|', error)\n"
        "print('torch' in sys.modules)\n"
    )
    *lines, loaded = without_vllm(code).splitlines()
    assert len(lines) == 14
    for line in lines:
        assert line.split(" | ")[1] == (
            "integrations.vllm needs vllm, which is not installed; pip install 'pagestride[vllm]'"
        )
    assert loaded == "False"


def test_a_from_import_says_it_too() -> None:
    code = (
        "try:\n"
        "    from integrations.vllm import init_kv_cache\n"
        "except ValueError as error:\n"
        "    print(error)\n"
    )
    assert "pip install 'pagestride[vllm]'" in without_vllm(code)


def test_a_name_that_is_not_there() -> None:
    import integrations.vllm as module

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        module.nonsense  # noqa: B018
    assert set(module.__all__) <= set(dir(module))
