"""What lies where in a paged KV cache: layouts, specs, strides, sizing, resolution, visibility.

The standard library only. Every public name imports from here, and its module loads when the
name is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from layout_core.attention import AttentionBackend as AttentionBackend
    from layout_core.attention import AttentionImpl as AttentionImpl
    from layout_core.attention import AttentionMetadata as AttentionMetadata
    from layout_core.attention import AttentionMetadataBuilder as AttentionMetadataBuilder
    from layout_core.attention import PackedPaddingMetadata as PackedPaddingMetadata
    from layout_core.attention import PagedAttentionContext as PagedAttentionContext
    from layout_core.attention import PoolCell as PoolCell
    from layout_core.attention import QueryRange as QueryRange
    from layout_core.attention import VideoTokenLayout as VideoTokenLayout
    from layout_core.attention import VideoTokenSpan as VideoTokenSpan
    from layout_core.attention import check_backend_available as check_backend_available
    from layout_core.attention import check_backend_serves as check_backend_serves
    from layout_core.block_sizes import resolve_block_size as resolve_block_size
    from layout_core.configs import CacheConfig as CacheConfig
    from layout_core.configs import ModelConfig as ModelConfig
    from layout_core.configs import ParallelConfig as ParallelConfig
    from layout_core.configs import RunConfig as RunConfig
    from layout_core.configs import SchedulerConfig as SchedulerConfig
    from layout_core.control_plane import WorkerReply as WorkerReply
    from layout_core.control_plane import collect_replies as collect_replies
    from layout_core.control_plane import serve_adoption as serve_adoption
    from layout_core.diffusion import (
        BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT as BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT,
    )
    from layout_core.diffusion import (
        DEFAULT_DIFFUSION_KV_CACHE_LAYOUT as DEFAULT_DIFFUSION_KV_CACHE_LAYOUT,
    )
    from layout_core.diffusion import adopt_kv_cache_layout as adopt_kv_cache_layout
    from layout_core.diffusion import (
        assert_backend_layout_supported as assert_backend_layout_supported,
    )
    from layout_core.diffusion import block_stride_demand as block_stride_demand
    from layout_core.diffusion import build_kv_cache_tensor as build_kv_cache_tensor
    from layout_core.diffusion import build_native_kv_cache_configs as build_native_kv_cache_configs
    from layout_core.diffusion import (
        get_connector_required_kv_cache_layout as get_connector_required_kv_cache_layout,
    )
    from layout_core.diffusion import (
        resolve_diffusion_kv_cache_layout as resolve_diffusion_kv_cache_layout,
    )
    from layout_core.dtypes import DTYPES as DTYPES
    from layout_core.dtypes import DType as DType
    from layout_core.errors import AdoptionError as AdoptionError
    from layout_core.errors import AsleepError as AsleepError
    from layout_core.errors import BlockPoolError as BlockPoolError
    from layout_core.errors import BlockSizeError as BlockSizeError
    from layout_core.errors import BlockTableError as BlockTableError
    from layout_core.errors import ConfigError as ConfigError
    from layout_core.errors import ConflictingAllocationError as ConflictingAllocationError
    from layout_core.errors import DeviceError as DeviceError
    from layout_core.errors import DiffusionKVAdmissionError as DiffusionKVAdmissionError
    from layout_core.errors import IllegalCombinationError as IllegalCombinationError
    from layout_core.errors import IndexLimitError as IndexLimitError
    from layout_core.errors import InsufficientMemoryError as InsufficientMemoryError
    from layout_core.errors import LayoutConflictError as LayoutConflictError
    from layout_core.errors import LayoutError as LayoutError
    from layout_core.errors import MergeError as MergeError
    from layout_core.errors import MissingPackageError as MissingPackageError
    from layout_core.errors import OverlapError as OverlapError
    from layout_core.errors import PlatformError as PlatformError
    from layout_core.errors import PoolError as PoolError
    from layout_core.errors import PrefixCacheError as PrefixCacheError
    from layout_core.errors import RequestError as RequestError
    from layout_core.errors import RowError as RowError
    from layout_core.errors import SpecError as SpecError
    from layout_core.errors import StaleAllocationError as StaleAllocationError
    from layout_core.errors import StaleBatchError as StaleBatchError
    from layout_core.errors import StrideError as StrideError
    from layout_core.errors import TensorError as TensorError
    from layout_core.errors import TransferError as TransferError
    from layout_core.errors import UnknownBackendError as UnknownBackendError
    from layout_core.errors import UnknownDTypeError as UnknownDTypeError
    from layout_core.errors import UnknownLayoutError as UnknownLayoutError
    from layout_core.errors import UnknownRequestError as UnknownRequestError
    from layout_core.errors import UnresolvedLayoutError as UnresolvedLayoutError
    from layout_core.errors import UnsupportedError as UnsupportedError
    from layout_core.errors import VisibilityError as VisibilityError
    from layout_core.foreign import as_config as as_config
    from layout_core.foreign import as_spec as as_spec
    from layout_core.grouping import get_kv_cache_groups as get_kv_cache_groups
    from layout_core.grouping import unify_kv_cache_spec_page_size as unify_kv_cache_spec_page_size
    from layout_core.heads import HeadPlan as HeadPlan
    from layout_core.heads import pad_heads as pad_heads
    from layout_core.layouts import LAYOUT_ALIASES as LAYOUT_ALIASES
    from layout_core.layouts import KVCacheLayout as KVCacheLayout
    from layout_core.legality import LEGAL_COMBINATIONS as LEGAL_COMBINATIONS
    from layout_core.legality import Legality as Legality
    from layout_core.owners import ByteOwners as ByteOwners
    from layout_core.owners import OwnedByte as OwnedByte
    from layout_core.owners import owners_of_byte as owners_of_byte
    from layout_core.placement import plan_tensors as plan_tensors
    from layout_core.placement import pool_bytes_per_block as pool_bytes_per_block
    from layout_core.protocols import Engine as Engine
    from layout_core.protocols import Layer as Layer
    from layout_core.protocols import PrefixIndex as PrefixIndex
    from layout_core.quant import KVQuantMode as KVQuantMode
    from layout_core.quant import get_kv_quant_mode as get_kv_quant_mode
    from layout_core.recognise import recognise_layout as recognise_layout
    from layout_core.resolution import DEFAULT_LAYOUT_PREFERENCE as DEFAULT_LAYOUT_PREFERENCE
    from layout_core.resolution import LayoutPreferenceWarning as LayoutPreferenceWarning
    from layout_core.resolution import (
        get_supported_kv_cache_layouts as get_supported_kv_cache_layouts,
    )
    from layout_core.resolution import resolve_kv_cache_layout as resolve_kv_cache_layout
    from layout_core.resolve import check_config as check_config
    from layout_core.resolve import make_config as make_config
    from layout_core.resolve import resolve_layout as resolve_layout
    from layout_core.resolve import single_group_config as single_group_config
    from layout_core.rows import NULL_BLOCK_ID as NULL_BLOCK_ID
    from layout_core.rows import PAD_SLOT as PAD_SLOT
    from layout_core.rows import BlockTables as BlockTables
    from layout_core.rows import Bucket as Bucket
    from layout_core.rows import PagedAttentionRow as PagedAttentionRow
    from layout_core.rows import compute_slot_mapping as compute_slot_mapping
    from layout_core.runs import PaddingBytes as PaddingBytes
    from layout_core.runs import Runs as Runs
    from layout_core.runs import count_runs as count_runs
    from layout_core.runs import padding_of as padding_of
    from layout_core.runs import run_ranges as run_ranges
    from layout_core.serving import check_servable as check_servable
    from layout_core.sizing import check_enough_kv_cache_memory as check_enough_kv_cache_memory
    from layout_core.sizing import estimate_max_model_len as estimate_max_model_len
    from layout_core.sizing import (
        generate_scheduler_kv_cache_config as generate_scheduler_kv_cache_config,
    )
    from layout_core.sizing import (
        get_kv_cache_config_from_groups as get_kv_cache_config_from_groups,
    )
    from layout_core.sizing import get_kv_cache_configs as get_kv_cache_configs
    from layout_core.sizing import (
        get_max_concurrency_for_kv_cache_config as get_max_concurrency_for_kv_cache_config,
    )
    from layout_core.sizing import max_memory_usage_bytes as max_memory_usage_bytes
    from layout_core.sizing import resolve_kv_cache_block_sizes as resolve_kv_cache_block_sizes
    from layout_core.specs import AttentionSpec as AttentionSpec
    from layout_core.specs import ChunkedLocalAttentionSpec as ChunkedLocalAttentionSpec
    from layout_core.specs import CrossAttentionSpec as CrossAttentionSpec
    from layout_core.specs import EncoderOnlyAttentionSpec as EncoderOnlyAttentionSpec
    from layout_core.specs import FullAttentionSpec as FullAttentionSpec
    from layout_core.specs import HiddenStateCacheSpec as HiddenStateCacheSpec
    from layout_core.specs import KVCacheSpec as KVCacheSpec
    from layout_core.specs import MLAAttentionSpec as MLAAttentionSpec
    from layout_core.specs import MultipleOf as MultipleOf
    from layout_core.specs import RSWASpec as RSWASpec
    from layout_core.specs import SinkFullAttentionSpec as SinkFullAttentionSpec
    from layout_core.specs import SlidingWindowMLASpec as SlidingWindowMLASpec
    from layout_core.specs import SlidingWindowSpec as SlidingWindowSpec
    from layout_core.specs import UniformTypeKVCacheSpecs as UniformTypeKVCacheSpecs
    from layout_core.step import StepPlan as StepPlan
    from layout_core.step import plan_step as plan_step
    from layout_core.strides import (
        compute_layer_kv_cache_shape_bytes as compute_layer_kv_cache_shape_bytes,
    )
    from layout_core.strides import compute_layout_strides as compute_layout_strides
    from layout_core.tensors import KVCacheConfig as KVCacheConfig
    from layout_core.tensors import KVCacheGroupSpec as KVCacheGroupSpec
    from layout_core.tensors import KVCacheTensor as KVCacheTensor
    from layout_core.views import BlockGranularity as BlockGranularity
    from layout_core.views import ByteRange as ByteRange
    from layout_core.views import GroupPlan as GroupPlan
    from layout_core.views import LayerView as LayerView
    from layout_core.views import ResolvedLayout as ResolvedLayout
    from layout_core.views import RowGeometry as RowGeometry
    from layout_core.views import RowView as RowView
    from layout_core.views import row_geometry as row_geometry
    from layout_core.visibility import Spans as Spans
    from layout_core.visibility import TileClass as TileClass
    from layout_core.visibility import Visibility as Visibility
    from layout_core.visibility import check_spans as check_spans
    from layout_core.visibility import classify_tile as classify_tile
    from layout_core.visibility import row_intervals as row_intervals
    from layout_core.visibility import visible_intervals as visible_intervals

_NAMES: Final = {
    "attention": (
        "AttentionBackend AttentionImpl AttentionMetadata AttentionMetadataBuilder "
        "PackedPaddingMetadata PagedAttentionContext PoolCell QueryRange VideoTokenLayout "
        "VideoTokenSpan check_backend_available check_backend_serves"
    ),
    "block_sizes": "resolve_block_size",
    "configs": "CacheConfig ModelConfig ParallelConfig RunConfig SchedulerConfig",
    "control_plane": "WorkerReply collect_replies serve_adoption",
    "diffusion": (
        "BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT DEFAULT_DIFFUSION_KV_CACHE_LAYOUT "
        "adopt_kv_cache_layout assert_backend_layout_supported block_stride_demand "
        "build_kv_cache_tensor "
        "build_native_kv_cache_configs get_connector_required_kv_cache_layout "
        "resolve_diffusion_kv_cache_layout"
    ),
    "dtypes": "DTYPES DType",
    "errors": (
        "AdoptionError AsleepError BlockPoolError BlockSizeError BlockTableError ConfigError "
        "ConflictingAllocationError DeviceError DiffusionKVAdmissionError "
        "IllegalCombinationError IndexLimitError InsufficientMemoryError LayoutConflictError "
        "LayoutError MergeError MissingPackageError OverlapError PlatformError PoolError "
        "PrefixCacheError RequestError RowError SpecError StaleAllocationError StaleBatchError "
        "StrideError TensorError TransferError UnknownBackendError UnknownDTypeError "
        "UnknownLayoutError UnknownRequestError UnresolvedLayoutError UnsupportedError "
        "VisibilityError"
    ),
    "foreign": "as_config as_spec",
    "grouping": "get_kv_cache_groups unify_kv_cache_spec_page_size",
    "heads": "HeadPlan pad_heads",
    "layouts": "KVCacheLayout LAYOUT_ALIASES",
    "legality": "LEGAL_COMBINATIONS Legality",
    "owners": "ByteOwners OwnedByte owners_of_byte",
    "placement": "plan_tensors pool_bytes_per_block",
    "protocols": "Engine Layer PrefixIndex",
    "quant": "KVQuantMode get_kv_quant_mode",
    "recognise": "recognise_layout",
    "resolution": (
        "DEFAULT_LAYOUT_PREFERENCE LayoutPreferenceWarning get_supported_kv_cache_layouts "
        "resolve_kv_cache_layout"
    ),
    "resolve": "check_config make_config resolve_layout single_group_config",
    "rows": "BlockTables Bucket NULL_BLOCK_ID PAD_SLOT PagedAttentionRow compute_slot_mapping",
    "runs": "PaddingBytes Runs count_runs padding_of run_ranges",
    "serving": "check_servable",
    "sizing": (
        "check_enough_kv_cache_memory estimate_max_model_len generate_scheduler_kv_cache_config "
        "get_kv_cache_config_from_groups get_kv_cache_configs "
        "get_max_concurrency_for_kv_cache_config max_memory_usage_bytes "
        "resolve_kv_cache_block_sizes"
    ),
    "specs": (
        "AttentionSpec ChunkedLocalAttentionSpec CrossAttentionSpec EncoderOnlyAttentionSpec "
        "FullAttentionSpec HiddenStateCacheSpec KVCacheSpec MLAAttentionSpec MultipleOf "
        "RSWASpec SinkFullAttentionSpec SlidingWindowMLASpec SlidingWindowSpec "
        "UniformTypeKVCacheSpecs"
    ),
    "step": "StepPlan plan_step",
    "strides": "compute_layer_kv_cache_shape_bytes compute_layout_strides",
    "tensors": "KVCacheConfig KVCacheGroupSpec KVCacheTensor",
    "views": (
        "BlockGranularity ByteRange GroupPlan LayerView ResolvedLayout RowGeometry RowView "
        "row_geometry"
    ),
    "visibility": (
        "Spans TileClass Visibility check_spans classify_tile row_intervals visible_intervals"
    ),
}
_MODULE_OF: Final = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Load the module of a public name (PEP 562)."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
