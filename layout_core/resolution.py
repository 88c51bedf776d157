"""Which layout a model's cache gets, from what the workers' backends can serve."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from layout_core.configs import ConfigLike
from layout_core.errors import ConfigError, LayoutConflictError
from layout_core.foreign import as_spec
from layout_core.layouts import KVCacheLayout
from layout_core.specs import AttentionSpec

DEFAULT_LAYOUT_PREFERENCE: Final = (
    KVCacheLayout.LBNHC,
    KVCacheLayout.LBHNC,
    KVCacheLayout.BLNHC,
    KVCacheLayout.BLHNC,
    KVCacheLayout.BHLNC,
    KVCacheLayout.LHBNC,
)
"""The order where no backend declares one (vLLM's)."""


class LayoutPreferenceWarning(UserWarning):
    """A preferred layout that is not among those that every backend serves."""


def get_supported_kv_cache_layouts(backends: Iterable[object]) -> list[KVCacheLayout]:
    """Layouts that every backend of one worker serves, most preferred first.

    Args:
        backends: classes with ``supported_kv_cache_layouts()``: a sequence of layouts, most
            preferred first, or ``None`` where any will do. One without it says nothing.

    Returns:
        The declared order where all declare the same; else the common ones, those that most
        backends put first coming first, ties in the order of the enum. The default order
        where none declares any.

    Raises:
        LayoutConflictError: no layout is common to all.
    """
    declared: list[list[KVCacheLayout]] = []
    for backend in backends:
        getter = getattr(backend, "supported_kv_cache_layouts", None)
        layouts = getter() if callable(getter) else None
        if layouts is not None:
            declared.append([KVCacheLayout.parse(layout) for layout in layouts])
    if not declared:
        declared = [list(DEFAULT_LAYOUT_PREFERENCE)]
    if any(not layouts for layouts in declared):
        raise LayoutConflictError("backends: one declares that it supports no KV cache layout")
    first = declared[0]
    if all(layouts == first for layouts in declared):
        return first
    votes = Counter(layouts[0] for layouts in declared)
    common = [m for m in KVCacheLayout if all(m in layouts for layouts in declared)]
    if not common:
        raise LayoutConflictError(
            f"backends: no KV cache layout is supported by all, got {[_names(d) for d in declared]}"
        )
    return sorted(common, key=lambda layout: -votes[layout])


def _names(layouts: Iterable[KVCacheLayout]) -> list[str]:
    return [layout.name for layout in layouts]


def resolve_kv_cache_layout(
    config: ConfigLike,
    supported_layouts: Sequence[Sequence[object]],
    kv_cache_specs: Iterable[object] | None = None,
    *,
    requested: object | None = None,
    preferred: object | None = None,
) -> KVCacheLayout:
    """Resolve one layout for the whole model, once, and record it on ``config.cache_config``.

    Args:
        config: its ``cache_config`` takes the name; a layout already there wins.
        supported_layouts: what each worker reported (names or members, most preferred first;
            :func:`get_supported_kv_cache_layouts`). All must be alike.
        kv_cache_specs: the layers' specs. Unlike ``(H, N, page)`` need a block-compact layout;
            page sizes that differ between sharded and replicated layers need B outermost.
        requested: a layout that the user demands; it must be among the candidates.
        preferred: a connector's preference, used where it is among them; else a
            :class:`LayoutPreferenceWarning` says so.

    Raises:
        ConfigError: no worker reported, or workers that disagree.
        LayoutConflictError: no candidate is left, the requested one is none, or it is not the
            layout already recorded. Nothing is recorded then.
    """
    wanted = None if requested is None else KVCacheLayout.parse(requested)
    current = getattr(config.cache_config, "kv_cache_layout", None)
    if current is not None:
        layout = KVCacheLayout.parse(current)
        if wanted is not None and wanted is not layout:
            raise LayoutConflictError(
                f"requested: the layout is already resolved to {layout.name}, got {wanted.name}"
            )
        return layout
    reported = [[KVCacheLayout.parse(x) for x in worker] for worker in supported_layouts]
    if not reported or not all(reported):
        raise ConfigError(
            "supported_layouts: expected at least one layout of each worker, got "
            f"{[_names(worker) for worker in reported]}"
        )
    for rank, worker in enumerate(reported):
        if worker != reported[0]:
            raise ConfigError(
                f"supported_layouts[{rank}]: workers must report the same, expected "
                f"{_names(reported[0])}, got {_names(worker)}"
            )
    candidates = _narrow(reported[0], [as_spec(spec) for spec in kv_cache_specs or ()])
    layout = candidates[0]
    if wanted is not None:
        if wanted not in candidates:
            raise LayoutConflictError(
                f"requested: expected one of {_names(candidates)}, got {wanted.name}"
            )
        layout = wanted
    elif preferred is not None:
        choice = KVCacheLayout.parse(preferred)
        if choice in candidates:
            layout = choice
        else:
            warnings.warn(
                f"preferred KV cache layout {choice.name} is none of {_names(candidates)}; "
                f"using {layout.name}",
                LayoutPreferenceWarning,
                stacklevel=2,
            )
    config.cache_config.kv_cache_layout = layout.name
    return layout


def _narrow(reported: list[KVCacheLayout], specs: Sequence[object]) -> list[KVCacheLayout]:
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    shapes = {(s.num_heads, s.num_states, s.page_size_bytes) for s in attention}
    candidates = reported
    if len(shapes) > 1:
        candidates = [layout for layout in candidates if layout.is_block_compact]
        if not candidates:
            raise LayoutConflictError(
                "supported_layouts: layers of unlike (H, N, page) "
                f"{sorted(shapes)} need a block-compact layout, got {_names(reported)}"
            )
    sharding = {s.is_dcp_sharded for s in attention}
    if len(sharding) > 1 and len({s.page_size_bytes for s in attention}) > 1:
        candidates = [layout for layout in candidates if layout.is_block_outermost]
        if not candidates:
            raise LayoutConflictError(
                "supported_layouts: sharded and replicated layers of unlike page sizes need a "
                f"layout with B outermost, got {_names(reported)}"
            )
    return candidates
