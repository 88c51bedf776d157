"""vLLM's ``init_kv_cache`` with our engine's pool under it.

vLLM's layers are bound to views ``[B, H, N, C]`` of the pool that our torch engine allocated,
and the pool comes along, so that the engine's own paged attention reads and writes the very
same bytes. Which form the function has is read off the installed vLLM's signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Final

import torch
import vllm

import backends
from backends.torch_cuda.allocator import TorchPool
from backends.torch_cuda.dtypes import torch_dtype
from layout_core.configs import read_config, resolved_layout_of
from layout_core.errors import ConfigError, LayoutConflictError, UnsupportedError
from layout_core.foreign import as_config
from layout_core.layouts import KVCacheLayout
from layout_core.resolve import resolve_layout
from layout_core.tensors import KVCacheConfig

_REQUIRED: Final = (
    "forward_context",
    "kv_cache_config",
    "device",
    "kernel_block_sizes",
    "vllm_config",
)
_OPTIONAL: Final = (
    "runner_kv_caches",  # 0.29: a list of the runner's that is filled
    "kv_cache_allocation_context",
    "block_tables",  # from 0.30: of HiSparse alone
    "attn_groups",  # from 0.32: views for groups whose kernels want other blocks
)


class KVCaches(dict[str, torch.Tensor]):
    """Layer name -> its view ``[B, H, N, C]`` in elements, as vLLM's function returns.

    ``pool`` is the engine's, over the same memory: what ``forward_paged`` takes.
    """

    def __init__(self, views: Mapping[str, torch.Tensor], pool: TorchPool) -> None:
        super().__init__(views)
        self.pool = pool


def init_kv_cache(*args: Any, **kwargs: Any) -> KVCaches:
    """Allocate a worker's cache and bind its layers; takes what the installed vLLM's takes.

    - 0.29: ``(runner_kv_caches, forward_context, kv_cache_config, device, kernel_block_sizes,
      vllm_config)``; the list is filled in the order of the layers.
    - 0.30: without the list, and with ``block_tables=``.
    - 0.32: with ``attn_groups=`` too.

    ``kv_cache_allocation_context=`` holds while memory is allocated, in all of them. Layers
    that share another's K/V get its view. Where H or N is of size 1, its stride is the product
    of the sizes inside it, which vLLM's need not be; every address is the same.

    Returns:
        The views by layer, and the pool.

    Raises:
        TypeError: arguments that the installed vLLM's function would not take.
        UnresolvedLayoutError: no layout was adopted yet.
        LayoutConflictError: the config carries another layout than the worker adopted.
        UnsupportedError: HiSparse, or a spec that the engine does not serve.
        ConfigError: an edited config, or a layer that is not in ``forward_context``. Nothing is
            allocated or bound by a call that raises.
    """
    call = _bind(args, kwargs)
    vllm_config, context = call["vllm_config"], call["forward_context"]
    if read_config(vllm_config, "attention_config.hisparse_config") is not None:
        raise UnsupportedError(
            "vllm_config.attention_config.hisparse_config: expected None; blocks of HiSparse lie "
            "in host memory of their own, which is not supported"
        )
    shared = _shared_layers(vllm_config)
    config = _without_shared_layers(call["kv_cache_config"], shared)
    runner_list = call.get("runner_kv_caches")
    _check_bindable(config, shared, context, runner_list)
    with call.get("kv_cache_allocation_context") or nullcontext():
        caches = allocate_kv_cache(
            config,
            call["device"],
            resolved_layout_of(vllm_config.cache_config),
            call["kernel_block_sizes"],
        )
    caches.update({name: caches[target] for name, target in shared.items()})
    _bind_layers(caches, context, call, _modules_per_layer(vllm_config))
    return caches


def allocate_kv_cache(
    kv_cache_config: Any,
    device: torch.device | str,
    layout: Any,
    kernel_block_sizes: Sequence[int] | None = None,
) -> KVCaches:
    """vLLM's ``allocate_kv_cache`` with our engine's pool: one allocation, one view a layer.

    Args:
        kv_cache_config: vLLM's or ours.
        device: where the pool lies.
        layout: what the worker adopted: a member of vLLM's or ours, or a name.
        kernel_block_sizes: for each group, the tokens of a kernel block; groups past its end
            are not split.

    Raises:
        LayoutConflictError: the config carries another layout.
        ConfigError, StrideError, IllegalCombinationError, UnsupportedError: a config that does
            not follow from its layout, or cannot be split, or is not served.
    """
    chosen = KVCacheLayout.parse(layout)
    config = as_config(kv_cache_config)
    if config.kv_cache_layout is not None:
        carried = KVCacheLayout.parse(config.kv_cache_layout)
        if carried is not chosen:
            raise LayoutConflictError(
                f"kv_cache_config.kv_cache_layout: {carried.name} disagrees with the layout that "
                f"the worker adopted, {chosen.name}"
            )
    config = replace(config, kv_cache_layout=chosen.name)
    groups = len(config.kv_cache_groups)
    sizes: list[int | None] = [*(kernel_block_sizes or ()), *[None] * groups]
    resolved = resolve_layout(config, kernel_block_sizes=sizes[:groups])
    engine = backends.load("torch_cuda", device=str(device))
    pool: TorchPool = engine.allocate(resolved)
    layers = {layer.view.name: layer for layer in pool.layers}
    views = {
        name: layers[name].content.view(torch_dtype(layers[name].view.dtype))
        for tensor in config.kv_cache_tensors
        for name in tensor.layers
    }
    return KVCaches(views, pool)


# What the installed vLLM's function takes.


def _bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    from vllm.v1.worker.gpu import attn_utils

    signature = inspect.signature(attn_utils.init_kv_cache)
    check_form(list(signature.parameters))
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def check_form(parameters: Sequence[str]) -> None:
    """Raise unless every parameter of vLLM's function is one whose meaning is known here.

    Raises:
        UnsupportedError: names what is missing or new, and the version.
    """
    missing = [name for name in _REQUIRED if name not in parameters]
    new = [name for name in parameters if name not in (*_REQUIRED, *_OPTIONAL)]
    if missing or new:
        raise UnsupportedError(
            f"init_kv_cache of vLLM {vllm.__version__}: expected the parameters "
            f"{', '.join(_REQUIRED)} and any of {', '.join(_OPTIONAL)}; missing: "
            f"{', '.join(missing) or 'none'}, not known here: {', '.join(new) or 'none'}"
        )


# Layers that share another layer's K/V.


def _shared_layers(vllm_config: Any) -> dict[str, str]:
    """Layer -> the layer whose K/V it uses."""
    from vllm.v1.worker.gpu.attn_utils import get_shared_kv_cache_layers

    return dict(get_shared_kv_cache_layers(vllm_config))


def _without_shared_layers(config: Any, shared: Mapping[str, str]) -> KVCacheConfig:
    """Ours, from vLLM's config, whose groups list the sharing layers after the others."""
    ours = as_config(config)
    if not shared:
        return ours
    groups = [
        replace(group, layer_names=[name for name in group.layer_names if name not in shared])
        for group in ours.kv_cache_groups
    ]
    return replace(ours, kv_cache_groups=groups)


# Binding.


def _check_bindable(
    config: KVCacheConfig,
    shared: Mapping[str, str],
    context: Mapping[str, Any],
    runner_list: list[Any] | None,
) -> None:
    """Raise where vLLM's binding would stop half-way."""
    placed = [name for tensor in config.kv_cache_tensors for name in tensor.layers]
    for name, target in shared.items():
        if target not in placed:
            raise ConfigError(
                f"layer {name!r}: it shares the K/V of {target!r}, which the config does not place"
            )
    if runner_list is None:
        return  # from 0.30 on, layers of another runner may be missing
    if runner_list:
        raise ConfigError(
            f"runner_kv_caches: expected an empty list, got {len(runner_list)} entries"
        )
    missing = [name for name in (*placed, *shared) if name not in context]
    if missing:
        raise ConfigError(f"forward_context: expected every placed layer, missing: {missing}")


def _modules_per_layer(vllm_config: Any) -> int:
    """Attention modules of one decoder layer: how many integers its layers' names carry."""
    hf_config = getattr(getattr(vllm_config, "model_config", None), "hf_config", None)
    kind = getattr(hf_config, "model_type", None)
    return 2 if kind in ("longcat_flash", "longcat_flash_ngram") else 1


def _bind_layers(
    caches: KVCaches, context: Mapping[str, Any], call: Mapping[str, Any], modules: int
) -> None:
    from vllm.v1.worker import utils

    theirs: Any = utils
    if "runner_kv_caches" in call:
        theirs.bind_kv_cache(caches, context, call["runner_kv_caches"], modules)
        return
    bindable = {name: cache for name, cache in caches.items() if name in context}
    groups: Iterable[Any] = call.get("attn_groups") or ()
    if "attn_groups" in call:
        bindable = theirs.map_kv_caches_to_kernel_blocks(bindable, groups)
    theirs.bind_kv_cache_to_layers(
        bindable, context, modules, kv_cache_groups=call["kv_cache_config"].kv_cache_groups
    )
