"""Stand-ins for ``vllm_omni.diffusion.diffusion_kv.layout``: our rules behind its signatures.

They are those of :mod:`integrations.vllm`, and take and return vLLM's own types. They refuse
more than vLLM-Omni does: a layout that cannot hold a spec, and a carried config whose tensors
do not follow from its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm.v1.kv_cache_interface import KVCacheSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout

from integrations.vllm import control
from integrations.vllm.control import (
    BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT,
    DEFAULT_DIFFUSION_KV_CACHE_LAYOUT,
    adopt_kv_cache_layout,
    assert_backend_layout_supported,
    get_connector_required_kv_cache_layout,
    resolve_diffusion_kv_cache_layout,
)

__all__ = (
    "BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT",
    "DEFAULT_DIFFUSION_KV_CACHE_LAYOUT",
    "adopt_kv_cache_layout",
    "assert_backend_layout_supported",
    "build_kv_cache_tensor",
    "get_connector_required_kv_cache_layout",
    "resolve_diffusion_kv_cache_layout",
)


def build_kv_cache_tensor(
    spec: KVCacheSpec,
    num_blocks: int,
    layers: Sequence[str],
    *,
    layout: KVCacheLayout | None = None,
    offset: int = 0,
) -> KVCacheTensor:
    """See :func:`layout_core.diffusion.build_kv_cache_tensor`.

    ``size`` counts the bytes from ``offset`` on, as vLLM-Omni's does; ours counts the whole
    allocation.
    """
    tensor = control.build_kv_cache_tensor(spec, num_blocks, layers, layout=layout, offset=offset)
    return replace(tensor, size=tensor.size - offset)
