"""One denoise step of the scaled model in JAX: one program, the pool donated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from diffusion_runner.bench.scaled_model import ScaledModel


def make_step(
    engine: Any, model: ScaledModel, layout: str, *, reuse: bool
) -> Callable[[], jax.Array]:
    """A step over all tokens, or over the target alone; returns the hidden states."""
    resolved = model.plan(layout)
    weights = [
        {name: engine.from_numpy(x) for name, x in layer.items()} for layer in model.weights()
    ]
    states = engine.from_numpy(model.hidden_states())
    g = model.geometry
    at = (g.num_heads, g.num_heads + g.num_kv_heads)

    def step(pool: Any, x: jax.Array, batch: Any, weights: Any) -> tuple[jax.Array, Any]:
        for index, layer in enumerate(weights):
            packed = (_normalised(x) @ layer["qkv"]).reshape(len(x), -1, g.head_size)
            query, key, value = jnp.split(packed, at, axis=1)
            attended, pool = engine.forward_paged(pool, index, query, key, value, batch)
            x = x + attended.reshape(len(x), -1) @ layer["out"]
            x = x + jax.nn.gelu(_normalised(x) @ layer["up"], approximate=False) @ layer["down"]
        return x, pool

    program = jax.jit(step, donate_argnums=0)
    batch = model.prepare(engine, resolved, reuse=False)
    _, pool = program(engine.allocate(resolved), states, batch, weights)
    held = [pool]
    batch = model.prepare(engine, resolved, reuse=reuse)
    given = states[model.prefix :] if reuse else states

    def call() -> jax.Array:
        x, held[0] = program(held[0], given, batch, weights)
        return x.block_until_ready()

    return call


def _normalised(x: jax.Array) -> jax.Array:
    mean = x.mean(axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
