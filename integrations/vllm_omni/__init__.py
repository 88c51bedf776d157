"""pagestride inside vLLM-Omni 0.30: its diffusion attention backends, and its layout functions.

``install("torch_cuda")`` puts an engine behind a member of vLLM-Omni's backend registry,
``remove`` takes it out again. Models that were built before keep what they were built with.

Names import from here; their modules load when a name is first used. vLLM-Omni missing is an
error then, and says what to install.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from layout_core.packages import check_installed

if TYPE_CHECKING:
    from integrations.vllm_omni.layout import adopt_kv_cache_layout as adopt_kv_cache_layout
    from integrations.vllm_omni.layout import (
        assert_backend_layout_supported as assert_backend_layout_supported,
    )
    from integrations.vllm_omni.layout import build_kv_cache_tensor as build_kv_cache_tensor
    from integrations.vllm_omni.layout import (
        get_connector_required_kv_cache_layout as get_connector_required_kv_cache_layout,
    )
    from integrations.vllm_omni.layout import (
        resolve_diffusion_kv_cache_layout as resolve_diffusion_kv_cache_layout,
    )
    from integrations.vllm_omni.metadata import as_attention_metadata as as_attention_metadata
    from integrations.vllm_omni.paged import attach as attach
    from integrations.vllm_omni.parallel import rank_local_spec as rank_local_spec
    from integrations.vllm_omni.parallel import ulysses_degree as ulysses_degree
    from integrations.vllm_omni.registry import Installed as Installed
    from integrations.vllm_omni.registry import install as install
    from integrations.vllm_omni.registry import remove as remove

_NAMES: Final = {
    "layout": (
        "BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT DEFAULT_DIFFUSION_KV_CACHE_LAYOUT "
        "adopt_kv_cache_layout assert_backend_layout_supported build_kv_cache_tensor "
        "get_connector_required_kv_cache_layout resolve_diffusion_kv_cache_layout"
    ),
    "metadata": "as_attention_metadata",
    "paged": "attach",
    "parallel": "rank_local_spec ulysses_degree",
    "registry": "BACKENDS Installed install remove",
    "torch_backend": "OmniTorchBackend OmniTorchImpl",
    "jax_backend": "OmniJaxBackend OmniJaxImpl",
}
_MODULE_OF: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Load the module of a public name (PEP 562).

    Raises:
        MissingPackageError: vLLM or vLLM-Omni is not installed.
    """
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_installed("integrations.vllm_omni", ("vllm", "vllm_omni"), "vllm-omni")
    value: object = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
