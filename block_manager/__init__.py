"""Who owns which block: pool, prefix cache, CFG rows, forks, and the worker's row table.

Needs ``layout_core`` and the standard library alone.
"""

from block_manager.block_pool import BlockPool
from block_manager.cache_manager import DiffusionKVCacheManager, PrefixCacheStats
from block_manager.geometry import CacheGeometry
from block_manager.legality import PrefixLegality, prefix_cache_legality, usable_hit_len
from block_manager.metadata import (
    DiffusionKVContextMetadata,
    DiffusionKVMetadata,
    DiffusionKVSequenceMetadata,
    DiffusionKVUpdate,
)
from block_manager.prefix_keys import PrefixDomain, PrefixFeature, prefix_keys
from block_manager.requests import DiffusionKVContext, DiffusionKVRequest, cfg_rows
from block_manager.row_table import RowTable
from layout_core.errors import (
    AsleepError,
    BlockPoolError,
    ConflictingAllocationError,
    DiffusionKVAdmissionError,
    PrefixCacheError,
    RequestError,
    StaleAllocationError,
    TransferError,
    UnknownRequestError,
)

__all__ = [
    "AsleepError",
    "BlockPool",
    "BlockPoolError",
    "CacheGeometry",
    "ConflictingAllocationError",
    "DiffusionKVAdmissionError",
    "DiffusionKVCacheManager",
    "DiffusionKVContext",
    "DiffusionKVContextMetadata",
    "DiffusionKVMetadata",
    "DiffusionKVRequest",
    "DiffusionKVSequenceMetadata",
    "DiffusionKVUpdate",
    "PrefixCacheError",
    "PrefixCacheStats",
    "PrefixDomain",
    "PrefixFeature",
    "PrefixLegality",
    "RequestError",
    "RowTable",
    "StaleAllocationError",
    "TransferError",
    "UnknownRequestError",
    "cfg_rows",
    "prefix_cache_legality",
    "prefix_keys",
    "usable_hit_len",
]
