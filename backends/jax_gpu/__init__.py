"""The JAX engine: pools as flat arrays of words, pure functions over pytrees, donation checked.

``create_engine(device)`` makes one. Nothing here runs at import, and no JAX option is changed.
"""

from __future__ import annotations

from backends.jax_gpu.allocator import JaxPool
from backends.jax_gpu.batch import JaxBatch
from backends.jax_gpu.donation import check_donation
from backends.jax_gpu.dtypes import quantize
from backends.jax_gpu.engine import JaxEngine, create_engine

__all__ = ["JaxBatch", "JaxEngine", "JaxPool", "check_donation", "create_engine", "quantize"]
