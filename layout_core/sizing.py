"""How many blocks the memory gives, whether a request fits, and the config of each worker.

Numbers are vLLM 0.29's. Nothing here changes a config but :func:`get_kv_cache_configs`, which
writes a fitted ``max_model_len`` back, and only once all else has succeeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import gcd, lcm
from typing import Any

from layout_core.configs import ConfigLike, ModelConfig, read_config, resolved_layout_of
from layout_core.errors import ConfigError, InsufficientMemoryError, SpecError
from layout_core.foreign import as_spec
from layout_core.grouping import get_kv_cache_groups
from layout_core.layouts import KVCacheLayout
from layout_core.placement import plan_tensors, pool_bytes_per_block
from layout_core.specs import (
    EncoderOnlyAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cdiv,
    layer_specs_of,
)
from layout_core.tensors import KVCacheConfig, KVCacheGroupSpec

AUTO_FIT = -1
"""``model_config.original_max_model_len`` of a run that lets sizing fit the length."""


class _AtLength:
    """A config as it would be with another ``max_model_len``; the real one is not touched."""

    def __init__(self, config: ConfigLike, max_model_len: int) -> None:
        self._config = config
        self.model_config = ModelConfig(max_model_len)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


def max_memory_usage_bytes(config: ConfigLike, kv_cache_specs: Iterable[KVCacheSpec]) -> int:
    """Most bytes that one request of ``max_model_len`` takes in these layers."""
    return sum(as_spec(spec).max_memory_usage_bytes(config) for spec in kv_cache_specs)


def blocks_per_request(config: ConfigLike, groups: Iterable[KVCacheGroupSpec]) -> int:
    """Most blocks that one request takes: every group claims its own from the one pool."""
    total = 0
    for group in groups:
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            total += spec.max_memory_usage_pages(config)
        else:
            total += cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes)
    return total


def get_max_concurrency_for_kv_cache_config(config: ConfigLike, kv: KVCacheConfig) -> float:
    """Requests of ``max_model_len`` that the blocks hold at a time."""
    return kv.num_blocks / blocks_per_request(config, kv.kv_cache_groups)


def estimate_max_model_len(
    config: ConfigLike, kv_cache_spec: Mapping[str, KVCacheSpec], available_memory: int
) -> int:
    """Longest request that fits ``available_memory`` bytes, at most ``max_model_len``.

    0 where not even one token fits. The config is not changed.
    """
    specs = [as_spec(spec) for spec in kv_cache_spec.values()]
    return _longest(
        read_config(config, "model_config.max_model_len"),
        lambda n: max_memory_usage_bytes(_AtLength(config, n), specs) <= available_memory,
    )


def _longest(limit: int, fits: Callable[[int], bool]) -> int:
    """Largest ``n`` in [1, limit] that fits, or 0; ``fits`` falls once."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def check_enough_kv_cache_memory(
    config: ConfigLike, kv_cache_spec: Mapping[str, KVCacheSpec], available_memory: int
) -> None:
    """Raise unless one request of ``max_model_len`` fits beside the null block.

    Raises:
        InsufficientMemoryError: says what is needed, what is there and the length that fits.
    """
    if not kv_cache_spec:
        return
    specs = {name: as_spec(spec) for name, spec in kv_cache_spec.items()}
    layout = resolved_layout_of(getattr(config, "cache_config", None))
    groups = get_kv_cache_groups(config, specs, layout=layout)
    usable = available_memory - pool_bytes_per_block(groups, layout)
    needed = max_memory_usage_bytes(config, specs.values())
    if usable <= 0 or needed > usable:
        longest = estimate_max_model_len(config, specs, usable)
        raise _too_little(config, needed, usable, available_memory, longest, "")


def _too_little(
    config: ConfigLike, needed: int, usable: int, given: int, longest: int, where: str
) -> InsufficientMemoryError:
    length = read_config(config, "model_config.max_model_len")
    would = f"a max_model_len of {longest} would fit" if longest else "not even one token would fit"
    return InsufficientMemoryError(
        f"{where}available_memory: one request of max_model_len {length} needs {needed} bytes, and "
        f"of the {given} bytes given {max(usable, 0)} are left beside the null block; {would}"
    )


def get_kv_cache_config_from_groups(
    config: ConfigLike,
    kv_cache_groups: Sequence[KVCacheGroupSpec],
    available_memory: int,
    *,
    layout: KVCacheLayout | None = None,
) -> KVCacheConfig:
    """The config of one worker from its groups and its memory.

    ``num_gpu_blocks_override`` replaces the number of blocks. With no groups at all there is
    one block, which a pool's null block needs.

    Raises:
        InsufficientMemoryError: the memory holds no block.
        UnresolvedLayoutError, IllegalCombinationError: as in :func:`get_kv_cache_configs`.
    """
    retention = read_config(config, "cache_config.prefix_cache_retention_interval")
    if layout is None:
        layout = resolved_layout_of(getattr(config, "cache_config", None))
    if not kv_cache_groups:
        return KVCacheConfig(1, [], [], retention, layout.name)
    per_block = pool_bytes_per_block(kv_cache_groups, layout)
    override = _override(config)
    num_blocks = available_memory // per_block if override is None else override
    return _config_of(kv_cache_groups, num_blocks, layout, retention, per_block, available_memory)


def _config_of(
    groups: Sequence[KVCacheGroupSpec],
    num_blocks: int,
    layout: KVCacheLayout,
    retention: int | None,
    per_block: int,
    available_memory: int,
) -> KVCacheConfig:
    if num_blocks < 1:
        raise InsufficientMemoryError(
            f"available_memory: a block takes {per_block} bytes, got {available_memory}"
        )
    tensors = plan_tensors(groups, num_blocks, layout)
    return KVCacheConfig(num_blocks, tensors, list(groups), retention, layout.name)


def _override(config: ConfigLike) -> int | None:
    override = read_config(config, "cache_config.num_gpu_blocks_override")
    if override is None:
        return None
    if type(override) is not int or override < 1:
        raise ConfigError(
            f"cache_config.num_gpu_blocks_override: expected None or an int >= 1, got {override!r}"
        )
    return override


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """What sizing decided, before anything is written back."""

    configs: list[KVCacheConfig]  #: one for each worker, all with the same ``num_blocks``
    max_model_len: int | None  #: the fitted length where auto-fit shortened it, else ``None``


def plan_worker_configs(
    config: ConfigLike,
    kv_cache_specs: Sequence[Mapping[str, object]],
    available_memory: Sequence[int],
    layout: KVCacheLayout,
) -> WorkerPlan:
    """Size all workers under one layout; the config is not changed.

    Args:
        config: a run's config.
        kv_cache_specs: for each worker, the spec of each of its layers.
        available_memory: for each worker, bytes for its cache.
        layout: the resolved layout.

    Raises:
        ConfigError: lists of unequal length, or a worker without a layer.
        SpecError: workers that disagree on a layer, or a layer that keeps no cache.
        InsufficientMemoryError: one request does not fit some worker, naming it.
        IllegalCombinationError: the layout cannot hold the groups.
    """
    if len(kv_cache_specs) != len(available_memory) or not kv_cache_specs:
        raise ConfigError(
            f"available_memory: expected one entry for each of {len(kv_cache_specs)} workers, at "
            f"least one, got {len(available_memory)}"
        )
    merged = _merge_workers(kv_cache_specs)
    retained = _extra_retained_tokens(config)
    for name, spec in merged.items():
        if isinstance(spec, SlidingWindowSpec) and spec.extra_retained_tokens != retained:
            merged[name] = replace(spec, extra_retained_tokens=retained)
    groups = get_kv_cache_groups(config, merged, layout=layout)
    projected = [_project(groups, specs) for specs in kv_cache_specs]
    retention = read_config(config, "cache_config.prefix_cache_retention_interval")
    if not groups:
        empty = [KVCacheConfig(1, [], [], retention, layout.name) for _ in kv_cache_specs]
        return WorkerPlan(empty, None)
    per_block = [_bytes_per_block(p, layout, rank) for rank, p in enumerate(projected)]
    override = _override(config)
    memory = list(available_memory)
    if override is not None:
        memory = [override * size for size in per_block]
    usable = [given - size for given, size in zip(memory, per_block)]  # less the null block
    length = read_config(config, "model_config.max_model_len")
    fitted: int | None = None
    if read_config(config, "model_config.original_max_model_len") == AUTO_FIT:
        fit = min(
            _longest_for_groups(config, worker, size, room)
            for worker, size, room in zip(projected, per_block, usable)
        )
        if fit < 1:
            rank = min(range(len(usable)), key=lambda r: usable[r] // per_block[r])
            raise _too_little(
                _AtLength(config, 1),
                blocks_per_request(_AtLength(config, 1), projected[rank]) * per_block[rank],
                usable[rank],
                memory[rank],
                0,
                f"worker {rank}: ",
            )
        fitted = fit if fit < length else None
    sized = config if fitted is None else _AtLength(config, fitted)
    for rank, (worker, size, room) in enumerate(zip(projected, per_block, usable)):
        needed = blocks_per_request(sized, worker) * size
        if room <= 0 or needed > room:
            longest = _longest_for_groups(config, worker, size, room)
            raise _too_little(sized, needed, room, memory[rank], longest, f"worker {rank}: ")
    num_blocks = override or min(given // size for given, size in zip(memory, per_block))
    configs = [
        _config_of(worker, num_blocks, layout, retention, size, given)
        for worker, size, given in zip(projected, per_block, memory)
    ]
    return WorkerPlan(configs, fitted)


def get_kv_cache_configs(
    config: ConfigLike,
    kv_cache_specs: Sequence[Mapping[str, object]],
    available_memory: Sequence[int],
) -> list[KVCacheConfig]:
    """The config of each worker, all with the smallest ``num_blocks`` among them.

    The null block is subtracted before the fit is judged. Where
    ``model_config.original_max_model_len == -1``, ``max_model_len`` is fitted to what is left,
    capped by its own value, and written back.

    Args and errors: see :func:`plan_worker_configs`; the layout is the one recorded on
    ``config.cache_config``.
    """
    layout = resolved_layout_of(getattr(config, "cache_config", None))
    plan = plan_worker_configs(config, kv_cache_specs, available_memory, layout)
    record_max_model_len(config, plan)
    return plan.configs


def record_max_model_len(config: ConfigLike, plan: WorkerPlan) -> None:
    """Write a fitted ``max_model_len`` back to the config."""
    if plan.max_model_len is not None:
        config.model_config.max_model_len = plan.max_model_len


def _merge_workers(workers: Sequence[Mapping[str, object]]) -> dict[str, KVCacheSpec]:
    merged: dict[str, KVCacheSpec] = {}
    for rank, specs in enumerate(workers):
        for name, foreign in specs.items():
            spec = (
                foreign
                if isinstance(foreign, KVCacheSpec)
                else as_spec(foreign, where=f"worker {rank}, layer {name!r}")
            )
            if isinstance(spec, EncoderOnlyAttentionSpec):
                raise SpecError(
                    f"worker {rank}, layer {name!r}: an encoder-only layer keeps no K/V, so it "
                    "cannot be given a cache"
                )
            known = merged.setdefault(name, spec)
            if known is not spec and known != spec:
                raise SpecError(
                    f"worker {rank}, layer {name!r}: workers must agree on a layer's spec, "
                    f"expected {known}, got {spec}"
                )
    return merged


def _extra_retained_tokens(config: ConfigLike) -> int:
    """Tokens kept before a window for a draft model of several modules."""
    speculative = read_config(config, "speculative_config")
    if speculative is None or not speculative.use_multi_module_mtp():
        return 0
    return int(speculative.num_speculative_tokens) - 1


def _project(
    groups: Sequence[KVCacheGroupSpec], worker: Mapping[str, object]
) -> list[KVCacheGroupSpec]:
    """The groups with only the layers that a worker holds; empty groups keep their place."""
    out = []
    for group in groups:
        names = [name for name in group.layer_names if name in worker]
        spec = group.kv_cache_spec
        partly = names and len(names) < len(group.layer_names)
        if partly and isinstance(spec, UniformTypeKVCacheSpecs):
            held = {name: spec.kv_cache_specs[name] for name in names}
            spec = UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=held)
        out.append(
            KVCacheGroupSpec(
                names, spec, group.is_eagle_group and bool(names), group.enable_kv_transfer
            )
        )
    return out


def _bytes_per_block(groups: Sequence[KVCacheGroupSpec], layout: KVCacheLayout, rank: int) -> int:
    if not any(group.layer_names for group in groups):
        raise ConfigError(f"worker {rank}: expected at least one layer with a cache, got none")
    return pool_bytes_per_block(groups, layout)


def _longest_for_groups(
    config: ConfigLike, groups: Sequence[KVCacheGroupSpec], per_block: int, room: int
) -> int:
    return _longest(
        read_config(config, "model_config.max_model_len"),
        lambda n: blocks_per_request(_AtLength(config, n), groups) * per_block <= room,
    )


def generate_scheduler_kv_cache_config(kv_cache_configs: Sequence[KVCacheConfig]) -> KVCacheConfig:
    """The config that a scheduler plans with: the first worker's, one spec for each group.

    Raises:
        ConfigError: workers with different numbers of blocks.
    """
    counts = [config.num_blocks for config in kv_cache_configs]
    if not counts or len(set(counts)) > 1:
        raise ConfigError(f"kv_cache_configs: expected workers with one num_blocks, got {counts}")
    first = kv_cache_configs[0]
    return replace(
        first,
        kv_cache_tensors=[replace(t, layers=list(t.layers)) for t in first.kv_cache_tensors],
        kv_cache_groups=[
            replace(
                group,
                layer_names=list(group.layer_names),
                kv_cache_spec=layer_specs_of(group.kv_cache_spec)[0],
            )
            for group in first.kv_cache_groups
        ],
    )


def resolve_kv_cache_block_sizes(
    kv_cache_config: KVCacheConfig, config: ConfigLike
) -> tuple[int, int]:
    """``(scheduler_block_size, hash_block_size)`` in tokens.

    The scheduler's is what lengths are rounded to: the common multiple of the groups' block
    sizes, each times the decode context parallel size where its layers are sharded. The
    hash's is what prefix keys are computed for: ``cache_config.prefix_match_unit``, or the
    common divisor of the groups' sizes; the scheduler's own where nothing reads the hashes.
    With one group both are ``cache_config.block_size``, times the ranks.

    Raises:
        ConfigError: a ``prefix_match_unit`` that does not divide every group's block size, or
            differs from the only group's; compressed states that a cache hit would cut.
    """
    dcp = int(read_config(config, "parallel_config.decode_context_parallel_size"))
    unit = read_config(config, "cache_config.prefix_match_unit")
    hashing = (
        read_config(config, "cache_config.enable_prefix_caching")
        or read_config(config, "kv_transfer_config") is not None
    )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) <= 1:
        sharded = not groups or groups[0].kv_cache_spec.is_dcp_sharded
        size = int(read_config(config, "cache_config.block_size")) * (dcp if sharded else 1)
        if groups and hashing and unit not in (None, size):
            raise ConfigError(
                f"cache_config.prefix_match_unit: with one group, prefix hits end on blocks of "
                f"{size} tokens, so expected None or {size}, got {unit}"
            )
        return size, size
    sizes = [
        group.kv_cache_spec.block_size * (dcp if group.kv_cache_spec.is_dcp_sharded else 1)
        for group in groups
    ]
    scheduler = lcm(*sizes)
    if not hashing:
        return scheduler, scheduler
    cached = [
        size for size, group in zip(sizes, groups) if group.kv_cache_spec.prefix_cacheable
    ] or sizes
    hashed = gcd(*cached) if unit is None else int(unit)
    if any(size % hashed for size in cached):
        raise ConfigError(
            f"cache_config.prefix_match_unit: expected a divisor of every group's block size "
            f"{sizes}, got {hashed}"
        )
    compressed = sorted(
        {
            tokens
            for group in groups
            for spec in layer_specs_of(group.kv_cache_spec)
            if not isinstance(tokens := getattr(spec, "tokens_per_state", 1), Fraction)
            and tokens > 1
            and spec.prefix_cacheable
        }
    )
    if any(scheduler % tokens for tokens in compressed):
        raise ConfigError(
            f"cache_config.prefix_match_unit: a cache hit ends on multiples of {scheduler} tokens, "
            f"which would cut stored states of {compressed} tokens"
        )
    return scheduler, hashed
