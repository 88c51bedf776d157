"""One paged workload, the same for every engine and peer: rows, tables, random K/V, a pool."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffusion_runner.errors import RunError
from layout_core import (
    Bucket,
    DType,
    FullAttentionSpec,
    PagedAttentionRow,
    ResolvedLayout,
    Visibility,
    resolve_layout,
    single_group_config,
)

EVERYTHING = Visibility(causal=False)

AGREEMENT = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 2e-2}
"""Largest difference to dense attention at which a candidate is timed at all: numbers of size 1."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Heads, sizes and pages of a layer."""

    num_heads: int = 16
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 32
    dtype: str = "float32"

    @property
    def spec(self) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=DType.parse(self.dtype),
        )

    def blocks(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one batch: ``(queries, keys)`` of each; every query sees all keys of its row.

    ``bucket_keys`` is the length that tables are padded to, where an engine pads; 0: no padding.
    """

    shapes: tuple[tuple[int, int], ...]
    bucket_keys: int = 0

    @property
    def queries(self) -> int:
        return sum(queries for queries, _ in self.shapes)

    @property
    def keys(self) -> int:
        return sum(keys for _, keys in self.shapes)


class Tables:
    """Block tables that never change; rows are told apart by their ``sequence_id``."""

    version = 0

    def __init__(self, rows: Rows, geometry: Geometry, *, shuffled: bool) -> None:
        need = [geometry.blocks(max(keys, rows.bucket_keys)) for _, keys in rows.shapes]
        self.num_blocks = sum(need) + 1  # and the null block
        ids = np.arange(1, self.num_blocks)
        if shuffled:
            ids = np.random.default_rng(0).permutation(ids)
        ends = np.cumsum(need)
        self._rows = [array("i", ids[end - n : end].tolist()) for n, end in zip(need, ends)]
        self._block_size = geometry.block_size

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        if row.sequence_id is None:
            raise RunError("row: the bench tells rows apart by sequence_id, got none")
        return self._rows[row.sequence_id][: -(-row.seq_len // self._block_size)]

    def slots(self, lengths: Sequence[int]) -> NDArray[np.int64]:
        """Slots of the positions ``[0, length)`` of each row, one row after another."""
        out = []
        for ids, length in zip(self._rows, lengths, strict=True):
            position = np.arange(length)
            block = np.asarray(ids, dtype=np.int64)[position // self._block_size]
            out.append(block * self._block_size + position % self._block_size)
        return np.concatenate(out)


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """Random numbers of a batch, rows packed one after another."""

    query: NDArray[Any]  #: [sum of queries, Hq, D]
    key: NDArray[Any]  #: [sum of keys, Hkv, D]
    value: NDArray[Any]  #: [sum of keys, Hkv, D]

    def of_row(self, rows: Rows, index: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Q, K and V of one row."""
        q_at = sum(q for q, _ in rows.shapes[:index])
        k_at = sum(k for _, k in rows.shapes[:index])
        queries, keys = rows.shapes[index]
        at = slice(k_at, k_at + keys)
        return self.query[q_at : q_at + queries], self.key[at], self.value[at]


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy's type of a name; the narrow ones are ml_dtypes'."""
    if name != "bfloat16":
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(ml_dtypes.bfloat16)


def random_data(rows: Rows, geometry: Geometry) -> Data:
    """Standard normal numbers in the geometry's dtype."""
    rng = np.random.default_rng(1)
    dtype = numpy_dtype(geometry.dtype)

    def draw(tokens: int, heads: int) -> NDArray[Any]:
        shape = (tokens, heads, geometry.head_size)
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    return Data(
        draw(rows.queries, geometry.num_heads),
        draw(rows.keys, geometry.num_kv_heads),
        draw(rows.keys, geometry.num_kv_heads),
    )


def resolved_plan(
    geometry: Geometry, num_blocks: int, layout: str, num_layers: int = 2
) -> ResolvedLayout:
    """A plan of equal layers; at least two, so that the layouts differ."""
    names = [str(index) for index in range(num_layers)]
    return resolve_layout(single_group_config(geometry.spec, num_blocks, names, layout))


def finish(engine: Any, pool: Any, output: Any) -> None:
    """Wait until an output and the pool are there."""
    ready = getattr(output, "block_until_ready", None)
    if ready is not None:  # JAX returns before it is done
        ready()
    engine.synchronize(pool)


class PagedCall:
    """``forward_paged`` over rows whose keys lie in the pool; each call waits for its output."""

    def __init__(
        self,
        engine: Any,
        layout: str,
        geometry: Geometry,
        rows: Rows,
        data: Data,
        *,
        shuffled: bool = True,
        kernel: str = "auto",
        write: bool = False,
    ) -> None:
        tables = Tables(rows, geometry, shuffled=shuffled)
        resolved = resolved_plan(geometry, tables.num_blocks, layout)
        self._engine = engine
        pool = engine.allocate(resolved)
        slots = tables.slots([keys for _, keys in rows.shapes])
        key, value = engine.from_numpy(data.key), engine.from_numpy(data.value)
        self._pool = engine.write(pool, 1, key, value, engine.from_numpy(slots))
        self._query = engine.from_numpy(data.query)
        self._key = self._value = None
        if write:
            new = _last(rows)
            self._key = engine.from_numpy(data.key[new])
            self._value = engine.from_numpy(data.value[new])
        self._batch = engine.prepare(
            resolved,
            [
                PagedAttentionRow("r", q, k, kv_start_pos=k - q, sequence_id=i)
                for i, (q, k) in enumerate(rows.shapes)
            ],
            tables,
            visibility=EVERYTHING,
            num_heads=geometry.num_heads,
            kernel=kernel,
            bucket=(
                Bucket(rows.queries, len(rows.shapes), geometry.blocks(rows.bucket_keys))
                if rows.bucket_keys
                else None
            ),
        )

    @property
    def kernel(self) -> str:
        """The kernel that runs."""
        return str(self._batch.kernel)

    def output(self) -> NDArray[Any]:
        """``[T, Hq, D]`` in float32."""
        output, self._pool = self._forward()
        return np.asarray(self._engine.to_numpy(output)).astype(np.float32)

    def __call__(self) -> None:
        output, self._pool = self._forward()
        finish(self._engine, self._pool, output)

    def _forward(self) -> tuple[Any, Any]:
        result: tuple[Any, Any] = self._engine.forward_paged(
            self._pool, 1, self._query, self._key, self._value, self._batch
        )
        return result


def _last(rows: Rows) -> NDArray[np.int64]:
    """Indices, in the packed keys, of the last positions of each row: one for each query."""
    out, at = [], 0
    for queries, keys in rows.shapes:
        out.append(np.arange(at + keys - queries, at + keys))
        at += keys
    return np.concatenate(out)


def dense_reference(rows: Rows, geometry: Geometry, data: Data) -> NDArray[np.float32]:
    """Dense attention of every row in float64: what a candidate must give to be timed."""
    out = []
    group = geometry.num_heads // geometry.num_kv_heads
    for index in range(len(rows.shapes)):
        q, k, v = (x.astype(np.float64) for x in data.of_row(rows, index))
        k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * geometry.head_size**-0.5
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores)
        weights /= weights.sum(axis=-1, keepdims=True)
        out.append(np.einsum("hqk,khd->qhd", weights, v))
    return np.concatenate(out).astype(np.float32)


def check_agrees(name: str, got: NDArray[Any], want: NDArray[Any], dtype: str) -> None:
    """Refuse to time a candidate that does other work.

    Raises:
        RunError: the outputs differ by more than :data:`AGREEMENT`.
    """
    error = float(np.abs(got - want).max()) if got.shape == want.shape else float("nan")
    if not error <= AGREEMENT[dtype]:
        raise RunError(
            f"{name}: its output differs from dense attention by {error:.3g}, at most "
            f"{AGREEMENT[dtype]:g} for {dtype}; it was not timed"
        )
