"""The registry of engines: flags, missing packages, third parties."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import pytest

import backends
from backends import registry
from layout_core.errors import DeviceError, MissingPackageError, UnknownBackendError
from layout_core.protocols import Engine


def entries(*points: EntryPoint) -> Any:
    return lambda *, group: [p for p in points if p.group == group]


def test_load_gives_an_engine_on_the_cpu_by_default() -> None:
    engine = backends.load("torch_cuda")
    assert isinstance(engine, Engine)
    assert (engine.name, engine.device) == ("torch_cuda", "cpu")
    with pytest.raises(DeviceError, match="expects 'cpu', 'cuda' or 'cuda:N', got 'tpu'"):
        backends.load("torch_cuda", device="tpu")


def test_an_unknown_flag_lists_the_valid_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("mine", "my_engine", registry.ENTRY_POINT_GROUP)
    monkeypatch.setattr(registry.metadata, "entry_points", entries(point))
    with pytest.raises(
        UnknownBackendError, match="expected one of torch_cuda, jax_gpu, mine, got 'torch'"
    ):
        backends.load("torch")


@pytest.mark.parametrize(
    ("flag", "package", "extra"), [("torch_cuda", "torch", "torch"), ("jax_gpu", "jax", "jax")]
)
def test_a_missing_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, flag: str, package: str, extra: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        registry.importlib.util,
        "find_spec",
        lambda name: None if name == package else found(name),
    )
    with pytest.raises(
        MissingPackageError, match=rf"needs {package}, .*pip install 'pagestride\[{extra}\]'"
    ):
        backends.load(flag)


def test_third_parties_are_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str | None] = []
    module = SimpleNamespace(__name__="my_engine", create_engine=lambda device: made.append(device))
    points = (
        EntryPoint("mine", "my_engine", registry.ENTRY_POINT_GROUP),
        EntryPoint("empty", "empty_engine", registry.ENTRY_POINT_GROUP),
        EntryPoint("twice", "my_engine", registry.ENTRY_POINT_GROUP),
        EntryPoint("twice", "empty_engine", registry.ENTRY_POINT_GROUP),
    )
    monkeypatch.setattr(registry.metadata, "entry_points", entries(*points))
    monkeypatch.setitem(sys.modules, "my_engine", module)  # type: ignore[arg-type]
    empty = SimpleNamespace(__name__="empty_engine")
    monkeypatch.setitem(sys.modules, "empty_engine", empty)  # type: ignore[arg-type]
    assert backends.load("mine", device="cpu") is None
    assert made == ["cpu"]
    with pytest.raises(UnknownBackendError, match="'empty_engine' has no create_engine"):
        backends.load("empty")
    with pytest.raises(UnknownBackendError, match="more than once: empty_engine, my_engine"):
        backends.load("twice")


def test_importing_the_registry_loads_no_framework() -> None:
    code = "import sys, backends; print(sorted({'torch', 'jax', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
