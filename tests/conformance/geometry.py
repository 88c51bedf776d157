"""Shapes, strides, tensors and views: the same bytes of the same buffer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from layout_core import (
    IllegalCombinationError,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
    as_spec,
    compute_layer_kv_cache_shape_bytes,
    compute_layout_strides,
    make_config,
    pool_bytes_per_block,
    resolve_layout,
)
from tests.conformance import peers
from tests.conformance.cases import (
    BLOCK_SIZES,
    SpecCase,
    layouts,
    rarely,
    spec_cases,
    without_later_fields,
)
from tests.conformance.judge import Answer, difference, judge, ours, refusal, theirs
from tests.conformance.tally import BOTH_REFUSE, EQUAL, Disagreement, Tally

SMALL_BYTES = 1 << 15
"""Buffers up to this size are filled and read back; larger ones compare addresses alone."""


def fit_version(case: SpecCase) -> SpecCase:
    """The case as the vLLM at hand can express it."""
    return case if peers.IS_032 else without_later_fields(case)


def build_pair(case: SpecCase) -> tuple[KVCacheSpec, Any] | str:
    """Both sides' specs, or the outcome where ours was refused.

    vLLM looks at the padding when a page size is asked for, we when the spec is built.
    """

    def build() -> Any:
        spec = peers.build_spec(case)
        assert spec.page_size_bytes > 0 or spec.num_states < 1
        return spec

    our, their = ours(case.ours), theirs(build)
    if our.error is None and their.error is None:
        return our.value, their.value
    if our.error is not None and their.error is not None:
        return BOTH_REFUSE
    if our.error is not None and their.value.num_states < 1:
        return refusal("block-without-whole-state")
    if their.error is not None and case.get("alignment") and case.get("page_size_padded"):
        return difference("stale-alignment-padding")
    raise Disagreement(f"building {case}:\n  ours   {our}\n  vLLM   {their}")


# Shapes and strides.


@dataclass(frozen=True)
class StrideCase:
    """One call of ``compute_layout_strides``."""

    spec: SpecCase
    num_blocks: int
    num_layers: int
    layout: KVCacheLayout
    kernel_block_size: int | None
    fixed_strides: tuple[int | None, ...]


@st.composite
def stride_cases(draw: st.DrawFn) -> StrideCase:
    spec = draw(spec_cases())
    block_size = spec.get("block_size")
    kernel = None
    if rarely(draw, 2):
        divisors = [d for d in range(1, block_size + 1) if block_size % d == 0]
        kernel = draw(st.sampled_from(divisors if not rarely(draw, 8) else [3, 5, 7, 16, 256]))
    fixed: tuple[int | None, ...] = (None,) * 5
    if rarely(draw, 3):
        one = st.none() | st.sampled_from((1, 64, 4096, 100_000, -1, 0))
        fixed = (draw(one), draw(one), None, None, None)
        if rarely(draw, 3):
            fixed = (*fixed[:2], draw(one), draw(one), None)
    return StrideCase(
        spec=spec,
        num_blocks=draw(st.sampled_from((1, 2, 3, 5, 1000, 1_000_000, 10**9))),
        num_layers=draw(st.integers(1, 5)),
        layout=draw(layouts),
        kernel_block_size=kernel,
        fixed_strides=fixed,
    )


def compare_strides(case: StrideCase, tally: Tally) -> str:
    """Spec sizes, the shape, and the five strides."""
    spec_case = fit_version(case.spec)
    pair = build_pair(spec_case)
    if isinstance(pair, str):
        return pair
    our_spec, their_spec = pair
    tally.labels[f"layout {case.layout.name}"] += 1
    tally.labels[spec_case.kind] += 1
    said, meant = peers.describe(our_spec), peers.describe(their_spec)
    if said != meant:
        raise Disagreement(f"sizes of {spec_case}:\n  ours   {said}\n  vLLM   {meant}")
    if peers.describe(as_spec(their_spec)) != meant:
        raise Disagreement(f"as_spec changed {their_spec} to {as_spec(their_spec)}")
    kernel = case.kernel_block_size
    if kernel is not None and kernel != our_spec.block_size:
        tally.labels["kernel blocks"] += 1
    if any(case.fixed_strides):
        tally.labels["fixed strides"] += 1
    if spec_case.get("page_size_padded"):
        tally.labels["padded"] += 1

    def loses_states() -> str | None:
        if kernel is None or our_spec.block_size % kernel:
            return None
        ratio = our_spec.block_size // kernel
        whole = ratio * their_spec.get_num_kernel_states(kernel)
        return None if whole == their_spec.num_states else "split-loses-states"

    shape = judge(
        "shape",
        case,
        ours(lambda: compute_layer_kv_cache_shape_bytes(our_spec, case.num_blocks, kernel)),
        theirs(
            lambda: peers.interface.compute_layer_kv_cache_shape_bytes(
                their_spec, case.num_blocks, kernel
            )
        ),
        we_refuse=loses_states,
    )
    strides = judge(
        "strides",
        case,
        ours(
            lambda: compute_layout_strides(
                our_spec,
                case.num_blocks,
                case.num_layers,
                case.layout,
                kernel,
                case.fixed_strides,
            )
        ),
        theirs(
            lambda: peers.interface.compute_layout_strides(
                their_spec,
                case.num_blocks,
                case.num_layers,
                peers.layout_of(case.layout),
                kernel,
                case.fixed_strides,
            )
        ),
        we_refuse=loses_states,
    )
    return strides if shape == EQUAL else shape


# Tensors and views.


@dataclass(frozen=True)
class ViewCase:
    """Groups in one allocation; each layer of a group has a spec of its own, or all share one."""

    groups: tuple[tuple[SpecCase, ...], ...]
    num_blocks: int
    slack: int  # bytes of memory beyond whole blocks, as a share of a block in 1/8
    layout: KVCacheLayout
    kernel_block_sizes: tuple[int | None, ...] | None


VIEW_KINDS = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "MLAAttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
)


@st.composite
def view_cases(draw: st.DrawFn) -> ViewCase:
    small = {"max_heads": 4, "head_sizes": (4, 1, 2, 8, 16), "block_sizes": (4, 1, 2, 6, 8, 16)}
    large = {"max_heads": 16, "head_sizes": (64, 128, 80), "block_sizes": BLOCK_SIZES}
    big = rarely(draw, 4)
    options: dict[str, Any] = large if big else small
    plain = not rarely(draw, 3)
    first = draw(spec_cases(VIEW_KINDS, plain=plain, **options))
    groups: list[tuple[SpecCase, ...]] = []
    for _ in range(draw(st.sampled_from((1, 2, 1, 3)))):
        layers = draw(st.integers(1, 4))
        how = draw(st.sampled_from(("same", "same", "swapped", "other", "mixed", "aligned")))
        if how == "mixed":
            # layers of one type and block size, with page sizes of their own
            wanted = dict(options, block_sizes=(first.get("block_size"),))
            specs = [
                draw(spec_cases(("FullAttentionSpec",), plain=plain, **wanted))
                for _ in range(layers)
            ]
            groups.append(tuple(specs))
            continue
        spec = first
        if how == "swapped":  # the same page, cut otherwise
            spec = first.changed(
                block_size=first.get("num_kv_heads"), num_kv_heads=first.get("block_size")
            )
        elif how == "aligned":
            spec = first.changed(block_stride_alignment=256)
        elif how == "other":
            spec = draw(spec_cases(VIEW_KINDS, plain=plain, **options))
        groups.append((spec,) * layers)
    kernels: tuple[int | None, ...] | None = None
    if not rarely(draw, 3):
        kernels = tuple(
            draw(st.sampled_from([None, *(d for d in range(1, size + 1) if size % d == 0), size]))
            for size in (group[0].get("block_size") for group in groups)
        )
    return ViewCase(
        groups=tuple(groups),
        num_blocks=draw(st.sampled_from((100_000, 3_000_000) if big else (2, 1, 3, 5))),
        slack=draw(st.integers(0, 7)),
        layout=draw(layouts),
        kernel_block_sizes=kernels,
    )


def build_groups(
    case_groups: tuple[tuple[SpecCase, ...], ...],
) -> tuple[list[KVCacheGroupSpec], list[Any]] | str:
    """Both sides' groups, or the outcome where a spec was refused."""
    our_groups, their_groups = [], []
    for index, specs in enumerate(case_groups):
        pairs = []
        for spec in specs:
            pair = build_pair(fit_version(spec))
            if isinstance(pair, str):
                return pair
            pairs.append(pair)
        names = [f"g{index}.l{position}" for position in range(len(specs))]
        our_spec, their_spec = pairs[0]
        if len(set(specs)) > 1:
            size = our_spec.block_size
            our_spec = UniformTypeKVCacheSpecs(size, dict(zip(names, (p[0] for p in pairs))))
            their_spec = peers.interface.UniformTypeKVCacheSpecs(
                block_size=size, kv_cache_specs=dict(zip(names, (p[1] for p in pairs)))
            )
        our_groups.append(KVCacheGroupSpec(names, our_spec))
        their_groups.append(peers.group_spec(names, their_spec))
    return our_groups, their_groups


def layer_specs(group: Any) -> list[Any]:
    """The distinct layer specs of a group of either side."""
    spec = group.kv_cache_spec
    return list(getattr(spec, "kv_cache_specs", {"": spec}).values())


def unequal_pitches(layout: KVCacheLayout, groups: list[Any]) -> bool:
    """Whether groups overlay each other with blocks that lie unequally far apart."""
    if not peers.IS_032 or len(groups) < 2 or layout.is_block_outermost:
        return False
    pitches = set()
    for group in groups:
        for spec in layer_specs(group):
            alignment = spec.get_block_stride_alignment()
            pitches.add(-(-spec.page_size_bytes // alignment) * alignment)
    return len(pitches) > 1


def compare_views(case: ViewCase, tally: Tally) -> str:
    """Tensors from groups, then the views of a real buffer, layer by layer."""
    groups = build_groups(case.groups)
    if isinstance(groups, str):
        return groups
    our_groups, their_groups = groups
    per_block = pool_bytes_per_block(our_groups, case.layout)
    memory = per_block * case.num_blocks + per_block * case.slack // 8
    config = peers.vllm_config(layout=case.layout)
    our = ours(lambda: make_config(our_groups, case.num_blocks, case.layout))
    their = theirs(
        lambda: peers.utils.get_kv_cache_config_from_groups(config, their_groups, memory)
    )

    def unlike() -> str | None:
        shapes = {
            (spec.num_heads, spec.num_states, spec.state_content_size_bytes)
            for group in their_groups
            for spec in layer_specs(group)
        }
        overlaid = len(their_groups) > 1 and len(shapes) > 1
        if overlaid and case.layout is KVCacheLayout.LHBNC:
            assert isinstance(our.error, IllegalCombinationError)
            return "unlike-groups-overlaid"
        if unequal_pitches(case.layout, their_groups):
            return "unequal-pitches-overlaid"
        return None

    outcome = judge(
        "tensors",
        case,
        Answer(our.value and peers.describe_config(our.value), our.error),
        Answer(their.value and peers.describe_config(their.value), their.error),
        we_refuse=unlike,
    )
    if outcome != EQUAL:
        return outcome
    tally.labels[f"layout {case.layout.name}"] += 1
    if len(our_groups) > 1:
        tally.labels["several groups"] += 1
    if len({spec.page_size_bytes for g in our_groups for spec in layer_specs(g)}) > 1:
        tally.labels["mixed pages"] += 1
    return _compare_buffers(case, our.value, their.value, tally)


def _compare_buffers(case: ViewCase, our_config: Any, their_config: Any, tally: Tally) -> str:
    kernels = case.kernel_block_sizes or (None,) * len(case.groups)
    size = our_config.kv_cache_tensors[0].size
    small = size <= SMALL_BYTES
    if small:
        # the low byte of a square mixed with the high: neighbours and far cells differ
        scattered = np.arange(size, dtype=np.uint64) * 2654435761
        memory = (scattered >> np.uint64(13)).astype(np.int8)
        raw = peers.torch.from_numpy(memory)
    else:
        memory = None
        raw = peers.torch.empty(size, dtype=peers.torch.int8, device="meta")
    our = ours(lambda: resolve_layout(our_config, kernel_block_sizes=kernels))
    their = theirs(lambda: _their_views(raw, case, their_config, kernels))

    def split() -> str | None:
        for group, kernel in zip(their_config.kv_cache_groups, kernels):
            for spec in layer_specs(group):
                if kernel is None or kernel == spec.block_size:
                    continue
                ratio = spec.block_size // kernel
                if ratio * spec.get_num_kernel_states(kernel) != spec.num_states:
                    return "split-loses-states"
                if case.layout is KVCacheLayout.BHLNC and spec.num_heads > 1:
                    return "bhlnc-split"
        return None

    if our.error is not None or their.error is not None:
        return judge("views", case, our, their, we_refuse=split)
    base = raw.storage_offset()
    owner = np.full(size if small else 0, -1)  # the block id that each byte belongs to
    index = np.arange(len(owner))
    for view in our.value.layers:
        peer = their.value[view.name]
        item = peer.element_size()
        address = (peer.storage_offset() - base) * item
        shape = (*peer.shape[:3], peer.shape[3] * item)
        strides = tuple(stride * item for stride in peer.stride()[:3])
        mine = tuple(
            # ours is canonical along an H or N of size 1, which nobody follows
            theirs_ if axis > 0 and length == 1 else own
            for axis, (own, theirs_, length) in enumerate(zip(view.strides, strides, shape))
        )
        if (view.offset, view.shape, mine) != (address, shape, strides):
            raise Disagreement(
                f"view {view.name} of {case}:\n"
                f"  ours   offset {view.offset}, shape {view.shape}, strides {mine}\n"
                f"  vLLM   offset {address}, shape {shape}, strides {strides}"
            )
        if memory is not None:
            cells = np.lib.stride_tricks.as_strided(
                memory[view.offset :], view.shape, view.strides, writeable=False
            )
            read = peer.contiguous().view(peers.torch.int8).numpy()
            if not np.array_equal(cells, read):
                raise Disagreement(f"view {view.name} of {case}: it reads other bytes")
            tally.labels["filled and read"] += 1
            where = np.lib.stride_tricks.as_strided(
                index[view.offset :], view.shape, [step * 8 for step in view.strides]
            )
            for block, touched in enumerate(where):
                block_id = block // view.blocks_per_manager_block
                if not np.isin(owner[touched], (-1, block_id)).all():
                    raise Disagreement(
                        f"view {view.name} of {case}: block {block_id} shares bytes with "
                        f"blocks {set(owner[touched].flat) - {-1, block_id}}"
                    )
                owner[touched] = block_id
        if view.blocks_per_manager_block > 1:
            tally.labels["kernel blocks"] += 1
    return EQUAL


def _their_views(raw: Any, case: ViewCase, config: Any, kernels: Any) -> dict[str, Any]:
    """vLLM's view of each layer by name."""
    views: dict[str, Any] = {}
    spec_of = {}
    kernel_of = {}
    for group, kernel in zip(config.kv_cache_groups, kernels):
        for name in group.layer_names:
            spec = group.kv_cache_spec
            spec_of[name] = getattr(spec, "kv_cache_specs", {}).get(name, spec)
            kernel_of[name] = kernel
    for tensor in config.kv_cache_tensors:
        name = tensor.layers[0]
        spec = spec_of[name]
        item = peers.torch.empty(0, dtype=spec.dtype).element_size()
        content = spec.state_content_size_bytes
        steps = (tensor.offset, tensor.layer_stride, tensor.block_stride, content)
        if any(step % item for step in steps):
            # torch cannot view such bytes as this dtype; the bytes themselves are compared
            spec = replace(spec, dtype=peers.torch.int8, state_content_bytes=content)
        made = peers.interface.create_kv_cache_views(
            raw,
            spec,
            config.num_blocks,
            peers.layout_of(case.layout),
            tensor,
            kernel_of[name],
        )
        views.update(zip(tensor.layers, made, strict=True))
    return views
