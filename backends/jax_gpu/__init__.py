"""The JAX engine: pools as flat arrays of words, pure functions over pytrees, donation checked.

``create_engine(device)`` makes one. Nothing here runs at import, and no JAX option is changed.
"""

from __future__ import annotations

from backends.jax_gpu.allocator import JaxPool
from backends.jax_gpu.batch import JaxBatch
from backends.jax_gpu.compiled import check_donation
from backends.jax_gpu.dtypes import quantize
from backends.jax_gpu.engine import JaxEngine, create_engine
from backends.jax_gpu.ranks import ShardedBatch, ShardedPool
from backends.jax_gpu.sharding import ShardedEngine, sharded_engine
from backends.jax_gpu.sharing import Loan, import_pool, lend
from backends.jax_gpu.spreading import gather_queries, spread_keys, spread_queries

__all__ = [
    "JaxBatch",
    "JaxEngine",
    "JaxPool",
    "Loan",
    "ShardedBatch",
    "ShardedEngine",
    "ShardedPool",
    "check_donation",
    "create_engine",
    "gather_queries",
    "import_pool",
    "lend",
    "quantize",
    "sharded_engine",
    "spread_keys",
    "spread_queries",
]
