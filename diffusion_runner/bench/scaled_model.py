"""A transformer of HunyuanImage-3's proportions, scaled down to what the machine holds.

Of 10,700 tokens of a row 6,700 are prefix, whose K/V are reused after the first step (figures of
the model's public diffusion-cache benchmarks); a tenth of both stands here. Weights are random:
only the work is that of a model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffusion_runner.bench.workload import Geometry, Rows, Tables, resolved_plan
from layout_core import PagedAttentionRow, ResolvedLayout, Visibility

Weights = list[dict[str, NDArray[np.float32]]]

PROMPT_CAUSAL = Visibility(causal=True)
"""The prefix is causal, and the image is a full span on top of it."""


@dataclass(frozen=True, slots=True)
class ScaledModel:
    """Sizes of the model and of its one row."""

    num_layers: int = 4
    hidden: int = 512
    mlp: int = 2048
    geometry: Geometry = field(
        default_factory=lambda: Geometry(num_heads=8, num_kv_heads=2, head_size=64, block_size=32)
    )
    prefix: int = 670
    target: int = 400
    steps: int = 50

    @property
    def seq_len(self) -> int:
        return self.prefix + self.target

    @property
    def qkv(self) -> int:
        """Width of the packed projection."""
        g = self.geometry
        return (g.num_heads + 2 * g.num_kv_heads) * g.head_size

    def operations(self, *, reuse: bool) -> int:
        """Multiplications and additions of one step: linear layers for each query token, and
        ``4 * Hq * D`` for each pair of a query and a key that it sees."""
        g = self.geometry
        inner = g.num_heads * g.head_size
        tokens = self.target if reuse else self.seq_len
        linear = 2 * tokens * (self.hidden * (self.qkv + inner) + 2 * self.hidden * self.mlp)
        pairs = self.target * self.seq_len
        if not reuse:
            pairs += self.prefix * (self.prefix + 1) // 2
        return self.num_layers * (linear + 4 * inner * pairs)

    def speedup(self, full: float, reused: float) -> float:
        """How many times faster a run is with reuse, from the cost of one step of each kind.

        The first step of a run with reuse is a full one.
        """
        return self.steps * full / (full + (self.steps - 1) * reused)

    def weights(self) -> Weights:
        """Random weights, of a size that keeps activations near 1."""
        rng = np.random.default_rng(0)
        inner = self.geometry.num_heads * self.geometry.head_size
        shapes = {
            "qkv": (self.hidden, self.qkv),
            "out": (inner, self.hidden),
            "up": (self.hidden, self.mlp),
            "down": (self.mlp, self.hidden),
        }
        return [
            {
                name: (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)
                for name, shape in shapes.items()
            }
            for _ in range(self.num_layers)
        ]

    def hidden_states(self) -> NDArray[np.float32]:
        """``[seq_len, hidden]``."""
        shape = (self.seq_len, self.hidden)
        return np.random.default_rng(1).standard_normal(shape).astype(np.float32)

    def tables(self) -> Tables:
        """The block table of the row."""
        return Tables(Rows(((1, self.seq_len),)), self.geometry, shuffled=True)

    def plan(self, layout: str) -> ResolvedLayout:
        """The pool that holds the row."""
        return resolved_plan(self.geometry, self.tables().num_blocks, layout, self.num_layers)

    def prepare(self, engine: Any, resolved: ResolvedLayout, *, reuse: bool) -> Any:
        """The batch of a step."""
        first = self.prefix if reuse else 0
        row = PagedAttentionRow(
            "r", self.seq_len - first, self.seq_len, kv_start_pos=first, sequence_id=0
        )
        return engine.prepare(
            resolved,
            [row],
            self.tables(),
            visibility=PROMPT_CAUSAL,
            num_heads=self.geometry.num_heads,
            spans=[[(self.prefix, self.seq_len)]],
        )
