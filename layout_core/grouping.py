"""Which layers share a block table: the groups of a model, by vLLM 0.29's rules.

A block id belongs to one group at a time and every group draws from one pool, so groups are
made to waste as little of a block as the layers allow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import gcd

from layout_core.configs import ConfigLike, read_config, resolved_layout_of
from layout_core.errors import MergeError, SpecError, UnsupportedError
from layout_core.layouts import KVCacheLayout
from layout_core.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cdiv,
    layer_specs_of,
    rebuild_as,
)
from layout_core.tensors import KVCacheGroupSpec


def get_kv_cache_groups(
    config: ConfigLike,
    kv_cache_spec: Mapping[str, KVCacheSpec],
    *,
    layout: KVCacheLayout | None = None,
) -> list[KVCacheGroupSpec]:
    """Split the layers of a model into groups.

    In this order: one group where the specs merge; one where they are of one type; packed
    groups where the layout has B outermost and page sizes differ; else one page size for all,
    by longer blocks or by padding, and groups of equal length.

    Args:
        config: read for ``scheduler_config.disable_hybrid_kv_cache_manager`` and the layout.
        kv_cache_spec: the spec of each layer, in registration order; not changed.
        layout: the layout; ``None`` reads it from ``config.cache_config``, where it is needed.

    Raises:
        SpecError: layers that no rule can group.
        UnsupportedError: page sizes that can be neither divided nor padded.
        UnresolvedLayoutError: the layout is needed and not resolved yet.
    """
    specs = dict(kv_cache_spec)
    if read_config(config, "scheduler_config.disable_hybrid_kv_cache_manager"):
        specs = _promote_by_sharding(specs)
    if not specs:
        return []
    merged = merge_if_uniform(specs.values())
    if merged is not None:
        groups = [KVCacheGroupSpec(list(specs), merged)]
    elif (uniform := UniformTypeKVCacheSpecs.from_specs(specs)) is not None:
        groups = [KVCacheGroupSpec(list(specs), uniform)]
    else:
        groups = _hybrid_groups(config, specs, layout)
    return groups


def merge_if_uniform(specs: Iterable[KVCacheSpec]) -> KVCacheSpec | None:
    """The one spec that all layers merge into, or ``None`` where they do not.

    Raises:
        SpecError: the layers are alike but for two different windows or chunks.
    """
    listed = list(specs)
    try:
        return type(listed[0]).merge(listed)
    except MergeError:
        return None


def _is_one_type(specs: Mapping[str, KVCacheSpec]) -> bool:
    return merge_if_uniform(specs.values()) is not None or UniformTypeKVCacheSpecs.is_uniform_type(
        specs
    )


def _hybrid_groups(
    config: ConfigLike, specs: Mapping[str, KVCacheSpec], layout: KVCacheLayout | None
) -> list[KVCacheGroupSpec]:
    # hidden-state layers have a block table of their own and join no other bucket
    hidden = {n: s for n, s in specs.items() if isinstance(s, HiddenStateCacheSpec)}
    rest = {n: s for n, s in specs.items() if n not in hidden}
    if not rest:
        raise SpecError("kv_cache_spec: expected layers beside those that cache hidden states")
    if layout is None:
        layout = resolved_layout_of(getattr(config, "cache_config", None))
    packed = _packed_groups(rest, layout)
    if packed:
        packed += [KVCacheGroupSpec([name], spec) for name, spec in hidden.items()]
        _mark_draft_groups(config, packed)
        return packed
    stuck = _layers_that_cannot_share_a_page(rest)
    if stuck:
        fallback = _full_allocation_groups(specs)
        if fallback is not None:
            return fallback
        name, page, largest = stuck[0]
        raise UnsupportedError(
            f"layer {name!r}: its page of {page} bytes does not divide the largest page of "
            f"{largest} bytes, and a {type(rest[name]).__name__} page cannot be padded; expected "
            "a divisor, or a layout with B outermost"
        )
    groups = _equal_length_groups(unify_kv_cache_spec_page_size(rest))
    if hidden:
        page = groups[0].kv_cache_spec.page_size_bytes
        shared = gcd(*(group.kv_cache_spec.block_size for group in groups))
        for name, spec in hidden.items():
            for_token = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
            block_size = _largest_divisor_at_most(shared, max(page // for_token, 1))
            aligned = replace(spec, block_size=block_size, page_size_padded=page)
            groups.append(KVCacheGroupSpec([name], aligned))
    _mark_draft_groups(config, groups)
    return groups


def _largest_divisor_at_most(value: int, limit: int) -> int:
    return next(d for d in range(min(value, limit), 0, -1) if value % d == 0)


def _mark_draft_groups(config: ConfigLike, groups: Sequence[KVCacheGroupSpec]) -> None:
    """Flag the groups of a draft model, which its specs declare."""
    speculative = read_config(config, "speculative_config")
    if speculative is None or not speculative.use_eagle():
        return
    for group in groups:
        if any(
            isinstance(spec, MLAAttentionSpec) and spec.non_causal_multi_token_decode
            for spec in layer_specs_of(group.kv_cache_spec)
        ):
            group.is_eagle_group = True


# One page size for all groups.


def _layers_that_cannot_share_a_page(
    specs: Mapping[str, KVCacheSpec],
) -> list[tuple[str, int, int]]:
    largest = max(spec.page_size_bytes for spec in specs.values())
    return [
        (name, spec.page_size_bytes, largest)
        for name, spec in specs.items()
        if largest % spec.page_size_bytes and not _can_pad(spec)
    ]


def _can_pad(spec: KVCacheSpec) -> bool:
    # sparse MLA kernels index whole token rows, so its pages keep their own alignment
    return isinstance(spec, AttentionSpec) and not isinstance(spec, MLAAttentionSpec)


def unify_kv_cache_spec_page_size(
    kv_cache_spec: Mapping[str, KVCacheSpec],
) -> dict[str, KVCacheSpec]:
    """The specs brought to the largest page size: by longer blocks, or by padding.

    A page that divides the largest gets as many times the tokens; another is padded.

    Raises:
        UnsupportedError: a page that neither divides the largest nor can be padded.
    """
    largest = max((spec.page_size_bytes for spec in kv_cache_spec.values()), default=0)
    out: dict[str, KVCacheSpec] = {}
    for name, spec in kv_cache_spec.items():
        page = spec.page_size_bytes
        if page == largest:
            out[name] = spec
        elif largest % page == 0:
            out[name] = _longer_block(name, spec, largest // page, largest)
        elif _can_pad(spec):
            out[name] = replace(spec, page_size_padded=largest)  # type: ignore[call-arg]
        else:
            raise UnsupportedError(
                f"layer {name!r}: its page of {page} bytes neither divides the largest of "
                f"{largest} bytes nor can be padded"
            )
    return out


def _longer_block(name: str, spec: KVCacheSpec, ratio: int, largest: int) -> KVCacheSpec:
    """``ratio`` times the tokens; refused where a padded page would not become the largest."""
    padded = getattr(spec, "page_size_padded", None)
    if padded is not None and getattr(spec, "alignment", None) is None:
        raise UnsupportedError(
            f"layer {name!r}: its page is padded to {padded} bytes, so {ratio} times the tokens "
            f"do not make a page of {largest} bytes"
        )
    longer = replace(spec, block_size=spec.block_size * ratio)
    if longer.page_size_bytes != largest:
        raise UnsupportedError(
            f"layer {name!r}: {ratio} times the tokens make a page of {longer.page_size_bytes} "
            f"bytes, expected {largest}"
        )
    return longer


def _equal_length_groups(specs: Mapping[str, KVCacheSpec]) -> list[KVCacheGroupSpec]:
    """Groups of one length: layers of a kind are dealt out in turn.

    The length is the shortest kind's, or the longest's where that is less than 1.5 times it,
    so that few places stay empty.
    """
    by_spec: dict[KVCacheSpec, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        by_spec[spec].append(name)
    buckets: list[tuple[list[str], list[KVCacheSpec]]] = []
    for spec, names in by_spec.items():
        for bucket_names, bucket_specs in buckets:
            if _can_merge([*bucket_specs, spec]):
                bucket_names.extend(names)
                bucket_specs.append(spec)
                break
        else:
            buckets.append((list(names), [spec]))
    shortest = min(len(names) for names, _ in buckets)
    longest = max(len(names) for names, _ in buckets)
    length = longest if longest < shortest * 1.5 else shortest
    groups = []
    for names, _ in buckets:
        count = cdiv(len(names), length)
        for start in range(count):
            # every count-th layer, so that each pipeline stage gets its share of every group
            dealt = names[start::count]
            merged = type(specs[dealt[0]]).merge([specs[name] for name in dealt])
            groups.append(KVCacheGroupSpec(dealt, merged))
    return groups


def _can_merge(specs: Sequence[KVCacheSpec]) -> bool:
    try:
        type(specs[0]).merge(specs)
    except SpecError:
        return False
    return True


# Packed groups, for layouts with B outermost.


def _packed_groups(
    specs: Mapping[str, KVCacheSpec], layout: KVCacheLayout
) -> list[KVCacheGroupSpec]:
    """Groups of mixed page sizes that fill one block side by side; none where they need not.

    A bucket with equally many layers of each page size is a repeated pattern, and is split so
    that all groups hold about as many repeats.
    """
    if not layout.is_block_outermost or len({s.page_size_bytes for s in specs.values()}) <= 1:
        return []
    buckets: list[dict[str, KVCacheSpec]] = []
    for name, spec in specs.items():
        for bucket in buckets:
            if UniformTypeKVCacheSpecs.is_uniform_type({**bucket, name: spec}):
                bucket[name] = spec
                break
        else:
            buckets.append({name: spec})
    parts: list[tuple[dict[str, KVCacheSpec], list[list[str]], bool, int]] = []
    for bucket in buckets:
        by_size: dict[int, list[str]] = defaultdict(list)
        for name, spec in bucket.items():
            by_size[spec.page_size_bytes].append(name)
        lists = list(by_size.values())
        balanced = len({len(names) for names in lists}) == 1
        parts.append((bucket, lists, balanced, max(len(names) for names in lists)))
    floor = max(
        (repeats for _, lists, balanced, repeats in parts if balanced and len(lists) > 1),
        default=0,
    )
    length = (
        _least_padding([r for _, _, balanced, r in parts if balanced], floor) if floor else None
    )
    groups = []
    for bucket, lists, balanced, repeats in parts:
        count = cdiv(repeats, length) if balanced and length is not None else 1
        if count == 1:
            groups.append(KVCacheGroupSpec(list(bucket), _uniform(bucket)))
            continue
        pattern = list(zip(*lists, strict=True))
        for start in range(count):
            names = [name for repeat in pattern[start::count] for name in repeat]
            groups.append(KVCacheGroupSpec(names, _uniform({n: bucket[n] for n in names})))
    return groups


def _uniform(specs: Mapping[str, KVCacheSpec]) -> UniformTypeKVCacheSpecs:
    block_size = next(iter(specs.values())).block_size
    return UniformTypeKVCacheSpecs(block_size=block_size, kv_cache_specs=dict(specs))


def _least_padding(values: Sequence[int], floor: int) -> int:
    """The ``d >= floor`` that pads ``values`` least when each is rounded up to a multiple.

    Ties go to the larger ``d``.
    """
    candidates = range(max(1, floor), max(values) + 1)
    return min(candidates, key=lambda d: (sum(-v % d for v in values), -d))


# Local layers stored as full ones.


def _promote_by_sharding(specs: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """:func:`promote_local_specs` of the sharded and of the replicated layers, each for itself."""
    out = dict(specs)
    for sharded in (True, False):
        part = {name: spec for name, spec in specs.items() if spec.is_dcp_sharded is sharded}
        out.update(promote_local_specs(part))
    return out


def promote_local_specs(kv_cache_spec: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
    """Windowed and chunked layers as full ones where full ones are there too.

    It changes what is kept, not what a layer sees.

    Raises:
        SpecError: the layers are still of several types.
    """
    out = dict(kv_cache_spec)
    if not out or _is_one_type(out):
        return out
    full = [spec for spec in out.values() if isinstance(spec, FullAttentionSpec)]
    local = (SlidingWindowSpec, ChunkedLocalAttentionSpec)
    if full and any(isinstance(spec, local) for spec in out.values()):
        sizes = {spec.block_size for spec in full}
        shared = sizes.pop() if len(sizes) == 1 else None
        for name, spec in kv_cache_spec.items():
            if isinstance(spec, local):
                out[name] = _promoted(spec, shared or spec.block_size)
    if not _is_one_type(out):
        kinds = sorted({type(spec).__name__ for spec in out.values()})
        raise SpecError(
            f"kv_cache_spec: the layers cannot be stored as one type, got {', '.join(kinds)}"
        )
    return out


def _promoted(
    spec: SlidingWindowSpec | ChunkedLocalAttentionSpec, block_size: int
) -> FullAttentionSpec:
    target = MLAAttentionSpec if isinstance(spec, SlidingWindowMLASpec) else FullAttentionSpec
    padded = spec.page_size_padded
    if padded is not None:
        padded = max(padded, spec.unpadded_page_size_bytes * block_size // spec.block_size)
    return rebuild_as(target, spec, block_size=block_size, page_size_padded=padded)


def _full_allocation_groups(
    specs: Mapping[str, KVCacheSpec],
) -> list[KVCacheGroupSpec] | None:
    """One group of MLA layers and promoted windowed ones, or ``None`` where that is no way."""
    kinds = list(specs.values())
    if any(
        isinstance(s, HiddenStateCacheSpec | SlidingWindowMLASpec | ChunkedLocalAttentionSpec)
        for s in kinds
    ):
        return None
    has_mla = any(isinstance(s, MLAAttentionSpec) for s in kinds)
    if not (has_mla and any(isinstance(s, SlidingWindowSpec) for s in kinds)):
        return None
    try:
        promoted = promote_local_specs(specs)
    except SpecError:
        return None
    uniform = UniformTypeKVCacheSpecs.from_specs(promoted)
    return None if uniform is None else [KVCacheGroupSpec(list(promoted), uniform)]
