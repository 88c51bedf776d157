"""vLLM's own code as peers of ``pagestride bench``: planning, block manager, CPU attention."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from vllm import _custom_ops as ops
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.core import kv_cache_utils, single_type_kv_cache_manager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

from diffusion_runner.bench.harness import Call, Timed
from diffusion_runner.bench.workload import Data, Geometry, Rows, Tables

BLOCK_SIZE = 16

Prompts = Callable[["count[int]", int], list[tuple[int, ...]]]
"""A counter and blocks of a row -> one new prompt for each row."""


def _spec() -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
    )


def plan_call(num_layers: int, num_blocks: int) -> Call:
    """``get_kv_cache_configs`` on equal layers."""
    specs = {f"model.layers.{i}.attn": _spec() for i in range(num_layers)}
    config = SimpleNamespace(  # what sizing reads of a VllmConfig, in 0.29 and in 0.32
        cache_config=SimpleNamespace(
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
            get_resolved_kv_cache_layout=lambda: KVCacheLayout["LBNHC"],
        ),
        model_config=SimpleNamespace(max_model_len=4096, original_max_model_len=None),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
    )
    single_type_kv_cache_manager.register_all_kvcache_specs(config)
    memory = next(iter(specs.values())).page_size_bytes * num_layers * num_blocks
    return lambda: kv_cache_utils.get_kv_cache_configs(config, [dict(specs)], [memory])


def _manager(num_blocks: int, caching: bool) -> KVCacheManager:
    return KVCacheManager(
        KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], _spec())]),
        max_model_len=1 << 20,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        enable_caching=caching,
    )


def build_call(num_blocks: int) -> Call:
    """Building a manager."""
    return lambda: _manager(num_blocks, True)


def manager_call(num_blocks: int, caching: bool, prompts: Prompts, blocks: int = 256) -> Call:
    """The manager driven as vLLM-Omni drives it: look up, allocate, cache, free."""
    single_type_kv_cache_manager.register_all_kvcache_specs(VllmConfig())
    hash_fn = get_hash_fn_by_name("sha256")
    kv_cache_utils.init_none_hash(hash_fn)
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK_SIZE, hash_fn)
    manager, numbers = _manager(num_blocks, caching), count()

    def call() -> Timed:
        requests = [
            Request(f"row-{index}", list(row), SamplingParams(max_tokens=1), None)
            for index, row in enumerate(prompts(numbers, blocks))
        ]
        start = time.thread_time_ns()
        if caching:
            for request in requests:
                request.block_hashes = hasher(request)
        found = [manager.get_computed_blocks(request) for request in requests]
        for request, (held, hit, *_) in zip(requests, found, strict=True):
            got = manager.allocate_slots(
                request,
                num_new_tokens=request.num_tokens - hit,
                num_new_computed_tokens=hit,
                new_computed_blocks=held,
                delay_cache_blocks=True,
                full_sequence_must_fit=True,
            )
            if got is None:
                raise RuntimeError("the request was not admitted")
        if caching:
            for request in requests:
                manager.cache_blocks(request, request.num_tokens - BLOCK_SIZE)
        for request in reversed(requests):
            manager.free(request)
        return Timed((time.thread_time_ns() - start) / 1e9)

    return call


def cpu_attention(
    engine: Any, geometry: Geometry, rows: Rows, data: Data
) -> Callable[[], torch.Tensor]:
    """vLLM's C++ kernel over its own pages, which keep K transposed: no reader of our pool."""
    tables = Tables(rows, geometry, shuffled=True)
    dtype = getattr(torch, geometry.dtype)
    heads, size, page = geometry.num_kv_heads, geometry.head_size, geometry.block_size
    cache = torch.zeros((tables.num_blocks, heads, 2 * page, size), dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    isa = _get_attn_isa(dtype, page, size)
    lengths = [keys for _, keys in rows.shapes]
    slots = torch.from_numpy(tables.slots(lengths))
    key, value = engine.from_numpy(data.key), engine.from_numpy(data.value)
    ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, slots, isa)
    block_table = torch.zeros((len(lengths), max(map(geometry.blocks, lengths))), dtype=torch.int32)
    at = 0
    for index, length in enumerate(lengths):
        ids = slots[at : at + length : page] // page
        block_table[index, : len(ids)] = ids.to(torch.int32)
        at += length
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.tensor([0, *(q for q, _ in rows.shapes)], dtype=torch.int32)
    starts = starts.cumsum(0, dtype=torch.int32)
    query = engine.from_numpy(data.query)
    output = torch.empty_like(query)
    metadata = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(lengths),
        num_heads=geometry.num_heads,
        num_kv_heads=heads,
        head_dim=size,
        seq_lens=seq_lens,
        dtype=dtype,
        query_start_loc=starts,
        causal=False,
        sliding_window_size=-1,
        isa=isa,
        enable_kv_split=True,
    )

    def call() -> torch.Tensor:
        ops.cpu_attention_with_kv_cache(
            query=query,
            key_cache=key_cache,
            value_cache=value_cache,
            output=output,
            query_start_loc=starts,
            seq_lens=seq_lens,
            scale=size**-0.5,
            causal=False,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=block_table,
            softcap=0.0,
            scheduler_metadata=metadata,
            s_aux=None,
        )
        return output

    return call
