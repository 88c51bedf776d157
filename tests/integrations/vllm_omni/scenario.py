"""One request through the real vLLM-Omni worker: two CFG rows, a prefill and two denoise steps.

Every output is compared with the float64 oracle over K/V that the test keeps itself, and at the
end the cells of the pool with what was written, byte for byte.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionMetadata

from tests import oracle
from tests.integrations.vllm_omni import peers
from tests.tolerances import assert_close, assert_same_bits

TARGET = 20


@dataclass(frozen=True)
class Case:
    """What is asked of a backend."""

    layout: str = "LBNHC"
    causal: bool = False
    spans: bool = False  # the target is one full span, the rest causal
    form: str = "packed"  # tokens [T, H, D]; "flat" [T, H * D]; "batched" [B, S, H, D], padded
    block_size: int = 32
    kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    num_heads: int = 4
    prefixes: tuple[int, ...] = (40, 33)  # of each row
    target: int = TARGET
    tail: int = 0  # tokens after the target, in the first step alone

    @property
    def shape(self) -> peers.Shape:
        return peers.Shape(
            num_heads=self.num_heads,
            causal=self.causal,
            block_size=self.block_size,
            num_kv_heads=self.kv_heads,
            dtype=self.dtype,
        )


@dataclass
class Request:
    """A worker with one request installed, and what was written for it so far."""

    worker: peers.Worker
    metadata: Any
    manager: Any
    keys: dict[tuple[str, int], np.ndarray]  # (layer, sequence) -> [seq_len, Hkv, D]
    values: dict[tuple[str, int], np.ndarray]


def start(case: Case, member: str = "TORCH_SDPA", **parallel: Any) -> Request:
    """A worker built, allocated, and told about a request of two rows."""
    shape = case.shape
    worker = peers.Worker(shape, member, layout=case.layout, **parallel)
    configs, _, manager = peers.control_plane(worker, 33, outermost=case.layout.startswith("B"))
    worker.allocate(configs[0], member)
    requests = [
        peers.request("r", i, prefix, case.target, case.tail)
        for i, prefix in enumerate(case.prefixes)
    ]
    metadata = manager.reserve_request("r", requests)
    assert metadata is not None
    worker.backend.install_diffusion_kv_metadata(metadata)
    return Request(worker, metadata, manager, {}, {})


def tokens(
    rng: np.random.Generator, rows: list[Any], heads: int, case: Case
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Random tokens in the case's form, and those of each row as ``[T, H, D]``."""
    size = case.shape.head_size
    own = [peers.tokens(rng, row.query_len, heads, size, case.dtype) for row in rows]
    if case.form == "batched":
        longest = max(len(part) for part in own)
        batch = torch.full((len(own), longest, heads, size), torch.nan, dtype=case.dtype)
        for index, part in enumerate(own):
            batch[index, : len(part)] = part
        return batch, own
    packed = torch.cat(own)
    return (packed.flatten(1) if case.form == "flat" else packed), own


def split(output: torch.Tensor, rows: list[Any], case: Case) -> list[torch.Tensor]:
    """The output of each row as ``[T, Hq, D]``."""
    heads, size = case.shape.num_heads, case.shape.head_size
    if case.form == "batched":
        assert output.shape[-2:] == (heads, size)
        for index, row in enumerate(rows):
            assert not output[index, row.query_len :].any(), "padded queries give zeros"
        return [output[index, : row.query_len] for index, row in enumerate(rows)]
    lengths = [row.query_len for row in rows]
    return list(output.reshape(-1, heads, size).split(lengths))


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float32).numpy()


def step(request: Request, case: Case, rng: np.random.Generator, *, denoise: bool) -> list[Any]:
    """One step of all layers, compared with the oracle; returns the outputs of the layers."""
    rows = peers.rows_of(request.metadata, denoise=denoise)
    spans = [[(s.prefix_len, s.prefix_len + s.target_len)] for s in request.metadata.sequences]
    omni = AttentionMetadata(full_attn_spans=spans) if case.spans else None
    outputs = []
    with request.worker.step(rows):
        for name, layer in request.worker.layers.items():
            query, queries = tokens(rng, rows, case.shape.num_heads, case)
            key, keys = tokens(rng, rows, case.kv_heads, case)
            value, values = tokens(rng, rows, case.kv_heads, case)
            output = layer(query, key, value, omni)
            assert output.dtype == case.dtype
            outputs.append(output)
            _remember(request, name, rows, keys, values)
            _compare(request, case, name, rows, queries, split(output, rows, case), spans)
    return outputs


def _remember(request: Request, name: str, rows: list[Any], keys: Any, values: Any) -> None:
    for row, key, value in zip(rows, keys, values):
        at = (name, row.sequence_id)
        end = row.kv_start_pos + row.query_len
        for store, part in ((request.keys, key), (request.values, value)):
            whole = store.get(at)
            if whole is None:
                whole = np.zeros((row.seq_len, *part.shape[1:]), np.float32)
            whole[row.kv_start_pos : end] = as_numpy(part)
            store[at] = whole


def _compare(
    request: Request, case: Case, name: str, rows: Any, queries: Any, outputs: Any, spans: Any
) -> None:
    for index, row in enumerate(rows):
        at = (name, row.sequence_id)
        mask = oracle.visible(
            row.query_len,
            row.seq_len,
            kv_start_pos=row.kv_start_pos,
            causal=case.causal,
            spans=spans[index] if case.spans else None,
        )
        expected, _ = oracle.dense_attention(
            as_numpy(queries[index]),
            request.keys[at][: row.seq_len],
            request.values[at][: row.seq_len],
            mask,
        )
        assert_close(
            as_numpy(outputs[index]),
            expected,
            "attention",
            str(case.dtype).removeprefix("torch."),
            f"{case}, {name}, row {row.identity}",
        )


def check_cells(request: Request, case: Case, cells_of: Any) -> None:
    """Every written cell holds K ‖ V, bit for bit.

    Args:
        cells_of: ``name -> [B, H, N, D + Dv]``, the layer's cells by block id.
    """
    for name in request.worker.layers:
        cells = cells_of(name)
        for sequence in request.metadata.sequences:
            at = (name, sequence.sequence_id)
            both = np.concatenate([request.keys[at], request.values[at]], axis=-1)
            (ids,) = sequence.block_ids
            for position in range(sequence.seq_len):
                block, inside = divmod(position, case.block_size)
                got = np.ascontiguousarray(cells[ids[block], :, inside])
                assert_same_bits(got, both[position], f"{name} {at} position {position}")


def random_case(rng: random.Random, layouts: tuple[str, ...]) -> Case:
    """A case that vLLM-Omni's adapter accepts: with spans, rows have segments of one kind."""
    causal = rng.random() < 0.5
    spans = rng.random() < 0.3
    kv_heads = rng.choice((1, 2, 4))
    return Case(
        layout=rng.choice(layouts),
        causal=causal,
        spans=spans,
        form=rng.choice(("packed", "flat", "batched")),
        block_size=rng.choice((32, 64)),
        kv_heads=kv_heads,
        num_heads=kv_heads * rng.choice((1, 2, 3)),
        prefixes=tuple(rng.randint(1, 90) for _ in range(rng.randint(1, 4))),
        target=rng.randint(1, 40),
        tail=0 if causal or spans else rng.choice((0, 0, 5)),
    )


def run(case: Case, member: str = "TORCH_SDPA", seed: int = 0) -> Request:
    """The whole scenario."""
    rng = np.random.default_rng(seed)
    request = start(case, member)
    for denoise in (False, True, True):
        step(request, case, rng, denoise=denoise)
    return request


def bound_cells(request: Request) -> Any:
    """Cells of the cache that vLLM bound to the layers, as float32."""
    caches = request.worker.backend.kv_caches_by_layer
    return lambda name: as_numpy(caches[name])


def worker_of(request: Request, backend: str) -> Any:
    """Our worker behind the adapter."""
    return vars(request.worker.backend.get_paged_attention_adapter())["_pagestride"][backend]
