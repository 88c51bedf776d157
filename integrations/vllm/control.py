"""The diffusion control plane with vLLM's own types.

The functions are those of ``layout_core.diffusion``, which decides; here they return vLLM's
enum and records, and a KV connector's class is found by vLLM's factory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, KVCacheTensor
from vllm.v1.kv_cache_layout import KVCacheLayout

from integrations.vllm.convert import check_class, to_vllm
from layout_core import diffusion
from layout_core.configs import read_config

DEFAULT_DIFFUSION_KV_CACHE_LAYOUT: Final[KVCacheLayout] = to_vllm(
    diffusion.DEFAULT_DIFFUSION_KV_CACHE_LAYOUT
)
BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT: Final[KVCacheLayout] = to_vllm(
    diffusion.BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT
)

assert_backend_layout_supported = diffusion.assert_backend_layout_supported


def resolve_diffusion_kv_cache_layout(
    vllm_config: Any,
    *,
    indexes_kv_by_block_stride: bool | None = False,
    required_layout: KVCacheLayout | str | None = None,
) -> KVCacheLayout:
    """Pin the layout's name on ``vllm_config.cache_config`` and return vLLM's member.

    See :func:`layout_core.resolve_diffusion_kv_cache_layout`.
    """
    return to_vllm(
        diffusion.resolve_diffusion_kv_cache_layout(
            vllm_config,
            indexes_kv_by_block_stride=indexes_kv_by_block_stride,
            required_layout=required_layout,
        )
    )


def adopt_kv_cache_layout(vllm_config: Any, kv_cache_config: Any) -> KVCacheLayout:
    """In a worker: take over the control plane's layout, before anything is allocated.

    See :func:`layout_core.adopt_kv_cache_layout`.
    """
    return to_vllm(diffusion.adopt_kv_cache_layout(vllm_config, kv_cache_config))


def find_connector_class(vllm_config: Any) -> Any:
    """The class of the configured KV connector, by vLLM's own factory; ``None`` without one.

    Raises:
        ValueError: vLLM's own, for a connector that it does not know.
    """
    transfer = read_config(vllm_config, "kv_transfer_config")
    if transfer is None:
        return None
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return KVConnectorFactory.get_connector_class(transfer)


def get_connector_required_kv_cache_layout(
    vllm_config: Any, *, connector_cls: Any = None
) -> KVCacheLayout | None:
    """The layout that the configured KV connector demands, or ``None``.

    Args:
        connector_cls: its class; ``None`` finds it by :func:`find_connector_class`.

    See :func:`layout_core.get_connector_required_kv_cache_layout`.
    """
    if connector_cls is None:
        connector_cls = find_connector_class(vllm_config)
    layout = diffusion.get_connector_required_kv_cache_layout(
        vllm_config, connector_cls=connector_cls
    )
    return None if layout is None else to_vllm(layout)


def build_kv_cache_tensor(
    spec: KVCacheSpec,
    num_blocks: int,
    layers: Sequence[str],
    *,
    layout: KVCacheLayout | str | None = None,
    offset: int = 0,
) -> KVCacheTensor:
    """vLLM's tensor for layers of one spec; see :func:`layout_core.build_kv_cache_tensor`."""
    chosen = getattr(layout, "name", layout)
    return to_vllm(
        diffusion.build_kv_cache_tensor(spec, num_blocks, layers, layout=chosen, offset=offset)
    )


def build_native_kv_cache_configs(
    vllm_config: Any,
    worker_specs: Sequence[Mapping[str, KVCacheSpec]],
    available_memory: Sequence[int],
    *,
    indexes_kv_by_block_stride: bool | None = False,
) -> tuple[list[KVCacheConfig], KVCacheConfig]:
    """vLLM's configs for all workers and for the scheduler, one layout on all.

    The layout that a configured KV connector demands is honoured. See
    :func:`layout_core.build_native_kv_cache_configs`.

    Raises:
        UnsupportedError: a config that the installed version cannot hold.
    """
    for rank, specs in enumerate(worker_specs):
        for name, spec in specs.items():
            check_class(spec, f"worker_specs[{rank}][{name!r}]")
    native = diffusion.plan_native_kv_cache_configs(
        vllm_config,
        worker_specs,
        available_memory,
        indexes_kv_by_block_stride=indexes_kv_by_block_stride,
        connector_cls=find_connector_class(vllm_config),
    )
    workers = [to_vllm(config) for config in native.plan.configs]
    scheduler = to_vllm(native.scheduler_config)
    diffusion.record_native_plan(vllm_config, native)  # last: a refusal above leaves no trace
    return workers, scheduler
