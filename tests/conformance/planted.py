"""Faults planted into our side, one for each kind: a comparison that misses its fault is blind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import layout_core


def _after(owner: Any, name: str, change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    """``owner.name`` with its result changed."""
    real = getattr(owner, name)
    return patch.object(owner, name, lambda *args, **kwargs: change(real(*args, **kwargs)))


def _in_geometry(name: str, change: Callable[[Any], Any]) -> AbstractContextManager[Any]:
    from tests.conformance import geometry  # it imports vLLM

    return _after(geometry, name, change)


def _shift_last_tensor(config: Any) -> Any:
    """The second tensor a byte too far."""
    if len(config.kv_cache_tensors) > 1:
        config.kv_cache_tensors[1].offset += 1
    return config


def _shift_views(resolved: Any) -> Any:
    """Every view's heads one byte apart from where they are."""
    layers = tuple(
        replace(view, strides=(view.strides[0], view.strides[1] + 1, *view.strides[2:]))
        for view in resolved.layers
    )
    return replace(resolved, layers=layers)


def _one_block_less(configs: list[Any]) -> list[Any]:
    return [replace(config, num_blocks=config.num_blocks - 1) for config in configs]


def _adopt_blindly(worker: Any, config: Any) -> Any:
    worker.cache_config.kv_cache_layout = config.kv_cache_layout
    return layout_core.KVCacheLayout.parse(config.kv_cache_layout)


def _managers() -> AbstractContextManager[Any]:
    from block_manager.block_pool import BlockPool

    # idle hits not counted against the free blocks
    return patch.object(BlockPool, "num_idle", lambda self, blocks: 0)


def _hits() -> AbstractContextManager[Any]:
    from tests.conformance.management import Ours

    return _after(Ours, "reserve", lambda hits: hits and [max(hit, 4) for hit in hits])


def _pools() -> AbstractContextManager[Any]:
    from block_manager.block_pool import BlockPool

    return _after(BlockPool, "ref_count", lambda count: min(count, 2))


PLANTED: dict[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "swapped strides": (
        "strides",
        lambda: _in_geometry("compute_layout_strides", lambda s: (s[0], s[1], s[3], s[2], s[4])),
    ),
    "an offset one byte off": (
        "views",
        lambda: _in_geometry("make_config", _shift_last_tensor),
    ),
    "heads one byte off": ("views", lambda: _in_geometry("resolve_layout", _shift_views)),
    "groups in another order": (
        "groups",
        lambda: _after(layout_core, "get_kv_cache_groups", lambda groups: groups[::-1]),
    ),
    "a block too few": (
        "configs",
        lambda: _after(layout_core, "get_kv_cache_configs", _one_block_less),
    ),
    "an edited config adopted": (
        "native",
        lambda: patch.object(layout_core, "adopt_kv_cache_layout", _adopt_blindly),
    ),
    "a token too many": (
        "memory",
        lambda: _after(layout_core, "estimate_max_model_len", lambda length: length + 1),
    ),
    "sizes swapped": (
        "block sizes",
        lambda: _after(layout_core, "resolve_kv_cache_block_sizes", lambda sizes: sizes[::-1]),
    ),
    "the first spec for all": (
        "merges",
        lambda: patch.object(layout_core.FullAttentionSpec, "merge", lambda specs: specs[0]),
    ),
    "the wrong preference": (
        "resolution",
        lambda: _after(layout_core, "get_supported_kv_cache_layouts", lambda found: found[::-1]),
    ),
    "idle hits not counted": ("managers", _managers),
    "hits too long": ("managers", _hits),
    "holds miscounted": ("pools", _pools),
}
"""What is wrong -> the kind that must notice, and how to plant it."""
