"""Reserve, share, publish, free: what a scheduler asks of the manager."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from block_manager import (
    AsleepError,
    BlockPoolError,
    DiffusionKVAdmissionError,
    DiffusionKVCacheManager,
    DiffusionKVContext,
    PrefixCacheError,
    PrefixCacheStats,
    RequestError,
    TransferError,
    UnknownRequestError,
    cfg_rows,
)
from layout_core.errors import ConfigError
from tests.manager.helpers import admit, config, manager, row, rows


def hits(metadata: Any) -> list[int]:
    return [sequence.cached_prefix_len for sequence in metadata.sequences]


def ids(metadata: Any, group: int = 0) -> list[list[int]]:
    return [sequence.block_ids[group] for sequence in metadata.sequences]


# -- admission ------------------------------------------------------------------------------


def test_two_cfg_rows_get_blocks_of_their_own() -> None:
    m = manager(16)
    metadata = admit(m, "a", rows("a", 2))
    assert ids(metadata) == [[1, 2, 3], [4, 5, 6]]
    assert metadata.allocation_generation == 1
    assert m.num_free_blocks == 9
    assert m.get_metadata("a") == metadata
    assert m.free_request("a") is True
    assert m.num_free_blocks == 15
    m.check()


def test_all_rows_or_none() -> None:
    # field case 22: FreeToken#367
    m = manager(2, 128)
    assert m.num_free_blocks == 1
    two = [row("a", i, prefix=1, target=1) for i in range(2)]
    with pytest.raises(
        DiffusionKVAdmissionError,
        match="it needs 2 blocks, an empty pool has 1 available",
    ) as caught:
        m.reserve_request("a", two)
    assert (caught.value.required_blocks, caught.value.available_blocks) == (2, 1)
    assert pickle.loads(pickle.dumps(caught.value)).required_blocks == 2
    assert m.num_free_blocks == 1
    assert not m.has_request("a")


def test_not_now_is_none_and_never_is_an_error() -> None:
    m = manager(8)
    admit(m, "a", rows("a", 2))
    before = m.state()
    assert m.reserve_request("b", rows("b", 1)) is None
    assert m.state() == before
    with pytest.raises(DiffusionKVAdmissionError, match="it needs 9 blocks"):
        m.reserve_request("c", rows("c", 3))
    assert m.state() == before
    m.free_request("a")
    assert m.reserve_request("b", rows("b", 1)) is not None


@pytest.mark.parametrize(("guidance", "charged"), [(1.0, 3), (2.0, 6)])
def test_guidance_decides_what_is_charged(guidance: float, charged: int) -> None:
    # field case 21: vllm-omni#6700
    m = manager(16)
    request = rows("a", cfg_rows(guidance))
    assert m.required_blocks(request) == charged
    admit(m, "a", request)
    assert m.num_free_blocks == 15 - charged


def test_a_row_longer_than_the_model_is_never_admitted() -> None:
    m = manager(16, max_model_len=11)
    with pytest.raises(DiffusionKVAdmissionError, match="12 tokens exceed max_model_len 11"):
        m.reserve_request("a", rows("a", 1))


@pytest.mark.parametrize(
    ("supplied", "missing"), [([0], [1, 2]), ([2], [0, 1]), ([0, 2], [1]), ([], [0, 1, 2])]
)
def test_missing_rows_are_all_named(supplied: list[int], missing: list[int]) -> None:
    # field cases 17 and 18: vllm-omni#4752, vllm-omni#1791
    m = manager(16)
    before = m.state()
    message = rf"3 rows are declared, {len(supplied)} supplied: sequence ids \[{missing[0]}"
    with pytest.raises(RequestError, match=message) as caught:
        m.reserve_request("a", [row("a", i) for i in supplied], num_rows=3)
    assert str(missing) in str(caught.value)
    assert m.state() == before


def test_rows_are_in_order_and_known_once() -> None:
    m = manager(32)
    with pytest.raises(RequestError, match=r"expected rows in the order .* \[0, 1\], got \[1, 0\]"):
        m.reserve_request("a", [row("a", 1), row("a", 0)])
    with pytest.raises(RequestError, match="expected at least one row, got none"):
        m.reserve_request("a", [])
    with pytest.raises(RequestError, match="request_id: expected a non-empty string"):
        m.reserve_request("", rows("a", 1))
    twice = [row("a", 0), row("a", 1)]
    object.__setattr__(twice[1], "request_id", "a/0")
    with pytest.raises(RequestError, match="row id 'a/0' stands twice"):
        m.reserve_request("a", twice)
    admit(m, "a", rows("a", 2))
    with pytest.raises(RequestError, match="request 'a': is already admitted"):
        m.reserve_request("a", rows("b", 1))
    with pytest.raises(RequestError, match="row id 'a/0' belongs to the admitted request 'a'"):
        m.reserve_request("b", rows("a", 1))


def test_unknown_requests() -> None:
    m = manager(8)
    for call in (m.get_metadata, m.publish_request, m.make_writable, m.complete_transfer):
        with pytest.raises(UnknownRequestError, match=r"^request 'x': is not admitted$"):
            call("x")
        with pytest.raises(KeyError):  # as in vLLM-Omni
            call("x")
    assert m.free_request("x") is False


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_model_len": 0}, "max_model_len: expected an int >= 1, got 0"),
        ({"max_in_flight_tokens": 0}, "max_in_flight_tokens: expected an int >= 1, got 0"),
        ({"scheduler_block_size": 6}, "expected a multiple of group 0's block size 4, got 6"),
        ({"hash_block_size": 3}, "expected a divisor of group 0's block size 4, got 3"),
        ({"prefix_caching_hash_algo": "md5"}, "expected 'sha256', got 'md5'"),
        ({"role_groups": {"cross": [1]}}, r"role_groups\['cross'\]: expected groups in \[0, 1\)"),
    ],
)
def test_contradicting_sizes_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        manager(8, **kwargs)


# -- prefix cache ---------------------------------------------------------------------------


def test_a_second_request_with_the_same_prompts_computes_only_the_unaligned_tails() -> None:
    m = manager(32)
    first = admit(m, "a", rows("a", 2, prefix=10))
    assert hits(first) == [0, 0]
    assert m.reserve_request("early", rows("early", 2, prefix=10)) is not None
    m.free_request("early")
    assert m.publish_request("a") == 4
    assert m.publish_request("a") == 0
    second = admit(m, "b", rows("b", 2, prefix=10))
    assert hits(second) == [8, 8]
    assert [table[:2] for table in ids(second)] == [table[:2] for table in ids(first)]
    assert not {b for t in ids(second) for b in t[2:]} & {b for t in ids(first) for b in t}
    assert m.stats == PrefixCacheStats(rows=6, tokens=60, hit_tokens=16)


def test_nothing_is_found_before_it_is_published() -> None:
    m = manager(32)
    admit(m, "a", rows("a", 1))
    assert hits(admit(m, "b", rows("b", 1))) == [0]


@pytest.mark.parametrize(("prompt", "new", "taken"), [(11, 1, 3), (12, 1, 3), (13, 2, 4)])
@pytest.mark.parametrize("idle", [True, False])
def test_cached_blocks_are_counted_once(prompt: int, new: int, taken: int, idle: bool) -> None:
    # field case 24: TensorRT-LLM#12404; block 4, 8 tokens cached
    m = manager(32)
    admit(m, "a", [row("a", prefix=8, target=1)])
    m.publish_request("a")
    if idle:
        m.free_request("a")
    free = m.num_free_blocks
    known = set() if idle else {b for t in ids(m.get_metadata("a")) for b in t}
    metadata = admit(m, "b", [row("b", prefix=prompt - 1, target=1)])
    assert hits(metadata) == [8]
    assert len(ids(metadata)[0]) - 2 == new
    assert free - m.num_free_blocks == (taken if idle else new)
    assert idle or known & set(ids(metadata)[0]) == set(ids(metadata)[0][:2])


def test_hits_are_held_before_misses_allocate() -> None:
    # row 1's cached blocks are idle and oldest: row 0's allocation must not take them
    m = manager(8)
    admit(m, "a", [row("a", prefix=range(100, 108), target=1)])
    m.publish_request("a")
    m.free_request("a")
    metadata = admit(
        m, "b", [row("b", 0, prefix=11, target=1), row("b", 1, prefix=range(100, 108), target=1)]
    )
    assert hits(metadata) == [0, 8]
    assert m.num_free_blocks == 1
    assert len({b for t in ids(metadata) for b in t}) == 6
    m.check()


def test_shared_hits_are_charged_once_so_a_warm_request_fits_where_a_cold_one_does_not() -> None:
    m = manager(6)
    admit(m, "a", [row("a", prefix=8, target=4)])
    m.publish_request("a")
    m.free_request("a")
    both = [row("b", i, prefix=8, target=4) for i in range(2)]
    assert m.required_blocks(both) == 6 > m.num_free_blocks
    metadata = admit(m, "b", both)
    assert hits(metadata) == [8, 8]
    assert m.num_free_blocks == 1
    m.check()


@pytest.mark.parametrize(("clip", "expected"), [(False, [8, 4]), (True, [4, 4])])
def test_hits_are_kept_for_each_row_unless_asked_to_clip(clip: bool, expected: list[int]) -> None:
    m = manager(32, clip_hits_to_shortest=clip)
    admit(m, "a", [row("a", 0), row("a", 1, prefix=range(50, 54))])
    m.publish_request("a")
    metadata = admit(m, "b", [row("b", 0), row("b", 1, prefix=range(50, 58))])
    assert hits(metadata) == expected
    m.check()


def test_the_span_rule_holds_after_clipping() -> None:
    # row 0 alone hits 12; clipped to row 1's 8 it would end inside [6, 10): 4 is left for both
    m = manager(32, clip_hits_to_shortest=True)
    spans = [(6, 10)]
    admit(m, "a", [row("a", 0, prefix=12, full_spans=spans), row("a", 1, prefix=range(50, 58))])
    m.publish_request("a")
    metadata = admit(
        m,
        "b",
        [row("b", 0, prefix=12, full_spans=spans), row("b", 1, prefix=range(50, 62))],
    )
    assert hits(metadata) == [4, 4]


@pytest.mark.parametrize(("published", "usable"), [(8, 4), (12, 12)])
def test_a_hit_never_ends_inside_a_span(published: int, usable: int) -> None:
    # field case 20: lmdeploy#4618. The second prompt differs from the first after `published`
    m = manager(32)
    admit(m, "a", [row("a", prefix=12, full_spans=[(6, 10)])])
    m.publish_request("a")
    tokens = [*range(published), *range(900, 916 - published)]
    metadata = admit(m, "b", [row("b", prefix=tokens, full_spans=[(6, 10)])])
    assert hits(metadata) == [usable]


def test_a_block_in_a_span_is_not_shared_with_another_span_of_equal_beginning() -> None:
    # both rows have the same first 8 tokens, and [4, 10) sees tokens that differ: the third
    # request's hit of 12 must take block 1 from row 1, never from row 0, which came first
    m = manager(32)
    span = [(4, 10)]
    tokens = [[*range(8), 900, 9, 10, 11], [*range(8), 8, 900, 10, 11]]
    first = admit(m, "a", [row("a", i, prefix=tokens[i], full_spans=span) for i in range(2)])
    m.publish_request("a")
    second = admit(m, "b", [row("b", prefix=tokens[1], full_spans=span)])
    assert hits(second) == [12]
    assert ids(second)[0][1:3] == ids(first)[1][1:3]


def test_rows_of_other_domains_share_nothing() -> None:
    m = manager(64)
    admit(m, "a", [row("a")])
    m.publish_request("a")
    for name, change in {
        "namespace": {"cache_namespace": "other"},
        "lora": {"lora_id": 1},
        "salt": {"cache_salt": "tenant"},
        "branch": {"cfg_branch": 1},
        "spans": {"full_spans": [(0, 2)]},
    }.items():
        assert hits(admit(m, name, [row(name, **change)])) == [0], name
    assert hits(admit(m, "same", [row("same")])) == [8]


def test_a_prefix_that_sees_the_target_is_refused_by_name() -> None:
    # W6: vllm-omni#4710
    m = manager(32)
    before = m.state()
    with pytest.raises(PrefixCacheError, match=r"row 'a/0': .*query 6 .* sees key 8 .*\[6, 10\)"):
        m.reserve_request("a", [row("a", full_spans=[(6, 10)])])
    assert m.state() == before
    # without tokens it asks for no caching; without caching nobody reuses the prefix
    admit(m, "b", [row("b", prefix=(), target=12, full_spans=[(6, 10)])])
    off = manager(32, enable_prefix_caching=False)
    assert off.reserve_request("a", [row("a", full_spans=[(6, 10)])]) is not None


def test_without_caching_nothing_is_found_and_ids_return_in_order() -> None:
    m = manager(16, enable_prefix_caching=False)
    first = admit(m, "a", rows("a", 2))
    assert m.publish_request("a") == 0
    m.free_request("a")
    second = admit(m, "b", rows("b", 2))
    assert ids(first) == ids(second)
    assert hits(second) == [0, 0]
    assert m.stats == PrefixCacheStats()


def test_beginnings_of_prompts_stay_longest() -> None:
    m = manager(5)
    admit(m, "a", [row("a", prefix=12, target=1)])
    m.publish_request("a")
    m.free_request("a")
    admit(m, "b", [row("b", prefix=range(50, 54), target=4)])  # evicts one block of a
    m.free_request("b")
    assert hits(admit(m, "c", [row("c", prefix=12, target=1)])) == [8]


def test_reset_forgets_prefixes() -> None:
    m = manager(16)
    admit(m, "a", rows("a", 1))
    m.publish_request("a")
    assert m.reset_prefix_cache() == 2
    assert hits(admit(m, "b", rows("b", 1))) == [0]
    m.check()


# -- groups and contexts --------------------------------------------------------------------


def test_groups_of_unlike_block_sizes_share_one_space_of_ids() -> None:
    m = manager(32, 4, 8)
    assert m.hit_alignment == 8
    metadata = admit(m, "a", [row("a", prefix=20, target=4)])
    (sequence,) = metadata.sequences
    assert [len(table) for table in sequence.block_ids] == [6, 3]
    assert len({b for table in sequence.block_ids for b in table}) == 9
    assert m.publish_request("a") == 4 + 2  # 16 tokens, the last multiple of 8
    warm = admit(m, "b", [row("b", prefix=20, target=4)]).sequences[0]
    assert warm.cached_prefix_len == 16
    assert warm.block_ids[0][:4] == sequence.block_ids[0][:4]
    assert warm.block_ids[1][:2] == sequence.block_ids[1][:2]
    m.check()


def test_a_group_that_lost_a_block_shortens_the_hit_for_all() -> None:
    m = manager(32, 4, 8)
    metadata = admit(m, "a", [row("a", prefix=16, target=4)])
    m.publish_request("a")
    m.block_pool.unpublish([metadata.sequences[0].block_ids[1][1]])
    assert hits(admit(m, "b", [row("b", prefix=16, target=4)])) == [8]


def test_a_context_is_shared_by_the_rows_that_name_it() -> None:
    m = manager(32, 4, 4, cross=(1,))
    text = DiffusionKVContext("text", "cross", 10)
    image = DiffusionKVContext("image", "cross", 3)
    request = [row("a", 0, kv_contexts=[text, image]), row("a", 1, kv_contexts=[text])]
    assert m.required_blocks(request) == 3 + 3 + 3 + 1
    metadata = admit(m, "a", request)
    assert [s.context_ids for s in metadata.sequences] == [("text", "image"), ("text",)]
    assert [(c.context_id, c.cache_role, c.num_tokens) for c in metadata.contexts] == [
        ("text", "cross", 10),
        ("image", "cross", 3),
    ]
    assert [[len(t) for t in c.block_ids] for c in metadata.contexts] == [[0, 3], [0, 1]]
    assert [[len(t) for t in s.block_ids] for s in metadata.sequences] == [[3, 0], [3, 0]]
    m.check()
    m.free_request("a")
    assert m.num_free_blocks == 31


def test_a_sequence_takes_no_blocks_where_there_is_cross_attention_alone() -> None:
    m = DiffusionKVCacheManager(
        config(4, 4, cross=(0,)), max_model_len=16, scheduler_block_size=4, hash_block_size=4
    )
    text = DiffusionKVContext("text", "cross", 10)
    metadata = m.reserve_request("a", [row("a", 0, kv_contexts=[text])])
    assert metadata is not None
    assert metadata.sequences[0].block_ids == ([],)
    assert metadata.contexts[0].block_ids == ([1, 2, 3],)
    assert m.required_blocks([row("b", 0, kv_contexts=[text])]) == 3


def test_contexts_use_the_sequences_groups_where_there_is_no_cross_attention() -> None:
    m = manager(32, 4, 8, role_groups={"reference": [1]})
    contexts = [DiffusionKVContext("any", "anything", 8), DiffusionKVContext("r", "reference", 8)]
    metadata = admit(m, "a", [row("a", kv_contexts=contexts)])
    assert [[len(t) for t in c.block_ids] for c in metadata.contexts] == [[2, 1], [0, 1]]


def test_contexts_that_contradict_each_other_are_refused() -> None:
    m = manager(32)
    request = [
        row("a", 0, kv_contexts=[DiffusionKVContext("text", "cross", 10)]),
        row("a", 1, kv_contexts=[DiffusionKVContext("text", "cross", 11)]),
    ]
    with pytest.raises(RequestError, match="row 'a/1': context 'text' contradicts another row's"):
        m.reserve_request("a", request)


# -- transfers, sleep, close ----------------------------------------------------------------


def test_kv_that_is_being_received_is_not_readable() -> None:
    m = manager(32)
    admit(m, "a", [row("a", kv_transfer_params={"from": "prefill"})])
    for call in (m.publish_request, m.check_readable, lambda a: m.fork_request(a, "child")):
        with pytest.raises(TransferError, match="is being received and is not readable yet"):
            call("a")
    m.complete_transfer("a")
    m.check_readable("a")
    assert m.publish_request("a") == 2


def test_a_failed_receive_never_becomes_readable_and_is_released_once() -> None:
    # W7: vllm#52234
    m = manager(32)
    metadata = admit(m, "a", [row("a", kv_transfer_params={"from": "prefill"})])
    bad = ids(metadata)[0][1:3]
    with pytest.raises(BlockPoolError, match="block 31 was reported as not received, and the"):
        m.fail_transfer("a", [bad[0], 31])
    assert m.fail_transfer("a", [bad[1], bad[0], bad[0]]) == ("a",)
    for call in (
        m.publish_request,
        m.complete_transfer,
        m.make_writable,
        lambda a: m.fork_request(a, "child"),
    ):
        with pytest.raises(
            TransferError, match=rf"blocks \[{bad[0]}, {bad[1]}\] was not"
        ) as caught:
            call("a")
        assert caught.value.block_ids == tuple(bad)
        assert pickle.loads(pickle.dumps(caught.value)).block_ids == tuple(bad)
    assert m.free_request("a") is True
    assert m.num_free_blocks == 31
    assert m.free_request("a") is False
    assert m.num_free_blocks == 31
    assert hits(admit(m, "b", [row("b")])) == [0]


def test_a_failure_reaches_everyone_who_holds_the_block_and_the_index() -> None:
    m = manager(32)
    first = admit(m, "a", [row("a")])
    m.publish_request("a")
    admit(m, "b", [row("b")])
    admit(m, "c", [row("c", prefix=range(50, 58))])
    assert m.fail_transfer("a", ids(first)[0][:1]) == ("a", "b")
    m.check_readable("c")
    with pytest.raises(TransferError, match="request 'b'"):
        m.check_readable("b")
    assert hits(admit(m, "d", [row("d")])) == [0]
    m.close()
    m.check()
    assert m.num_free_blocks == 31


def test_sleep_and_wake_up_drop_the_prefix_index() -> None:
    m = manager(16)
    admit(m, "a", rows("a", 1))
    m.publish_request("a")
    with pytest.raises(RequestError, match=r"free these requests first.*\['a'\]"):
        m.sleep()
    assert hits(admit(m, "b", rows("b", 1))) == [8]
    m.close()
    m.sleep()
    with pytest.raises(AsleepError, match="reserve_request: the manager is asleep"):
        m.reserve_request("c", rows("c", 1))
    m.wake_up()
    assert hits(admit(m, "c", rows("c", 1))) == [0]


def test_close_frees_everything() -> None:
    m = manager(32)
    for name in "abc":
        admit(m, name, rows(name, 1))
    assert m.request_ids == ("a", "b", "c")
    m.close()
    assert m.request_ids == ()
    assert m.num_free_blocks == 31
    m.check()


def test_generations_are_never_used_twice() -> None:
    m = manager(32)
    seen = []
    for _ in range(3):
        seen.append(admit(m, "a", rows("a", 1)).allocation_generation)
        m.free_request("a")
    assert m.reserve_request("b", rows("b", 8)) is not None
    assert m.reserve_request("c", rows("c", 8)) is None
    m.free_request("b")
    seen.append(admit(m, "c", rows("c", 1)).allocation_generation)
    assert seen == sorted(set(seen))


def test_the_receiver_may_keep_and_change_its_payload() -> None:
    m = manager(16)
    metadata = admit(m, "a", rows("a", 1))
    before = m.get_metadata("a")
    metadata.sequences[0].block_ids[0].clear()
    assert m.get_metadata("a") == before
    m.free_request("a")
    m.check()


def test_any_object_with_the_attributes_is_a_config() -> None:
    from types import SimpleNamespace as Namespace

    from block_manager import CacheGeometry

    class CrossAttentionSpec:
        block_size = 8

    class Wrapped(CrossAttentionSpec):
        pass

    foreign = Namespace(
        num_blocks=7,
        kv_cache_groups=[
            Namespace(kv_cache_spec=Namespace(block_size=4)),
            Namespace(kv_cache_spec=Wrapped()),
            Namespace(
                kv_cache_spec=Namespace(block_size=8, kv_cache_specs={"x": CrossAttentionSpec()})
            ),
        ],
    )
    geometry = CacheGeometry.from_config(foreign)
    assert geometry.block_sizes == (4, 8, 8)
    assert geometry.sequence_groups == (0,)
    assert geometry.context_groups == (1, 2)
    assert CacheGeometry.from_config(config(8, 4, 8)).sequence_groups == (0, 1)
    for groups, message in (
        ([], "expected at least one group"),
        ([Namespace(kv_cache_spec=Namespace(block_size=0))], "group 0: block_size: expected"),
    ):
        with pytest.raises(ConfigError, match=message):
            CacheGeometry.from_config(Namespace(num_blocks=7, kv_cache_groups=groups))
