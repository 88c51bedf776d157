"""The shared suite with the torch engine's Triton kernels, run by Triton's interpreter.

A process of its own: the interpreter is chosen by an environment variable that must be set before
the kernels' modules are imported. The engine is the CUDA engine but for its device: the same
plans, the same tables, the same launches with the same arguments, on tensors of the CPU.

    python -m tests.engines.interpreted [--every N --from K] tests/engines/test_suite_blocks.py ...

``--every N --from K`` runs each N-th test of those collected; the rest is pytest's.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

KERNELS = (("torch_cuda", "triton"), ("torch_cuda", "gather"))


def interpreted_engine() -> Any:
    """A torch engine on the CPU that launches what the CUDA engine launches."""
    import torch

    from backends.torch_cuda.engine import TorchEngine
    from backends.torch_cuda.kernels.base import Chip
    from backends.torch_cuda.kernels.gather import GatherKernel
    from backends.torch_cuda.kernels.select import Toolkit
    from backends.torch_cuda.kernels.triton import TritonKernel, TritonMoves

    # sm_80: there 8-bit floats are decoded by hand, which the interpreter can do
    chip = Chip(capability=(8, 0), num_sms=64)
    kernels = (
        TritonKernel(chip, device_type="cpu", upcast=True),
        GatherKernel(device_type="cpu"),
    )
    return TorchEngine("cpu", toolkit=Toolkit(torch.device("cpu"), kernels, TritonMoves()))


class Slice:
    """A pytest plugin that keeps every N-th test."""

    def __init__(self, every: int, first: int) -> None:
        self._every, self._first = every, first

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        dropped = [x for i, x in enumerate(items) if i % self._every != self._first]
        items[:] = [x for i, x in enumerate(items) if i % self._every == self._first]
        config.hook.pytest_deselected(items=dropped)


def slice_of(arguments: list[str]) -> tuple[Slice, list[str]]:
    """The slice that ``--every`` and ``--from`` say, and pytest's own arguments."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--from", type=int, default=0, dest="first")
    options, rest = parser.parse_known_args(arguments)
    return Slice(options.every, options.first), rest


def main(arguments: list[str]) -> int:
    plugin, rest = slice_of(arguments)
    os.environ["TRITON_INTERPRET"] = "1"
    import pytest

    import backends
    from tests.engines import suite
    from tests.kernels import interpreter

    interpreter.mend()
    engine = interpreted_engine()
    backends.load = lambda name, *, device=None: engine  # type: ignore[assignment]
    suite.ENGINE_KERNELS = KERNELS  # before the test modules read it
    fixed = ["--floors", "never", "-p", "no:cacheprovider"]
    return int(pytest.main([*fixed, *rest], plugins=[plugin]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
