"""Dense attention on ``[B, S, H, D]``, and the class that states what this engine can do.

What a query sees is planned by :func:`layout_core.dense.plan_dense`; the steps are those of
:mod:`.kernels.xla`, as over pages. A mask only removes keys from what the plan shows. Under
``jit`` the plan's ints are constants of the program, so lengths and boundaries must be ints.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backends.jax_gpu import paged
from backends.jax_gpu.allocator import is_traced
from backends.jax_gpu.donation import Donation
from backends.jax_gpu.dtypes import QUERY_DTYPES
from backends.jax_gpu.kernels import xla
from layout_core.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    PagedAttentionContext,
    check_joint,
)
from layout_core.dense import DensePlan, plan_dense, uses_video_layout
from layout_core.dtypes import DType
from layout_core.errors import TensorError, UnsupportedError
from layout_core.packages import check_installed

QKV_LAYOUT = "BSND"

Metadata = AttentionMetadata[jax.Array]


class JaxAttentionBackend(AttentionBackend):
    """The JAX engine's capabilities, on the CPU and on GPUs alike."""

    # Strides are data here: any layout is followed, none demanded or forbidden. The attribute
    # itself is None, as callers (vLLM-Omni's layout check, too) look at it before they call it.
    indexes_kv_by_block_stride = None  # type: ignore[assignment]

    supports_piecewise_spans = True
    supports_paged_kv = True
    supports_prefix_kv_slicing = True
    supported_platforms = ("cuda", "cpu")

    @staticmethod
    def get_name() -> str:
        return "PAGESTRIDE_JAX"

    @staticmethod
    def get_impl_cls() -> type[JaxAttentionImpl]:
        return JaxAttentionImpl

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
        check_installed(
            f"attention backend {cls.get_name()}", ("jax", "jaxlib", "numpy", "ml_dtypes"), "jax"
        )


class JaxAttentionImpl(AttentionImpl[jax.Array]):
    """Attends for one layer, dense or paged; see :class:`layout_core.attention.AttentionImpl`.

    ``forward_paged`` stores the new pool in the context's cell, a side effect: inside ``jit``
    call the engine's function instead.
    """

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
                f"backend_kwargs: {JaxAttentionBackend.get_name()} has no options, got "
                f"{sorted(backend_kwargs)}"
            )
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_size = head_size
        self.softmax_scale = softmax_scale
        self.causal = causal
        self.prefix = prefix
        self._donation = Donation()

    def platform(self, query: jax.Array) -> str:
        if is_traced(query):  # a program may run anywhere: JAX compiles it for its device
            return "cpu"
        kind = next(iter(query.devices())).platform
        return "cuda" if kind == "gpu" else kind

    def forward_cpu(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        attn_metadata: Metadata | None = None,
    ) -> jax.Array:
        return self._dense(query, key, value, attn_metadata)

    def forward_cuda(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        attn_metadata: Metadata | None = None,
    ) -> jax.Array:
        return self._dense(query, key, value, attn_metadata)

    def forward_paged(self, context: PagedAttentionContext[jax.Array, Any, Any]) -> jax.Array:
        output, context.cell.pool = paged.forward_paged(
            context.cell.pool,
            context.layer,
            context.query,
            context.key,
            context.value,
            context.batch,
            self._donation,
            softmax_scale=self.softmax_scale,
            softcap=context.softcap,
            k_scale=context.k_scale,
            v_scale=context.v_scale,
        )
        return output

    def _dense(
        self, query: jax.Array, key: jax.Array, value: jax.Array, metadata: Metadata | None
    ) -> jax.Array:
        return dense_attention(
            query,
            key,
            value,
            metadata,
            heads=(self.num_heads, self.num_kv_heads, self.head_size),
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            name=self.prefix,
        )


def dense_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    metadata: Metadata | None = None,
    *,
    heads: tuple[int, int, int] | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    name: str = "",
) -> jax.Array:
    """Dense attention by intervals and, where one is given, a mask.

    ``cu_seqlens`` given as device arrays are read once by the host, which no program can do:
    under ``jit`` give them as ints.

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
        own_keys = key.shape[1]
        query, key, value = _join(query, key, value, metadata)
        if not uses_video_layout(metadata):  # else the mask masks nothing but the padding
            mask = _joined_mask(metadata, own_keys, query, key)
    _check_dense(query, key, value, heads, name)
    plan = plan_dense(
        query.shape[0],
        query.shape[1],
        key.shape[1],
        causal=causal,
        metadata=metadata,  # its arrays are not read
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
        query, key, value = (x.reshape(1, -1, *x.shape[2:]) for x in (query, key, value))
    intervals = _intervals(plan, query.shape[0], query.shape[1])
    output: jax.Array = _dense_program(query, key, value, *intervals, mask, scale)
    return output.reshape(shape)


def _dense(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: jax.Array,
    key_ranges: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    mask: jax.Array | None,
    scale: float,
) -> jax.Array:
    return xla.dense_attention(query, key, value, rows, key_ranges, lo, hi, mask, scale=scale)


_dense_program = jax.jit(_dense)


Int32 = np.ndarray[Any, np.dtype[np.int32]]


def _intervals(plan: DensePlan, batch: int, tokens: int) -> tuple[Int32, Int32, Int32, Int32]:
    """``rows, key_ranges, lo, hi`` of :func:`.kernels.xla.dense_attention`.

    Documents are padded to a power of two with rows of no query, so that other counts of them
    run the same program. Rows of samples all cover one range of queries; where they differ in
    length, the rest of the shorter ones sees nothing.
    """
    lo, hi = np.zeros((batch, tokens), np.int32), np.zeros((batch, tokens), np.int32)
    count = len(plan.rows) if plan.flatten else 1
    rows = np.zeros((1 << max(count - 1, 0).bit_length(), 2), np.int32)
    key_ranges = np.zeros((batch, len(rows), 2), np.int32)
    if not plan.flatten:
        rows[0] = 0, tokens
    for index, row in enumerate(plan.rows):
        samples = slice(None) if row.sample is None else row.sample
        end = row.start + len(row.lo)
        lo[samples, row.start : end] = row.lo
        hi[samples, row.start : end] = row.hi
        if plan.flatten:
            rows[index] = row.start, end
        key_ranges[samples, index if plan.flatten else 0] = row.key_range()
    return rows, key_ranges, lo, hi


def _check_dense(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    heads: tuple[int, int, int] | None,
    name: str,
) -> None:
    where = f"layer {name!r}"
    for argument, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim != 4:
            raise TensorError(f"{argument}: {where} expects [B, S, H, D], got {list(array.shape)}")
        if array.dtype != query.dtype:
            raise TensorError(
                f"{argument}: {where} expects {query.dtype} as the query, got {array.dtype}"
            )
    dtype = DType.parse(query.dtype)
    if dtype.name not in QUERY_DTYPES:
        raise TensorError(f"query: {where} expects one of {', '.join(QUERY_DTYPES)}, got {dtype}")
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
    query: jax.Array, key: jax.Array, value: jax.Array, metadata: Metadata
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def join(joint: jax.Array | None, own: jax.Array) -> jax.Array:
        if joint is None:
            return own
        parts = (joint, own) if metadata.joint_strategy == "front" else (own, joint)
        return jnp.concatenate(parts, axis=1)

    return (
        join(metadata.joint_query, query),
        join(metadata.joint_key, key),
        join(metadata.joint_value, value),
    )


def _joined_mask(
    metadata: Metadata, own_keys: int, query: jax.Array, key: jax.Array
) -> jax.Array | None:
    """The mask of the joined sequence, ``[B|1, Hq|1, Sq|1, Sk|1]``; bool or float."""
    mask, joint = metadata.attn_mask, metadata.joint_attn_mask
    batch, queries, keys = query.shape[0], query.shape[1], key.shape[1]
    joint_keys = keys - own_keys
    if mask is None and joint is None:
        return None
    if joint_keys and (joint is not None or (mask is not None and mask.shape[-1] == own_keys)):
        mask = _joined_key_mask(metadata, batch, own_keys, joint_keys)
    assert mask is not None  # one of the two was given
    if not jnp.issubdtype(mask.dtype, jnp.floating) and mask.dtype != jnp.bool_:
        mask = mask != 0
    shape = tuple(mask.shape)
    if shape == (batch, keys):
        mask = mask[:, None, None, :]
    elif shape == (queries, keys):
        mask = mask[None, None]
    elif shape == (batch, queries, keys):
        mask = mask[:, None]
    full = (batch, query.shape[2], queries, keys)
    if mask.ndim != 4 or any(a not in (1, b) for a, b in zip(mask.shape, full, strict=True)):
        raise TensorError(
            f"attn_mask: expected [{batch}, {keys}], [{queries}, {keys}], [{batch}, {queries}, "
            f"{keys}] or what broadcasts to {list(full)}, got {list(shape)}"
        )
    return mask


def _joined_key_mask(metadata: Metadata, batch: int, own_keys: int, joint_keys: int) -> jax.Array:
    """``[B, Sj + Sk]`` from the masks of the two parts; one that is missing masks nothing.

    Float where one of them is.
    """
    parts: list[jax.Array] = []
    for name, part, count in (
        ("joint_attn_mask", metadata.joint_attn_mask, joint_keys),
        ("attn_mask", metadata.attn_mask, own_keys),
    ):
        if part is None:
            part = jnp.ones((batch, count), jnp.bool_)
        if tuple(part.shape) != (batch, count):
            raise TensorError(f"{name}: expected [{batch}, {count}], got {list(part.shape)}")
        parts.append(part if jnp.issubdtype(part.dtype, jnp.floating) else part != 0)
    if any(jnp.issubdtype(part.dtype, jnp.floating) for part in parts):
        parts = [_additive(part) for part in parts]
    return jnp.concatenate(parts if metadata.joint_strategy == "front" else parts[::-1], axis=1)


def _additive(mask: jax.Array) -> jax.Array:
    if mask.dtype != jnp.bool_:
        return mask.astype(jnp.float32)
    return jnp.where(mask, jnp.float32(0), -jnp.inf)


def _bounds(metadata: Metadata | None, name: str) -> Sequence[int] | None:
    bounds = None if metadata is None else metadata.extra.get(name)
    if bounds is None:
        return None
    if is_traced(bounds):
        raise TensorError(
            f"extra[{name!r}]: inside a program expected ints, got a traced array; its values are "
            "not known when the program is built"
        )
    return [int(bound) for bound in np.asarray(bounds)]
