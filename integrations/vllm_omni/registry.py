"""Into vLLM-Omni's registry of diffusion attention backends, and out of it again.

The registry is a closed enum: nothing can be added, but each member takes an override.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any, Final

from vllm_omni.diffusion.attention import selector
from vllm_omni.diffusion.attention.backends.registry import (
    DiffusionAttentionBackendEnum,
    register_diffusion_backend,
)
from vllm_omni.diffusion.diffusion_kv import layout as omni_layout

from backends.registry import BUILT_IN
from integrations.vllm_omni import layout
from layout_core.errors import ConfigError, UnknownBackendError, UnsupportedError
from layout_core.packages import check_installed

SERVED_VERSION: Final = "0.30"
"""vLLM-Omni's; a worker of ours reads what another version may call otherwise."""

BACKENDS: Final = {
    "torch_cuda": "integrations.vllm_omni.torch_backend.OmniTorchBackend",
    "jax_gpu": "integrations.vllm_omni.jax_backend.OmniJaxBackend",
}
"""For each engine's flag the class that vLLM-Omni finds by its path."""

LAYOUT_FUNCTIONS: Final = (
    "adopt_kv_cache_layout",
    "assert_backend_layout_supported",
    "build_kv_cache_tensor",
    "get_connector_required_kv_cache_layout",
    "resolve_diffusion_kv_cache_layout",
)


@dataclass(frozen=True, slots=True)
class Installed:
    """What :func:`install` changed; :func:`remove` takes it back."""

    member: str  #: of ``DiffusionAttentionBackendEnum``
    path: str  #: the class that it now means
    previous: str | None  #: the override that stood there before
    layout_functions: tuple[tuple[str, Callable[..., Any]], ...] = ()
    """Names that ours stand in for, and vLLM-Omni's functions."""


def install(
    backend: str = "torch_cuda", *, member: str = "TORCH_SDPA", layout_functions: bool = False
) -> Installed:
    """Let a member of vLLM-Omni's backend registry mean an engine of ours.

    Layers that are built afterwards and select the member use the engine, for dense and paged
    calls. Nothing is changed by a call that raises.

    Args:
        backend: the engine's flag, a key of :data:`BACKENDS`.
        member: name of the member whose place is taken.
        layout_functions: whether our functions also stand in for those of vLLM-Omni's
            ``diffusion_kv.layout``, in every module that has imported them.

    Returns:
        What to give to :func:`remove`.

    Raises:
        UnknownBackendError: no such flag.
        ConfigError: no such member; lists them.
        UnsupportedError: another version of vLLM-Omni.
        MissingPackageError: what the engine needs is not installed.
    """
    if backend not in BACKENDS:
        raise UnknownBackendError(
            f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}"
        )
    members = DiffusionAttentionBackendEnum.__members__
    if member not in members:
        raise ConfigError(f"member: expected one of {', '.join(members)}, got {member!r}")
    version = metadata.version("vllm-omni")
    if version.split(".")[:2] != SERVED_VERSION.split("."):
        raise UnsupportedError(
            f"vllm_omni: expected version {SERVED_VERSION}, got {version}; its worker's adapter "
            "may differ"
        )
    ours = BUILT_IN[backend]
    check_installed(f"backend {backend!r}", ours.requires, ours.extra)
    path = BACKENDS[backend]
    _load(path).validate_available()
    slot = members[member]
    previous = slot.get_path() if slot.is_overridden() else None
    register_diffusion_backend(slot, path)
    selector._cached_get_backend_cls.cache_clear()  # it keeps the class that a name once meant
    originals: list[tuple[str, Callable[..., Any]]] = []
    for name in LAYOUT_FUNCTIONS if layout_functions else ():
        originals.append((name, getattr(omni_layout, name)))
        _replace(name, getattr(omni_layout, name), getattr(layout, name))
    return Installed(member, path, previous, tuple(originals))


def remove(installed: Installed) -> None:
    """Undo an :func:`install`: the registry is as it was before it.

    Of two installs on one member the later one is removed first.

    Raises:
        ConfigError: the member means something else by now. Nothing is changed then.
    """
    slot = DiffusionAttentionBackendEnum.__members__[installed.member]
    current = slot.get_path()
    if current != installed.path or not slot.is_overridden():
        raise ConfigError(
            f"installed: member {installed.member} means {current} by now, expected "
            f"{installed.path}; remove what was installed later first"
        )
    if installed.previous is None:
        slot.clear_override()
    else:
        register_diffusion_backend(slot, installed.previous)
    selector._cached_get_backend_cls.cache_clear()
    for name, original in installed.layout_functions:
        _replace(name, getattr(layout, name), original)


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def _replace(name: str, old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Bind ``name`` anew in each module of vLLM-Omni where it means ``old``."""
    for module_name, module in list(sys.modules.items()):
        if module_name.startswith("vllm_omni.") and vars(module).get(name) is old:
            setattr(module, name, new)
