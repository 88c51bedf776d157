"""Peers in JAX: its own attention on contiguous K/V."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from diffusion_runner.bench.workload import Data, Geometry, Rows

Attend = Callable[[], jax.Array]


def dense(engine: Any, geometry: Geometry, rows: Rows, data: Data) -> Attend:
    """``jax.nn.dot_product_attention``, jitted; ``implementation=None`` is XLA on a CPU."""
    return _attend(engine, rows, data, None)


def cudnn(engine: Any, geometry: Geometry, rows: Rows, data: Data) -> Attend:
    """The same, forced to cuDNN (a GPU)."""
    return _attend(engine, rows, data, "cudnn")


def _attend(engine: Any, rows: Rows, data: Data, implementation: Any) -> Attend:
    parts = [
        tuple(engine.from_numpy(x)[None] for x in data.of_row(rows, index))
        for index in range(len(rows.shapes))
    ]

    @jax.jit
    def attend(parts: Any) -> jax.Array:
        out = [
            jax.nn.dot_product_attention(q, k, v, implementation=implementation)[0]
            for q, k, v in parts
        ]
        return jax.numpy.concatenate(out)

    return lambda: attend(parts)


def done(call: Attend) -> Callable[[], None]:
    """The call, waiting for its output."""

    def run() -> None:
        call().block_until_ready()

    return run
