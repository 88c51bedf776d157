"""The worker's row table: install, replace, remove, and what it refuses to hand out."""

from __future__ import annotations

from array import array
from dataclasses import make_dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from block_manager import (
    AsleepError,
    ConflictingAllocationError,
    DiffusionKVContext,
    DiffusionKVContextMetadata,
    DiffusionKVMetadata,
    DiffusionKVSequenceMetadata,
    RowTable,
    StaleAllocationError,
    TransferError,
    UnknownRequestError,
)
from block_manager.row_table import _all_below, _is_ascending
from layout_core.errors import BlockTableError, ConfigError, LayoutError, RowError
from layout_core.resolve import resolve_layout
from layout_core.rows import BlockTables, Bucket, PagedAttentionRow, compute_slot_mapping
from layout_core.step import plan_step
from layout_core.visibility import Visibility
from tests.manager.helpers import admit, config, manager, row, rows


def table(num_blocks: int = 32, *sizes: int, **kwargs: Any) -> RowTable:
    cross = kwargs.pop("cross", ())
    kwargs.setdefault("max_model_len", 64)
    return RowTable(config(num_blocks, *sizes, cross=cross), **kwargs)


def payload(
    *block_ids: list[int], request_id: str = "a", generation: int = 1, seq_len: int = 12
) -> DiffusionKVMetadata:
    """Sequences of 12 tokens in three blocks of 4, unless told otherwise."""
    return DiffusionKVMetadata(
        request_id,
        generation,
        tuple(
            DiffusionKVSequenceMetadata(i, 8, 4, seq_len, (ids,)) for i, ids in enumerate(block_ids)
        ),
    )


def at(request_id: str = "a", sequence_id: int = 0, seq_len: int = 12) -> PagedAttentionRow:
    return PagedAttentionRow(request_id, 1, seq_len, sequence_id=sequence_id)


def test_it_is_a_block_tables() -> None:
    assert isinstance(table(), BlockTables)


def test_rows_are_installed_and_read() -> None:
    t = table()
    assert t.install(payload([3, 1, 2], [7, 5, 6])) is True
    assert t.block_ids(at(), 0) == array("i", [3, 1, 2])
    assert t.block_ids(at(sequence_id=1), 0) == array("i", [7, 5, 6])
    assert (t.num_rows, t.request_ids, t.generation("a")) == (2, ("a",), 1)
    assert t.generation("b") is None


def test_positions_past_a_row_have_no_slot() -> None:
    # field case 9: vllm#54296
    t = table(32, 16)
    for index, block in enumerate((5, 9)):
        t.install(
            DiffusionKVMetadata(
                f"r{index}", 1, (DiffusionKVSequenceMetadata(0, 8, 8, 16, ([block],)),)
            )
        )
    ids = t.block_ids(at("r0", seq_len=16), 0)
    assert list(compute_slot_mapping(ids, [0, 16], 16)) == [80, -1]


def test_a_warm_up_batch_writes_nowhere() -> None:
    # field case 10: vllm#39444
    cfg = config(8)
    plan = plan_step(
        resolve_layout(cfg),
        [],
        RowTable(cfg, max_model_len=64),
        visibility=Visibility(causal=True),
        bucket=Bucket(tokens=6, rows=2, blocks=3),
    )
    assert list(plan.slots) == [-1] * 6
    assert list(compute_slot_mapping([0, 0], range(8), 4)) == [-1] * 8


@pytest.mark.parametrize(("null_block", "slots"), [(True, [-1, -1]), (False, [0, 3])])
def test_block_0_is_writable_only_where_it_is_not_held_back(
    null_block: bool, slots: list[int]
) -> None:
    # field case 11: LMCache#2984, kvcached#398
    m = manager(4, null_block=null_block)
    t = table(4, null_block=null_block)
    t.install(admit(m, "a", [row("a", prefix=0, target=4)]))
    ids = t.block_ids(at(seq_len=4), 0)
    assert list(ids) == ([1] if null_block else [0])
    assert list(compute_slot_mapping([0], [0, 3], 4, null_block=null_block)) == slots


def test_the_same_generation_again_changes_nothing() -> None:
    t = table()
    t.install(payload([1, 2, 3]))
    before = t.state()
    assert t.install(payload([1, 2, 3])) is False
    assert t.replace(payload([1, 2, 3])) is False
    assert t.state() == before


def test_the_same_rows_under_a_newer_generation_keep_batches_valid() -> None:
    t = table()
    t.install(payload([1, 2, 3]))
    version = t.version
    assert t.install(payload([1, 2, 3], generation=5)) is False
    assert (t.version, t.generation("a")) == (version, 5)
    with pytest.raises(StaleAllocationError, match=r"generation 4 is older than the .* 5"):
        t.install(payload([1, 2, 3], generation=4))


@pytest.mark.parametrize("generation", [3, 4])
@pytest.mark.parametrize(
    "other", [([1, 2, 4],), ([1, 2, 3], [4, 5, 6])], ids=["other blocks", "another row"]
)
def test_other_rows_for_an_active_request_conflict(
    generation: int, other: tuple[list[int], ...]
) -> None:
    t = table()
    t.install(payload([1, 2, 3], generation=3))
    before = t.state()
    with pytest.raises(ConflictingAllocationError, match="call replace, or remove"):
        t.install(payload(*other, generation=generation))
    with pytest.raises(StaleAllocationError):
        t.install(payload(*other, generation=2))
    assert t.state() == before


def test_replace_needs_a_newer_generation_and_makes_batches_stale() -> None:
    t = table()
    t.install(payload([1, 2, 3], generation=3))
    version = t.version
    with pytest.raises(ConflictingAllocationError, match="a changed allocation has a newer"):
        t.replace(payload([1, 2, 4], generation=3))
    with pytest.raises(StaleAllocationError):
        t.replace(payload([1, 2, 4], generation=2))
    assert t.version == version
    assert t.replace(payload([1, 2, 4], [5, 6, 7], generation=4)) is True
    assert t.version > version
    assert t.block_ids(at(), 0) == array("i", [1, 2, 4])
    assert t.replace(payload([5, 6, 7], request_id="b")) is True


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (payload([1, 2]), BlockTableError, "exactly 3 blocks of 4 tokens for 12 tokens, got 2"),
        (payload([1, 2, 3, 4]), BlockTableError, "request 'a', sequence 0, group 0: .* got 4"),
        (
            payload([1, 32, 3]),
            BlockTableError,
            r"entry 1: expected a block id in \[0, 32\), got 32",
        ),
        (payload([1, 2, -3]), BlockTableError, "entry 2: .* got -3"),
        (payload([1, 2.5, 3]), BlockTableError, "entry 1: .* got 2.5"),  # type: ignore[list-item]
        (payload([1, 2], [1]), BlockTableError, "sequence 0"),
        (payload([4, 2, 4]), BlockTableError, "block 4 stands twice in a row"),
        (payload([4, 0, 4]), BlockTableError, "block 4 stands twice in a row"),
        (payload(), RowError, "expected at least one sequence, got none"),
        (payload([1, 2, 3], request_id=""), RowError, "request_id: expected a non-empty string"),
        (
            payload([1, 2, 3], generation=-1),
            RowError,
            "allocation_generation: expected an int >= 0",
        ),
        (payload([1], seq_len=4), RowError, r"expected at most seq_len 4, got 8 \+ 4"),
        (payload(list(range(1, 18)), seq_len=68), RowError, "68 tokens exceed max_model_len 64"),
        (
            replace(payload([1, 2, 3]), sequences=payload([1, 2, 3]).sequences * 2),
            RowError,
            r"expected distinct rows, got \[0, 0\]",
        ),
    ],
)
def test_a_bad_payload_is_refused_and_changes_nothing(
    bad: DiffusionKVMetadata, error: type[LayoutError], message: str
) -> None:
    t = table()
    t.install(payload([9, 10, 11], request_id="b"))
    before = t.state()
    for call in (t.install, t.replace):
        with pytest.raises(error, match=message):
            call(bad)
    assert t.state() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_id": -1}, "sequence_id: expected an int >= 0, got -1"),
        ({"cached_prefix_len": 9}, "cached_prefix_len: expected at most prefix_len 8, got 9"),
        ({"first_key": 9}, "first_key: expected at most prefix_len 8, got 9"),
        ({"context_ids": ("text",)}, r"context_ids: the request has no contexts \['text'\]"),
        ({"target_len": "4"}, "target_len: expected an int >= 0, got '4'"),
    ],
)
def test_a_bad_sequence_is_refused(change: dict[str, Any], message: str) -> None:
    good = payload([1, 2, 3])
    bad = replace(good, sequences=(replace(good.sequences[0], **change),))
    with pytest.raises(RowError, match=message):
        table().install(bad)


def test_a_row_without_a_list_for_each_group_is_refused() -> None:
    with pytest.raises(BlockTableError, match="expected a list for each of 2 groups, got 1"):
        table(32, 4, 8).install(payload([1, 2, 3]))


def test_missing_rows_are_all_named() -> None:
    # field cases 17 and 18: vllm-omni#4752, vllm-omni#1791
    t = table()
    with pytest.raises(
        RowError, match=r"3 rows are declared, 1 supplied: sequence ids \[1, 2\] are missing"
    ):
        t.install(payload([1, 2, 3]), num_sequences=3)
    assert t.num_rows == 0
    t.install(payload([1, 2, 3]))
    with pytest.raises(UnknownRequestError, match=r"rows \('a', 1\), \('a', 2\): are not inst"):
        t.require_rows([at(sequence_id=i) for i in range(3)])
    t.require_rows([at()])
    with pytest.raises(UnknownRequestError, match=r"rows \('a', 2\): are not installed; .*'a', 0"):
        t.block_ids(at(sequence_id=2), 0)


def test_limits_of_rows() -> None:
    t = table(64, max_rows=3, max_rows_per_request=2)
    with pytest.raises(RowError, match="has 3 rows, max_rows_per_request is 2"):
        t.install(payload([1, 2, 3], [4, 5, 6], [7, 8, 9]))
    t.install(payload([1, 2, 3], [4, 5, 6]))
    before = t.state()
    with pytest.raises(RowError, match="request 'b': needs 2 rows, 1 of max_rows 3 are free"):
        t.install(payload([7, 8, 9], [10, 11, 12], request_id="b"))
    assert t.state() == before
    t.install(payload([7, 8, 9], request_id="b"))
    assert [t.row_index(("a", 0)), t.row_index(("a", 1)), t.row_index(("b", 0))] == [0, 1, 2]
    assert t.remove(["a"]) == 2
    t.install(payload([1, 2, 3], request_id="c"))
    assert t.row_index(("c", 0)) == 0
    with pytest.raises(UnknownRequestError):
        t.row_index(("a", 0))


def test_removal_by_request_and_by_generation() -> None:
    t = table(64)
    t.install(payload([1, 2, 3], generation=4))
    version = t.version
    assert t.remove([("a", 3)]) == 0  # a late removal of an earlier allocation
    assert t.remove(["x"]) == 0
    assert t.version == version
    assert t.remove([("a", 4), "x"]) == 1
    assert t.version > version
    with pytest.raises(UnknownRequestError):
        t.block_ids(at(), 0)
    assert t.install(payload([4, 5, 6], generation=1)) is True  # the name is free again


def test_rows_longer_than_installed_or_of_other_groups_are_refused() -> None:
    t = table()
    t.install(payload([1, 2, 3]))
    with pytest.raises(BlockTableError, match=r"seq_len: expected at most the 12 tokens .* got 13"):
        t.block_ids(at(seq_len=13), 0)
    for group in (1, -1):
        with pytest.raises(
            BlockTableError, match=rf"group: expected an index in \[0, 1\), got {group}"
        ):
            t.block_ids(at(), group)


def test_contexts_have_rows_of_their_own() -> None:
    m = manager(32, 4, 4, cross=(1,))
    t = table(32, 4, 4, cross=(1,))
    text = DiffusionKVContext("text", "cross", 6)
    metadata = admit(m, "a", [row("a", i, kv_contexts=[text]) for i in range(2)])
    t.install(metadata)
    assert t.num_rows == 3
    where = PagedAttentionRow("a", 12, 6, context_id="text", read_only=True)
    assert list(t.block_ids(where, 1)) == metadata.contexts[0].block_ids[1]
    assert list(t.block_ids(where, 0)) == []
    bad = replace(
        metadata,
        contexts=(*metadata.contexts, DiffusionKVContextMetadata("", "cross", 6, ([], [1, 2]))),
    )
    with pytest.raises(RowError, match="context_id: expected a non-empty string, got ''"):
        table(32, 4, 4, cross=(1,)).install(bad)


def test_payloads_of_vllm_omni_are_read_by_attribute() -> None:
    # the fields of vllm_omni.diffusion.diffusion_kv.metadata 0.30, which has no first_key
    context_type = make_dataclass("C", ["context_id", "cache_role", "num_tokens", "block_ids"])
    sequence_type = make_dataclass(
        "S",
        [
            "sequence_id",
            "prefix_len",
            "target_len",
            "seq_len",
            "block_ids",
            ("cached_prefix_len", int, 0),
            ("context_ids", tuple, ()),
            ("num_computed_tokens", int, 0),
        ],
    )
    metadata_type = make_dataclass(
        "M", ["request_id", "allocation_generation", "sequences", ("contexts", tuple, ())]
    )
    foreign = metadata_type(
        "a",
        1,
        (sequence_type(0, 8, 4, 12, ([3, 1, 2],), context_ids=("text",)),),
        (context_type("text", "cross", 5, ([4, 5],)),),
    )
    t = table()
    assert t.install(foreign) is True
    assert t.block_ids(at(), 0) == array("i", [3, 1, 2])
    ours = DiffusionKVMetadata(
        "a",
        1,
        (DiffusionKVSequenceMetadata(0, 8, 4, 12, ([3, 1, 2],), context_ids=("text",)),),
        (DiffusionKVContextMetadata("text", "cross", 5, ([4, 5],)),),
    )
    assert t.install(ours) is False


def test_null_ids_stand_only_where_no_query_sees() -> None:
    cfg = config(32)
    t = RowTable(cfg, max_model_len=64)
    t.install(payload([0, 0, 3]))
    resolved = resolve_layout(cfg)
    writer = PagedAttentionRow("a", 4, 12, kv_start_pos=8, first_key=8, sequence_id=0)
    plan = plan_step(resolved, [writer], t, visibility=Visibility(causal=False))
    assert list(plan.slots) == [12, 13, 14, 15]
    with pytest.raises(BlockTableError, match="entry 0 is the null block, and queries see keys"):
        plan_step(
            resolved,
            [replace(writer, first_key=0)],
            t,
            visibility=Visibility(causal=False),
        )


def test_kv_that_did_not_arrive_is_never_handed_out() -> None:
    # W7: vllm#52234
    t = table()
    t.install(payload([1, 2, 3]))
    t.install(payload([4, 5, 6], request_id="b"))
    version = t.version
    t.begin_transfer("a")
    assert t.version > version
    with pytest.raises(TransferError, match="is being received and is not readable yet"):
        t.block_ids(at(), 0)
    assert list(t.block_ids(at("b"), 0)) == [4, 5, 6]
    with pytest.raises(BlockTableError, match=r"blocks \[5\] were reported as not received, and"):
        t.fail_transfer("a", [2, 5])
    t.fail_transfer("a", [3, 2])
    for call in (lambda: t.block_ids(at(), 0), lambda: t.complete_transfer("a")):
        with pytest.raises(TransferError, match=r"blocks \[2, 3\] was not received") as caught:
            call()
        assert caught.value.block_ids == (2, 3)
    with pytest.raises(TransferError):
        t.begin_transfer("a")
    with pytest.raises(TransferError):
        t.replace(payload([7, 8, 9], generation=2))
    assert t.remove(["a"]) == 1
    t.install(payload([1, 2, 3], generation=2))
    t.begin_transfer("a")
    t.complete_transfer("a")
    assert list(t.block_ids(at(), 0)) == [1, 2, 3]
    with pytest.raises(UnknownRequestError, match="request 'x': is not installed"):
        t.begin_transfer("x")


def test_sleep_drops_the_rows_and_wake_up_makes_batches_stale() -> None:
    t = table()
    t.install(payload([1, 2, 3]))
    versions = [t.version]
    t.sleep()
    versions.append(t.version)
    for call in (lambda: t.block_ids(at(), 0), lambda: t.install(payload([1, 2, 3]))):
        with pytest.raises(AsleepError, match="the row table is asleep"):
            call()
    t.wake_up()
    versions.append(t.version)
    assert versions == sorted(set(versions))
    assert t.install(payload([1, 2, 3])) is True


def test_every_change_of_rows_changes_the_version() -> None:
    m, t = manager(64), table(64)
    seen = [t.version]

    def changed() -> None:
        seen.append(t.version)

    t.install(admit(m, "a", rows("a", 2)))
    changed()
    t.install(m.fork_request("a", "b"))
    changed()
    update = m.make_writable("b")
    assert update is not None
    t.replace(update.metadata)
    changed()
    t.replace(m.evict_before("a", 4))
    changed()
    t.remove(["a"])
    changed()
    t.sleep()
    changed()
    t.wake_up()
    changed()
    assert seen == sorted(set(seen))


@pytest.mark.parametrize(
    "kwargs", [{"max_model_len": 0}, {"max_rows": 0}, {"max_rows_per_request": -1}]
)
def test_bad_limits_are_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(kwargs))}: expected an int >= 1"):
        table(**kwargs)


_limits = st.one_of(st.integers(1, 9), st.integers(1, 2**31))
_ids = st.one_of(st.integers(0, 9), st.integers(0, 2**31), st.integers(0, 2**32 - 1))


@given(_limits, st.lists(_ids, max_size=8))
def test_the_range_of_all_ids_is_decided_at_once(limit: int, ids: list[int]) -> None:
    assert _all_below(limit, array("I", ids).tobytes()) == all(each < limit for each in ids)


@given(_limits, st.lists(st.integers(0, 2**31 - 1), max_size=8), st.integers(0, 8))
def test_the_largest_id_decides(limit: int, ids: list[int], at: int) -> None:
    below = [each % limit for each in ids]
    for edge in (limit - 1, limit):
        raw = array("I", [*below[:at], edge, *below[at:]]).tobytes()
        assert _all_below(limit, raw) == (edge < limit)


@pytest.mark.parametrize("ids", [[9, 3, 5], [5, 3, 9], [1, 2, 3]])
def test_ids_may_stand_in_any_order(ids: list[int]) -> None:
    t = table()
    t.install(payload(ids))
    found = t.block_ids(PagedAttentionRow("a", 1, 12, sequence_id=0), 0)
    assert found == array("i", ids)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=8), st.booleans())
def test_ascending_is_decided_rightly_for_all_at_once(ids: list[int], in_order: bool) -> None:
    if in_order:
        ids.sort()
    expected = all(a < b for a, b in pairwise(ids)) and max(ids, default=0) < 2**31
    assert _is_ascending(array("I", ids).tobytes()) == expected
