"""What a CUDA graph does, played on the CPU: launches are recorded once and repeated.

A capture keeps addresses and plain numbers, and nothing else; so does the recording here. The
replays run in Triton's interpreter, after updates of the batch and new inputs written where the
old ones lay. Run by ``python -m tests.engines.interpreted``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backends.torch_cuda.kernels import triton as kernels
from layout_core.rows import Bucket
from layout_core.visibility import Visibility
from tests.engines.interpreted import interpreted_engine
from tests.engines.test_torch_paged import Tables, plan, random, row
from tests.oracle import dense_attention, visible
from tests.tolerances import assert_close

TOKENS, HEADS, KV_HEADS, SIZE = 24, 4, 2, 32


class Graph:
    """Launches with the very tensors they were given."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, dict[str, Any], dict[str, float]]] = []

    def record(self, patch: pytest.MonkeyPatch) -> None:
        original = kernels.start

        def start(launch: Any, buffers: Any, scalars: Any = {}) -> None:  # noqa: B006
            self.launches.append((launch, dict(buffers), dict(scalars)))
            original(launch, buffers, scalars)

        patch.setattr(kernels, "start", start)

    def replay(self) -> None:
        for launch, buffers, scalars in self.launches:
            kernels.start(launch, buffers, scalars)


class Case:
    """A pool, a bucket, and inputs at addresses that stay."""

    def __init__(self, layout: str = "BLHNC") -> None:
        self.engine = interpreted_engine()
        self.resolved = plan(layout, head_size=SIZE, kv_heads=KV_HEADS)
        self.pool = self.engine.allocate(self.resolved)
        self.tables = Tables({("r", 0): [7, 3, 12, 5], ("r", 1): [8, 10]})
        self.query = torch.zeros(TOKENS, HEADS, SIZE)
        self.key = torch.zeros(TOKENS, KV_HEADS, SIZE)
        self.value = torch.zeros(TOKENS, KV_HEADS, SIZE)
        self.batch = self.engine.prepare(
            self.resolved,
            [],
            self.tables,
            visibility=Visibility(causal=True),
            num_heads=HEADS,
            kernel="triton",
            bucket=Bucket(tokens=TOKENS, rows=2, blocks=4),
        )

    def capture(self) -> tuple[Graph, torch.Tensor]:
        graph = Graph()
        with pytest.MonkeyPatch.context() as patch:
            graph.record(patch)
            out, _ = self.engine.forward_paged(
                self.pool, 1, self.query, self.key, self.value, self.batch
            )
        return graph, out

    def fill(self, rng: np.random.Generator, tokens: int) -> None:
        for tensor in (self.query, self.key, self.value):
            tensor.fill_(torch.nan)
            tensor[:tokens] = random(rng, tokens, *tensor.shape[1:])


def expected(case: Case, start: int, stop: int) -> np.ndarray:
    out, _ = dense_attention(
        case.query[start:stop].numpy(),
        case.key[start:stop].numpy(),
        case.value[start:stop].numpy(),
        visible(stop - start, stop - start, causal=True),
    )
    return out


@pytest.mark.parametrize("splits", [1, 3])
def test_a_captured_step_follows_updates(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured on a warm-up batch without rows; replayed for rows that came later."""
    monkeypatch.setattr(kernels, "choose_splits", lambda *_, **__: splits)
    case = Case()
    rng = np.random.default_rng(0)
    before = bytes(case.resolved.size_bytes)
    case.fill(rng, 0)  # all NaN
    graph, out = case.capture()
    assert case.engine.pool_bytes(case.pool) == before, "a capture writes to padded slots alone"
    assert not out.any()
    assert len(graph.launches) == (2 if splits == 1 else 3)  # the write, attention, a merge
    for rows in (
        [row(17, 17), row(5, 5, sequence_id=1)],
        [row(9, 9, sequence_id=1)],
        [row(24, 24)],
    ):
        case.tables.change()
        case.engine.update(case.batch, rows, case.tables)
        tokens = sum(r.query_len for r in rows)
        case.fill(rng, tokens)
        out.fill_(torch.nan)
        graph.replay()
        first = 0
        for r in rows:
            last = first + r.query_len
            got = out[first:last].numpy()
            assert_close(got, expected(case, first, last), "attention", "float32", f"{r}")
            first = last
        assert not out[tokens:].any()


def test_field_case_30_a_pool_cleared_after_the_capture() -> None:
    """Same address, contents zero, replay valid."""
    case = Case()
    rng = np.random.default_rng(1)
    graph, out = case.capture()
    rows = [row(17, 17), row(5, 5, sequence_id=1)]
    case.engine.update(case.batch, rows, case.tables)
    address = case.pool.storage.data_ptr()
    case.fill(rng, 22)
    graph.replay()
    assert any(case.engine.pool_bytes(case.pool))
    assert case.engine.clear(case.pool) is case.pool
    assert case.pool.storage.data_ptr() == address
    assert case.engine.pool_bytes(case.pool) == bytes(case.resolved.size_bytes)
    case.fill(rng, 22)
    graph.replay()
    assert_close(out[:17].numpy(), expected(case, 0, 17), "attention", "float32")
    # a step that only reads what was cleared: every key is zero, and so is every value
    read = case.engine.prepare(
        case.resolved, [row(3, 17, 14, read_only=True)], case.tables,
        visibility=Visibility(causal=False), num_heads=HEADS, kernel="triton",
    )  # fmt: skip
    case.engine.clear(case.pool)
    zeros, _ = case.engine.forward_paged(case.pool, 1, case.query[:3], None, None, read)
    assert not zeros.any()


def test_slots_past_the_pool_are_skipped_by_the_public_write() -> None:
    """On a GPU the host cannot look; here the check of the CPU is taken away."""
    case = Case()
    layer = case.pool.layers[0]
    limit = layer.view.shape[0] * layer.view.block_size
    ones = torch.ones(5, KV_HEADS, SIZE)
    slots = torch.tensor([limit, -1, 9, -7, 1 << 40])
    case.engine.toolkit.moves.write(layer, ones, ones, slots)
    assert int((layer.content.view(torch.float32) == 1).sum()) == KV_HEADS * 2 * SIZE
    assert int((case.pool.storage.view(torch.float32) == 1).sum()) == KV_HEADS * 2 * SIZE


@pytest.mark.parametrize("dtype", ["float64", "uint8"])
def test_every_dtype_of_a_pool_can_be_moved(dtype: str) -> None:
    """Moves look at no value: float64, which no attention kernel takes, is moved as words."""
    engine = interpreted_engine()
    resolved = plan("BHLNC", dtype, head_size=16)
    plain = resolved.size_bytes
    rng = np.random.default_rng(2)
    data = rng.integers(0, 256, plain, np.uint8).tobytes()
    raw = torch.from_numpy(rng.integers(0, 256, (4, 2, 16 * resolved.layers[0].dtype.itemsize),
                                        np.uint8))  # fmt: skip
    key = raw.view(getattr(torch, dtype))
    slots = torch.tensor([9, -1, 40, 33])
    from backends.torch_cuda import create_engine

    pools = []
    for each in (create_engine("cpu"), engine):
        pool = each.load_bytes(resolved, data)
        each.write(pool, 1, key, key, slots)
        each.copy_blocks(pool, [(4, 11), (1, 2)])
        pools.append(each.pool_bytes(pool))
    assert pools[0] == pools[1]
