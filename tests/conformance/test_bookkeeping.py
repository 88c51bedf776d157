"""What the comparison with vLLM counts and demands; needs no vLLM itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings

from layout_core import LayoutError
from tests.conformance.cases import SpecCase, payload_of, spec_cases, without_later_fields
from tests.conformance.differences import WE_ANSWER, WE_FOLLOW, WE_REFUSE, undocumented
from tests.conformance.planted import PLANTED
from tests.conformance.runner import KINDS
from tests.conformance.tally import BOTH_REFUSE, EQUAL, Floor, Tally, first_difference
from tests.conformance.tally import floor_failures as failures_of

ROOT = Path(__file__).parents[2]
RECORDS = {v: ROOT / f"bench/results/conformance-{v}.json" for v in ("0.29.0", "0.32.0")}


def test_a_missing_vllm_is_a_failure() -> None:
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from tests.conformance.runner import main; sys.exit(main(['--cases', '1']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "conformance needs vLLM in this environment" in done.stderr


def test_a_kind_that_compared_too_little_fails() -> None:
    tally = Tally()
    tally.outcomes.update({EQUAL: 30, BOTH_REFUSE: 60})
    tally.labels["padded"] = 2
    floor = Floor(equal=0.4, refusals=0.5, labels=("padded", "split"), label_share=0.02)
    assert failures_of("strides", tally, floor, 100) == [
        "strides: 90 cases compared, expected at least 100",
        "strides: 30 cases equal, expected at least 40",
        "strides: 0 cases with split, expected at least 2",
    ]
    assert failures_of("strides", tally, Floor(0.3), 90) == []


def test_the_shares_of_the_kinds_make_up_the_whole() -> None:
    assert 1.0 <= sum(kind.share for kind in KINDS.values()) < 1.5
    assert {kind for kind, _ in PLANTED.values()} == {n for n, k in KINDS.items() if k.share}


def test_every_named_difference_is_in_the_document() -> None:
    assert undocumented() == []
    names = [*WE_REFUSE, *WE_ANSWER, *WE_FOLLOW]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("mine", "peer", "where"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, ".a[1]"),
        ([{"a": 1}], [{"b": 1}], "[0]"),
        ((1, 2), (1, 2, 3), ""),
        (1, 2, ""),
    ],
)
def test_the_message_points_at_the_first_difference(mine: object, peer: object, where: str) -> None:
    path, _, _ = first_difference(mine, peer)
    assert path == where


@settings(max_examples=200, deadline=None)
@given(spec_cases())
def test_cases_are_counted_by_arithmetic_of_their_own(case: SpecCase) -> None:
    if case.get("state_content_bytes") == 0:
        pytest.fail("a case without content compares nothing")
    try:
        spec = case.ours()
    except LayoutError:
        padded = case.get("page_size_padded")
        payload = payload_of(case.kind, dict(case.fields))
        assert payload == 0 or (padded is not None and padded < payload)
    else:
        assert spec.unpadded_page_size_bytes == payload_of(case.kind, dict(case.fields))  # type: ignore[attr-defined]
        older = without_later_fields(case).ours()
        assert (older.dcp_sharded, older.block_stride_alignment) == (None, None)


@pytest.mark.parametrize("version", RECORDS)
def test_the_recorded_run_compared_enough_and_agreed(version: str) -> None:
    record = json.loads(RECORDS[version].read_text(encoding="utf-8"))
    assert record["vllm"] == version
    assert record["cases"] >= 20_000
    assert record["disagreements"] == 0
    assert record["failures"] == []
    assert set(record["kinds"]) == set(KINDS)
    plain = {EQUAL, BOTH_REFUSE}
    named = {
        outcome.split(": ")[1]
        for kind in record["kinds"].values()
        for outcome in kind["outcomes"]
        if outcome not in plain
    }
    assert named <= WE_REFUSE | WE_ANSWER | WE_FOLLOW
