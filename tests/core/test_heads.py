"""Heads over ranks: field cases 15 and 26, and what must hold for every division."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layout_core.errors import SpecError
from layout_core.heads import pad_heads


def test_field_case_15_28_and_7_heads_over_2_ranks() -> None:
    plan = pad_heads(28, 7, 2)
    assert (plan.num_heads, plan.num_kv_heads) == (32, 8)
    assert (plan.heads_per_rank, plan.kv_heads_per_rank, plan.replicas) == (16, 4, 1)
    assert plan.owners == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert [plan.query_head(h) for h in range(26, 32)] == [26, 27, None, None, None, None]


def test_field_case_26_2_kv_heads_over_4_ranks() -> None:
    plan = pad_heads(8, 2, 4)
    assert plan.owners == ((0,), (0,), (1,), (1,))
    assert plan.num_kv_heads == 2
    assert plan.sources == ((0, 0), (2, 0)), "gathered to one rank, each head once"


def test_a_group_shared_by_replicas_is_padded_within() -> None:
    """6 query heads, 2 KV heads, 4 ranks: groups of 3 become 4, two query heads a rank."""
    plan = pad_heads(6, 2, 4)
    assert (plan.num_heads, plan.heads_per_rank, plan.replicas) == (8, 2, 2)
    assert [plan.query_head(h) for h in range(8)] == [0, 1, 2, None, 3, 4, 5, None]


@settings(max_examples=300)
@given(kv=st.integers(1, 24), group=st.integers(1, 9), ranks=st.integers(1, 16))
def test_every_rank_has_whole_groups_and_every_head_is_somewhere(
    kv: int, group: int, ranks: int
) -> None:
    plan = pad_heads(kv * group, kv, ranks)
    assert plan.num_heads == plan.heads_per_rank * ranks
    padded = plan.num_heads // plan.num_kv_heads
    assert sorted({h for own in plan.owners for h in own}) == list(range(plan.num_kv_heads))
    for rank, own in enumerate(plan.owners):
        assert len(own) == plan.kv_heads_per_rank
        local = plan.heads_per_rank // plan.kv_heads_per_rank
        for place in range(plan.heads_per_rank):
            # what an engine on this rank reads is the KV head of the model's query head
            head = rank * plan.heads_per_rank + place
            assert own[place // local] == head // padded
            real = plan.query_head(head)
            if real is not None:
                assert own[place // local] == real // group
    found = [plan.query_head(h) for h in range(plan.num_heads)]
    assert [h for h in found if h is not None] == list(range(kv * group))
    for head, (rank, index) in enumerate(plan.sources):
        assert plan.owners[rank][index] == head
    if kv % ranks == 0 or (ranks % kv == 0 and group % (ranks // kv) == 0):
        assert (plan.num_heads, plan.num_kv_heads) == (kv * group, kv), "nothing to pad"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1, 1), r"num_heads: expected an int >= 1, got 0"),
        ((4, 3, 1), r"num_heads: expected a multiple of the 3 KV heads, got 4"),
        ((4, 2, 0), r"ranks: expected an int >= 1, got 0"),
        ((4, True, 1), r"num_kv_heads: expected an int >= 1, got True"),
    ],
)
def test_refusals(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        pad_heads(*arguments)
    with pytest.raises(SpecError, match=r"head: expected an int in \[0, 32\), got 32"):
        pad_heads(28, 7, 2).query_head(32)
