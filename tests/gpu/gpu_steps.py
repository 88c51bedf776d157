"""Steps of real sizes on a GPU: kernels against the oracle, poison, large pools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from backends.torch_cuda import create_engine
from backends.torch_cuda.paged import paged_attention
from layout_core.dtypes import DType
from layout_core.resolve import resolve_layout, single_group_config
from layout_core.rows import PagedAttentionRow
from layout_core.specs import FullAttentionSpec
from layout_core.visibility import Visibility
from tests.cases import LAYOUTS
from tests.engines.test_torch_paged import Tables
from tests.oracle import dense_attention, visible
from tests.tolerances import assert_close

HEADS, KV_HEADS = 6, 2
RULES: dict[str, tuple[Visibility, Any]] = {
    "full": (Visibility(causal=False), None),
    "causal": (Visibility(causal=True), None),
    "window": (Visibility(causal=False, window_left=100, window_right=30), None),
    "spans": (Visibility(causal=True), [(40, 300), (420, 700)]),
}


def resolved_of(layout: str, dtype: str, block_size: int, head_size: int, num_blocks: int) -> Any:
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=KV_HEADS, head_size=head_size, dtype=DType.parse(dtype)
    )
    return resolve_layout(single_group_config(spec, num_blocks, ["0", "1"], layout))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    ("layout", "block_size", "head_size"),
    [*((layout, 64, 128) for layout in LAYOUTS), ("LBNHC", 16, 64), ("BHLNC", 128, 256),
     ("LBHNC", 48, 80), ("BLNHC", 7, 96)],
)  # fmt: skip
@pytest.mark.parametrize("kernel", ["triton", "gather"])
def test_a_long_row_in_a_poisoned_pool(
    kernel: str, layout: str, block_size: int, head_size: int, dtype: str, rule: str
) -> None:
    visibility, spans = RULES[rule]
    engine = create_engine("cuda")
    lengths = (733, 64, 1)
    blocks = sum(-(-n // block_size) for n in lengths)
    resolved = resolved_of(layout, dtype, block_size, head_size, blocks + 3)
    order = np.random.default_rng(0).permutation(np.arange(1, blocks + 1)).tolist()
    tables: dict[Any, list[int]] = {}
    for i, n in enumerate(lengths):
        tables["r", i] = [order.pop() for _ in range(-(-n // block_size))]
    pool = engine.load_bytes(resolved, b"\xff" * resolved.size_bytes)
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    total = sum(lengths)
    query = torch.randn(total, HEADS, head_size, device="cuda").to(kind)
    key, value = (torch.randn(total, KV_HEADS, head_size, device="cuda").to(kind) for _ in range(2))
    rows = [PagedAttentionRow("r", n, n, sequence_id=i) for i, n in enumerate(lengths)]
    batch = engine.prepare(
        resolved, rows, Tables(tables), visibility=visibility, num_heads=HEADS, kernel=kernel,
        spans=None if spans is None else [spans, None, None],
    )  # fmt: skip
    out, lse = paged_attention(pool, 1, query, key, value, batch, return_lse=True)
    plain, _ = engine.forward_paged(pool, 1, query, None, None, batch)
    assert lse is not None
    first = 0
    for i, n in enumerate(lengths):
        at = slice(first, first + n)
        mask = visible(
            n, n, causal=visibility.causal, window_left=visibility.window_left,
            window_right=visibility.window_right, spans=spans if i == 0 else None,
        )  # fmt: skip
        expected, expected_lse = dense_attention(
            *(x[at].double().cpu().numpy() for x in (query, key, value)), mask
        )
        for got in (out, plain):
            assert_close(got[at].float().cpu().numpy(), expected, "attention", dtype, f"row {i}")
        assert_close(lse[at].cpu().numpy(), expected_lse, "lse", "float32", f"row {i}")
        first += n


@pytest.mark.parametrize("layout", ["LBNHC", "BLHNC"])
def test_a_pool_of_more_than_2_31_elements(layout: str) -> None:
    """The last blocks of a pool of 4.3 billion elements are written, read and copied."""
    engine = create_engine("cuda")
    num_blocks = 1 << 16
    resolved = resolved_of(layout, "bfloat16", 64, 128, num_blocks)
    assert resolved.size_bytes // 2 > 1 << 31
    pool = engine.allocate(resolved)
    ids = [num_blocks - 1, num_blocks - 2, num_blocks - 3]
    rows = [PagedAttentionRow("r", 150, 150, sequence_id=0)]
    torch.manual_seed(0)
    query = torch.randn(150, HEADS, 128, device="cuda").bfloat16()
    key, value = (torch.randn(150, KV_HEADS, 128, device="cuda").bfloat16() for _ in range(2))
    rule = Visibility(causal=False)
    batch = engine.prepare(
        resolved, rows, Tables({("r", 0): ids}), visibility=rule, num_heads=HEADS, kernel="triton"
    )
    out, _ = engine.forward_paged(pool, 1, query, key, value, batch)
    expected, _ = dense_attention(
        *(x.double().cpu().numpy() for x in (query, key, value)), np.ones((150, 150), bool)
    )
    assert_close(out.float().cpu().numpy(), expected, "attention", "bfloat16")
    engine.copy_blocks(pool, [(num_blocks - 1, 5), (num_blocks - 2, 6), (num_blocks - 3, 7)])
    batch = engine.prepare(
        resolved, rows, Tables({("r", 0): [5, 6, 7]}), visibility=rule, num_heads=HEADS,
        kernel="triton",
    )  # fmt: skip
    again, _ = engine.forward_paged(pool, 1, query, None, None, batch)
    assert torch.equal(again, out)
    touched = (pool.layers[1].content != 0).flatten(1).any(dim=1).nonzero().flatten().tolist()
    assert touched == [5, 6, 7, *sorted(ids)]
    assert not pool.layers[0].content.any()


def test_an_engine_on_a_device_that_is_not_current() -> None:
    """Launches go where the pool is. One device: the call is the same, and must work."""
    last = torch.cuda.device_count() - 1
    engine = create_engine(f"cuda:{last}")
    resolved = resolved_of("LBNHC", "bfloat16", 16, 64, 4)
    pool = engine.allocate(resolved)
    batch = engine.prepare(
        resolved, [PagedAttentionRow("r", 16, 16, sequence_id=0)], Tables({("r", 0): [2]}),
        visibility=Visibility(causal=True), num_heads=HEADS,
    )  # fmt: skip
    ones = torch.ones(16, HEADS, 64, dtype=torch.bfloat16, device=f"cuda:{last}")
    out, _ = engine.forward_paged(pool, 0, ones, ones[:, :2], ones[:, :2], batch)
    assert torch.equal(out, ones)
