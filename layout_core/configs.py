"""What sizing and resolution read of a run's configuration, and how they read it.

The functions of the core take vLLM's own ``VllmConfig`` as well as the small classes below:
everything is read by attribute, through one table of vLLM's defaults, so that a config double
may leave out what it does not care about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from layout_core.errors import ConfigError, LayoutConflictError, UnresolvedLayoutError
from layout_core.layouts import KVCacheLayout

ConfigLike = Any
"""A ``VllmConfig``, a :class:`RunConfig`, or a double with some of their attributes."""


@dataclass
class CacheConfig:
    """What a run says about its cache; the resolved layout is recorded here.

    Args:
        block_size: tokens of a block; vLLM's default is 16.
        num_gpu_blocks_override: blocks to plan for, whatever the memory.
        enable_prefix_caching: whether block hashes are computed.
        prefix_match_unit: tokens of one hashed block; ``None`` is the group sizes' divisor.
        kv_cache_layout: name of the resolved layout, canonical; ``None`` until resolution.
            An alias is recorded under its canonical name. Once set, it is final.
        prefix_cache_retention_interval: carried for the scheduler; it sizes nothing.

    Raises:
        UnknownLayoutError: a name that is no layout.
        LayoutConflictError: another layout is set over a resolved one.
    """

    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    prefix_match_unit: int | None = None
    kv_cache_layout: str | None = None
    prefix_cache_retention_interval: int | None = None

    def __setattr__(self, name: str, value: object) -> None:
        if name == "kv_cache_layout":
            current = self.__dict__.get("kv_cache_layout")
            if value is not None:
                value = KVCacheLayout.parse(value).name
            if current is not None and value != current:
                raise LayoutConflictError(
                    f"cache_config.kv_cache_layout: the layout was resolved to {current} and is "
                    f"final, got {value!r}"
                )
        super().__setattr__(name, value)

    def get_resolved_kv_cache_layout(self) -> KVCacheLayout:
        """The layout; it raises :class:`UnresolvedLayoutError` before resolution."""
        return resolved_layout_of(self)


@dataclass
class ModelConfig:
    """Length limits of a model.

    Args:
        max_model_len: most tokens of one request.
        original_max_model_len: what the user asked for; −1 lets sizing fit ``max_model_len``
            to the memory.
    """

    max_model_len: int
    original_max_model_len: int | None = None


@dataclass
class SchedulerConfig:
    """Limits of one scheduling step; the defaults are vLLM's."""

    max_num_batched_tokens: int = 2048
    max_num_encoder_input_tokens: int | None = None  #: ``None``: ``max_num_batched_tokens``
    disable_hybrid_kv_cache_manager: bool = False


@dataclass
class ParallelConfig:
    """Ranks that share the tokens of one cache, and the pipeline."""

    decode_context_parallel_size: int = 1
    pipeline_parallel_size: int = 1


@dataclass
class RunConfig:
    """The parts together, under the names that ``VllmConfig`` gives them."""

    model_config: ModelConfig
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    kv_transfer_config: object | None = None
    max_concurrent_batches: int = 1


_REQUIRED: Final = object()

# dotted path -> vLLM's default
_DEFAULTS: Final[dict[str, object]] = {
    "model_config.max_model_len": _REQUIRED,
    "model_config.original_max_model_len": None,
    "cache_config.block_size": 16,
    "cache_config.num_gpu_blocks_override": None,
    "cache_config.enable_prefix_caching": True,
    "cache_config.prefix_match_unit": None,
    "cache_config.prefix_cache_retention_interval": None,
    "cache_config.kv_cache_layout": None,
    "scheduler_config.max_num_batched_tokens": 2048,
    "scheduler_config.max_num_encoder_input_tokens": None,
    "scheduler_config.disable_hybrid_kv_cache_manager": False,
    "parallel_config.decode_context_parallel_size": 1,
    "parallel_config.pipeline_parallel_size": 1,
    "max_concurrent_batches": 1,
    "max_in_flight_tokens": None,
    "kv_transfer_config": None,
    "speculative_config": None,
    "attention_config.hisparse_config": None,
}


def read_config(config: ConfigLike, path: str) -> Any:
    """An attribute by dotted path, or vLLM's default where the config lacks it.

    Raises:
        ConfigError: the config lacks an attribute that has no default.
    """
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name, _REQUIRED)
        if value is _REQUIRED or value is None:
            break
    if value is not _REQUIRED and value is not None:
        return value
    default = _DEFAULTS[path]
    if default is _REQUIRED:
        raise ConfigError(f"{path}: the config has none, and there is no default")
    if path == "scheduler_config.max_num_encoder_input_tokens":
        return read_config(config, "scheduler_config.max_num_batched_tokens")
    if path == "max_in_flight_tokens":
        # a batch for each step that may be under way (vLLM's VllmConfig.max_in_flight_tokens)
        return read_config(config, "max_concurrent_batches") * read_config(
            config, "scheduler_config.max_num_batched_tokens"
        )
    return default


def resolved_layout_of(cache_config: object) -> KVCacheLayout:
    """The layout recorded on a cache config.

    Raises:
        UnresolvedLayoutError: none is recorded yet.
        UnknownLayoutError: what is recorded is no layout.
    """
    name = getattr(cache_config, "kv_cache_layout", None)
    if name is None:
        raise UnresolvedLayoutError(
            "cache_config.kv_cache_layout: the layout is not resolved yet; the control plane "
            "resolves it once, and a worker adopts it before it allocates"
        )
    return KVCacheLayout.parse(name)
