"""Paged attention of the torch engine on a GPU, against torch's own on contiguous K/V.

One process; every round runs all candidates once, one after another, and a ratio is the median of
the rounds' ratios. Block tables are shuffled (``scattered``) or handed out in order (``extents``).
A candidate that cannot run is named with the reason, and left out.

    python -m bench.gpu_attention PART [--rounds 20] [--json out.json]

Parts: ``long`` (S queries over S keys), ``layouts`` (the six layouts), ``few`` (few queries over
many keys), ``spans`` (a causal prefix and a full target), ``write`` (K/V stored, against a copy of
as many bytes). ``--device cpu --tiny`` runs the same code on small shapes, to try it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from backends.torch_cuda import create_engine
from diffusion_runner.bench.harness import Limits, Timed, interleave
from layout_core.dtypes import DType
from layout_core.layouts import KVCacheLayout
from layout_core.resolve import resolve_layout, single_group_config
from layout_core.rows import PagedAttentionRow
from layout_core.specs import FullAttentionSpec
from layout_core.visibility import Visibility

PARTS = ("long", "layouts", "few", "spans", "write")
LAYOUTS = tuple(KVCacheLayout.__members__)
DTYPE = "bfloat16"
INNER_SECONDS = 2e-3
"""A measurement repeats a call until it takes about this long."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Case:
    """One shape."""

    part: str
    queries: int
    keys: int
    heads: int = 16
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 64
    layout: str = "LBNHC"
    scattered: bool = True
    span: int = 0  #: the last so many queries see all keys, the others are causal; 0: all see all

    @property
    def name(self) -> str:
        return (
            f"{self.part} {self.queries}x{self.keys} H{self.heads}/{self.kv_heads} "
            f"D{self.head_size} page {self.block_size} {self.layout} "
            f"{'scattered' if self.scattered else 'extents'}"
        )

    @property
    def pairs(self) -> int:
        """Pairs of query and visible key."""
        if not self.span:
            return self.queries * self.keys
        causal = self.queries - self.span
        return causal * (causal + 1) // 2 + self.span * self.keys

    @property
    def flops(self) -> int:
        """Of the two matrix products, for the pairs that are seen."""
        return 4 * self.pairs * self.heads * self.head_size


def cases(part: str, tiny: bool) -> Iterator[Case]:
    """The shapes of a part."""
    if tiny:
        yield Case(part, 48, 48, 4, 2, 32, 16, "BLHNC", True, 24 if part == "spans" else 0)
        return
    if part == "long":
        for keys in (1024, 2048, 4096, 8192, 16384):
            yield Case(part, keys, keys)
        for head_size in (64, 256):
            yield Case(part, 4096, 4096, head_size=head_size)
        for block_size in (16, 128):
            for scattered in (True, False):
                yield Case(part, 4096, 4096, block_size=block_size, scattered=scattered)
        yield Case(part, 4096, 4096, scattered=False)
    elif part == "layouts":
        for block_size in (16, 64):
            for layout in LAYOUTS:
                yield Case(part, 4096, 4096, block_size=block_size, layout=layout)
    elif part == "few":
        for queries in (1000, 1500, 2000):
            yield Case(part, queries, 62_000, heads=9, kv_heads=9)
        yield Case(part, 32, 16_384)
    elif part == "spans":
        for keys in (4096, 8192):
            yield Case(part, keys, keys, span=keys // 2)
    else:
        for layout in LAYOUTS:
            yield Case(part, 8192, 8192, layout=layout)


class Tables:
    """The block table of one row."""

    version = 0

    def __init__(self, case: Case) -> None:
        blocks = -(-case.keys // case.block_size)
        order = torch.arange(1, blocks + 1)
        if case.scattered:
            order = order[torch.randperm(blocks, generator=torch.Generator().manual_seed(0))]
        self._blocks = array("i", order.tolist())

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        return self._blocks


@dataclass(frozen=True, slots=True)
class Candidates:
    """Calls by name, and why some are not there."""

    calls: dict[str, Call]
    absent: dict[str, str]


class Step:
    """A pool filled with random K/V, queries, and the same K/V contiguous."""

    def __init__(self, case: Case, device: str) -> None:
        self.case = case
        self.engine = create_engine(device)
        blocks = -(-case.keys // case.block_size)
        spec = FullAttentionSpec(
            block_size=case.block_size,
            num_kv_heads=case.kv_heads,
            head_size=case.head_size,
            dtype=DType.parse(DTYPE),
        )
        config = single_group_config(spec, blocks + 1, ["0", "1"], case.layout)
        self.resolved = resolve_layout(config)
        self.tables = Tables(case)
        self.pool = self.engine.allocate(self.resolved)
        torch.manual_seed(1)
        kind = getattr(torch, DTYPE)
        where = torch.device(device)
        shape = (case.keys, case.kv_heads, case.head_size)
        self.key, self.value = (torch.randn(shape, device=where).to(kind) for _ in range(2))
        self.query = torch.randn(case.queries, case.heads, case.head_size, device=where).to(kind)
        fill = [PagedAttentionRow("r", case.keys, case.keys, sequence_id=0)]
        batch = self.engine.prepare(
            self.resolved, fill, self.tables, visibility=Visibility(causal=False),
            num_heads=case.heads,
        )  # fmt: skip
        self.slots = batch.tensors.slots
        self.engine.write(self.pool, 1, self.key, self.value, self.slots)

    def paged(self, kernel: str) -> Call:
        case = self.case
        start = case.keys - case.queries
        rows = [
            PagedAttentionRow("r", case.queries, case.keys, start, sequence_id=0, read_only=True)
        ]
        batch = self.engine.prepare(
            self.resolved,
            rows,
            self.tables,
            visibility=Visibility(causal=bool(case.span)),
            num_heads=case.heads,
            spans=[[(case.keys - case.span, case.keys)]] if case.span else None,
            kernel=kernel,
        )
        return lambda: self.engine.forward_paged(self.pool, 1, self.query, None, None, batch)[0]

    def dense(self, backend: SDPBackend) -> Call:
        """torch's attention on contiguous K/V, heads before tokens; every query sees all keys."""
        q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (self.query, self.key, self.value))

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                out = scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
            return out[0].transpose(0, 1)

        return call

    def flex(self) -> Call:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        q, k, v = (x.transpose(0, 1)[None].contiguous() for x in (self.query, self.key, self.value))
        compiled = torch.compile(flex_attention)
        mask = None
        if self.case.span:
            first = self.case.keys - self.case.span

            def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
                return (j <= i) | (i >= first)

            mask = create_block_mask(
                seen, None, None, self.case.queries, self.case.keys, device=str(q.device)
            )
        gqa = q.shape[1] != k.shape[1]
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=gqa)[0].transpose(0, 1)


def attention_candidates(case: Case, device: str) -> Candidates:
    """Every way to attend over the case's keys that runs here, checked against each other."""
    step = Step(case, device)
    makers: dict[str, Callable[[], Call]] = {}
    for kernel in step.engine.kernels:
        makers[kernel] = lambda kernel=kernel: step.paged(kernel)
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    if device == "cpu":
        backends = {"flash": SDPBackend.FLASH_ATTENTION}
    for name, backend in backends.items():
        makers[f"dense {name}"] = lambda backend=backend: step.dense(backend)
    if device != "cpu":
        makers["dense flex"] = step.flex
    calls: dict[str, Call] = {}
    absent: dict[str, str] = {}
    reference: torch.Tensor | None = None
    for name, maker in makers.items():
        try:
            call = maker()
            out = call()
        except Exception as error:  # a peer that this torch or this chip has not: it is recorded
            absent[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        masked = not case.span or not name.startswith("dense") or name == "dense flex"
        if masked:
            if reference is None:
                reference = out
            apart = float((out.float() - reference.float()).abs().max())
            if apart > 3e-2:
                raise SystemExit(f"{case.name}: {name} differs by {apart}")
        calls[name] = call
    return Candidates(calls, absent)


def write_candidates(case: Case, device: str) -> Candidates:
    """Storing K/V of a packed projection, and copying as many bytes."""
    step = Step(case, device)
    packed = torch.stack([step.key, step.value], dim=1)  # [T, 2, H, D]: strided K and V
    key, value = packed[:, 0], packed[:, 1]
    target = torch.empty_like(packed)
    return Candidates(
        {
            "write": lambda: step.engine.write(step.pool, 1, key, value, step.slots),
            "copy": lambda: target.copy_(packed),
        },
        {},
    )


def seconds_of(call: Call, device: str, times: int) -> float:
    """Of one call, from ``times`` of them in a row."""
    if device == "cpu":
        start = time.perf_counter()
        for _ in range(times):
            call()
        return (time.perf_counter() - start) / times
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / times / 1e3


def measure(case: Case, device: str, rounds: int) -> dict[str, Any]:
    """Median seconds and ratios of one case."""
    make = write_candidates if case.part == "write" else attention_candidates
    candidates = make(case, device)
    times = {}
    for name, call in candidates.calls.items():
        once = min(seconds_of(call, device, 2) for _ in range(2))
        times[name] = max(1, min(200, int(INNER_SECONDS / max(once, 1e-7))))

    def batch(name: str) -> Call:
        return lambda: Timed(seconds_of(candidates.calls[name], device, times[name]))

    limits = Limits(rounds=rounds, seconds=math.inf, least=rounds, warmup=2, settle=0)
    seconds = interleave({name: batch(name) for name in candidates.calls}, limits)
    record: dict[str, Any] = {"case": asdict(case), "name": case.name, "absent": candidates.absent}
    record["seconds"] = {name: statistics.median(took) for name, took in seconds.items()}
    if case.part == "write":
        moved = 2 * 2 * 2 * case.keys * case.kv_heads * case.head_size  # read and written
        record["gigabytes_per_second"] = {n: moved / s / 1e9 for n, s in record["seconds"].items()}
        record["ratio"] = {"write of copy's bandwidth": ratio(seconds, "copy", "write")}
        return record
    record["teraflops"] = {n: case.flops / s / 1e12 for n, s in record["seconds"].items()}
    own = "triton" if "triton" in seconds else "sdpa"
    record["ratio"] = {
        f"{own} of {name}": ratio(seconds, name, own) for name in seconds if name != own
    }
    if case.span:
        share = case.pairs / (case.queries * case.keys)
        record["ratio"].update(
            {
                f"{own} of {name} for the work that is left": share * ratio(seconds, name, own)
                for name in seconds
                if name.startswith("dense") and name != "dense flex"
            }
        )
    return record


def ratio(seconds: dict[str, list[float]], peer: str, own: str) -> float:
    """The speed of ``own``, counted in that of ``peer``: above 1 it is faster."""
    return statistics.median(a / b for a, b in zip(seconds[peer], seconds[own], strict=True))


def setting(device: str) -> dict[str, Any]:
    """What the numbers were measured on."""
    found: dict[str, Any] = {"torch": torch.__version__, "device": device}
    if device != "cpu":
        properties = torch.cuda.get_device_properties(torch.device(device))
        found["device"] = properties.name
        found["processors"] = properties.multi_processor_count
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="one small shape, to try the code")
    parser.add_argument("--seconds", type=float, default=480, help="start no case after this long")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    started = time.monotonic()
    results, left_out = [], []
    for case in cases(options.part, options.tiny):
        if time.monotonic() - started > options.seconds:
            left_out.append(case.name)
            continue
        record = measure(case, options.device, options.rounds)
        results.append(record)
        numbers = "  ".join(f"{name} {value:.2f}" for name, value in record["ratio"].items())
        print(f"{case.name}\n    {numbers}", flush=True)
        for name, reason in record["absent"].items():
            print(f"    without {name}: {reason}", flush=True)
    for name in left_out:
        print(f"left out for want of time: {name}")
    if options.json is not None:
        found = {"setting": setting(options.device), "results": results, "left_out": left_out}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
