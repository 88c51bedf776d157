"""Peers in torch: dense attention on contiguous K/V, gathered pages, FlexAttention, cuDNN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from diffusion_runner.bench.workload import Data, Geometry, Rows, Tables

Attend = Callable[[], torch.Tensor]
"""Attends over all rows; returns ``[T, Hq, D]``."""


def set_threads(threads: int) -> None:
    """Threads of torch's CPU kernels."""
    torch.set_num_threads(threads)


def _dense(engine: Any, rows: Rows, data: Data) -> list[tuple[torch.Tensor, ...]]:
    """Q, K and V of each row as contiguous ``[1, H, S, D]``: what SDPA takes at its best."""
    return [
        tuple(
            engine.from_numpy(x).transpose(0, 1)[None].contiguous()
            for x in data.of_row(rows, index)
        )
        for index in range(len(rows.shapes))
    ]


def dense(engine: Any, geometry: Geometry, rows: Rows, data: Data) -> Attend:
    """torch's own choice of ``scaled_dot_product_attention`` for each row."""
    return _sdpa(engine, rows, data, None)


def flash(engine: Any, geometry: Geometry, rows: Rows, data: Data) -> Attend:
    """The same, forced to FlashAttention (a GPU)."""
    return _sdpa(engine, rows, data, SDPBackend.FLASH_ATTENTION)


def cudnn(engine: Any, geometry: Geometry, rows: Rows, data: Data) -> Attend:
    """The same, forced to cuDNN (a GPU)."""
    return _sdpa(engine, rows, data, SDPBackend.CUDNN_ATTENTION)


def _sdpa(engine: Any, rows: Rows, data: Data, backend: SDPBackend | None) -> Attend:
    parts = _dense(engine, rows, data)

    def call() -> torch.Tensor:
        return torch.cat(
            [scaled_dot_product_attention(*p, enable_gqa=True)[0].transpose(0, 1) for p in parts]
        )

    if backend is None:
        return call

    def forced() -> torch.Tensor:
        with sdpa_kernel(backend):
            return call()

    return forced


def gather(engine: Any, geometry: Geometry, rows: Rows, data: Data) -> Attend:
    """Pages gathered to contiguous K/V by plain indexing, then SDPA: what one writes by hand."""
    tables = Tables(rows, geometry, shuffled=True)
    shape = (tables.num_blocks * geometry.block_size, geometry.num_kv_heads, geometry.head_size)
    slots = torch.from_numpy(tables.slots([keys for _, keys in rows.shapes]))
    pages = []
    for source in (engine.from_numpy(data.key), engine.from_numpy(data.value)):
        page = torch.zeros(shape, dtype=source.dtype, device=source.device)
        page[slots.to(source.device)] = source
        pages.append(page)
    queries = [q for q, _, _ in _dense(engine, rows, data)]
    of_rows, at = [], 0
    for _, keys in rows.shapes:
        of_rows.append(slots[at : at + keys].to(pages[0].device))
        at += keys

    def call() -> torch.Tensor:
        out = []
        for query, index in zip(queries, of_rows, strict=True):
            key, value = (page[index].transpose(0, 1)[None] for page in pages)
            out.append(scaled_dot_product_attention(query, key, value, enable_gqa=True))
        return torch.cat([x[0].transpose(0, 1) for x in out])

    return call


def flex(engine: Any, geometry: Geometry, rows: Rows, data: Data) -> Attend:
    """``flex_attention``, compiled, over a shared pool of pages through a block mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if len(rows.shapes) != 1:
        raise ValueError("flex: the peer is written for one row")
    ((queries, keys),) = rows.shapes
    tables = Tables(rows, geometry, shuffled=True)
    slots = torch.from_numpy(tables.slots([keys]))
    query, key, value = (x for x in _dense(engine, rows, data)[0])
    total = tables.num_blocks * geometry.block_size
    slots = slots.to(key.device)
    pages = []
    for source in (key, value):
        page = torch.zeros((1, source.shape[1], total, source.shape[3]), dtype=source.dtype)
        page = page.to(source.device)
        page[:, :, slots] = source
        pages.append(page)
    written = torch.zeros(total, dtype=torch.bool, device=key.device)
    written[slots] = True
    mask = create_block_mask(
        lambda b, h, q, k: written[k], None, None, queries, total, device=str(key.device)
    )
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> torch.Tensor:
        out = compiled(query, *pages, block_mask=mask, enable_gqa=True)
        return out[0].transpose(0, 1)  # type: ignore[union-attr,no-any-return]

    return call


def done(call: Attend) -> Callable[[], None]:
    """The call, waiting for a GPU."""

    def run() -> None:
        out = call()
        if out.is_cuda:
            torch.cuda.synchronize(out.device)

    return run
