"""A counting double for device-to-host copies: what an engine reads back while it runs.

On the CPU nothing waits, so a read is counted where it is asked for: at every torch function,
method and operation that hands values to Python, and at JAX's conversions of an array. On a GPU
the frameworks' own guards raise.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

CONVERSIONS = ("__array__", "__bool__", "__int__", "__float__", "__index__", "item", "tolist")
TORCH_FUNCTIONS = {*CONVERSIONS, "numpy", "cpu", "nonzero", "argwhere", "masked_select", "unique",
                   "equal", "allclose", "is_nonzero", "__contains__", "__dlpack__"}  # fmt: skip


@contextmanager
def host_reads(engine: Any) -> Iterator[list[str]]:
    """A list that fills with the name of every read while the context is open."""
    with _torch_reads(engine) if engine.name == "torch_cuda" else _jax_reads() as seen:
        yield seen


@contextmanager
def _torch_reads(engine: Any) -> Iterator[list[str]]:
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            name = getattr(func, "__name__", "")
            to_cpu = name == "to" and any(str(a) == "cpu" for a in args[1:])
            if name in TORCH_FUNCTIONS or to_cpu:
                seen.append(name)
            return func(*args, **(kwargs or {}))

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            if func.overloadpacket.__name__ == "_local_scalar_dense":
                seen.append("_local_scalar_dense")
            return func(*args, **(kwargs or {}))

    with ExitStack() as stack:
        if engine.device.startswith("cuda"):
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            stack.callback(torch.cuda.set_sync_debug_mode, before)
        stack.enter_context(Functions())
        stack.enter_context(Operations())
        yield seen


@contextmanager
def _jax_reads() -> Iterator[list[str]]:
    import jax
    import numpy as np

    seen: list[str] = []
    kind = type(jax.device_put(np.zeros(1, np.float32)))

    def counting(name: str, method: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return method(self, *args, **kwargs)

        return call

    def converted(value: Any, *args: Any, _convert: Any, **kwargs: Any) -> Any:
        if isinstance(value, kind):
            seen.append("numpy conversion")
        return _convert(value, *args, **kwargs)

    with ExitStack() as stack:
        for name in CONVERSIONS:
            stack.enter_context(patch.object(kind, name, counting(name, getattr(kind, name))))
        for name in ("asarray", "array"):  # they take the buffer and call no method
            original = getattr(np, name)
            stack.enter_context(
                patch.object(
                    np, name, lambda v, *a, _o=original, **k: converted(v, *a, _convert=_o, **k)
                )
            )
        stack.enter_context(
            patch.object(
                jax,
                "device_get",
                lambda x, _get=jax.device_get: (seen.append("device_get"), _get(x))[1],
            )
        )
        stack.enter_context(jax.transfer_guard_device_to_host("disallow"))
        yield seen
