"""What a kernel is to the engine: a refusal, a plan for each step, and the call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from backends.torch_cuda.allocator import LayerTensors
from backends.torch_cuda.paging import PageGeometry
from layout_core.step import StepPlan
from layout_core.views import LayerView, ResolvedLayout


@dataclass(frozen=True, slots=True)
class Chip:
    """What choices depend on."""

    capability: tuple[int, int]
    num_sms: int


@dataclass(frozen=True, slots=True)
class KernelCase:
    """What a kernel must serve: a step on a device, for the layers of one group."""

    device: torch.device
    num_heads: int
    layers: tuple[LayerView, ...]
    step: StepPlan

    @property
    def resolved(self) -> ResolvedLayout:
        """The plan of the allocation."""
        return self.step.resolved


@dataclass(slots=True, eq=False)
class StepTensors:
    """The arrays of a :class:`~layout_core.step.StepPlan` on the device; filled in place.

    ``T`` and ``R`` are the plan's ``num_tokens`` and ``num_rows``, padding included.
    """

    query_lens: torch.Tensor  #: int32 [R]
    seq_lens: torch.Tensor  #: int32 [R]
    kv_starts: torch.Tensor  #: int32 [R]
    cu_seqlens: torch.Tensor  #: int32 [R + 1]
    lo: torch.Tensor  #: int32 [T]
    hi: torch.Tensor  #: int32 [T]
    block_table: torch.Tensor  #: int32 [R, max_blocks]
    slots: torch.Tensor  #: int64 [T]


@dataclass(frozen=True, slots=True)
class Scalars:
    """The numbers of one attention call."""

    softmax_scale: float
    softcap: float  #: 0 is off
    k_scale: float
    v_scale: float


class Kernel(Protocol):
    """A way to attend over pages. Stateless: what a step needs is in the plan it returns."""

    @property
    def name(self) -> str:
        """The name that ``kernel=`` takes."""
        ...

    @property
    def capturable(self) -> bool:
        """Whether :meth:`run` may be captured in a CUDA graph and replayed after updates."""
        ...

    def refuse(self, case: KernelCase) -> str | None:
        """Why the kernel cannot serve a case; ``None`` where it can."""
        ...

    def plan(
        self,
        case: KernelCase,
        tensors: StepTensors,
        geometries: Mapping[PageGeometry, int],
    ) -> Any:
        """What the kernel precomputes for a step.

        Args:
            case: what was not refused; its ``step`` holds the host's integers.
            tensors: the same on the device.
            geometries: the distinct geometries of the group's layers, numbered.
        """
        ...

    def update(
        self,
        work: Any,
        case: KernelCase,
        tensors: StepTensors,
        geometries: Mapping[PageGeometry, int],
    ) -> Any:
        """As :meth:`plan` for new integers of the same shapes, with the work of the old ones.

        A capturable kernel refills ``work`` where it lies, and returns it.
        """
        ...

    def notes(self, case: KernelCase) -> tuple[str, ...]:
        """What a user may want to know: what this layout or dtype costs, in sentences."""
        ...

    def run(
        self,
        layer: LayerTensors,
        query: torch.Tensor,
        work: Any,
        tensors: StepTensors,
        geometry: int,
        scalars: Scalars,
        *,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend. Nothing is read back to the host.

        Args:
            layer: the layer's views; K/V of the step are already written.
            query: ``[T, Hq, D]``.
            work: what :meth:`plan` returned.
            tensors: the step's arrays.
            geometry: the layer's number among the geometries given to :meth:`plan`.
            scalars: the call's numbers.
            return_lse: also return the logsumexp of the visible scores.

        Returns:
            The output ``[T, Hq, Dv]``, contiguous and in the query's dtype, zero where a query
            sees nothing; and ``None`` or the LSE ``[T, Hq]``: natural logarithm, float32
            (float64 for float64 queries), −∞ where a query sees nothing.
        """
        ...
