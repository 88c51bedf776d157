"""One denoise step of the scaled model in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import gelu, layer_norm

from diffusion_runner.bench.scaled_model import ScaledModel


def make_step(
    engine: Any, model: ScaledModel, layout: str, *, reuse: bool
) -> Callable[[], torch.Tensor]:
    """A step over all tokens, or over the target alone; returns the hidden states."""
    resolved = model.plan(layout)
    pool = engine.allocate(resolved)
    weights = [
        {name: engine.from_numpy(x) for name, x in layer.items()} for layer in model.weights()
    ]
    states = engine.from_numpy(model.hidden_states())
    _run(engine, model, pool, weights, states, model.prepare(engine, resolved, reuse=False))
    batch = model.prepare(engine, resolved, reuse=reuse)
    given = states[model.prefix :] if reuse else states
    return lambda: _run(engine, model, pool, weights, given, batch)


def _run(
    engine: Any,
    model: ScaledModel,
    pool: Any,
    weights: list[dict[str, torch.Tensor]],
    x: torch.Tensor,
    batch: Any,
) -> torch.Tensor:
    g = model.geometry
    heads = [g.num_heads, g.num_kv_heads, g.num_kv_heads]
    for index, layer in enumerate(weights):
        packed = layer_norm(x, (model.hidden,)) @ layer["qkv"]
        query, key, value = packed.view(len(x), -1, g.head_size).split(heads, dim=1)
        attended, _ = engine.forward_paged(pool, index, query, key, value, batch)
        x = x + attended.reshape(len(x), -1) @ layer["out"]
        x = x + gelu(layer_norm(x, (model.hidden,)) @ layer["up"]) @ layer["down"]
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return x
