"""The torch engine: one flat byte tensor, strided views of it, and paged attention.

``create_engine(device)`` makes it; :mod:`backends.registry` calls that. The device is a CUDA
GPU or the CPU: the code is the same, what differs is which kernels serve it.
"""

from __future__ import annotations

from backends.torch_cuda.engine import TorchEngine, create_engine

__all__ = ["TorchEngine", "create_engine"]
