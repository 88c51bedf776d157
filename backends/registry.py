"""The registry: a backend flag, and the module that serves it, imported on demand.

A module of an engine exposes ``create_engine(device: str | None) -> Engine``. Third parties add
theirs through the entry-point group ``pagestride.backends``: the entry's name is the flag, its
value the module (``my_engine = "my_package.engine"``). Nothing falls back to another engine.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from layout_core.errors import UnknownBackendError
from layout_core.packages import check_installed

if TYPE_CHECKING:
    from layout_core.protocols import Engine

ENTRY_POINT_GROUP: Final = "pagestride.backends"


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """An engine of this project."""

    module: str
    requires: tuple[str, ...]  #: packages that must be importable
    extra: str  #: the extra that installs them


BUILT_IN: Final[dict[str, BuiltIn]] = {
    "torch_cuda": BuiltIn("backends.torch_cuda", ("torch",), "torch"),
    "jax_gpu": BuiltIn("backends.jax_gpu", ("jax", "numpy", "ml_dtypes"), "jax"),
}


def names() -> tuple[str, ...]:
    """All backend flags, ours first, then third parties' in alphabetical order.

    Reads the metadata of installed packages; imports none of them.
    """
    others = {entry.name for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    return (*BUILT_IN, *sorted(others - set(BUILT_IN)))


def load(name: str, *, device: str | None = None) -> Engine[Any, Any, Any]:
    """The engine of a backend flag.

    Args:
        name: ``torch_cuda``, ``jax_gpu``, or a third party's flag.
        device: ``cpu``, ``cuda`` or ``cuda:N``; ``None`` is the engine's default, which is
            ``cpu`` for both of ours.

    Raises:
        UnknownBackendError: no such flag, or a third party's that exposes no
            ``create_engine``; lists the valid flags.
        MissingPackageError: what the engine needs is not installed; says how to install it.
        DeviceError: a device that is not there.
    """
    module = importlib.import_module(_module_of(name))
    create = getattr(module, "create_engine", None)
    if create is None:
        raise UnknownBackendError(
            f"backend {name!r}: module {module.__name__!r} has no create_engine(device)"
        )
    engine: Engine[Any, Any, Any] = create(device)
    return engine


def _module_of(name: str) -> str:
    ours = BUILT_IN.get(name)
    if ours is not None:
        check_installed(f"backend {name!r}", ours.requires, ours.extra)
        return ours.module
    entries = [e for e in metadata.entry_points(group=ENTRY_POINT_GROUP) if e.name == name]
    if not entries:
        raise UnknownBackendError(f"backend: expected one of {', '.join(names())}, got {name!r}")
    if len({entry.value for entry in entries}) > 1:
        raise UnknownBackendError(
            f"backend {name!r} is registered more than once: "
            f"{', '.join(sorted(entry.value for entry in entries))}"
        )
    return entries[0].module
