"""Torch tensors for an engine of any framework, and its arrays as torch tensors, by DLPack."""

from __future__ import annotations

import importlib
from typing import Any, Protocol

import torch
from torch.utils.dlpack import from_dlpack

from layout_core.errors import UnsupportedError


class Bridge(Protocol):
    """How tensors get to an engine and back."""

    def to_engine(self, tensor: torch.Tensor) -> Any:
        """The same values as an array of the engine's framework, on the same device."""
        ...

    def to_torch(self, array: Any) -> torch.Tensor:
        """An array of the engine's framework as a tensor that its holder may write to."""
        ...


class TorchBridge:
    """The engine's arrays are torch tensors."""

    def to_engine(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def to_torch(self, array: torch.Tensor) -> torch.Tensor:
        return array


class JaxBridge:
    """Through DLPack. JAX arrays are immutable, so a tensor made of one is a copy."""

    def __init__(self) -> None:
        self._jax: Any = importlib.import_module("jax")

    def to_engine(self, tensor: torch.Tensor) -> Any:
        # DLPack exports no autograd and JAX takes dense arrays alone; both are visible here
        return self._jax.dlpack.from_dlpack(tensor.detach().contiguous())

    def to_torch(self, array: Any) -> torch.Tensor:
        # a tensor on the array's own memory could be written to behind JAX's back
        return from_dlpack(array.block_until_ready()).clone()


def bridge_for(engine: Any) -> Bridge:
    """The bridge to an engine, by its flag.

    Raises:
        UnsupportedError: the engine is a third party's, whose framework is not known.
    """
    makers: dict[str, type[TorchBridge] | type[JaxBridge]] = {
        "torch_cuda": TorchBridge,
        "jax_gpu": JaxBridge,
    }
    if engine.name not in makers:
        raise UnsupportedError(
            f"backend: torch tensors can be given to {', '.join(makers)}, got {engine.name!r}, "
            "whose framework is not known here"
        )
    return makers[engine.name]()
