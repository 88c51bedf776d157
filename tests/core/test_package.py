"""The package as a whole: what it exports, and what importing it loads."""

from __future__ import annotations

import ast
import inspect
import pathlib
import subprocess
import sys
from typing import Any

import pytest

import layout_core
from layout_core import errors

ROOT = pathlib.Path(layout_core.__file__).parent.parent


def python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_every_public_name_resolves_to_its_module() -> None:
    assert len(layout_core.__all__) > 80
    for name in layout_core.__all__:
        value = getattr(layout_core, name)
        module = inspect.getmodule(value)
        if module is not None and inspect.isclass(value):
            assert module.__name__.startswith("layout_core.")
    assert set(layout_core.__all__) <= set(dir(layout_core))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'layout_core' has no attribute 'nothing'"):
        _ = layout_core.nothing  # type: ignore[attr-defined]


def test_the_static_names_are_those_of_the_table() -> None:
    source = (ROOT / "layout_core" / "__init__.py").read_text()
    static = {
        alias.asname
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert static == set(layout_core.__all__)


def test_importing_loads_no_submodule_and_nothing_third_party() -> None:
    loaded = python(
        "import sys, layout_core\n"
        "print(sorted(m for m in sys.modules if m.startswith('layout_core')))"
    )
    assert loaded == "['layout_core']"
    foreign = python(
        "import sys\n"
        "bare = set(sys.modules)\n"
        "import layout_core\n"
        "for name in layout_core.__all__: getattr(layout_core, name)\n"
        "names = {m.partition('.')[0] for m in set(sys.modules) - bare}\n"
        "print(sorted(names - set(sys.stdlib_module_names) - {'layout_core'}))"
    )
    assert foreign == "[]"


def test_every_error_is_a_layout_error_and_a_value_error() -> None:
    classes: list[Any] = [
        value
        for _, value in inspect.getmembers(errors, inspect.isclass)
        if value.__module__ == errors.__name__
    ]
    assert len(classes) > 20
    for cls in classes:
        assert issubclass(cls, errors.LayoutError)
        assert issubclass(cls, ValueError)
        assert cls.__doc__
