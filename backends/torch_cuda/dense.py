"""Dense attention on ``[B, S, H, D]``, and the class that states what this engine can do.

What a query sees is planned by :func:`layout_core.dense.plan_dense`; the calls are those of
:mod:`.kernels.segments`, as in a paged step. A mask only removes keys from what the plan shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backends.torch_cuda import paged
from backends.torch_cuda.dtypes import COMPUTE_DTYPES, core_dtype
from backends.torch_cuda.kernels.sdpa import accumulator, fused_attention, interval_mask
from backends.torch_cuda.kernels.segments import Mode, Segment, segment_row
from layout_core.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    PagedAttentionContext,
    check_joint,
)
from layout_core.dense import DensePlan, DenseRow, plan_dense, uses_video_layout
from layout_core.errors import TensorError, UnsupportedError
from layout_core.packages import check_installed

QKV_LAYOUT = "BSND"


class TorchAttentionBackend(AttentionBackend):
    """The torch engine's capabilities, on the CPU and on GPUs alike."""

    # Strides are data here: any layout is followed, none demanded or forbidden. The attribute
    # itself is None, as callers (vLLM-Omni's layout check, too) look at it before they call it.
    indexes_kv_by_block_stride = None  # type: ignore[assignment]

    supports_piecewise_spans = True
    supports_paged_kv = True
    supports_prefix_kv_slicing = True
    supported_platforms = ("cuda", "cpu")

    @staticmethod
    def get_name() -> str:
        return "PAGESTRIDE_TORCH"

    @staticmethod
    def get_impl_cls() -> type[TorchAttentionImpl]:
        return TorchAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata[Any]]:
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder[Any]]:
        return AttentionMetadataBuilder

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return []

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        return True

    @classmethod
    def supports_packed_mask_free(cls) -> bool:
        return True

    @classmethod
    def supports_multi_doc_packed_varlen(cls) -> bool:
        return True

    @classmethod
    def validate_available(cls) -> None:
        check_installed(f"attention backend {cls.get_name()}", ("torch",), "torch")


class TorchAttentionImpl(AttentionImpl[torch.Tensor]):
    """Attends for one layer, dense or paged; see :class:`layout_core.attention.AttentionImpl`."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        qkv_layout: str | None = None,
        backend_kwargs: dict[str, Any] | None = None,
        **extra: Any,
    ) -> None:
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or kv_heads < 1 or num_heads % kv_heads:
            raise TensorError(
                f"num_heads: layer {prefix!r} expects a multiple of {kv_heads} KV heads, "
                f"got {num_heads}"
            )
        if qkv_layout not in (None, QKV_LAYOUT):
            raise UnsupportedError(
                f"qkv_layout: layer {prefix!r} expects None or {QKV_LAYOUT!r}, got {qkv_layout!r}"
            )
        if backend_kwargs:
            raise UnsupportedError(
                f"backend_kwargs: {TorchAttentionBackend.get_name()} has no options, got "
                f"{sorted(backend_kwargs)}"
            )
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_size = head_size
        self.softmax_scale = softmax_scale
        self.causal = causal
        self.prefix = prefix

    def platform(self, query: torch.Tensor) -> str:
        kind = query.device.type
        return "rocm" if kind == "cuda" and torch.version.hip is not None else kind

    def forward_cpu(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        return self._dense(query, key, value, attn_metadata)

    def forward_cuda(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        return self._dense(query, key, value, attn_metadata)

    def forward_paged(self, context: PagedAttentionContext[torch.Tensor, Any, Any]) -> torch.Tensor:
        output, context.cell.pool = paged.forward_paged(
            context.cell.pool,
            context.layer,
            context.query,
            context.key,
            context.value,
            context.batch,
            softmax_scale=self.softmax_scale,
            softcap=context.softcap,
            k_scale=context.k_scale,
            v_scale=context.v_scale,
        )
        return output

    def _dense(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: AttentionMetadata[torch.Tensor] | None,
    ) -> torch.Tensor:
        heads = (self.num_heads, self.num_kv_heads, self.head_size)
        return dense_attention(
            query,
            key,
            value,
            metadata,
            heads=heads,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            name=self.prefix,
        )


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: AttentionMetadata[torch.Tensor] | None = None,
    *,
    heads: tuple[int, int, int] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    name: str = "",
) -> torch.Tensor:
    """Dense attention by intervals and, where one is given, a mask.

    ``cu_seqlens`` given as device tensors are read once by the host; given as lists of ints
    they cost no wait.

    Args:
        query: ``[B, Sq, Hq, D]``.
        key, value: ``[B, Sk, Hkv, D]`` and ``[B, Sk, Hkv, Dv]``.
        metadata: see :class:`~layout_core.attention.AttentionMetadata`.
        heads: ``(Hq, Hkv, D)`` to check against; ``None``: whatever comes.
        softmax_scale: ``None`` is ``D ** -0.5``.
        causal: the layer's rule.
        name: the layer's, for messages.

    Returns:
        ``[B, Sj + Sq, Hq, Dv]``; zero where a query sees nothing.

    Raises:
        TensorError, VisibilityError: arguments that contradict each other.
    """
    mask = None
    if metadata is not None:
        check_joint(metadata)
        sizes = (query.shape[1], key.shape[1])
        query, key, value = _join(query, key, value, metadata)
        if not uses_video_layout(metadata):  # else the mask masks nothing but the padding
            mask = _joined_mask(metadata, sizes, query, key)
    _check_dense(query, key, value, heads, name)
    plan = plan_dense(
        query.shape[0],
        query.shape[1],
        key.shape[1],
        causal=causal,
        metadata=metadata,
        cu_seqlens_q=_bounds(metadata, "cu_seqlens_q"),
        cu_seqlens_k=_bounds(metadata, "cu_seqlens_k"),
    )
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    shape = (*query.shape[:3], value.shape[-1])
    if plan.flatten:
        if mask is not None and query.shape[0] > 1:
            raise UnsupportedError(
                f"attn_mask: layer {name!r} cannot take one beside cu_seqlens over "
                f"{query.shape[0]} samples"
            )
        query, key, value = (x.flatten(0, 1)[None] for x in (query, key, value))
    # [B, H, S, D] views
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if mask is not None:
        out = _masked(q, k, v, plan, mask, scale)
    else:
        out = _unmasked(q, k, v, plan, scale)
    return out.transpose(1, 2).reshape(shape)


def _check_dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: tuple[int, int, int] | None,
    name: str,
) -> None:
    where = f"layer {name!r}"
    for argument, array in (("query", query), ("key", key), ("value", value)):
        if array.dim() != 4:
            raise TensorError(f"{argument}: {where} expects [B, S, H, D], got {list(array.shape)}")
        if array.dtype != query.dtype or array.device != query.device:
            raise TensorError(
                f"{argument}: {where} expects {query.dtype} on {query.device} as the query, got "
                f"{array.dtype} on {array.device}"
            )
    dtype = core_dtype(query.dtype)
    if dtype.name not in COMPUTE_DTYPES:
        raise TensorError(f"query: {where} expects one of {', '.join(COMPUTE_DTYPES)}, got {dtype}")
    batch, _, num_heads, size = query.shape
    if heads is not None and (num_heads, key.shape[2], size) != heads:
        raise TensorError(
            f"query, key: {where} expects {heads[0]} query heads, {heads[1]} KV heads of size "
            f"{heads[2]}, got {num_heads}, {key.shape[2]} and {size}"
        )
    if key.shape[0] != batch or key.shape[3] != size or num_heads % max(1, key.shape[2]):
        raise TensorError(
            f"key: {where} expects [{batch}, Sk, Hkv, {size}] with Hkv dividing {num_heads}, got "
            f"{list(key.shape)}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise TensorError(
            f"value: {where} expects {[*key.shape[:3]]} and a head size, got {list(value.shape)}"
        )


def _join(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: AttentionMetadata[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def join(joint: torch.Tensor | None, own: torch.Tensor) -> torch.Tensor:
        if joint is None:
            return own
        parts = (joint, own) if metadata.joint_strategy == "front" else (own, joint)
        return torch.cat(parts, dim=1)

    return (
        join(metadata.joint_query, query),
        join(metadata.joint_key, key),
        join(metadata.joint_value, value),
    )


def _joined_mask(
    metadata: AttentionMetadata[torch.Tensor],
    own: tuple[int, int],
    query: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor | None:
    """The mask of the joined sequence, broadcastable to ``[B, H, Sq, Sk]``; bool or float."""
    mask, joint = metadata.attn_mask, metadata.joint_attn_mask
    batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    joint_keys = keys - own[1]
    if mask is None and joint is None:
        return None
    if joint_keys and (joint is not None or (mask is not None and mask.shape[-1] == own[1])):
        mask = _joined_key_mask(mask, joint, batch, own[1], joint_keys, metadata, key.device)
    assert mask is not None  # one of the two was given
    if not mask.dtype.is_floating_point and mask.dtype != torch.bool:
        mask = mask != 0
    shape = tuple(mask.shape)
    if shape == (batch, keys):
        mask = mask[:, None, None, :]
    elif shape == (queries, keys):
        mask = mask[None, None]
    elif shape == (batch, queries, keys):
        mask = mask[:, None]
    full = (batch, query.shape[2], queries, keys)
    if mask.dim() != 4 or any(a not in (1, b) for a, b in zip(mask.shape, full, strict=True)):
        raise TensorError(
            f"attn_mask: expected [{batch}, {keys}], [{queries}, {keys}], [{batch}, {queries}, "
            f"{keys}] or what broadcasts to {list(full)}, got {list(shape)}"
        )
    if mask.device != query.device:
        raise TensorError(f"attn_mask: expected on {query.device}, got on {mask.device}")
    return mask


def _joined_key_mask(
    mask: torch.Tensor | None,
    joint: torch.Tensor | None,
    batch: int,
    own_keys: int,
    joint_keys: int,
    metadata: AttentionMetadata[torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """``[B, Sj + Sk]`` from the masks of the two parts; one that is missing masks nothing.

    Float where one of them is.
    """
    parts: list[torch.Tensor] = []
    for name, part, count in (
        ("joint_attn_mask", joint, joint_keys),
        ("attn_mask", mask, own_keys),
    ):
        if part is None:
            part = torch.ones(batch, count, dtype=torch.bool, device=device)
        if tuple(part.shape) != (batch, count):
            raise TensorError(f"{name}: expected [{batch}, {count}], got {list(part.shape)}")
        parts.append(part if part.dtype.is_floating_point else part != 0)
    if any(part.dtype.is_floating_point for part in parts):  # to add: 0 or −inf for a boolean
        parts = [_additive(part) for part in parts]
    return torch.cat(parts if metadata.joint_strategy == "front" else parts[::-1], dim=1)


def _additive(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(torch.float32)
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -torch.inf)


def _bounds(metadata: AttentionMetadata[torch.Tensor] | None, name: str) -> Sequence[int] | None:
    bounds = None if metadata is None else metadata.extra.get(name)
    if bounds is None:
        return None
    if isinstance(bounds, torch.Tensor):
        return [int(bound) for bound in bounds.tolist()]
    return [int(bound) for bound in bounds]


def _samples(row: DenseRow, batch: int) -> slice:
    return slice(0, batch) if row.sample is None else slice(row.sample, row.sample + 1)


def _intervals(
    row: DenseRow, start: int, end: int, first: int, last: int, like: torch.Tensor
) -> torch.Tensor:
    """The mask of a row's queries ``[start, end)`` over the keys ``[first, last)``."""
    lo, hi = (torch.tensor(x[start:end], device=like.device) for x in (row.lo, row.hi))
    return interval_mask(lo, hi, first, last)


def _unmasked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: DensePlan, scale: float
) -> torch.Tensor:
    """Attention of all rows, a call for each segment; ``[B, Hq, Sq, Dv]``."""
    batch, heads, queries, _ = q.shape
    calls = [(row, segment) for row in plan.rows for segment in segment_row(row.lo, row.hi)]

    def attend(row: DenseRow, s: Segment) -> torch.Tensor:
        at, seen = _samples(row, batch), slice(s.first, s.last)
        mask = None
        if s.mode is Mode.MASKED:
            mask = _intervals(row, s.start, s.end, s.first, s.last, q)
        part = q[at, :, row.start + s.start : row.start + s.end]
        return fused_attention(part, k[at, :, seen], v[at, :, seen], s.mode, mask, scale)

    if len(calls) == 1:
        row, segment = calls[0]
        if row.sample is None and segment.end - segment.start == queries:
            return attend(row, segment)
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=q.dtype, device=q.device)
    for row, segment in calls:
        where = slice(row.start + segment.start, row.start + segment.end)
        out[_samples(row, batch), :, where] = attend(row, segment)
    return out


def _masked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: DensePlan,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention with a mask: a key counts where both the interval and the mask show it.

    A call for each row of the plan over the keys that the row sees, so that documents stay apart.
    """
    batch, heads, queries, _ = q.shape
    out = torch.zeros(batch, heads, queries, v.shape[-1], dtype=q.dtype, device=q.device)
    for row in plan.rows:
        first, last = row.key_range()
        if first == last:
            continue
        at, seen = _samples(row, batch), slice(first, last)
        own = slice(row.start, row.start + len(row.lo))
        shown = _intervals(row, 0, len(row.lo), first, last, q)
        part = _cut(mask, (at, slice(None), own, seen))
        out[at, :, own] = _masked_row(
            q[at, :, own], k[at, :, seen], v[at, :, seen], shown, part, scale
        )
    return out


def _cut(mask: torch.Tensor, where: tuple[slice, ...]) -> torch.Tensor:
    """A part of a mask that broadcasts: an axis of size 1 is kept whole."""
    return mask[tuple(slice(None) if n == 1 else s for n, s in zip(mask.shape, where, strict=True))]


def _masked_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    shown: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of ``[B, Hq, Q, D]`` over ``K`` keys; ``shown`` is bool ``[Q, K]``."""
    if mask.dtype == torch.bool:
        visible, bias = shown & mask, None
    else:
        visible, bias = shown & (mask != -torch.inf), mask
    # a key that no query sees may be padding that holds NaN, and 0 * NaN is NaN
    used = visible.any(dim=2).any(dim=1)[:, None, :, None]
    k, v = k.masked_fill(~used, 0), v.masked_fill(~used, 0)
    dtype, wide = q.dtype, accumulator(q.dtype)
    if bias is not None and q.dtype != wide:
        # SDPA would round the bias to the query's type
        q, k, v = q.to(wide), k.to(wide), v.to(wide)
    if bias is not None:
        bias = bias.to(wide).masked_fill(~visible, -torch.inf)
    out = fused_attention(q, k, v, Mode.MASKED, visible if bias is None else bias, scale)
    return out.masked_fill(~visible.any(dim=-1, keepdim=True), 0).to(dtype)
