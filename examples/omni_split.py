"""vLLM-Omni's control plane and a worker of ours in two processes, with a checked result.

The control plane is vLLM-Omni's; its ``KVCacheConfig`` and the ``DiffusionKVMetadata`` of two CFG
rows go over a pipe. The worker adopts the layout, allocates, installs the rows and attends over
their pages: a prefill, then a denoise step that rewrites the target alone. Run it with
``python -m examples.omni_split --backend torch_cuda``.
"""

from __future__ import annotations

import argparse
import multiprocessing
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np

import backends
import layout_core
from block_manager import RowTable

LAYERS = ("blocks.0.attn", "blocks.1.attn")
HEADS, KV_HEADS, SIZE, BLOCK_SIZE = 4, 2, 32, 16
PREFIXES, TARGET, MAX_LEN = (40, 33), 20, 128


def control_plane() -> tuple[Any, Any]:
    """vLLM-Omni's side: a worker's config, and the allocation of a request."""
    import torch
    from vllm.config import CacheConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm_omni.diffusion.diffusion_kv.initialization import build_native_kv_cache_configs
    from vllm_omni.diffusion.diffusion_kv.manager import DiffusionKVCacheManager
    from vllm_omni.diffusion.diffusion_kv.request import DiffusionKVRequest

    config: Any = VllmConfig(cache_config=CacheConfig(block_size=BLOCK_SIZE))
    config.model_config = SimpleNamespace(max_model_len=MAX_LEN, original_max_model_len=MAX_LEN)
    cell = {"num_kv_heads": KV_HEADS, "head_size": SIZE, "dtype": torch.float32}
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, **cell, non_causal=True)
    specs, memory = dict.fromkeys(LAYERS, spec), 33 * len(LAYERS) * spec.page_size_bytes
    demand = {"indexes_kv_by_block_stride": True}
    workers, scheduler = build_native_kv_cache_configs(config, [specs], [memory], **demand)
    sizes = dict.fromkeys(("scheduler_block_size", "hash_block_size"), BLOCK_SIZE)
    manager = DiffusionKVCacheManager(scheduler, max_model_len=MAX_LEN, **sizes)
    rows = []
    for row, prefix in enumerate(PREFIXES):
        lengths = {"prefix_len": prefix, "target_len": TARGET, "seq_len": prefix + TARGET}
        rows.append(DiffusionKVRequest(f"r{row}", sequence_id=row, **lengths))
    return workers[0], manager.reserve_request("r", rows)


def tokens(step: int, layer: str, row: int, count: int) -> list[np.ndarray]:
    """Q, K and V ``[count, H, D]`` of a model; both processes know how to make them."""
    rng = np.random.default_rng((step, LAYERS.index(layer), row))
    shapes = [(count, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def worker(pipe: Connection, backend: str) -> None:
    """Refuse as a worker pinned to another layout; then adopt, allocate, install and attend."""
    config, metadata = pipe.recv()
    pinned, own = (layout_core.RunConfig(layout_core.ModelConfig(MAX_LEN)) for _ in range(2))
    pinned.cache_config.kv_cache_layout = "LBNHC"
    try:
        layout_core.adopt_kv_cache_layout(pinned, config)
    except layout_core.LayoutError as error:
        pipe.send(str(error))
    layout_core.adopt_kv_cache_layout(own, config)
    resolved = layout_core.resolve_layout(config)
    engine, rule = backends.load(backend), layout_core.Visibility(causal=False)
    pool, table = engine.allocate(resolved), RowTable(config, max_model_len=MAX_LEN)
    table.install(metadata)
    outputs = {}
    for step in range(2):
        rows = []
        for s in metadata.sequences:
            at = s.prefix_len if step else s.cached_prefix_len
            span = (s.seq_len - at, s.seq_len, at, 0)  # queries, keys, start, nothing evicted
            rows.append(layout_core.PagedAttentionRow("r", *span, s.sequence_id))
        batch = engine.prepare(resolved, rows, table, visibility=rule, num_heads=HEADS)
        for layer in LAYERS:
            parts = [tokens(step, layer, i, row.query_len) for i, row in enumerate(rows)]
            q, k, v = (engine.from_numpy(np.concatenate(each)) for each in zip(*parts))
            output, pool = engine.forward_paged(pool, layer, q, k, v, batch)
            outputs[step, layer] = engine.to_numpy(output)
    pipe.send((resolved.layout.name, outputs))


def dense_attention(step: int, layer: str) -> np.ndarray:
    out = []
    for row, prefix in enumerate(PREFIXES):
        q, k, v = tokens(0, layer, row, prefix + TARGET)
        if step:
            q, k[prefix:], v[prefix:] = tokens(1, layer, row, TARGET)
        k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1) for x in (k, v))
        weights = np.exp(np.einsum("qhd,khd->hqk", q, k) * SIZE**-0.5)
        out.append(np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v))
    return np.concatenate(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--backend", default="torch_cuda", choices=("torch_cuda", "jax_gpu"))
    here, there = multiprocessing.Pipe()
    arguments = (there, parser.parse_args().backend)
    process = multiprocessing.get_context("spawn").Process(target=worker, args=arguments)
    process.start()
    there.close()  # so that a worker that dies is an error here, and no wait
    here.send(control_plane())
    refusal, (layout, outputs) = here.recv(), here.recv()
    worst = max(np.abs(outputs[at] - dense_attention(*at)).max() for at in outputs)
    print(f"refused: {refusal}\n{layout}: {len(outputs)} paged calls, worst error {worst:.1e}")
    if layout != "BLNHC" or worst > 1e-5 or "disagrees with the layout" not in refusal:
        raise SystemExit("not what it should be")


if __name__ == "__main__":
    main()
