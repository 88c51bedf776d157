"""The real vLLM's objects for our cases. Importing this module imports vLLM.

``VllmConfig`` and its cache, scheduler and parallel parts are vLLM's own. The model config is a
double with the two lengths that sizing reads: the real one needs a model's files.
"""

from __future__ import annotations

import logging
import os
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import vllm
from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from layout_core import KVCacheLayout
from tests.conformance.cases import SpecCase

interface: Any = kv_cache_interface
utils: Any = kv_cache_utils

VERSION: str = vllm.__version__.split("+")[0]
IS_032 = tuple(int(part) for part in VERSION.split(".")[:2]) >= (0, 32)

REFUSALS = (
    AssertionError,
    ValueError,
    NotImplementedError,
    TypeError,
    RuntimeError,
    StopIteration,
)
"""What vLLM raises where it refuses, torch's own refusals of a view included."""

LATER_FIELDS = ("block_stride_alignment", "dcp_sharded")
"""Spec fields that came with 0.32."""

logging.disable(logging.WARNING)
KVCacheSpecRegistry._ensure_registered()

_CONFIG: list[VllmConfig] = []


def build_spec(case: SpecCase) -> Any:
    """vLLM's spec of a case."""
    fields = dict(case.fields)
    if not IS_032:
        for name in LATER_FIELDS:
            fields.pop(name, None)
    if "dtype" in fields:
        fields["dtype"] = getattr(torch, str(fields["dtype"]))
    if "kv_quant_mode" in fields:
        fields["kv_quant_mode"] = interface.KVQuantMode(fields["kv_quant_mode"])
    return getattr(interface, case.kind)(**fields)


def layout_of(layout: KVCacheLayout) -> Any:
    """vLLM's member of the same name."""
    return interface.KVCacheLayout[layout.name]


def vllm_config(
    *,
    layout: KVCacheLayout | None = None,
    max_model_len: int = 1024,
    original_max_model_len: int | None = None,
    max_num_batched_tokens: int = 2048,
    max_num_encoder_input_tokens: int = 2048,
    dcp: int = 1,
    block_size: int = 16,
    num_gpu_blocks_override: int | None = None,
    enable_prefix_caching: bool = True,
    prefix_match_unit: int | None = None,
    disable_hybrid: bool = False,
    connector: bool = False,
) -> Any:
    """A ``VllmConfig`` with what sizing and resolution read. One object, set anew each time."""
    if not _CONFIG:
        scheduler = SchedulerConfig(max_model_len=1024, is_encoder_decoder=False)
        _CONFIG.append(
            VllmConfig(
                cache_config=CacheConfig(block_size=16),
                scheduler_config=scheduler,
                parallel_config=ParallelConfig(),
            )
        )
    config: Any = _CONFIG[0]
    config.model_config = SimpleNamespace(
        max_model_len=max_model_len, original_max_model_len=original_max_model_len
    )
    config.cache_config.kv_cache_layout = None if layout is None else layout.name
    config.cache_config.block_size = block_size
    config.cache_config.num_gpu_blocks_override = num_gpu_blocks_override
    config.cache_config.enable_prefix_caching = enable_prefix_caching
    config.cache_config.prefix_match_unit = prefix_match_unit
    config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
    config.scheduler_config.max_num_encoder_input_tokens = max_num_encoder_input_tokens
    config.scheduler_config.disable_hybrid_kv_cache_manager = disable_hybrid
    config.parallel_config.decode_context_parallel_size = dcp
    config.kv_transfer_config = SimpleNamespace(kv_connector=None) if connector else None
    return config


def group_spec(layer_names: list[str], spec: Any) -> Any:
    """vLLM's group."""
    return interface.KVCacheGroupSpec(list(layer_names), spec)


def describe(spec: Any) -> dict[str, object]:
    """What a spec of either side says, in the words of both.

    ``dcp_sharded`` is compared as it works: 0.29 has no such field and shards attention.
    """
    kind = type(spec).__name__
    if kind == "UniformTypeKVCacheSpecs":
        inner = {name: describe(layer) for name, layer in spec.kv_cache_specs.items()}
        return {"kind": kind, "block_size": spec.block_size, "specs": inner}
    out: dict[str, object] = {"kind": kind}
    for name in _FIELDS[kind]:
        value = getattr(spec, name, None)
        if name == "dtype":
            value = str(value).removeprefix("torch.")
        elif name == "kv_quant_mode":
            value = int(value)
        elif name == "block_stride_alignment" and hasattr(value, "base"):
            value = ("multiple of", value.base)
        elif isinstance(value, Fraction) and value.denominator == 1:
            value = int(value)
        out[name] = value
    sharded = getattr(spec, "dcp_sharded", None)
    out["dcp_sharded"] = True if sharded is None else sharded
    for name in ("num_heads", "num_states", "state_content_size_bytes", "page_size_bytes"):
        out[name] = getattr(spec, name)
    return out


_ATTENTION = [
    "block_size",
    "block_stride_alignment",
    "num_kv_heads",
    "head_size",
    "dtype",
    "head_size_v",
    "kv_quant_mode",
    "page_size_padded",
    "num_head_slots",
    "state_content_bytes",
    "tokens_per_state",
]
_FULL = [*_ATTENTION, "sliding_window", "attention_chunk_size", "non_causal"]
_MLA = ["cache_dtype_str", "alignment", "model_version"]
_FIELDS: dict[str, list[str]] = {
    "FullAttentionSpec": _FULL,
    "MLAAttentionSpec": [*_FULL, *_MLA, "non_causal_multi_token_decode"],
    "HiddenStateCacheSpec": [*_FULL, *_MLA, "non_causal_multi_token_decode"],
    "SinkFullAttentionSpec": [*_FULL, "sink_len"],
    "RSWASpec": [*_FULL, "rswa_window"],
    "SlidingWindowSpec": [*_ATTENTION, "sliding_window", "extra_retained_tokens"],
    "SlidingWindowMLASpec": [*_ATTENTION, "sliding_window", "extra_retained_tokens", *_MLA],
    "ChunkedLocalAttentionSpec": [*_ATTENTION, "attention_chunk_size"],
    "CrossAttentionSpec": _ATTENTION,
    "EncoderOnlyAttentionSpec": _ATTENTION,
}


def describe_groups(groups: Any) -> list[dict[str, object]]:
    """Groups of either side."""
    return [
        {
            "layers": list(group.layer_names),
            "spec": describe(group.kv_cache_spec),
            "eagle": group.is_eagle_group,
            "transfer": group.enable_kv_transfer,
        }
        for group in groups
    ]


def describe_config(config: Any) -> dict[str, object]:
    """A ``KVCacheConfig`` of either side, without the carried layout name."""
    return {
        "num_blocks": config.num_blocks,
        "tensors": [
            (t.size, list(t.layers), t.layer_stride, t.block_stride, t.offset)
            for t in config.kv_cache_tensors
        ],
        "groups": describe_groups(config.kv_cache_groups),
    }
