"""A toy transformer, two rows of guidance, prompts that stay in pages: the smallest runner.

python examples/minimal_runner.py --backend jax_gpu"""

import argparse

import numpy as np

import backends
import layout_core as core
from block_manager import DiffusionKVCacheManager, DiffusionKVRequest, RowTable

LAYERS, HEADS, SIZE, TARGET, STEPS, GUIDANCE = 2, 4, 16, 32, 8, 3.0
WIDTH, PROMPTS = HEADS * SIZE, (3, 11)  # tokens of the empty prompt and of the prompt
SPANS = [(n, n + TARGET) for n in PROMPTS]  # the image: it sees the prompt and itself
normal = np.random.default_rng(0).normal
QKV, OUT = (normal(size=(LAYERS, WIDTH, n * WIDTH)) / WIDTH**0.5 for n in (3, 1))
TEXTS, NOISE = [normal(size=(n, WIDTH)) for n in PROMPTS], normal(size=(TARGET, WIDTH))


def denoise(attend, cached):
    """Guided Euler steps; ``cached``: after the first, rows are the image's tokens alone."""
    sample = NOISE
    for step in range(STEPS):
        rows = [sample if cached and step else np.concatenate([t, sample]) for t in TEXTS]
        x = np.concatenate(rows)
        for layer in range(LAYERS):
            q, k, v = (x @ QKV[layer]).reshape(-1, 3, HEADS, SIZE).swapaxes(0, 1)
            x = x + attend(step, layer, q, k, v).reshape(-1, WIDTH) @ OUT[layer]
        empty, prompt = (row[-TARGET:] for row in np.split(x, [len(rows[0])]))
        sample = sample - (empty + GUIDANCE * (prompt - empty)) / STEPS / 4
    return sample


def dense(step, layer, *qkv):
    """What the pages are held against: whole rows at every step, in NumPy."""
    outputs = []
    for n, q, k, v in zip(PROMPTS, *(np.split(x.swapaxes(0, 1), [SPANS[0][1]], 1) for x in qkv)):
        i = np.arange(n + TARGET)
        weights = np.exp(q @ k.swapaxes(1, 2) / SIZE**0.5)
        weights *= (i[:, None] >= i) | (i[:, None] >= n)
        outputs.append((weights @ v / weights.sum(-1, keepdims=True)).swapaxes(0, 1))
    return np.concatenate(outputs)


def paged(backend):
    """Attention with the prompts in pages: step 0 writes whole rows, later ones the image."""
    spec = core.FullAttentionSpec(16, num_kv_heads=HEADS, head_size=SIZE, dtype="float32")
    config = core.single_group_config(spec, 16, [str(i) for i in range(LAYERS)], "BLNHC")
    sizes = {"max_model_len": 64, "scheduler_block_size": 16, "hash_block_size": 16}
    manager, tables = DiffusionKVCacheManager(config, **sizes), RowTable(config, max_model_len=64)
    request, steps = [], [[], []]  # the rows of the first step, and of the later ones
    for i, (n, end) in enumerate(SPANS):
        lengths = {"prefix_len": n, "target_len": TARGET, "seq_len": end}
        request.append(DiffusionKVRequest(f"r/{i}", sequence_id=i, **lengths))
        for rows, start in zip(steps, (0, n)):
            rows.append(core.PagedAttentionRow("r", end - start, end, start, sequence_id=i))
    tables.install(manager.reserve_request("r", request))
    engine, plan = backends.load(backend), core.resolve_layout(config)
    sees = {"visibility": core.Visibility(causal=True), "spans": [[span] for span in SPANS]}
    batches = [engine.prepare(plan, rows, tables, num_heads=HEADS, **sees) for rows in steps]
    pool = engine.allocate(plan)

    def attend(step, layer, *qkv):
        nonlocal pool
        arrays = (engine.from_numpy(np.ascontiguousarray(x, np.float32)) for x in qkv)
        output, pool = engine.forward_paged(pool, layer, *arrays, batches[min(step, 1)])
        return engine.to_numpy(output)

    return attend


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("--backend", default="torch_cuda")
    backend = options.parse_args().backend
    apart = np.abs(denoise(paged(backend), cached=True) - denoise(dense, cached=False)).max()
    print(f"{backend}: {STEPS} guided steps, {apart:.0e} from dense attention")
    assert apart < 1e-4, "the pages gave another picture"
