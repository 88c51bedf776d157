"""vLLM-Omni's ``AttentionMetadata`` as ours: the same fields and meaning, other classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, Final

from layout_core.attention import (
    AttentionMetadata,
    PackedPaddingMetadata,
    QueryRange,
    VideoTokenLayout,
    VideoTokenSpan,
)

_ARRAYS: Final = ("attn_mask", "joint_attn_mask", "joint_query", "joint_key", "joint_value")

UNQUANTISED: Final = "float"
"""vLLM-Omni's word in ``extra["kv_cache_dtype"]`` for a layer or step that is left as it is."""


def as_attention_metadata(
    metadata: Any, convert: Callable[[Any], Any] = lambda array: array
) -> AttentionMetadata[Any] | None:
    """Our metadata with the content of vLLM-Omni's; ours is returned as it is.

    Args:
        metadata: ``None``, ours, or vLLM-Omni's; it is not changed.
        convert: applied to each mask and joint array, to hand them to another framework.
    """
    if metadata is None or isinstance(metadata, AttentionMetadata):
        return metadata
    values = {field.name: getattr(metadata, field.name) for field in fields(AttentionMetadata)}
    for name in _ARRAYS:
        if values[name] is not None:
            values[name] = convert(values[name])
    extra = dict(metadata.extra)
    if extra.get("kv_cache_dtype") == UNQUANTISED:
        del extra["kv_cache_dtype"]
    values["extra"] = extra
    ranges, video, packed = metadata.query_ranges, metadata.video_layout, metadata.packed_padding
    if ranges is not None:
        values["query_ranges"] = tuple(
            QueryRange(r.local_start, r.local_end, r.global_start) for r in ranges
        )
    if video is not None:
        values["video_layout"] = VideoTokenLayout(
            video.prefix_len,
            video.latent_grid,
            video.used_len,
            tuple(VideoTokenSpan(s.start, s.latent_grid, s.role) for s in video.video_spans),
        )
    if packed is not None:
        values["packed_padding"] = PackedPaddingMetadata(
            packed.q_length, packed.kv_length, packed.cu_seqlens_q, packed.cu_seqlens_k
        )
    return AttentionMetadata(**values)
