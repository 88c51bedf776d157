"""Which device an engine works on, checked once when the engine is made."""

from __future__ import annotations

import torch

from layout_core.errors import DeviceError

DEFAULT_DEVICE = "cpu"
"""The embedded default: a GPU is used where it was asked for, never by surprise."""


def resolve_device(device: str | None) -> torch.device:
    """The torch device of ``cpu``, ``cuda`` or ``cuda:N``; ``None`` is :data:`DEFAULT_DEVICE`.

    Raises:
        DeviceError: another kind of device, or a GPU that is not there.
    """
    name = DEFAULT_DEVICE if device is None else device
    kind, _, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    well_formed = (kind == "cpu" and name == "cpu") or (
        kind == "cuda" and (name == "cuda" or index.isdecimal())
    )
    if not well_formed:
        raise DeviceError(f"device: torch_cuda expects 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        raise DeviceError(
            f"device: {name!r} was asked for, and torch {torch.__version__} sees no CUDA device; "
            "device='cpu' works everywhere"
        )
    if index and int(index) >= count:
        raise DeviceError(f"device: {name!r} was asked for, and there are {count} CUDA devices")
    # an index is fixed here, so that a later torch.cuda.set_device moves nothing
    return torch.device("cuda", int(index) if index else torch.cuda.current_device())
