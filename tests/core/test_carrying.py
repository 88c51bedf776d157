"""A config through JSON, pickle and a spawned process; and the two ends of an adoption."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_core import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVQuantMode,
    MLAAttentionSpec,
    ModelConfig,
    MultipleOf,
    RunConfig,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    make_config,
    resolve_layout,
    single_group_config,
)
from layout_core.control_plane import WorkerReply, collect_replies, serve_adoption
from layout_core.errors import (
    AdoptionError,
    ConfigError,
    LayoutConflictError,
    SpecError,
    UnsupportedError,
)
from tests.core.spawned import adopt, echo

VALUES: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 8,
    "dtype": "bfloat16",
}
SPEC = FullAttentionSpec(**VALUES)


def rich_config() -> KVCacheConfig:
    """Every kind of field that a config can carry."""
    wrapper = UniformTypeKVCacheSpecs(
        block_size=16,
        kv_cache_specs={
            "f": FullAttentionSpec(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR, **VALUES),
            "m": MLAAttentionSpec(alignment=384, cache_dtype_str="fp8", **VALUES),
        },
    )
    groups = [
        KVCacheGroupSpec(["f", "m"], wrapper, is_eagle_group=True),
        KVCacheGroupSpec(["w"], SlidingWindowSpec(sliding_window=4, **VALUES)),
        KVCacheGroupSpec(["c"], ChunkedLocalAttentionSpec(attention_chunk_size=4, **VALUES)),
        KVCacheGroupSpec(
            ["x"],
            CrossAttentionSpec(tokens_per_state=Fraction(1, 4), **VALUES),
            enable_kv_transfer=False,
        ),
        KVCacheGroupSpec(["y"], FullAttentionSpec(block_stride_alignment=MultipleOf(8), **VALUES)),
    ]
    config = make_config(groups, 7, "BLHNC")
    config.hash_block_size = 16
    config.cache_hit_alignment_tokens = 64
    config.prefix_cache_retention_interval = 3
    config.kv_tp_replicas = 2
    return config


def test_json_and_pickle_round_trip() -> None:
    config = rich_config()
    again = KVCacheConfig.from_json(config.to_json())
    assert again == config
    assert resolve_layout(again) == resolve_layout(config)
    assert again.to_json() == config.to_json()
    assert pickle.loads(pickle.dumps(config)) == config


@given(
    st.sampled_from(list(KVCacheLayout)),
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
    st.sampled_from([1, 2, Fraction(1, 2)]),
    st.sampled_from([None, 24]),
    st.booleans(),
)
@settings(deadline=None)
def test_json_round_trip_of_drawn_configs(
    layout: KVCacheLayout,
    num_blocks: int,
    heads: int,
    dtype: str,
    tokens: int | Fraction,
    content: int | None,
    non_causal: bool,
) -> None:
    spec = FullAttentionSpec(
        block_size=4,
        num_kv_heads=heads,
        head_size=4,
        dtype=dtype,  # type: ignore[arg-type]
        tokens_per_state=tokens,
        state_content_bytes=content,
        non_causal=non_causal,
    )
    config = single_group_config(spec, num_blocks, ["a", "b"], layout)
    assert KVCacheConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("path", "value", "error", "wording"),
    [
        (("num_blocks",), None, ConfigError, r"config.num_blocks: required, and missing"),
        (("colour",), 1, ConfigError, r"config.colour: unknown field, expected one of"),
        (("kv_cache_tensors",), 1, ConfigError, r"kv_cache_tensors: expected a list, got 1"),
        (("kv_cache_tensors", 0, "pitch"), 1, ConfigError, r"tensors\[0\].pitch: unknown field"),
        (("kv_cache_groups", 0), 1, ConfigError, r"groups\[0\]: expected a JSON object, got 1"),
        (
            ("kv_cache_groups", 0, "kv_cache_spec", "kind"),
            "MambaSpec",
            ConfigError,
            r"kv_cache_spec.kind: expected one of FullAttentionSpec.* got 'MambaSpec'",
        ),
        (
            ("kv_cache_groups", 0, "kv_cache_spec", "head_size"),
            0,
            SpecError,
            r"head_size: expected an int >= 1, got 0",
        ),
        (
            ("kv_cache_groups", 0, "kv_cache_spec", "kv_quant_mode"),
            "FP3",
            ConfigError,
            r"kv_quant_mode: expected a mode's name, got 'FP3'",
        ),
        # later versions' fields: at their default they pass, else they are refused by name
        (("hisparse_host_num_blocks",), 4, UnsupportedError, r"config.hisparse_host_num_blocks"),
        (
            ("kv_cache_tensors", 0, "host_resident"),
            True,
            UnsupportedError,
            r"kv_cache_tensors\[0\].host_resident: expected the default False, got True",
        ),
        (
            ("kv_cache_groups", 0, "role"),
            "hisparse_source",
            UnsupportedError,
            r"kv_cache_groups\[0\].role: expected the default 'default'",
        ),
    ],
)
def test_text_that_says_something_else(
    path: tuple[Any, ...], value: Any, error: type[Exception], wording: str
) -> None:
    data = json.loads(single_group_config(SPEC, 4, ["a"], "LBNHC").to_json())
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    with pytest.raises(error, match=wording):
        KVCacheConfig.from_json(json.dumps(data))


def test_later_fields_at_their_default_are_carried() -> None:
    config = single_group_config(SPEC, 4, ["a"], "LBNHC")
    data = json.loads(config.to_json())
    data["hisparse_shared_host_pool"] = False
    data["kv_cache_groups"][0]["role"] = "default"
    data["kv_cache_tensors"][0]["host_resident"] = False
    assert KVCacheConfig.from_json(json.dumps(data)) == config


def test_what_is_no_json() -> None:
    with pytest.raises(ConfigError, match=r"config: expected JSON text, got '\{\"num_blocks\"'"):
        KVCacheConfig.from_json('{"num_blocks"')
    with pytest.raises(ConfigError, match=r"config: expected a JSON object, got \[\]"):
        KVCacheConfig.from_json("[]")


# Processes. The workers' side is in a module of its own, which loads fast when spawned.


def test_a_config_through_a_spawned_process() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    worker = context.Process(target=echo, args=(theirs,))
    worker.start()
    config = rich_config()
    ours.send(config)
    assert ours.poll(60)
    echoed, resolved = ours.recv()
    worker.join(60)
    assert worker.exitcode == 0
    assert echoed == config
    assert resolved == resolve_layout(config)


def _start_workers(
    pins: list[str | None], text: str
) -> tuple[list[WorkerReply], list[int | None], list[int | None]]:
    """Replies, bytes allocated (``None`` where nothing was), exit codes."""
    context = multiprocessing.get_context("spawn")
    started = []
    for rank, pinned in enumerate(pins):
        ours, theirs = context.Pipe()
        process = context.Process(target=adopt, args=(rank, pinned, text, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    replies: list[WorkerReply] = []
    allocated: list[int | None] = []
    codes: list[int | None] = []
    for process, ours in started:
        assert ours.poll(60)
        replies.append(ours.recv())
        try:
            allocated.append(ours.recv())
        except EOFError:
            allocated.append(None)
        process.join(60)
        codes.append(process.exitcode)
    return replies, allocated, codes


def test_every_worker_adopts_before_it_allocates() -> None:
    config = single_group_config(SPEC, 4, ["a", "b"], "BLNHC")
    replies, allocated, codes = _start_workers([None, "BLNHC"], config.to_json())
    collect_replies(replies, 2, "BLNHC")
    assert [reply.layout for reply in replies] == ["BLNHC", "BLNHC"]
    assert allocated == [resolve_layout(config).size_bytes] * 2
    assert codes == [0, 0]


def test_a_worker_pinned_otherwise_raises_and_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    config = single_group_config(SPEC, 4, ["a", "b"], "BLNHC")
    replies, allocated, codes = _start_workers([None, "LBNHC", None], config.to_json())
    with pytest.raises(
        AdoptionError,
        match=r"1 of 3 did not adopt layout BLNHC: rank 1: LayoutConflictError: .*'LBNHC' "
        r"disagrees with the layout",
    ):
        collect_replies(replies, 3, KVCacheLayout.BLNHC)
    assert allocated[1] is None
    assert allocated[0] == allocated[2] == resolve_layout(config).size_bytes
    assert codes == [0, 1, 0]
    assert "LayoutConflictError" in capfd.readouterr().err  # the worker itself raised


def test_every_fault_of_an_adoption_is_named() -> None:
    replies = [
        WorkerReply(0, "LBNHC"),
        WorkerReply(1, "BLNHC"),
        WorkerReply(1, "LBNHC"),
        WorkerReply(9, "LBNHC"),
        WorkerReply(2, None, "ConfigError: edited"),
    ]
    with pytest.raises(AdoptionError) as error:
        collect_replies(replies, 4, "LBNHC")
    text = str(error.value)
    for part in (
        "rank 1: an answer that is not expected",
        "rank 9: an answer that is not expected",
        "rank 1: adopted BLNHC, expected LBNHC",
        "rank 2: ConfigError: edited",
        "rank 3: no answer",
    ):
        assert part in text
    assert "rank 0" not in text
    assert isinstance(error.value, LayoutConflictError)


def test_an_edited_text_is_answered_and_raised() -> None:
    data = json.loads(single_group_config(SPEC, 4, ["a", "b"], "LBNHC").to_json())
    data["kv_cache_tensors"][0]["layer_stride"] += 64
    answers: list[WorkerReply] = []
    run = RunConfig(ModelConfig(64))
    with pytest.raises(ConfigError, match="layer_stride"):
        serve_adoption(3, run, json.dumps(data), answers.append)
    assert [answer.rank for answer in answers] == [3]
    assert answers[0].error is not None
    assert answers[0].error.startswith("ConfigError: config.kv_cache_tensors[0].layer_stride")
    assert run.cache_config.kv_cache_layout is None
