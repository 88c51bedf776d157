"""The cache of a run: planned in a control plane, adopted and allocated by a worker.

The two are in one process here, but they talk as if they were not: all that the worker gets is
the ``KVCacheConfig`` with the layout's name on it, and the largest length.
"""

from __future__ import annotations

from dataclasses import dataclass

from diffusion_runner.errors import RunError
from diffusion_runner.model.config import DigitsConfig
from layout_core import (
    AttentionBackend,
    CacheConfig,
    DType,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheLayout,
    ModelConfig,
    ResolvedLayout,
    RunConfig,
    adopt_kv_cache_layout,
    assert_backend_layout_supported,
    block_stride_demand,
    build_native_kv_cache_configs,
    resolve_diffusion_kv_cache_layout,
    resolve_layout,
)


@dataclass(frozen=True, slots=True)
class CachePlan:
    """What the scheduler and the worker each hold after sizing."""

    scheduler_config: KVCacheConfig
    resolved: ResolvedLayout  #: made by the worker from the config it was sent
    max_seq_len: int  #: tokens of the longest row


def blocks_of(seq_len: int, block_size: int) -> int:
    """Blocks of a row of ``seq_len`` tokens."""
    return -(-seq_len // block_size)


def plan_cache(
    config: DigitsConfig,
    *,
    attention_backend: type[AttentionBackend],
    layout: KVCacheLayout | None,
    block_size: int,
    kv_dtype: DType,
    max_seq_len: int,
    num_blocks: int,
    largest_request_blocks: int,
) -> CachePlan:
    """Size a pool of ``num_blocks`` blocks and lay it out.

    Args:
        attention_backend: of the workers' engine. What it says of block strides goes to the
            control plane, and the worker holds it against the layout that it adopts.
        layout: pinned before sizing; ``None`` leaves it to the backend.
        max_seq_len: tokens of the longest row.
        num_blocks: of the pool, the null block included.
        largest_request_blocks: what the largest request needs with all of its rows.

    Raises:
        RunError: the pool cannot hold one request.
        LayoutConflictError: the backend and the pinned layout contradict each other.
    """
    if num_blocks - 1 < largest_request_blocks:
        raise RunError(
            f"pool_blocks: one request needs {largest_request_blocks} blocks of {block_size} "
            f"tokens and the null block, so at least {largest_request_blocks + 1}, got {num_blocks}"
        )
    spec = FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=kv_dtype,
        non_causal=True,
    )
    specs = {f"layers.{layer}.attention": spec for layer in range(config.num_layers)}
    memory = num_blocks * config.num_layers * spec.page_size_bytes

    demand = block_stride_demand([attention_backend])
    control = _run_config(max_seq_len, block_size)
    resolve_diffusion_kv_cache_layout(
        control, indexes_kv_by_block_stride=demand, required_layout=layout
    )
    worker_configs, scheduler_config = build_native_kv_cache_configs(
        control, [specs], [memory], indexes_kv_by_block_stride=demand
    )

    worker = _run_config(max_seq_len, block_size)
    adopt_kv_cache_layout(worker, worker_configs[0])
    assert_backend_layout_supported(worker, attention_backend)
    return CachePlan(scheduler_config, resolve_layout(worker_configs[0]), max_seq_len)


def _run_config(max_seq_len: int, block_size: int) -> RunConfig:
    return RunConfig(
        model_config=ModelConfig(max_model_len=max_seq_len),
        cache_config=CacheConfig(block_size=block_size),
    )
