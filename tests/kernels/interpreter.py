"""One repair of the Triton interpreter, for every test that runs kernels in it.

Triton 3.6 turns a loop bound into an ``int`` by ``int(array of one element)``, which NumPy
allows no more since 2.4: it wants an array without axes.
"""

from __future__ import annotations

from typing import Any

from triton.runtime import interpreter


def mend() -> None:
    """Let loop bounds be numbers that a kernel computed. Twice is as good as once."""
    original = interpreter._patch_lang_tensor
    if getattr(original, "mended", False):
        return

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    patched.mended = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
