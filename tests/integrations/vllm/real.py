"""The real vLLM's objects for these checks. Importing this module imports vLLM."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.kv_cache_layout import KVCacheLayout as VllmLayout

from diffusion_runner.model.config import DigitsConfig
from tests.conformance import peers

interface: Any = kv_cache_interface
VERSION = tuple(int(part) for part in peers.VERSION.split(".")[:2])
LAYOUTS: tuple[VllmLayout, ...] = tuple(VllmLayout)


def spec(kind: str = "FullAttentionSpec", **changes: Any) -> Any:
    """vLLM's spec: 2 heads of 8 + 8 float16 elements, blocks of 16 tokens, pages of 1024 bytes."""
    values: dict[str, Any] = {
        "block_size": 16,
        "num_kv_heads": 2,
        "head_size": 8,
        "dtype": torch.float16,
    }
    values.update(changes)
    return getattr(interface, kind)(**values)


def config_of(layout: VllmLayout | None = None, *, max_model_len: int = 64) -> Any:
    """A fresh ``VllmConfig``; all real but for the model config, which needs a model's files."""
    config: Any = VllmConfig(
        cache_config=CacheConfig(block_size=16),
        scheduler_config=SchedulerConfig(max_model_len=max_model_len, is_encoder_decoder=False),
        parallel_config=ParallelConfig(),
    )
    config.model_config = SimpleNamespace(
        max_model_len=max_model_len,
        original_max_model_len=max_model_len,
        hf_config=SimpleNamespace(model_type="digits"),
    )
    if layout is not None:
        config.cache_config.kv_cache_layout = layout.name
    return config


def whole_config(folder: Path, model: DigitsConfig, *, ranks: int, block_size: int) -> Any:
    """A ``VllmConfig`` that is real throughout, for the shapes of our digits model.

    Args:
        folder: where the model's ``config.json`` is written; there are no weights.
    """
    length = model.max_sequence_tokens
    description = {
        "architectures": ["LlamaForCausalLM"],  # vLLM knows none of the digits model's
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": model.mlp_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "num_hidden_layers": model.num_layers,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": length,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(description), encoding="utf-8")
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, max_model_len=length, dtype="float32"
        ),
        cache_config=CacheConfig(block_size=block_size),
        scheduler_config=SchedulerConfig(max_model_len=length, is_encoder_decoder=False),
        parallel_config=ParallelConfig(tensor_parallel_size=ranks),
    )


def copy_of(config: Any) -> Any:
    """The config as it comes out of a pipe."""
    return pickle.loads(pickle.dumps(config))


def cache_of(
    specs: Mapping[str, Any], layout: VllmLayout, *, blocks: int = 5, config: Any = None
) -> Any:
    """vLLM's own ``KVCacheConfig`` for one worker with these layers, its layout recorded."""
    config = config_of(layout) if config is None else config
    config.cache_config.num_gpu_blocks_override = blocks
    memory = blocks * sum(one.page_size_bytes for one in specs.values())
    (made,) = peers.utils.get_kv_cache_configs(config, [dict(specs)], [memory])
    made.kv_cache_layout = layout.name
    return made


class Layer:
    """A layer as vLLM binds one: it keeps the view that it is given."""

    kv_cache: torch.Tensor | None = None

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache


def layers_of(config: Any) -> dict[str, Layer]:
    """A layer for each name that a config places."""
    return {name: Layer() for tensor in config.kv_cache_tensors for name in tensor.layers}


def contents(value: Any) -> Any:
    """An object of vLLM's as nested plain data, its classes included: for exact comparison."""
    if isinstance(value, torch.dtype) or not is_dataclass(value):
        if isinstance(value, Mapping):
            return {key: contents(item) for key, item in value.items()}
        if isinstance(value, str | bytes):
            return value
        if isinstance(value, Sequence):
            return [contents(item) for item in value]
        if type(value).__name__ == "MultipleOf":  # equal to itself alone before 0.32
            return ("MultipleOf", value.base)
        return value
    return (
        type(value),
        {item.name: contents(getattr(value, item.name)) for item in fields(value)},
    )


def strides_that_count(view: torch.Tensor) -> list[int | None]:
    """Strides, but ``None`` where an axis has one element and its stride reaches nothing."""
    return [
        stride if size > 1 else None for size, stride in zip(view.shape, view.stride(), strict=True)
    ]


def place_of(view: torch.Tensor) -> dict[str, Any]:
    """Everything that says which bytes of its allocation a view reaches, and as what."""
    return {
        "shape": tuple(view.shape),
        "dtype": view.dtype,
        "device": view.device.type,
        "offset": view.storage_offset(),
        "strides": strides_that_count(view),
        "allocation": view.untyped_storage().nbytes(),
    }
