"""How K/V gets into a pool and blocks move in it: the interface, and torch's own operations.

On the CPU rows of a flat view are stored by index. On a GPU kernels do it
(:mod:`.kernels.triton`), which skip padded slots where they lie.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from backends.torch_cuda.allocator import LayerTensors
from backends.torch_cuda.dtypes import as_bits
from backends.torch_cuda.kernels.base import StepTensors
from backends.torch_cuda.paging import PageGeometry, token_rows, written_tokens
from backends.torch_cuda.staging import integers
from layout_core.rows import PAD_SLOT
from layout_core.step import StepPlan


class Moves(Protocol):
    """A way to store and to copy. Stateless: what a step needs is in the plan it returns."""

    def plan(
        self, step: StepPlan, tensors: StepTensors, geometries: Mapping[PageGeometry, int]
    ) -> Any:
        """What :meth:`store` needs for the tokens that a step writes."""
        ...

    def update(
        self,
        work: Any,
        step: StepPlan,
        tensors: StepTensors,
        geometries: Mapping[PageGeometry, int],
    ) -> Any:
        """As :meth:`plan` after ``tensors`` was refilled, with the work of the old step."""
        ...

    def store(
        self, layer: LayerTensors, key: torch.Tensor, value: torch.Tensor, work: Any, geometry: int
    ) -> None:
        """Store a step's K and V, bit for bit. Nothing is read back to the host.

        Args:
            layer: the layer's views.
            key, value: ``[T, Hkv, D]`` and ``[T, Hkv, Dv]`` of the pool's dtype, any strides.
            work: what :meth:`plan` returned.
            geometry: the layer's number among the geometries given to :meth:`plan`.
        """
        ...

    def write(
        self, layer: LayerTensors, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Store K and V at ``slots [T]``, int32 or int64; −1 is skipped."""
        ...

    def copy_blocks(
        self, layers: Sequence[LayerTensors], sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        """Copy cells of whole manager blocks in every one of ``layers``, bit for bit."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class IndexedWork:
    """Which tokens of a step are written, and where; the host knows, so no device is asked."""

    tokens: torch.Tensor | None  #: int64 indices; ``None`` for all tokens
    rows: tuple[torch.Tensor, ...]  #: for each geometry: their rows of the view of tokens


class IndexedMoves:
    """Moves by torch's ``index_copy_``, on any device."""

    def plan(
        self, step: StepPlan, tensors: StepTensors, geometries: Mapping[PageGeometry, int]
    ) -> IndexedWork:
        slots = tensors.slots
        tokens = None
        if step.num_real_tokens < step.num_tokens or any(row.read_only for row in step.rows):
            kept = array("q", (i for i, slot in enumerate(step.slots) if slot != PAD_SLOT))
            tokens = integers(kept, slots.device)
            slots = slots.index_select(0, tokens)
        return IndexedWork(tokens, tuple(token_rows(geometry, slots) for geometry in geometries))

    def update(
        self,
        work: IndexedWork,
        step: StepPlan,
        tensors: StepTensors,
        geometries: Mapping[PageGeometry, int],
    ) -> IndexedWork:
        return self.plan(step, tensors, geometries)

    def store(
        self,
        layer: LayerTensors,
        key: torch.Tensor,
        value: torch.Tensor,
        work: IndexedWork,
        geometry: int,
    ) -> None:
        store_rows(layer, key, value, work.tokens, work.rows[geometry])

    def write(
        self, layer: LayerTensors, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        slots = slots.to(torch.int64)
        tokens = written_tokens(slots)
        if tokens.numel() == slots.numel():
            store_rows(layer, key, value, None, token_rows(layer.geometry, slots))
        else:
            rows = token_rows(layer.geometry, slots.index_select(0, tokens))
            store_rows(layer, key, value, tokens, rows)

    def copy_blocks(
        self, layers: Sequence[LayerTensors], sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        for layer in layers:
            ratio = layer.view.blocks_per_manager_block
            ids = [
                integers(
                    array("q", (b * ratio + part for b in blocks for part in range(ratio))),
                    layer.content.device,
                )
                for blocks in (sources, destinations)
            ]
            layer.content.index_copy_(0, ids[1], layer.content.index_select(0, ids[0]))


def store_rows(
    layer: LayerTensors,
    key: torch.Tensor,
    value: torch.Tensor,
    tokens: torch.Tensor | None,
    rows: torch.Tensor,
) -> None:
    """Store ``tokens`` of K and V (``None``: all) at rows of the layer's view of tokens."""
    for target, source in ((layer.key_tokens, key), (layer.value_tokens, value)):
        bits = as_bits(source.detach())
        target.index_copy_(0, rows, bits if tokens is None else bits.index_select(0, tokens))
