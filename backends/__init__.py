"""The engines, by flag: ``backends.load("torch_cuda", device="cpu")``.

Importing this package loads no framework; :func:`load` imports the one that was asked for.
"""

from __future__ import annotations

from backends.registry import ENTRY_POINT_GROUP, load, names

__all__ = ["ENTRY_POINT_GROUP", "load", "names"]
