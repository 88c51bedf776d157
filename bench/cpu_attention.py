"""Paged attention of the torch engine on the CPU, against torch's own on contiguous K/V.

Prints ratios, not seconds alone: every round runs all candidates once, one after another, and a
ratio is the median of the rounds' ratios to the dense call of the same round, so that a machine
that slows down slows both. ``--json`` writes the numbers down.

    python -m bench.cpu_attention [--rounds 15] [--threads 2] [--json out.json]
    python -m bench.cpu_attention --threads 1 --clock cpu      # on a machine that is busy
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from backends.torch_cuda import create_engine
from layout_core.dtypes import DType
from layout_core.layouts import KVCacheLayout
from layout_core.resolve import resolve_layout, single_group_config
from layout_core.rows import PagedAttentionRow
from layout_core.specs import FullAttentionSpec
from layout_core.visibility import Visibility

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, KEYS = 16, 8, 128, 32, 2048
RAGGED = (
    (32, 500),
    (256, 256),
    (1, 2048),
    (128, 1111),
    (512, 777),
    (64, 2000),
    (300, 301),
    (7, 90),
)
"""Queries and keys of the rows of one batch."""


class Tables:
    """Block tables that hand out shuffled blocks and never change."""

    version = 0

    def __init__(self, keys: Sequence[int], num_blocks: int) -> None:
        generator = torch.Generator().manual_seed(0)
        order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        self.rows: list[array[int]] = []
        for count in keys:
            blocks = -(-count // BLOCK_SIZE)
            self.rows.append(array("i", order[:blocks]))
            order = order[blocks:]

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        assert row.sequence_id is not None
        return self.rows[row.sequence_id]


def interleaved(
    calls: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds of each call in each round; one round runs each once, after two to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 2):
        for name, call in calls.items():
            start = clock()
            call()
            if number >= 2:
                seconds[name].append(clock() - start)
    return seconds


def paged_call(
    layout: str, dtype: str, shapes: Sequence[tuple[int, int]], *, write: bool
) -> tuple[Callable[[], torch.Tensor], list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """A call of ``forward_paged`` over filled rows, and the same rows dense as ``[1, H, S, D]``."""
    engine = create_engine("cpu")
    num_blocks = sum(-(-keys // BLOCK_SIZE) for _, keys in shapes) + 1
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=DType.parse(dtype)
    )
    resolved = resolve_layout(single_group_config(spec, num_blocks, ["0", "1"], layout))
    tables = Tables([keys for _, keys in shapes], num_blocks)
    pool = engine.allocate(resolved)
    rule = Visibility(causal=False)
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(getattr(torch, dtype))

    fill = [PagedAttentionRow("r", k, k, sequence_id=i) for i, (_, k) in enumerate(shapes)]
    total = sum(keys for _, keys in shapes)
    key, value = random(total, KV_HEADS, HEAD_SIZE), random(total, KV_HEADS, HEAD_SIZE)
    batch = engine.prepare(resolved, fill, tables, visibility=rule, num_heads=HEADS)
    engine.write(pool, 1, key, value, batch.tensors.slots)
    rows = [
        PagedAttentionRow("r", q, k, kv_start_pos=k - q, sequence_id=i)
        for i, (q, k) in enumerate(shapes)
    ]
    queries = random(sum(q for q, _ in shapes), HEADS, HEAD_SIZE)
    batch = engine.prepare(resolved, rows, tables, visibility=rule, num_heads=HEADS)
    dense, q_at, k_at = [], 0, 0
    new_key, new_value = [], []
    for q, k in shapes:
        # contiguous, heads before tokens: what a dense model hands to SDPA at its best
        one_q = queries[q_at : q_at + q].transpose(0, 1)[None].contiguous()
        one_k, one_v = (x[k_at : k_at + k].transpose(0, 1)[None].contiguous() for x in (key, value))
        dense.append((one_q, one_k, one_v))
        new_key.append(key[k_at + k - q : k_at + k])
        new_value.append(value[k_at + k - q : k_at + k])
        q_at, k_at = q_at + q, k_at + k
    k_new = torch.cat(new_key) if write else None
    v_new = torch.cat(new_value) if write else None

    def call() -> torch.Tensor:
        return engine.forward_paged(pool, 1, queries, k_new, v_new, batch)[0]

    expected = torch.cat([attend(*parts)[0].transpose(0, 1) for parts in dense])
    error = float((call() - expected).abs().max())
    if error > (1e-4 if dtype == "float32" else 2e-2):
        raise SystemExit(f"{layout} {dtype} {shapes}: paged and dense differ by {error}")
    return call, dense


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, enable_gqa=True)


def compare(
    name: str,
    dtype: str,
    shapes: Sequence[tuple[int, int]],
    rounds: int,
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Ratios of paged to dense for every layout, with and without the write."""
    calls: dict[str, Callable[[], object]] = {}
    dense: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for layout in KVCacheLayout.__members__:
        calls[layout], dense = paged_call(layout, dtype, shapes, write=False)
    calls["LBNHC, writing"], _ = paged_call("LBNHC", dtype, shapes, write=True)

    def all_dense() -> object:
        return [attend(*parts) for parts in dense]

    seconds = interleaved({"dense": all_dense, **calls}, rounds, clock)
    base = seconds["dense"]
    ratios = {
        call: statistics.median(a / b for a, b in zip(times, base, strict=True))
        for call, times in seconds.items()
        if call != "dense"
    }
    row = {
        "case": name,
        "dtype": dtype,
        "rows": [list(shape) for shape in shapes],
        "dense_ms": statistics.median(base) * 1e3,
        "ratio": ratios,
        "layout_spread": max(ratios[x] for x in KVCacheLayout.__members__)
        / min(ratios[x] for x in KVCacheLayout.__members__),
    }
    print(
        f"{name:<10} {dtype:<9} dense {row['dense_ms']:8.2f} ms   paged/dense (median of rounds):"
    )
    print("    " + "  ".join(f"{call} {ratio:.2f}" for call, ratio in ratios.items()))
    print(f"    slowest layout / fastest layout {row['layout_spread']:.2f}")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: time of this thread alone, for a machine that is busy; needs --threads 1",
    )
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu counts one thread: it needs --threads 1")
    clock = time.thread_time if options.clock == "cpu" else time.perf_counter
    torch.set_num_threads(options.threads)
    setting = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": options.threads,
        "clock": options.clock,
        "rounds": options.rounds,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_size": HEAD_SIZE,
        "block_size": BLOCK_SIZE,
    }
    print("  ".join(f"{name} {value}" for name, value in setting.items()))
    rows = []
    for dtype in options.dtypes:
        for name, shapes in (
            ("T=1024", [(1024, KEYS)]),
            ("T=32", [(32, KEYS)]),
            ("ragged", RAGGED),
        ):
            rows.append(compare(name, dtype, shapes, options.rounds, clock))
    if options.json is not None:
        options.json.write_text(json.dumps({"setting": setting, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
