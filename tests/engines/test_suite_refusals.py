"""What both engines refuse, in the same words, and that a refused call leaves no trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from layout_core.errors import (
    BlockTableError,
    LayoutError,
    PoolError,
    RowError,
    StaleBatchError,
    TensorError,
    UnsupportedError,
    VisibilityError,
)
from layout_core.visibility import Visibility
from tests.cases import CAUSAL, GROUPS, PLAIN, Array, Tables, numbers, plan_of, row
from tests.engines.suite import ENGINE_KERNELS
from tests.tolerances import assert_same_bits, assert_same_bytes

LoadEngine = Callable[[str], Any]

engines = pytest.mark.parametrize(("engine", "kernel"), ENGINE_KERNELS)


@dataclass
class Bench:
    """An engine with a pool of random bytes, a row and a batch that work."""

    engine: Any
    kernel: str
    shape: Any = GROUPS

    def __post_init__(self) -> None:
        self.plan = plan_of(self.shape, "LBNHC", "float32")
        rng = np.random.default_rng(0)
        self.data = rng.standard_normal(self.plan.size_bytes // 4).astype(np.float32).tobytes()
        self.pool = self.engine.load_bytes(self.plan, self.data)
        self.rows = [row("a", 3, 7), row("b", 2, 5, branch=1)]
        self.tables = Tables()
        for group, ids in enumerate(([[3, 9], [12, 2]], [[5, 6], [8, 20]])):
            for r, own in zip(self.rows, ids):
                self.tables.put(r, group, own)
        self.batch = self.prepare()

    def prepare(self, rows: Sequence[Any] | None = None, **changes: Any) -> Any:
        arguments = {"visibility": CAUSAL, "num_heads": 2, "kernel": self.kernel} | changes
        return self.engine.prepare(
            arguments.pop("resolved", self.plan),
            self.rows if rows is None else rows,
            arguments.pop("tables", self.tables),
            **arguments,
        )

    def array(self, *shape: int, dtype: str = "float32") -> Any:
        return self.engine.from_numpy(numbers(np.random.default_rng(1), shape, dtype))

    def slots(self, *slots: int) -> Any:
        return np.array(slots, np.int32)

    def assert_untouched(self) -> None:
        """The pool holds what it held, and can still be used."""
        assert_same_bytes(self.engine.pool_bytes(self.pool), self.data, "after a refused call")
        q = self.array(5, 2, 32)
        output, _ = self.engine.forward_paged(self.pool, 0, q, None, None, self.prepare())
        assert np.isfinite(self.engine.to_numpy(output)).all()


@pytest.fixture
def bench(load_engine: LoadEngine, engine: str, kernel: str) -> Bench:
    return Bench(load_engine(engine), kernel)


def _write(b: Bench, **changes: Any) -> Any:
    arguments = {
        "layer": 0,
        "key": b.array(2, 2, 32),
        "value": b.array(2, 2, 32),
        "slots": b.engine.from_numpy(b.slots(12, 13)),
    } | changes
    return b.engine.write(b.pool, *arguments.values())


WRITES: list[tuple[str, Callable[[Bench], dict[str, Any]], type[LayoutError], str]] = [
    (
        "dtype",
        lambda b: {"key": b.array(2, 2, 32, dtype="float16")},
        TensorError,
        r"key: layer 'group0.layer0' expects dtype float32, got float16",
    ),
    (
        "value's dtype",
        lambda b: {"value": b.array(2, 2, 32, dtype="bfloat16")},
        TensorError,
        r"value: layer 'group0.layer0' expects dtype float32, got bfloat16",
    ),
    (
        "heads",
        lambda b: {"key": b.array(2, 3, 32)},
        TensorError,
        r"key: .* expects shape \[2, 2, 32\], got \[2, 3, 32\]",
    ),
    (
        "head size",
        lambda b: {"value": b.array(2, 2, 16)},
        TensorError,
        r"value: .* expects shape \[2, 2, 32\], got \[2, 2, 16\]",
    ),
    ("tokens", lambda b: {"key": b.array(3, 2, 32)}, TensorError, r"key: .* got \[3, 2, 32\]"),
    ("layer", lambda b: {"layer": 4}, LayoutError, r"layer: expected an index in \[0, 4\), got 4"),
    ("negative layer", lambda b: {"layer": -1}, LayoutError, r"\[0, 4\), got -1"),
    ("name", lambda b: {"layer": "x"}, LayoutError, r"layer: 'x' is not in this plan"),
    (
        "slots of floats",
        lambda b: {"slots": b.array(2)},
        TensorError,
        r"slots: layer 'group0.layer0' expects int",
    ),
]


@engines
@pytest.mark.parametrize(("what", "changes", "error", "message"), WRITES, ids=lambda v: str(v)[:20])
def test_write_refuses(
    bench: Bench,
    what: str,
    changes: Callable[[Bench], dict[str, Any]],
    error: type[LayoutError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        _write(bench, **changes(bench))
    bench.assert_untouched()


PREPARES: list[tuple[str, Callable[[Bench], dict[str, Any]], type[LayoutError], str]] = [
    ("heads", lambda b: {"num_heads": 3}, TensorError, "multiple of the 2 KV heads of layer"),
    ("kernel", lambda b: {"kernel": "nope"}, UnsupportedError, "kernel: .*expect.*, got 'nope'"),
    ("group", lambda b: {"group": 2}, LayoutError, r"group: expected an index in \[0, 2\), got 2"),
    (
        "two writers",
        lambda b: {"rows": [b.rows[0], b.rows[0]]},
        RowError,
        "identity of a writing row must be unique",
    ),
    (
        "short table",
        lambda b: {"rows": [row("a", 1, 9)]},
        BlockTableError,
        "position 8 is past the row's 2 blocks of 4 tokens",
    ),
    (
        "spans and a window",
        lambda b: {
            "visibility": Visibility(causal=True, window_left=3),
            "spans": [[(0, 2)], None],
        },
        VisibilityError,
        "spans of request 'a': full spans cannot be combined",
    ),
    (
        "spans for one row",
        lambda b: {"spans": [[(0, 2)]]},
        VisibilityError,
        "one entry for each of 2 rows, got 1",
    ),
]


@engines
@pytest.mark.parametrize(
    ("what", "changes", "error", "message"), PREPARES, ids=lambda v: str(v)[:20]
)
def test_prepare_refuses(
    bench: Bench,
    what: str,
    changes: Callable[[Bench], dict[str, Any]],
    error: type[LayoutError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        bench.prepare(**changes(bench))
    bench.assert_untouched()


@engines
@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, 40], r"block id 40 is outside \[0, 40\)"),
        ([3, -1], r"block id -1 is outside \[0, 40\)"),
        ([0, 9], r"entry 0 is the null block, and queries see keys \[0, 4\)"),
        ([9, 9], "block 9 at entry 1 is written twice"),
    ],
)
def test_prepare_refuses_a_table(bench: Bench, ids: list[int], message: str) -> None:
    tables = Tables()
    r = row("a", 4, 7)
    tables.put(r, 0, ids)
    with pytest.raises(BlockTableError, match=message):
        bench.prepare([r], tables=tables)
    bench.assert_untouched()


FORWARDS: list[tuple[str, Callable[[Bench], dict[str, Any]], type[LayoutError], str]] = [
    ("query tokens", lambda b: {"query": b.array(4, 2, 32)}, TensorError, r"got \[4, 2, 32\]"),
    ("query heads", lambda b: {"query": b.array(5, 4, 32)}, TensorError, r"got \[5, 4, 32\]"),
    ("key dtype", lambda b: {"key": b.array(5, 2, 32, dtype="float16")}, TensorError, "key: "),
    ("key alone", lambda b: {"value": None}, TensorError, "key"),
    ("other group", lambda b: {"layer": 2}, PoolError, "it belongs to group 1, the batch was"),
    (
        "scale",
        lambda b: {"softmax_scale": float("nan")},
        TensorError,
        "softmax_scale: expected a finite number",
    ),
    ("softcap", lambda b: {"softcap": -1.0}, TensorError, "softcap: expected 0"),
    ("k_scale", lambda b: {"k_scale": 0.0}, TensorError, "k_scale: expected a finite number > 0"),
]


def _forward(b: Bench, **changes: Any) -> Any:
    arguments = {
        "layer": 0,
        "query": b.array(5, 2, 32),
        "key": b.array(5, 2, 32),
        "value": b.array(5, 2, 32),
    } | {k: v for k, v in changes.items() if k in ("layer", "query", "key", "value")}
    scalars = {k: v for k, v in changes.items() if k not in arguments and k != "batch"}
    batch = changes.get("batch", b.batch)
    return b.engine.forward_paged(b.pool, *arguments.values(), batch, **scalars)


@engines
@pytest.mark.parametrize(
    ("what", "changes", "error", "message"), FORWARDS, ids=lambda v: str(v)[:20]
)
def test_forward_paged_refuses(
    bench: Bench,
    what: str,
    changes: Callable[[Bench], dict[str, Any]],
    error: type[LayoutError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        _forward(bench, **changes(bench))
    bench.assert_untouched()


@engines
def test_a_stale_batch_is_refused_and_update_mends_it(bench: Bench) -> None:
    bench.tables.put(bench.rows[0], 0, [30, 31])
    with pytest.raises(StaleBatchError, match=r"prepared under version \d+ .* now at \d+"):
        _forward(bench)
    bench.assert_untouched()
    updated = bench.engine.update(bench.batch, bench.rows, bench.tables)
    output, pool = _forward(bench, batch=updated)
    wanted_pool = bench.engine.load_bytes(bench.plan, bench.data)
    fresh = bench.engine.forward_paged(
        wanted_pool, 0, *(bench.array(5, 2, 32) for _ in range(3)), bench.prepare()
    )
    got, want = (np.asarray(bench.engine.to_numpy(a)) for a in (output, fresh[0]))
    assert_same_bits(got, want, "an updated batch against a fresh one")
    assert_same_bytes(
        bench.engine.pool_bytes(pool), bench.engine.pool_bytes(fresh[1]), "their pools"
    )


@engines
def test_a_batch_of_another_plan_is_refused(bench: Bench) -> None:
    other = plan_of(PLAIN, "LBNHC", "float32")
    with pytest.raises(PoolError, match="prepared for another plan than the pool's"):
        _forward(bench, batch=bench.prepare(resolved=other))
    bench.assert_untouched()


COPIES: list[tuple[list[tuple[int, int]], int, type[LayoutError], str]] = [
    ([(1, 2), (3, 2)], 0, BlockTableError, r"pairs\[1\]: destination 2 is given twice"),
    ([(1, 2), (2, 3)], 0, BlockTableError, "destination 2 is also a source"),
    ([(1, 1)], 0, BlockTableError, "destination 1 is also a source"),
    ([(1, 0)], 0, BlockTableError, "destination 0 is the null block"),
    ([(1, 40)], 0, BlockTableError, r"destination 40 of group 0 is outside \[0, 40\)"),
    ([(-1, 2)], 0, BlockTableError, r"source -1 of group 0 is outside \[0, 40\)"),
    ([(1, 2)], 5, LayoutError, r"group: expected an index in \[0, 2\), got 5"),
]


@engines
@pytest.mark.parametrize(("pairs", "group", "error", "message"), COPIES)
def test_copy_blocks_refuses(
    bench: Bench,
    pairs: list[tuple[int, int]],
    group: int,
    error: type[LayoutError],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        bench.engine.copy_blocks(bench.pool, pairs, group=group)
    bench.assert_untouched()


@engines
def test_strided_inputs_are_taken_as_they_are(bench: Bench) -> None:
    """A view with other strides gives the bytes of its values, as a dense one does."""
    whole: Array = numbers(np.random.default_rng(3), (32, 2, 5), "float32")
    view = bench.engine.from_numpy(whole).swapaxes(0, 2)  # [5, 2, 32], not dense in torch
    dense = bench.engine.from_numpy(np.ascontiguousarray(whole.transpose(2, 1, 0)))
    pools = []
    for array in (view, dense):
        pool = bench.engine.load_bytes(bench.plan, bench.data)
        _, pool = bench.engine.forward_paged(
            pool, 1, bench.array(5, 2, 32), array, array, bench.batch
        )
        pools.append(bench.engine.pool_bytes(pool))
    assert_same_bytes(pools[0], pools[1], "strided against dense K and V")
    assert pools[0] != bench.data
