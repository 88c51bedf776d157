"""Integers of a step on the device: at fixed addresses, refilled by copies nobody waits for.

A CUDA graph remembers addresses, so whatever a kernel reads of a step lies in one block of memory
that is allocated once and refilled in place, on a GPU from pinned memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from math import prod
from typing import Final

import torch

from layout_core.errors import DeviceError

ALIGNMENT: Final = 16
"""Bytes. Every table starts at a multiple, as kernels that load vectors like it."""

INTEGERS: Final = {"i": torch.int32, "q": torch.int64}
"""Type codes of ``array`` that a table may have."""


class Staging:
    """Named integer tables in one block of device memory.

    Args:
        shapes: for each table its type code (``i`` or ``q``) and its shape, which is its room.
        device: where the tables are read.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[str, tuple[int, ...]]], device: torch.device
    ) -> None:
        self._shapes = dict(shapes)
        self._starts: dict[str, int] = {}
        total = 0
        for name, (code, shape) in shapes.items():
            self._starts[name] = total
            total += -(-prod(shape) * array(code).itemsize // ALIGNMENT) * ALIGNMENT
        self._block = torch.zeros(total, dtype=torch.uint8, device=device)
        self.tables: dict[str, torch.Tensor] = self._views(self._block)

    def _views(self, block: torch.Tensor) -> dict[str, torch.Tensor]:
        views = {}
        for name, (code, shape) in self._shapes.items():
            start = self._starts[name]
            part = block[start : start + prod(shape) * array(code).itemsize]
            views[name] = part.view(INTEGERS[code]).view(shape)
        return views

    def fill(self, values: Mapping[str, tuple[array[int], tuple[int, ...]]]) -> None:
        """Write every table, on a GPU by one copy that this call does not wait for.

        Args:
            values: for every table its numbers, row after row, and their shape: the table's, or
                smaller along any axis. What lies beyond it is unspecified.

        Raises:
            DeviceError: a CUDA graph is being captured, which would replay today's numbers.
        """
        device = self._block.device
        check_not_captured(device, "update")
        tables, host = self.tables, self._block  # on the CPU they are written where they are read
        if device.type == "cuda":
            # torch keeps pinned memory from being used again before the copy has read it
            host = torch.zeros(self._block.shape, dtype=torch.uint8, pin_memory=True)
            tables = self._views(host)
        for name, (numbers, shape) in values.items():
            if len(numbers):
                source = torch.frombuffer(numbers, dtype=INTEGERS[numbers.typecode]).view(shape)
                tables[name][tuple(slice(length) for length in shape)].copy_(source)
        if host is not self._block:
            self._block.copy_(host, non_blocking=True)


def integers(values: array[int], device: torch.device) -> torch.Tensor:
    """A tensor of its own with the numbers of an ``array``."""
    kind = INTEGERS[values.typecode]
    if not len(values):
        return torch.empty(0, dtype=kind, device=device)
    host = torch.frombuffer(values, dtype=kind)
    if device.type == "cpu":
        return host.clone()
    return host.pin_memory().to(device, non_blocking=True)


def capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured on the device's current stream."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_not_captured(device: torch.device, call: str) -> None:
    """Raise where a CUDA graph is being captured.

    Raises:
        DeviceError: names the call.
    """
    if capturing(device):
        raise DeviceError(
            f"{call}: a CUDA graph is being captured, and its replays would repeat today's "
            f"numbers; {call} before the capture and before each replay"
        )
