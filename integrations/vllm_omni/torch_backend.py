"""The torch engine as a diffusion attention backend of vLLM-Omni."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends import abstract

from backends.torch_cuda.allocator import TorchPool, pool_on
from backends.torch_cuda.dense import TorchAttentionBackend, TorchAttentionImpl, dense_attention
from integrations.vllm_omni.impl import OmniBackend, check_construction, check_local_heads
from integrations.vllm_omni.metadata import as_attention_metadata
from integrations.vllm_omni.paged import find_worker
from layout_core.attention import PagedAttentionContext
from layout_core.errors import PoolError
from layout_core.views import LayerView, ResolvedLayout


class OmniTorchBackend(OmniBackend, TorchAttentionBackend, abstract.AttentionBackend):
    """:class:`TorchAttentionBackend`, as vLLM-Omni's selector and layers want it."""

    @staticmethod
    def get_impl_cls() -> type[OmniTorchImpl]:
        return OmniTorchImpl


class OmniTorchImpl(TorchAttentionImpl, abstract.AttentionImpl):
    """Attends for one layer; dense calls run where the tensors are, on the CPU too.

    Paged calls use the cache that vLLM bound to the layers: it is the pool.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_construction(OmniTorchBackend.get_name())
        super().__init__(*args, **kwargs)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: Any = None,
    ) -> torch.Tensor:
        return super().forward(query, key, value, as_attention_metadata(attn_metadata))

    def _dense(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, metadata: Any
    ) -> torch.Tensor:
        check_local_heads(self, query)
        return dense_attention(
            query,
            key,
            value,
            as_attention_metadata(metadata),
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            name=self.prefix,
        )

    @torch.compiler.disable
    def forward_paged(self, paged_kv_context: Any) -> Any:
        """One layer's call of the active step; see :meth:`PagedWorker.forward`.

        Takes vLLM-Omni's ``DiffusionPagedAttentionContext``, and ours as the base class does.
        """
        if isinstance(paged_kv_context, PagedAttentionContext):
            return super().forward_paged(paged_kv_context)
        return find_worker(paged_kv_context, "torch_cuda", bound_pool).forward(paged_kv_context)


def bound_pool(engine: Any, resolved: ResolvedLayout, adapter: Any) -> TorchPool:
    """The allocation that vLLM bound to an adapter's layers, as a pool of ours.

    Raises:
        PoolError: a layer without a cache, or with one that is not where the plan has it.
    """
    storage: torch.UntypedStorage | None = None
    for view in resolved.layers:
        cache = adapter.layers[view.name].kv_cache
        if cache is None:
            raise PoolError(f"layer {view.name!r}: no cache is bound to it")
        own = cache.untyped_storage()
        if storage is not None and own.data_ptr() != storage.data_ptr():
            raise PoolError(
                f"layer {view.name!r}: its cache lies in another allocation than that of "
                f"{resolved.layers[0].name!r}; the plan has one for all"
            )
        storage = own
        _check_bound(view, cache)
    if storage is None:
        raise PoolError("adapter: the plan has no layers, so it has no pool")
    device = adapter.layers[resolved.layers[0].name].kv_cache.device
    whole = torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    return pool_on(resolved, whole[: resolved.size_bytes])  # an owner may round its bytes up


def _check_bound(view: LayerView, cache: torch.Tensor) -> None:
    """Raise unless a bound ``[B, H, N, C]`` tensor addresses what the plan says."""
    size = cache.element_size()
    at = cache.storage_offset() * size
    shape = (*cache.shape[:-1], cache.shape[-1] * size)
    strides = tuple(stride * size for stride in cache.stride()[:-1])
    followed = [
        (mine, theirs)
        for length, mine, theirs in zip(view.shape[:3], view.strides[:3], strides, strict=False)
        if length > 1
    ]
    if (at, shape) != (view.offset, view.shape) or any(a != b for a, b in followed):
        raise PoolError(
            f"layer {view.name!r}: its cache lies at byte {at} with shape {shape} and strides "
            f"{strides}, the plan has byte {view.offset}, shape {view.shape} and strides "
            f"{view.strides[:3]}"
        )
