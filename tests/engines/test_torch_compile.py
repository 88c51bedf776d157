"""``torch.compile`` of a model around the engine: one graph, the same numbers, the same bytes."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from backends.torch_cuda import ops
from layout_core.errors import PoolError, StaleBatchError, TensorError
from layout_core.rows import Bucket
from layout_core.visibility import Visibility
from tests.engines.test_torch_paged import ENGINE, Tables, plan, poisoned, random, row
from tests.tolerances import assert_same_bytes

HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 32, 24


class Block(torch.nn.Module):
    """A little transformer: two layers that attend over the pool, with what compilers fuse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(SIZE, (HEADS + 2 * KV_HEADS) * SIZE)
        self.out = torch.nn.Linear(HEADS * SIZE, SIZE)

    def forward(self, x: torch.Tensor, pool: Any, batch: Any) -> torch.Tensor:
        for layer in range(2):
            q, k, v = (
                self.qkv(x)
                .view(-1, HEADS + 2 * KV_HEADS, SIZE)
                .split([HEADS, KV_HEADS, KV_HEADS], dim=1)
            )
            attended, pool = ENGINE.forward_paged(pool, layer, q, k, v, batch)
            x = torch.tanh(x + self.out(attended.flatten(1)))
        read, pool = ENGINE.forward_paged(pool, 1, q, None, None, batch)
        return x + read.mean(dim=1)


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def prepared(tables: Tables, rows: Any) -> Any:
    return ENGINE.prepare(
        RESOLVED,
        rows,
        tables,
        visibility=Visibility(causal=True),
        num_heads=HEADS,
        bucket=Bucket(tokens=TOKENS, rows=2, blocks=5),
    )


RESOLVED = plan(head_size=SIZE, kv_heads=KV_HEADS)
BLOCKS = {("r", 0): [7, 3, 12, 5], ("r", 1): [8, 10]}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@torch.no_grad()
def test_a_model_compiles_to_one_graph_that_updates_do_not_break(backend: str) -> None:
    """Rows, tables and versions change under the program; it is compiled once."""
    model = Block()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    tables = Tables(BLOCKS)
    batch = prepared(tables, [row(17, 17), row(5, 9, 4, sequence_id=1)])
    pools = [poisoned(RESOLVED), poisoned(RESOLVED)]
    for pool in pools:  # what the second row reads and does not write
        fill = torch.arange(64, 68)
        for layer in range(2):
            ENGINE.write(pool, layer, torch.ones(4, 2, SIZE), torch.ones(4, 2, SIZE), fill)
    rng = np.random.default_rng(0)
    for rows in (
        [row(17, 17), row(5, 9, 4, sequence_id=1)],
        [row(8, 25, 17), row(3, 9, 6, sequence_id=1)],
        [row(24, 24)],
    ):
        tables.change()
        ENGINE.update(batch, rows, tables)
        x = random(rng, TOKENS, SIZE)
        expected = model(x, pools[0], batch)
        got = compiled(x, pools[1], batch)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        if backend != "inductor":  # which orders sums in its own way
            assert_same_bytes(ENGINE.pool_bytes(pools[1]), ENGINE.pool_bytes(pools[0]))
    assert counter.frame_count == 1
    operators = {str(node.target) for node in counter.graphs[0].graph.nodes}
    assert {o for o in operators if "pagestride" in o} == {
        "pagestride.write_kv_.default",
        "pagestride.paged_attention.default",
    }


@torch.no_grad()
def test_another_batch_compiles_at_most_once_more() -> None:
    """Its number becomes a symbol; the third batch finds the program of the second."""
    counter = CompileCounterWithBackend("eager")
    model = Block()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    pool = ENGINE.allocate(RESOLVED)
    x = torch.ones(TOKENS, SIZE)
    for _ in range(4):
        batch = prepared(Tables(BLOCKS), [row(17, 17)])
        assert torch.equal(compiled(x, pool, batch), model(x, pool, batch))
    assert counter.frame_count <= 2


@torch.no_grad()
def test_what_contradicts_raises_inside_a_compiled_model_too() -> None:
    compiled = torch.compile(Block(), backend="eager", fullgraph=True)
    tables = Tables(BLOCKS)
    batch = prepared(tables, [row(17, 17)])
    pool = ENGINE.allocate(RESOLVED)
    x = torch.ones(TOKENS, SIZE)
    tables.change()
    with pytest.raises(StaleBatchError, match="version 0 of the block tables, which are now at 1"):
        compiled(x, pool, batch)
    assert ENGINE.pool_bytes(pool) == bytes(RESOLVED.size_bytes)
    ENGINE.update(batch, [row(17, 17)], tables)
    with pytest.raises(TensorError, match=r"key: .* shape \[24, 2, 32\], got \[23, 2, 32\]"):
        compiled(x[1:], pool, batch)


def test_operators_know_what_they_are_given() -> None:
    """torch's own checks of schema, fake kernels and tracing; and a batch that is gone."""
    pool = ENGINE.allocate(RESOLVED)
    batch = prepared(Tables(BLOCKS), [row(17, 17)])
    rng = np.random.default_rng(1)
    query, key, value = (random(rng, TOKENS, h, SIZE) for h in (HEADS, KV_HEADS, KV_HEADS))
    number = batch.number
    write = (pool.storage, pool.places, key, value, number, 0)
    read = (pool.storage, pool.places, query, number, 0, SIZE, None, 0.0, 1.0, 1.0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.write_kv_, write, test_utils=checks)
    torch.library.opcheck(ops.paged_attention, read, test_utils=checks)
    with pytest.raises(PoolError, match="prepared for a pool of"):
        ops.paged_attention(pool.storage[16:], *read[1:])
    del batch
    gc.collect()
    with pytest.raises(StaleBatchError, match=f"batch: number {number} is gone"):
        ops.paged_attention(*read)
