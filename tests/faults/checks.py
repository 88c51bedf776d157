"""What is run against a planted fault: small selections of the suites, as functions.

Each raises :class:`tests.tolerances.Mismatch` where numbers or bytes are wrong, and nothing
else may count: a fault that merely crashes has not been caught by a comparison.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.cases import CAUSAL, PADDED, PLAIN, STEP_NAMES, Step, plan_of, room_for, row, steps
from tests.engines.suite import check_step
from tests.engines.suite_dense import FEATURES, expected, run_case
from tests.equivalence.memory import memory_of
from tests.equivalence.test_bytes import write_everywhere
from tests.tolerances import assert_close, assert_same_bytes

Check = Callable[[Any, str], None]
"""Takes an engine and the name of its kernel."""

_STEPS = {s.name: s for s in steps(4)}

PARTLY_EVICTED = Step(
    "evicted tokens inside the first block", (row("a", 3, 11, first_key=3), row("b", 2, 6)), CAUSAL
)
"""No whole block is evicted, so no null block stands where a wrong query would look."""


def step_check(*names: str, softcap: float = 0.0) -> Check:
    """Steps of the shared suite, by name, on dense pages in float32."""
    chosen = [_STEPS[name] for name in names]

    def check(engine: Any, kernel: str) -> None:
        for step in chosen:
            _run(engine, kernel, step, softcap=softcap)

    return check


def _run(engine: Any, kernel: str, step: Step, *, softcap: float = 0.0) -> None:
    check_step(
        engine, PLAIN, "LBNHC", step, dtype="float32", kernel=kernel, num_heads=4, seed=3,
        room=room_for(4), softcap=softcap,
    )  # fmt: skip


def check_evicted(engine: Any, kernel: str) -> None:
    _run(engine, kernel, PARTLY_EVICTED)


def check_padded_pages(engine: Any, kernel: str) -> None:
    check_step(
        engine, PADDED, "BLNHC", _STEPS[STEP_NAMES[2]], dtype="float16", kernel=kernel,
        num_heads=4, seed=3, room=room_for(4),
    )  # fmt: skip


def check_bits(engine: Any, kernel: str) -> None:
    """Random bits through ``write``, NaN payloads and padded slots among them."""
    for dtype in ("float32", "bfloat16"):
        pools, memory = write_everywhere([engine], PLAIN, "LBHNC", dtype, seed=5)
        assert_same_bytes(engine.pool_bytes(pools[0]), memory.data.tobytes(), f"bits in {dtype}")


def check_copy(engine: Any, kernel: str) -> None:
    """Blocks copied in every layer of the group."""
    plan = plan_of(PLAIN, "LBNHC", "float32")
    start = np.random.default_rng(2).integers(0, 256, plan.size_bytes, dtype=np.uint8)
    memory = memory_of(PLAIN, "LBNHC", 4)
    memory.data[:] = start
    for source, target in ((3, 8), (5, 12)):
        for layer in range(len(plan.layers)):
            memory.copy_block(layer, source, target)
    pool = engine.copy_blocks(engine.load_bytes(plan, start.tobytes()), [(3, 8), (5, 12)])
    assert_same_bytes(engine.pool_bytes(pool), memory.data.tobytes(), "copied blocks")


def dense_check(*features: str) -> Check:
    """Features of the dense suite, by name, in float32."""

    def check(engine: Any, kernel: str) -> None:
        for feature in features:
            case = FEATURES[feature]("float32")
            assert_close(run_case(engine, case), expected(case), "attention", "float32", feature)

    return check


check_causal = step_check("first step, lengths around a block")
check_cfg = step_check("two CFG rows of unlike prefixes, the target one full span")
check_full = step_check("target in the middle, trailing tokens from an earlier step")
check_spans = step_check("spans that differ, one row without any, one with an empty list")
check_window = step_check("causal window", "window on both sides, unlike")
check_chunk = step_check("chunks that are no multiple of a block")
check_contexts = step_check("contexts read by several rows, more queries than keys")
check_mixed_reads = step_check(
    "bottom-right causal reads that start before position 0, beside a writer"
)
check_softcap = step_check(
    "two CFG rows of unlike prefixes, the target one full span", softcap=0.75
)
check_dense_documents = dense_check("documents")
check_dense_padding = dense_check("padding by packed_padding", "valid keys", "one video")
check_dense_shard = dense_check("ranges of a shard")
check_dense_spans = dense_check("spans of each sample")
check_dense_joint = dense_check("joint mask, rear")
check_dense_mask = dense_check("mask of pairs")
