"""The diffusion control plane: which layout a diffusion model's cache has, and who must agree.

Names and contracts are those of vLLM-Omni's diffusion KV code. Configs, specs and backends
are read by attribute: vLLM's own serve as well as ours, and a double may lack what it does
not care about.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from layout_core.configs import ConfigLike, read_config
from layout_core.errors import ConfigError, LayoutConflictError, UnknownLayoutError
from layout_core.foreign import as_config, as_spec
from layout_core.layouts import KVCacheLayout
from layout_core.placement import plan_tensors
from layout_core.resolve import check_config
from layout_core.sizing import (
    WorkerPlan,
    generate_scheduler_kv_cache_config,
    plan_worker_configs,
    record_max_model_len,
)
from layout_core.tensors import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

DEFAULT_DIFFUSION_KV_CACHE_LAYOUT: Final = KVCacheLayout.LBNHC
"""The layout of a backend that does not index K/V by the block stride."""

BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT: Final = KVCacheLayout.BLNHC
"""The layout of a backend that does."""


def _choose_layout(
    vllm_config: ConfigLike,
    indexes_kv_by_block_stride: bool | None,
    required_layout: object | None,
) -> KVCacheLayout:
    """The layout that holds, checked against what is pinned; nothing is recorded."""
    required = None if required_layout is None else KVCacheLayout.parse(required_layout)
    outermost = None if indexes_kv_by_block_stride is None else bool(indexes_kv_by_block_stride)
    if required is not None and outermost not in (None, required.is_block_outermost):
        raise LayoutConflictError(
            f"required_layout: {required.name} contradicts the attention backend, which demands "
            f"{_demand(outermost)}"
        )
    current = read_config(vllm_config, "cache_config.kv_cache_layout")
    if current is None:
        if required is not None:
            return required
        return (
            BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT
            if outermost
            else DEFAULT_DIFFUSION_KV_CACHE_LAYOUT
        )
    layout = KVCacheLayout.parse(current)
    if required is not None and layout is not required:
        raise LayoutConflictError(
            f"cache_config.kv_cache_layout: the pinned {layout.name} contradicts the attention "
            f"backend or connector, which requires {required.name}"
        )
    if outermost not in (None, layout.is_block_outermost):
        raise LayoutConflictError(
            f"cache_config.kv_cache_layout: the pinned {layout.name} contradicts the attention "
            f"backend, which demands {_demand(outermost)}"
        )
    return layout


def block_stride_demand(backends: Iterable[object]) -> bool | None:
    """What the workers' attention backends demand of the layout, all together.

    Args:
        backends: classes. One without ``indexes_kv_by_block_stride``, or with ``None`` for it or
            from it, says nothing, and so does a ``None``.

    Returns:
        ``True``: B outermost; ``False``: not so; ``None``: nobody demands anything.

    Raises:
        LayoutConflictError: two backends demand opposite things; names both.
    """
    speakers: dict[bool, object] = {}
    for backend in backends:
        demand = getattr(backend, "indexes_kv_by_block_stride", None)
        demand = demand() if callable(demand) else demand
        if demand is not None:
            speakers.setdefault(bool(demand), backend)
    if len(speakers) > 1:
        raise LayoutConflictError(
            f"attention backends contradict each other: {_name(speakers[True])} demands "
            f"{_demand(True)}, {_name(speakers[False])} {_demand(False)}"
        )
    return next(iter(speakers), None)


def _name(backend: object) -> str:
    get_name = getattr(backend, "get_name", None)
    return str(get_name()) if callable(get_name) else getattr(backend, "__name__", repr(backend))


def _demand(outermost: bool | None) -> str:
    return "a layout with B outermost" if outermost else "a layout without B outermost"


def _pin(vllm_config: ConfigLike, layout: KVCacheLayout) -> None:
    """Record the layout where there is a place for it and none is recorded."""
    cache_config = getattr(vllm_config, "cache_config", None)
    if cache_config is not None and getattr(cache_config, "kv_cache_layout", None) is None:
        cache_config.kv_cache_layout = layout.name


def resolve_diffusion_kv_cache_layout(
    vllm_config: ConfigLike,
    *,
    indexes_kv_by_block_stride: bool | None = False,
    required_layout: object | None = None,
) -> KVCacheLayout:
    """Pin the layout on ``vllm_config.cache_config.kv_cache_layout`` and return it.

    A layout already there wins, and is checked. A config without a ``cache_config`` gets the
    implied layout back, and nothing is recorded.

    Args:
        vllm_config: the run's config.
        indexes_kv_by_block_stride: ``True`` demands a layout with B outermost, ``False``
            forbids one, ``None`` says nothing.
        required_layout: the layout that a connector demands.

    Raises:
        LayoutConflictError: a requirement contradicts the backend, or the pinned layout.
            Nothing is recorded then.
        UnknownLayoutError: a name that is no layout.
    """
    layout = _choose_layout(vllm_config, indexes_kv_by_block_stride, required_layout)
    _pin(vllm_config, layout)
    return layout


def adopt_kv_cache_layout(vllm_config: ConfigLike, kv_cache_config: Any) -> KVCacheLayout:
    """In a worker: take over the control plane's layout, before anything is allocated.

    A config with groups is checked first: one whose tensors do not follow from its layout,
    groups and block count is refused. Without a carried name, the default that the control
    plane pins holds.

    Raises:
        LayoutConflictError: the worker's config was pinned to another layout.
        ConfigError, UnsupportedError: an edited config, or one with a field that changes
            addressing or ownership. Nothing is recorded by a call that raises.
    """
    name = getattr(kv_cache_config, "kv_cache_layout", None)
    carried = None if name is None else KVCacheLayout.parse(name)
    current = read_config(vllm_config, "cache_config.kv_cache_layout")
    pinned = None if current is None else KVCacheLayout.parse(current)
    if carried is not None and pinned not in (None, carried):
        raise LayoutConflictError(
            f"worker: its KV cache layout {current!r} disagrees with the layout that the control "
            f"plane resolved, {carried.name!r}"
        )
    if carried is None and pinned is not None and pinned.is_block_outermost:
        raise LayoutConflictError(
            f"worker: its KV cache layout {current!r} disagrees with the layout of a config that "
            f"carries none, {DEFAULT_DIFFUSION_KV_CACHE_LAYOUT.name!r}, and so contradicts the "
            "attention backend"
        )
    layout = carried or pinned or DEFAULT_DIFFUSION_KV_CACHE_LAYOUT
    if getattr(kv_cache_config, "kv_cache_groups", None):
        check_config(as_config(kv_cache_config), layout=layout)
    _pin(vllm_config, layout)
    return layout


def assert_backend_layout_supported(vllm_config: ConfigLike, attn_backend: Any) -> None:
    """Raise where a backend's demand contradicts the resolved layout.

    Silent while the layout is unresolved, for ``None``, and for a backend that says nothing:
    one without ``indexes_kv_by_block_stride``, or with ``None`` for it or from it.

    Raises:
        LayoutConflictError: the message contains "contradicts the attention backend".
    """
    demand = block_stride_demand([attn_backend])
    if demand is None or read_config(vllm_config, "cache_config.kv_cache_layout") is None:
        return
    _choose_layout(vllm_config, demand, None)


def get_connector_required_kv_cache_layout(
    vllm_config: ConfigLike, *, connector_cls: Any = None
) -> KVCacheLayout | None:
    """The layout that the KV connector's class demands, or ``None``.

    Args:
        vllm_config: handed to the class's ``get_required_kvcache_layout``.
        connector_cls: the class; ``None`` where no connector is configured.

    Raises:
        ConfigError: a connector is configured and its class was not given.
        UnknownLayoutError: the class returns what is no layout; names the class.
    """
    if connector_cls is None:
        if read_config(vllm_config, "kv_transfer_config") is None:
            return None
        raise ConfigError(
            "connector_cls: kv_transfer_config names a KV connector, so its class is needed to "
            "learn the layout that it requires; got None"
        )
    getter = getattr(connector_cls, "get_required_kvcache_layout", None)
    layout = None if getter is None else getter(vllm_config)
    if layout is None:
        return None
    name = layout if isinstance(layout, str) else getattr(layout, "name", None)
    try:
        return KVCacheLayout.parse(layout)
    except UnknownLayoutError as error:
        raise UnknownLayoutError(
            f"connector {connector_cls.__name__} requires an unsupported KV cache layout "
            f"{name or layout!r}: {error}"
        ) from error


def build_kv_cache_tensor(
    spec: object,
    num_blocks: int,
    layers: Sequence[str],
    *,
    layout: KVCacheLayout | str | None = None,
    offset: int = 0,
) -> KVCacheTensor:
    """The placement of layers of one spec, alone in their allocation.

    Layer ``l``'s block ``b`` starts at ``offset + l*layer_stride + b*block_stride``; layers lie
    at distinct offsets.

    Args:
        spec: what each layer stores; a spec of ours or of vLLM's.
        num_blocks: manager blocks; >= 1.
        layers: layer names, distinct, at least one.
        layout: ``None`` is :data:`DEFAULT_DIFFUSION_KV_CACHE_LAYOUT`.
        offset: byte of block 0 of the first layer; ``size``, the whole allocation, counts it.

    Raises:
        ConfigError: an argument out of range.
        StrideError, IllegalCombinationError: the layout cannot hold the spec.
    """
    chosen = DEFAULT_DIFFUSION_KV_CACHE_LAYOUT if layout is None else KVCacheLayout.parse(layout)
    names = list(layers)
    if not names or len(set(names)) != len(names):
        raise ConfigError(f"layers: expected distinct names, at least one, got {names}")
    if type(num_blocks) is not int or num_blocks < 1:
        raise ConfigError(f"num_blocks: expected an int >= 1, got {num_blocks!r}")
    if type(offset) is not int or offset < 0:
        raise ConfigError(f"offset: expected an int >= 0, got {offset!r}")
    (tensor,) = plan_tensors([KVCacheGroupSpec(names, as_spec(spec))], num_blocks, chosen)
    tensor.offset += offset
    tensor.size += offset
    return tensor


def build_native_kv_cache_configs(
    vllm_config: ConfigLike,
    worker_specs: Sequence[Mapping[str, object]],
    available_memory: Sequence[int],
    *,
    indexes_kv_by_block_stride: bool | None = False,
    connector_cls: Any = None,
) -> tuple[list[KVCacheConfig], KVCacheConfig]:
    """Resolve the layout, size all workers, and make the scheduler's config.

    All workers get the smallest ``num_blocks``, one layout is on all configs, and the null
    block is subtracted before the fit is judged. Where ``original_max_model_len`` is −1,
    ``max_model_len`` is fitted, capped by its own value, and written back.

    Args:
        vllm_config: the run's config; the layout and a fitted length are recorded on it.
        worker_specs: for each worker, the spec of each layer (ours or vLLM's).
        available_memory: for each worker, bytes for its cache.
        indexes_kv_by_block_stride: see :func:`resolve_diffusion_kv_cache_layout`.
        connector_cls: see :func:`get_connector_required_kv_cache_layout`.

    Returns:
        ``(worker_configs, scheduler_config)``.

    Raises:
        LayoutConflictError, InsufficientMemoryError, IllegalCombinationError, SpecError,
        ConfigError: nothing is recorded then.
    """
    native = plan_native_kv_cache_configs(
        vllm_config,
        worker_specs,
        available_memory,
        indexes_kv_by_block_stride=indexes_kv_by_block_stride,
        connector_cls=connector_cls,
    )
    record_native_plan(vllm_config, native)
    return native.plan.configs, native.scheduler_config


@dataclass(frozen=True, slots=True)
class NativePlan:
    """What :func:`build_native_kv_cache_configs` decides, before it records anything."""

    layout: KVCacheLayout
    plan: WorkerPlan
    scheduler_config: KVCacheConfig


def plan_native_kv_cache_configs(
    vllm_config: ConfigLike,
    worker_specs: Sequence[Mapping[str, object]],
    available_memory: Sequence[int],
    *,
    indexes_kv_by_block_stride: bool | None = False,
    connector_cls: Any = None,
) -> NativePlan:
    """The first half of :func:`build_native_kv_cache_configs`: it decides, and records nothing."""
    required = get_connector_required_kv_cache_layout(vllm_config, connector_cls=connector_cls)
    layout = _choose_layout(vllm_config, indexes_kv_by_block_stride, required)
    plan = plan_worker_configs(vllm_config, worker_specs, available_memory, layout)
    return NativePlan(layout, plan, generate_scheduler_kv_cache_config(plan.configs))


def record_native_plan(vllm_config: ConfigLike, native: NativePlan) -> None:
    """The second half: the layout and a fitted length, on the config that was planned for."""
    _pin(vllm_config, native.layout)
    record_max_model_len(vllm_config, native.plan)
