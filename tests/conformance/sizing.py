"""Groups, worker configs, memory and block sizes of whole models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from hypothesis import strategies as st

import layout_core
from layout_core import (
    CacheConfig,
    KVCacheConfig,
    KVCacheLayout,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SchedulerConfig,
)
from tests.conformance import peers
from tests.conformance.cases import SpecCase, layouts, rarely, spec_cases
from tests.conformance.geometry import build_groups, build_pair, fit_version
from tests.conformance.judge import Answer, judge, ours, theirs
from tests.conformance.tally import EQUAL, Disagreement, Tally

MODEL_KINDS = (
    "FullAttentionSpec",
    "SlidingWindowSpec",
    "MLAAttentionSpec",
    "ChunkedLocalAttentionSpec",
    "CrossAttentionSpec",
    "SlidingWindowMLASpec",
    "SinkFullAttentionSpec",
    "RSWASpec",
)
OWN_FIELDS = {
    "SlidingWindowSpec": {"sliding_window": 64},
    "SlidingWindowMLASpec": {"sliding_window": 64},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size": 32},
    "RSWASpec": {"rswa_window": 32},
}
SHARED_FIELDS = [
    "block_size",
    "num_kv_heads",
    "head_size",
    "dtype",
    "page_size_padded",
    "num_head_slots",
    "state_content_bytes",
    "tokens_per_state",
    "block_stride_alignment",
    "dcp_sharded",
]
SMALL: dict[str, Any] = {
    "block_sizes": (16, 8, 32, 64, 24),
    "max_heads": 8,
    "head_sizes": (64, 16, 80, 128, 192),
}


def as_kind(case: SpecCase, kind: str) -> SpecCase:
    """The same page under another class."""
    shared = {name: value for name, value in case.fields if name in SHARED_FIELDS}
    return SpecCase(kind, tuple((shared | OWN_FIELDS.get(kind, {})).items()))


@st.composite
def models(draw: st.DrawFn) -> tuple[tuple[str, SpecCase], ...]:
    """Layers by name, in registration order: up to four specs that mostly resemble each other."""
    plain = not rarely(draw, 4)
    first = draw(spec_cases(MODEL_KINDS, plain=plain, **SMALL))
    specs = [first]
    for _ in range(draw(st.sampled_from((0, 1, 1, 2, 3)))):
        base = draw(st.sampled_from(specs))
        heads, size = base.get("num_kv_heads"), base.get("head_size")
        how = draw(
            st.sampled_from(
                (
                    "kind",
                    "kind",
                    "kind",
                    "heads",
                    "size",
                    "half more",
                    "window",
                    "block",
                    "dtype",
                    "sharding",
                    "fresh",
                )
            )
        )
        if how == "kind":
            spec = as_kind(base, draw(st.sampled_from(MODEL_KINDS)))
        elif how == "heads":
            spec = base.changed(num_kv_heads=heads * 2)
        elif how == "size":
            spec = base.changed(head_size=size * 2)
        elif how == "half more":
            spec = base.changed(head_size=size * 3 // 2)
        elif how == "window" and "Sliding" in base.kind:
            spec = base.changed(sliding_window=128)
        elif how == "block":
            spec = base.changed(block_size=base.get("block_size") * 2)
        elif how == "dtype":
            spec = base.changed(dtype="float32")
        elif how == "sharding":
            spec = base.changed(dcp_sharded=False)
        else:
            spec = draw(spec_cases(MODEL_KINDS, plain=plain, **SMALL))
        specs.append(spec)
    order = [*range(len(specs))]
    if rarely(draw, 2):
        order = order * draw(st.integers(1, 4))  # a pattern, repeated
    else:
        order += draw(st.lists(st.integers(0, len(specs) - 1), max_size=9))
    named = [(f"layers.{at}", specs[index]) for at, index in enumerate(order)]
    if rarely(draw, 10):
        hidden = as_kind(first, "HiddenStateCacheSpec")
        hidden = hidden.changed(page_size_padded=None, head_size=draw(st.sampled_from((64, 512))))
        named.append(("hidden", hidden))
    return tuple(named)


def build_model(
    model: tuple[tuple[str, SpecCase], ...],
) -> tuple[dict[str, Any], dict[str, Any]] | str:
    """Both sides' specs by layer, or the outcome where a spec was refused."""
    mine, peer = {}, {}
    built: dict[SpecCase, tuple[Any, Any]] = {}
    for name, case in model:
        case = fit_version(case)
        pair = built.get(case)
        if pair is None:
            made = build_pair(case)
            if isinstance(made, str):
                return made
            pair = built[case] = made
        mine[name], peer[name] = pair
    return mine, peer


def run_config(**options: Any) -> RunConfig:
    """Our own config with the options of :func:`peers.vllm_config`."""
    layout = options.get("layout")
    return RunConfig(
        model_config=ModelConfig(
            options.get("max_model_len", 1024), options.get("original_max_model_len")
        ),
        cache_config=CacheConfig(
            block_size=options.get("block_size", 16),
            num_gpu_blocks_override=options.get("num_gpu_blocks_override"),
            enable_prefix_caching=options.get("enable_prefix_caching", True),
            prefix_match_unit=options.get("prefix_match_unit"),
            kv_cache_layout=None if layout is None else layout.name,
        ),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=options.get("max_num_batched_tokens", 2048),
            max_num_encoder_input_tokens=options.get("max_num_encoder_input_tokens", 2048),
            disable_hybrid_kv_cache_manager=options.get("disable_hybrid", False),
        ),
        parallel_config=ParallelConfig(decode_context_parallel_size=options.get("dcp", 1)),
        kv_transfer_config=object() if options.get("connector") else None,
    )


def config_for_us(foreign: bool, options: dict[str, Any]) -> Any:
    """vLLM's own config, which we read by attribute, or ours."""
    return peers.vllm_config(**options) if foreign else run_config(**options)


# Groups.


@dataclass(frozen=True)
class GroupCase:
    model: tuple[tuple[str, SpecCase], ...]
    layout: KVCacheLayout
    disable_hybrid: bool
    foreign: bool  # whether we are given vLLM's own config


@st.composite
def group_cases(draw: st.DrawFn) -> GroupCase:
    return GroupCase(draw(models()), draw(layouts), rarely(draw, 5), draw(st.booleans()))


def compare_groups(case: GroupCase, tally: Tally) -> str:
    """``get_kv_cache_groups``."""
    model = build_model(case.model)
    if isinstance(model, str):
        return model
    mine, peer = model
    options: dict[str, Any] = {"layout": case.layout, "disable_hybrid": case.disable_hybrid}
    our = ours(
        lambda: peers.describe_groups(
            layout_core.get_kv_cache_groups(config_for_us(case.foreign, options), dict(mine))
        )
    )
    their = theirs(
        lambda: peers.describe_groups(
            peers.utils.get_kv_cache_groups(peers.vllm_config(**options), dict(peer))
        )
    )
    outcome = judge(
        "groups",
        case,
        our,
        their,
        we_differ=lambda: grouping_difference(case, peer, our, their),
    )
    if outcome == EQUAL:
        count = len(our.value)
        tally.labels["one group" if count == 1 else "several groups"] += 1
        if any("specs" in group["spec"] for group in our.value):
            tally.labels["mixed pages in a group"] += 1
        tally.labels[f"layout {case.layout.name}"] += 1
    return outcome


class ModelCase(Protocol):
    """What a difference in grouping may depend on."""

    @property
    def layout(self) -> KVCacheLayout: ...

    @property
    def disable_hybrid(self) -> bool: ...


def grouping_difference(
    case: ModelCase, peer: dict[str, Any], our: Answer, their: Answer
) -> str | None:
    """Names the documented difference in grouping that a model meets, or ``None``.

    Each is recognised by its cause in the specs, not by the two answers.
    """
    specs = list(dict.fromkeys(peer.values()))
    windows = [s for s in specs if type(s).__name__ == "SlidingWindowMLASpec"]
    if any(_merge_forgets(a, b) for a in windows for b in windows):
        return "sliding-window-mla-merge"
    for spec in specs:
        if type(spec).__name__ == "SinkFullAttentionSpec" and spec.tokens_per_state != 1:
            return "sink-merge-compressed"
    if their.error is not None and any(
        getattr(s, "alignment", None) is not None and s.page_size_padded is not None for s in specs
    ):
        return "stale-alignment-padding"
    if case.disable_hybrid and windows and isinstance(their.error, TypeError):
        return "window-mla-promotion"
    if peers.IS_032:
        pages = {spec.page_size_bytes for spec in specs}
        windowed = any(isinstance(s, peers.interface.SlidingWindowSpec) for s in specs)
        if case.layout.is_block_outermost and len(pages) > 1 and windowed:
            return "window-buckets-split"
        hidden = [s for s in specs if isinstance(s, peers.interface.HiddenStateCacheSpec)]
        rest = [s.page_size_bytes for s in specs if s not in hidden]
        for spec in hidden:
            if rest and spec.num_kv_heads * spec.head_size * spec.dtype.itemsize > max(rest):
                return "hidden-state-page"
        drafts = {getattr(s, "non_causal_multi_token_decode", None) for s in specs} - {None}
        if len(drafts) > 1:
            return "draft-mla-merge"
    return None


def _merge_forgets(a: Any, b: Any) -> bool:
    """Whether vLLM merges two windowed MLA specs into one that is not what both say."""
    try:
        merged = type(a).merge([a, b])
    except AssertionError:
        return False
    fields = set(peers.describe(a)) - {"alignment"}
    return any(
        peers.describe(merged)[name] != peers.describe(spec)[name]
        for spec in (a, b)
        for name in fields
    )


# Worker configs.


@dataclass(frozen=True)
class ConfigCase:
    model: tuple[tuple[str, SpecCase], ...]
    layout: KVCacheLayout
    stages: tuple[int, ...]  # layers of each worker; one entry and several ranks is TP
    ranks: int
    memory: tuple[int, ...]  # for each worker, in blocks of all its layers
    slack: int
    override: int | None
    max_model_len: int
    auto_fit: bool
    max_num_batched_tokens: int
    dcp: int
    disable_hybrid: bool
    foreign: bool


@st.composite
def config_cases(draw: st.DrawFn) -> ConfigCase:
    model = draw(models())
    workers = draw(st.sampled_from((1, 1, 2, 3)))
    pipeline = workers > 1 and len(model) >= workers and draw(st.booleans())
    stages = (len(model),)
    if pipeline:
        share, rest = divmod(len(model), workers)
        stages = tuple(share + (at < rest) for at in range(workers))
    amounts = st.sampled_from((400, 1000, 50_000, 100, 30, 8, 2, 1, 0))
    return ConfigCase(
        model=model,
        layout=draw(layouts),
        stages=stages,
        ranks=1 if pipeline else workers,
        memory=tuple(draw(amounts) for _ in range(workers)),
        slack=draw(st.integers(0, 5000)),
        override=draw(st.sampled_from((None, None, None, 1000, 3, 1))),
        max_model_len=draw(st.sampled_from((256, 1, 100, 1024, 4096, 100_000))),
        auto_fit=rarely(draw, 3),
        max_num_batched_tokens=draw(st.sampled_from((64, 128, 2048))),
        dcp=draw(st.sampled_from((1, 1, 1, 1, 2, 4))),
        disable_hybrid=rarely(draw, 6),
        foreign=draw(st.booleans()),
    )


def workers_of(case: ConfigCase, names: list[str]) -> list[list[str]]:
    """The layers of each worker."""
    workers: list[list[str]] = []
    start = 0
    for layers in case.stages:
        workers += [names[start : start + layers]] * case.ranks
        start += layers
    return workers


def memory_of(case: ConfigCase, mine: dict[str, Any], workers: list[list[str]]) -> list[int]:
    """Bytes of each worker."""
    return [
        blocks * sum(mine[name].page_size_bytes for name in worker) + case.slack
        for blocks, worker in zip(case.memory, workers)
    ]


def config_options(case: ConfigCase) -> dict[str, Any]:
    """A case in the words of :func:`peers.vllm_config` and :func:`run_config`."""
    return {
        "layout": case.layout,
        "max_model_len": case.max_model_len,
        "original_max_model_len": -1 if case.auto_fit else case.max_model_len,
        "max_num_batched_tokens": case.max_num_batched_tokens,
        "max_num_encoder_input_tokens": case.max_num_batched_tokens,
        "num_gpu_blocks_override": case.override,
        "dcp": case.dcp,
        "disable_hybrid": case.disable_hybrid,
    }


def compare_configs(case: ConfigCase, tally: Tally) -> str:
    """``get_kv_cache_configs``, the scheduler's config, the fitted length, concurrency."""
    model = build_model(case.model)
    if isinstance(model, str):
        return model
    mine, peer = model
    workers = workers_of(case, list(mine))
    memory = memory_of(case, mine, workers)
    options = config_options(case)

    def run(module: Any, specs: dict[str, Any], config: Any) -> dict[str, object]:
        configs = module.get_kv_cache_configs(
            config, [{n: specs[n] for n in worker} for worker in workers], list(memory)
        )
        scheduler = module.generate_scheduler_kv_cache_config(configs)
        return {
            "workers": [peers.describe_config(c) for c in configs],
            "scheduler": peers.describe_config(scheduler),
            "max_model_len": config.model_config.max_model_len,
            "concurrency": module.get_max_concurrency_for_kv_cache_config(config, scheduler),
        }

    our_config = config_for_us(case.foreign, options)
    our = ours(lambda: run(layout_core, peer if case.foreign else mine, our_config))
    left = our_config.model_config.max_model_len
    their = theirs(lambda: run(peers.utils, peer, peers.vllm_config(**options)))
    if our.error is not None and left != case.max_model_len:
        raise Disagreement(f"a refused {case} changed max_model_len to {left}")
    outcome = judge(
        "configs",
        case,
        our,
        their,
        we_refuse=lambda: config_refusal(case, mine, our, their),
        we_differ=lambda: absent_layers(their) or grouping_difference(case, peer, our, their),
    )
    if outcome == EQUAL:
        tally.labels[f"layout {case.layout.name}"] += 1
        if len(case.stages) > 1:
            tally.labels["pipeline stages"] += 1
        if case.ranks > 1:
            tally.labels["several ranks"] += 1
        if case.override is not None:
            tally.labels["num_gpu_blocks_override"] += 1
        if our.value["max_model_len"] != case.max_model_len:
            tally.labels["auto-fitted length"] += 1
        if len(our.value["scheduler"]["groups"]) > 1:
            tally.labels["several groups"] += 1
    elif type(our.error).__name__ == "InsufficientMemoryError":
        tally.labels["too little memory"] += 1
    return outcome


def absent_layers(their: Answer) -> str | None:
    """vLLM places the layers of a mixed group on a stage that holds none of them."""
    if their.value is None:
        return None
    for worker in their.value["workers"]:
        held = {name for group in worker["groups"] for name in group["layers"]}
        if any(name not in held for tensor in worker["tensors"] for name in tensor[1]):
            return "tensors-of-absent-layers"
    return None


def config_refusal(
    case: ConfigCase, mine: dict[str, Any], our: Answer, their: Answer
) -> str | None:
    """Names the documented refusal that a case meets, or ``None``."""
    shapes = {(s.num_heads, s.num_states, s.state_content_size_bytes) for s in mine.values()}
    if case.layout is KVCacheLayout.LHBNC and len(shapes) > 1 and their.value is not None:
        return "unlike-groups-overlaid"
    pitches = {
        -(-s.page_size_bytes // s.get_block_stride_alignment()) * s.get_block_stride_alignment()
        for s in mine.values()
    }
    if case.layout.is_layer_compact and len(pitches) > 1 and "bytes apart" in str(our.error):
        return "unequal-pitches-overlaid"
    return None


# Memory of specs, without groups.


@dataclass(frozen=True)
class MemoryCase:
    model: tuple[tuple[str, SpecCase], ...]
    memory: int
    max_model_len: int
    max_num_batched_tokens: int
    max_num_encoder_input_tokens: int
    dcp: int
    max_len: int
    foreign: bool


@st.composite
def memory_cases(draw: st.DrawFn) -> MemoryCase:
    return MemoryCase(
        model=draw(models()),
        memory=draw(st.sampled_from((0, 10_000, 1_000_000, 30_000_000, 10**9, 10**11))),
        max_model_len=draw(st.sampled_from((1, 100, 1000, 4096, 131_072, 1_000_000))),
        max_num_batched_tokens=draw(st.sampled_from((1, 64, 2048, 8192))),
        max_num_encoder_input_tokens=draw(st.sampled_from((64, 1500))),
        dcp=draw(st.sampled_from((1, 1, 1, 2, 4))),
        max_len=draw(st.sampled_from((1, 15, 16, 17, 1000, 4096))),
        foreign=draw(st.booleans()),
    )


def compare_memory(case: MemoryCase, tally: Tally) -> str:
    """``max_memory_usage_bytes``, ``estimate_max_model_len``, ``max_num_blocks_per_req``."""
    model = build_model(case.model)
    if isinstance(model, str):
        return model
    mine, peer = model
    options: dict[str, Any] = {
        "layout": KVCacheLayout.LBNHC,
        "max_model_len": case.max_model_len,
        "max_num_batched_tokens": case.max_num_batched_tokens,
        "max_num_encoder_input_tokens": case.max_num_encoder_input_tokens,
        "dcp": case.dcp,
    }

    def run(module: Any, specs: dict[str, Any], config: Any) -> tuple[object, ...]:
        return (
            module.max_memory_usage_bytes(config, specs.values()),
            module.estimate_max_model_len(config, specs, case.memory),
            [spec.max_num_blocks_per_req(config, case.max_len) for spec in specs.values()],
            config.model_config.max_model_len,
        )

    our = ours(lambda: run(layout_core, mine, config_for_us(case.foreign, options)))
    their = theirs(lambda: run(peers.utils, peer, peers.vllm_config(**options)))
    outcome = judge("memory", case, our, their)
    if outcome == EQUAL:
        if case.dcp > 1:
            tally.labels["context parallel"] += 1
        length = our.value[1]
        which = "none" if length == 0 else "all" if length == case.max_model_len else "part"
        tally.labels[f"length that fits: {which}"] += 1
        for _, spec in case.model:
            tally.labels[spec.kind] += 1
    return outcome


# Scheduler and hash block sizes.


@dataclass(frozen=True)
class BlockSizeCase:
    groups: tuple[tuple[SpecCase, ...], ...]
    block_size: int
    prefix_match_unit: int | None
    enable_prefix_caching: bool
    connector: bool
    dcp: int
    foreign: bool


@st.composite
def block_size_cases(draw: st.DrawFn) -> BlockSizeCase:
    sizes = (16, 8, 32, 64, 24, 48, 6)
    groups = []
    for _ in range(draw(st.sampled_from((2, 1, 2, 3, 4)))):
        options = dict(SMALL, block_sizes=sizes)
        plain = not rarely(draw, 4)
        spec = draw(spec_cases(MODEL_KINDS, plain=plain, **options))
        if rarely(draw, 5):
            spec = spec.changed(tokens_per_state=draw(st.sampled_from((2, 4, 3))))
        groups.append((spec,))
    return BlockSizeCase(
        groups=tuple(groups),
        block_size=draw(st.sampled_from(sizes)),
        prefix_match_unit=draw(st.sampled_from((None, None, 8, 16, 2, 6, 5, 64))),
        enable_prefix_caching=not rarely(draw, 4),
        connector=rarely(draw, 6),
        dcp=draw(st.sampled_from((1, 1, 2, 4))),
        foreign=draw(st.booleans()),
    )


def compare_block_sizes(case: BlockSizeCase, tally: Tally) -> str:
    """``resolve_kv_cache_block_sizes``."""
    groups = build_groups(case.groups)
    if isinstance(groups, str):
        return groups
    mine, peer = groups
    options: dict[str, Any] = {
        "layout": KVCacheLayout.LBNHC,
        "block_size": case.block_size,
        "prefix_match_unit": case.prefix_match_unit,
        "enable_prefix_caching": case.enable_prefix_caching,
        "connector": case.connector,
        "dcp": case.dcp,
    }
    our = ours(
        lambda: layout_core.resolve_kv_cache_block_sizes(
            KVCacheConfig(8, [], mine), config_for_us(case.foreign, options)
        )
    )
    their = theirs(
        lambda: peers.utils.resolve_kv_cache_block_sizes(
            peers.interface.KVCacheConfig(8, [], peer), peers.vllm_config(**options)
        )
    )

    def ignored_unit() -> str | None:
        if len(mine) == 1 and case.prefix_match_unit is not None and not peers.IS_032:
            return "prefix-match-unit-of-one-group"
        return None

    outcome = judge("block sizes", case, our, their, we_refuse=ignored_unit)
    if outcome == EQUAL:
        tally.labels["one group" if len(mine) == 1 else "several groups"] += 1
        if our.value[0] != our.value[1]:
            tally.labels["finer hashing"] += 1
    return outcome
