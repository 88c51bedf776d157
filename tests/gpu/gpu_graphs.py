"""CUDA graphs and ``torch.compile`` on a GPU: a denoise loop, captured once and replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from backends.torch_cuda import create_engine
from layout_core.errors import DeviceError
from layout_core.rows import Bucket
from layout_core.visibility import Visibility
from tests.cases import LAYOUTS
from tests.engines.test_torch_paged import Tables, plan, row

TOKENS, HEADS, KV_HEADS, SIZE, LAYERS, STEPS = 96, 8, 4, 64, 3, 4
ROWS = (
    [row(60, 60), row(30, 30, sequence_id=1)],
    [row(20, 60, 40), row(10, 30, 20, sequence_id=1)],
    [row(1, 64, 63)],
)


class Loop:
    """Steps of a little model, whose outputs feed the next step, over one pool."""

    def __init__(self, layout: str) -> None:
        torch.manual_seed(0)
        self.engine = create_engine("cuda")
        self.resolved = plan(
            layout, "bfloat16", num_blocks=20, head_size=SIZE, kv_heads=KV_HEADS, layers=LAYERS
        )
        self.pool = self.engine.allocate(self.resolved)
        self.tables = Tables({("r", 0): [7, 3, 12, 5, 9, 1, 19, 4], ("r", 1): [8, 10, 11, 14]})
        self.mix = torch.randn(SIZE, SIZE, device="cuda").bfloat16() / SIZE**0.5
        self.x = torch.zeros(TOKENS, HEADS, SIZE, device="cuda", dtype=torch.bfloat16)
        self.batch = self.engine.prepare(
            self.resolved, [], self.tables, visibility=Visibility(causal=False), num_heads=HEADS,
            bucket=Bucket(tokens=TOKENS, rows=2, blocks=8),
        )  # fmt: skip
        assert (self.batch.kernel, self.batch.capturable) == ("triton", True)

    def run(self) -> torch.Tensor:
        x = self.x
        for _ in range(STEPS):
            for layer in range(LAYERS):
                q = x @ self.mix
                out, _ = self.engine.forward_paged(
                    self.pool, layer, q, q[:, ::2], x[:, ::2], self.batch
                )
                x = torch.tanh(x + out)
        return x

    def update(self, rows: Any, seed: int) -> None:
        self.tables.change()
        self.engine.update(self.batch, rows, self.tables)
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.x.normal_(generator=generator)

    def captured(self) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()  # compiles the kernels
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.run()
        return graph, out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_denoise_loop_replays_with_changed_rows_and_inputs(layout: str) -> None:
    """Bit for bit what the same calls give without a graph; nothing is allocated, nothing waits."""
    loop = Loop(layout)
    graph, out = loop.captured()
    assert loop.engine.pool_bytes(loop.pool) == bytes(loop.resolved.size_bytes)
    for seed, rows in enumerate(ROWS):
        loop.update(rows, seed)
        before = loop.engine.pool_bytes(loop.pool)
        expected = loop.run().clone()
        written = loop.engine.pool_bytes(loop.pool)
        loop.pool.storage.copy_(torch.frombuffer(bytearray(before), dtype=torch.uint8))
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.memory_allocated() == held
        assert torch.equal(out, expected)
        assert loop.engine.pool_bytes(loop.pool) == written


def test_field_case_30_clear_after_the_capture() -> None:
    loop = Loop("LBNHC")
    graph, out = loop.captured()
    loop.update(ROWS[0], 0)
    graph.replay()
    first = out.clone()
    address = loop.pool.storage.data_ptr()
    assert loop.engine.clear(loop.pool).storage.data_ptr() == address
    assert loop.engine.pool_bytes(loop.pool) == bytes(loop.resolved.size_bytes)
    loop.update(ROWS[0], 0)
    graph.replay()
    assert torch.equal(out, first)


def test_updates_do_not_wait_and_are_refused_inside_a_capture() -> None:
    loop = Loop("LBNHC")
    loop.captured()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop.update(ROWS[1], 1)
        loop.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    loop.tables.change()
    with torch.cuda.graph(graph):
        with pytest.raises(DeviceError, match="update: a CUDA graph is being captured"):
            loop.engine.update(loop.batch, ROWS[0], loop.tables)
        loop.x.add_(0)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_a_compiled_model_gives_the_same(mode: str) -> None:
    loop = Loop("BLHNC")
    loop.update(ROWS[0], 0)
    expected = loop.run().clone()
    loop.engine.clear(loop.pool)

    def model(x: torch.Tensor) -> torch.Tensor:
        for layer in range(LAYERS):
            q = x @ loop.mix
            out, _ = loop.engine.forward_paged(
                loop.pool, layer, q, q[:, ::2], x[:, ::2], loop.batch
            )
            x = torch.tanh(x + out)
        return x

    compiled = torch.compile(model, fullgraph=True, mode=mode)
    for _ in range(3):  # the third replays what "reduce-overhead" captured
        x = loop.x
        for _ in range(STEPS):
            x = compiled(x).clone()
    torch.testing.assert_close(x, expected, rtol=3e-2, atol=3e-2)
