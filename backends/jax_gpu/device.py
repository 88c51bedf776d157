"""Which JAX device an engine works on. No fallback: a GPU asked for and not there raises."""

from __future__ import annotations

import jax

from layout_core.errors import DeviceError

DEFAULT_DEVICE = "cpu"
"""The embedded default: both engines run on the CPU."""


def find_device(device: str | None) -> tuple[str, jax.Device]:
    """The name and the JAX device for ``cpu``, ``cuda`` or ``cuda:N``.

    Args:
        device: ``None`` means :data:`DEFAULT_DEVICE`.

    Returns:
        ``(name, device)``; the name is the argument, with the default filled in.

    Raises:
        DeviceError: another word, or a device that is not there; lists those that are.
    """
    name = DEFAULT_DEVICE if device is None else device
    kind, _, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    if name not in ("cpu", "cuda") and not (kind == "cuda" and index.isdecimal()):
        raise DeviceError(f"device: jax_gpu expects 'cpu', 'cuda' or 'cuda:N', got {device!r}")
    try:
        devices = jax.devices(kind)
    except RuntimeError as error:  # JAX's way to say that it has no such platform
        present = sorted({d.platform for d in jax.devices()})
        raise DeviceError(
            f"device: {name!r} was asked for, JAX has only {', '.join(present)}; for CUDA install "
            f"jax[cuda13] ({error})"
        ) from error
    at = int(index or 0)
    if at >= len(devices):
        raise DeviceError(f"device: {name!r} was asked for, there are {len(devices)} of {kind!r}")
    return name, devices[at]
