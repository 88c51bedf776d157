"""Suites ``write`` and ``copy``: cells stored and blocks copied, beside a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from diffusion_runner.bench.harness import Call, Comparison, compare
from diffusion_runner.bench.options import Bench
from diffusion_runner.bench.workload import (
    Geometry,
    Rows,
    Tables,
    random_data,
    resolved_plan,
)

MEMCPY = "memcpy of as many bytes"
TOKENS = 512  # of 8 heads: 4,096 cells
BLOCKS = 64
LAYERS = 4


def write(bench: Bench) -> Iterator[Comparison]:
    """K and V of one layer stored at shuffled slots."""
    options = bench.options
    tokens = 64 if options.quick else TOKENS
    for dtype in options.dtypes:
        geometry = Geometry(dtype=dtype)
        rows = Rows(((1, 4 * tokens),))
        tables = Tables(rows, geometry, shuffled=options.shuffled)
        slots = tables.slots([4 * tokens])[:tokens]
        data = random_data(rows, geometry)
        key, value = data.key[:tokens], data.value[:tokens]
        calls: dict[str, Call] = {MEMCPY: _memcpy(key.nbytes + value.nbytes)}
        for name, engine in bench.engines.items():
            for layout in options.layouts:
                plan = resolved_plan(geometry, tables.num_blocks, layout)
                parts = [engine.from_numpy(x) for x in (key, value, slots)]
                calls[f"{name} {layout}"] = _Write(engine, engine.allocate(plan), parts)
        yield compare(
            "write",
            f"{tokens * geometry.num_kv_heads} cells, {dtype}",
            calls,
            base=MEMCPY,
            limits=options.limits,
            details={
                "cells": tokens * geometry.num_kv_heads,
                "dtype": dtype,
                "bytes": 2 * key.nbytes,
            },
        )


def copy(bench: Bench) -> Iterator[Comparison]:
    """Blocks copied in all layers of a group."""
    options = bench.options
    count = 8 if options.quick else BLOCKS
    for dtype in options.dtypes:
        geometry = Geometry(dtype=dtype)
        order = np.random.default_rng(0).permutation(2 * count) + 1
        pairs = list(zip(order[:count].tolist(), order[count:].tolist(), strict=True))
        size = LAYERS * count * geometry.spec.page_size_bytes
        calls: dict[str, Call] = {MEMCPY: _memcpy(size)}
        for name, engine in bench.engines.items():
            for layout in options.layouts:
                plan = resolved_plan(geometry, 2 * count + 1, layout, LAYERS)
                calls[f"{name} {layout}"] = _Copy(engine, engine.allocate(plan), pairs)
        yield compare(
            "copy",
            f"{count} blocks of {LAYERS} layers, {dtype}",
            calls,
            base=MEMCPY,
            limits=options.limits,
            details={"blocks": count, "layers": LAYERS, "dtype": dtype, "bytes": size},
        )


def _memcpy(size: int) -> Call:
    source, target = np.ones(size, np.uint8), np.zeros(size, np.uint8)

    def call() -> None:
        np.copyto(target, source)

    return call


class _Write:
    def __init__(self, engine: Any, pool: Any, parts: list[Any]) -> None:
        self._engine, self._pool, self._parts = engine, pool, parts

    def __call__(self) -> None:
        self._pool = self._engine.write(self._pool, 1, *self._parts)
        self._engine.synchronize(self._pool)


class _Copy:
    def __init__(self, engine: Any, pool: Any, pairs: list[tuple[int, int]]) -> None:
        self._engine, self._pool, self._pairs = engine, pool, pairs

    def __call__(self) -> None:
        self._pool = self._engine.copy_blocks(self._pool, self._pairs)
        self._engine.synchronize(self._pool)
