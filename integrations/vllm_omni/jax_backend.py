"""The JAX engine as a diffusion attention backend of vLLM-Omni: torch tensors in and out.

Tensors go over by DLPack; a strided one is copied, as JAX arrays are dense. The engine owns its
pool: the cache that vLLM binds to the layers is never read or written.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends import abstract

from backends.jax_gpu.dense import JaxAttentionBackend, JaxAttentionImpl, dense_attention
from integrations.tensors import JaxBridge
from integrations.vllm_omni.impl import OmniBackend, check_construction, check_local_heads
from integrations.vllm_omni.metadata import as_attention_metadata
from integrations.vllm_omni.paged import find_worker
from layout_core.attention import PLATFORM_ALIASES, PagedAttentionContext
from layout_core.errors import UnsupportedError
from layout_core.views import ResolvedLayout


class OmniJaxBackend(OmniBackend, JaxAttentionBackend, abstract.AttentionBackend):
    """:class:`JaxAttentionBackend`, as vLLM-Omni's selector and layers want it."""

    @staticmethod
    def get_impl_cls() -> type[OmniJaxImpl]:
        return OmniJaxImpl


class OmniJaxImpl(JaxAttentionImpl, abstract.AttentionImpl):
    """Attends for one layer, in JAX, on the device of the torch tensors."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_construction(OmniJaxBackend.get_name())
        super().__init__(*args, **kwargs)
        self._bridge = JaxBridge()

    def platform(self, query: Any) -> str:
        kind: str = query.device.type
        return PLATFORM_ALIASES.get(kind, kind)

    @torch.compiler.disable
    def forward(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
        metadata = as_attention_metadata(attn_metadata, self._bridge.to_engine)
        return super().forward(query, key, value, metadata)

    def _dense(self, query: Any, key: Any, value: Any, metadata: Any) -> Any:
        check_local_heads(self, query)
        to_engine = self._bridge.to_engine
        output = dense_attention(
            to_engine(query),
            to_engine(key),
            to_engine(value),
            as_attention_metadata(metadata, to_engine),
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            name=self.prefix,
        )
        return self._bridge.to_torch(output)

    @torch.compiler.disable
    def forward_paged(self, paged_kv_context: Any) -> Any:
        """One layer's call of the active step; see :meth:`PagedWorker.forward`.

        Takes vLLM-Omni's ``DiffusionPagedAttentionContext``, and ours as the base class does.
        """
        if isinstance(paged_kv_context, PagedAttentionContext):
            return super().forward_paged(paged_kv_context)
        return find_worker(paged_kv_context, "jax_gpu", own_pool).forward(paged_kv_context)


def own_pool(engine: Any, resolved: ResolvedLayout, adapter: Any) -> Any:
    """A pool of the engine's own.

    Raises:
        UnsupportedError: a KV connector is configured: it would move the bound cache.
    """
    transfer = adapter.vllm_config.kv_transfer_config
    if transfer is not None:
        raise UnsupportedError(
            f"kv_transfer_config: the JAX engine owns its pool, so the KV connector "
            f"{getattr(transfer, 'kv_connector', transfer)!r} would move a cache that nobody "
            "fills; use torch_cuda, or no connector"
        )
    return engine.allocate(resolved)
