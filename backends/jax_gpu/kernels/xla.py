"""Paged attention in plain XLA operations, on any device.

A call is one compiled program, whatever its rows, spans and lengths: one for each layer.

For each pair of KV heads and each row, the keys that the row's queries see are gathered from
their pages into float32, then each chunk of queries attends to them. A table of more than
:data:`WHOLE_TABLE` keys is walked in chunks, with an online softmax, and the bounds of the walk
are data: keys outside the intervals, and the unused rest of a bucket, cost nothing. Within a
chunk a query's interval is a mask.

Keys and values outside the row's visible range are set to zero before any product, because
they may be NaN, and ``0 * NaN`` is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from backends.jax_gpu.paging import Address, CellShape, read_cells

MAX_QUERY_ROWS = 512
"""Queries of a chunk times query heads of a KV head: the rows of a matrix product."""

WHOLE_TABLE = 512
"""Keys of a table that is attended to at once; a larger one is walked in chunks."""

KEY_CHUNK = 256
"""Keys of a chunk. A row pays for whole chunks, and a tile of scores stays in the cache."""

HEADS_AT_ONCE = 2
"""KV heads of a tile, where their number is a multiple of it. XLA on the CPU runs a loop's
operations one after another, so cores share work only within an operation. A tile of two heads
gives each of two cores whole matrices, and more cores their rows."""

_FLOAT = jnp.float32
_MINUS_INFINITY = float("-inf")
_INT32_MAX = 2**31 - 1
_LEAST_FINITE = float(np.finfo(np.float32).min)

# indices here are never negative, so JAX need not compile their wrapping
_slice = partial(lax.dynamic_slice, allow_negative_indices=False)
_update = partial(lax.dynamic_update_slice, allow_negative_indices=False)
_BY_HEAD_QK = (((2,), (2,)), ((0,), (0,)))  # [h, m, D] and [h, keys, D] -> [h, m, keys]
_BY_HEAD_WV = (((2,), (1,)), ((0,), (0,)))  # [h, m, keys] and [h, keys, Dv] -> [h, m, Dv]
_dot = partial(lax.dot_general, precision=lax.Precision.HIGHEST, preferred_element_type=_FLOAT)

KeysAndValues = tuple[jax.Array, jax.Array]

Bias = Callable[[jax.Array, jax.Array | int], jax.Array]
"""Scores ``[h, m, keys]`` and the position of the first key -> the scores with a mask applied."""

OutputAndLSE = tuple[jax.Array, jax.Array]


def heads_at_once(heads: int) -> int:
    """KV heads that go through the loops together: a divisor of ``heads``."""
    return HEADS_AT_ONCE if heads % HEADS_AT_ONCE == 0 else 1


def query_chunk(num_tokens: int, num_rows: int, group_size: int) -> int:
    """Queries of a chunk: a power of two near the mean row, so that short rows pad little."""
    mean = -(-num_tokens // max(num_rows, 1))
    power = 1 << max(mean - 1, 0).bit_length()
    return max(min(power, MAX_QUERY_ROWS // group_size), min(8, num_tokens), 1)


def paged_attention(
    words: jax.Array,
    cell: CellShape,
    address: Address,
    query: jax.Array,
    block_table: jax.Array,
    cu_seqlens: jax.Array,
    row_lo: jax.Array,
    row_hi: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    *,
    score_scale: jax.Array,
    value_scale: jax.Array,
    softcap: jax.Array | None,
) -> OutputAndLSE:
    """Attention of packed rows over their pages.

    Args:
        words: the pool.
        query: ``[T, Hq, D]``, rows packed one after another.
        block_table: int32 ``[R, M]``.
        cu_seqlens: int32 ``[R + 1]``.
        row_lo, row_hi: int32 ``[R]``, the union of the intervals of a row's queries.
        lo, hi: int32 ``[T]``, the half-open interval of keys that each query sees.
        score_scale: multiplies ``q · k`` as stored.
        value_scale: multiplies the stored values.
        softcap: ``None``, or ``c`` in ``c * tanh(score / c)``.

    Returns:
        ``(output [T, Hq, Dv]`` in the query's dtype, ``lse [T, Hq]`` in float32``)``. A query
        that sees no key gives zeros and −inf.
    """
    tokens, num_heads, _ = query.shape
    rows, max_blocks = block_table.shape
    heads, group = cell.num_kv_heads, num_heads // cell.num_kv_heads
    max_keys = max_blocks * cell.block_size
    if tokens == 0 or max_keys == 0:
        output = jnp.zeros((tokens, num_heads, cell.head_size_v), query.dtype)
        return output, jnp.full((tokens, num_heads), _MINUS_INFINITY, _FLOAT)

    chunk = query_chunk(tokens, rows, group)
    padding = (0, chunk)  # so that the last chunk of the last row is a whole slice
    # [H / h, h, (T + chunk) * group, D]: a KV head's queries packed as rows of one matrix
    packed = query.astype(_FLOAT) * score_scale
    packed = packed.reshape(tokens, heads, group, -1).transpose(1, 0, 2, 3)
    packed = jnp.pad(packed, ((0, 0), padding, (0, 0), (0, 0)))
    width = heads_at_once(heads)
    packed = packed.reshape(heads // width, width, (tokens + chunk) * group, -1)
    lo, hi = jnp.pad(lo, padding), jnp.pad(hi, padding)
    chunked = max_keys > WHOLE_TABLE
    attend = partial(_attend_in_chunks if chunked else _attend_at_once, softcap=softcap)

    def some_heads(first_and_queries: tuple[jax.Array, jax.Array]) -> OutputAndLSE:
        first, queries = first_and_queries  # queries [h, rows of the matrix, D]
        head = first + jnp.arange(width, dtype=jnp.int32)

        def one_row(row: jax.Array, carry: tuple[OutputAndLSE, KeysAndValues | None]) -> object:
            state, buffers = carry
            table = _slice(block_table, (row, 0), (1, max_blocks))[0]
            read = partial(_read_keys, words, cell, address, head, table, row_lo[row], row_hi[row])
            if buffers is None:
                keys_and_values = read(jnp.arange(max_keys, dtype=jnp.int32))
            else:
                buffers = _fill(read, row_lo[row], row_hi[row], buffers)
                keys_and_values = buffers
            begin, end = cu_seqlens[row], cu_seqlens[row + 1]

            def one_chunk(index: jax.Array, state: OutputAndLSE) -> OutputAndLSE:
                start = begin + index * chunk
                # queries past the row's end see nothing here; their own row writes them later
                inside = start + jnp.arange(chunk, dtype=jnp.int32) < end
                output, lse = attend(
                    _slice(queries, (0, start * group, 0), (width, chunk * group, cell.head_size)),
                    jnp.repeat(jnp.where(inside, _slice(lo, (start,), (chunk,)), 0), group),
                    jnp.repeat(jnp.where(inside, _slice(hi, (start,), (chunk,)), 0), group),
                    *keys_and_values,
                )
                output = (output * value_scale).astype(query.dtype)
                return (
                    _update(state[0], output, (0, start * group, 0)),
                    _update(state[1], lse, (0, start * group)),
                )

            chunks = lax.div(end - begin + (chunk - 1), chunk)
            return lax.fori_loop(0, chunks, one_chunk, state), buffers

        state = (
            jnp.zeros((*queries.shape[:2], cell.head_size_v), query.dtype),
            jnp.full(queries.shape[:2], _MINUS_INFINITY, _FLOAT),
        )
        buffers = None
        if chunked:
            padded_keys = -(-max_keys // KEY_CHUNK) * KEY_CHUNK
            buffers = (
                jnp.zeros((width, padded_keys, cell.head_size), _FLOAT),
                jnp.zeros((width, padded_keys, cell.head_size_v), _FLOAT),
            )
        (output, lse), _ = lax.fori_loop(0, rows, one_row, (state, buffers))
        return output[:, : tokens * group], lse[:, : tokens * group]

    output, lse = lax.map(some_heads, (jnp.arange(0, heads, width, dtype=jnp.int32), packed))
    output = output.reshape(heads, tokens, group, -1).transpose(1, 0, 2, 3)
    lse = lse.reshape(heads, tokens, group).transpose(1, 0, 2)
    return output.reshape(tokens, num_heads, -1), lse.reshape(tokens, num_heads)


def _read_keys(
    words: jax.Array,
    cell: CellShape,
    address: Address,
    head: jax.Array,
    table: jax.Array,
    first: jax.Array,
    last: jax.Array,
    position: jax.Array,
) -> KeysAndValues:
    """K and V ``[h, positions, ...]`` of heads ``[h]`` at these positions of a row.

    In float32, zero outside ``[first, last)``.
    """
    entry = jnp.minimum(lax.div(position, cell.block_size), table.shape[0] - 1)
    block = table.at[entry].get(mode="promise_in_bounds", wrap_negative_indices=False)
    cells = (
        address.offset
        + block * address.block_stride
        + lax.rem(position, cell.block_size) * address.token_stride
        + head[:, None] * address.head_stride
    )
    key, value = read_cells(words, cell, cells)
    visible = _inside(position, first, last)[:, None]
    return (
        jnp.where(visible, key.astype(_FLOAT), 0),
        jnp.where(visible, value.astype(_FLOAT), 0),
    )


def _fill(
    read: Callable[[jax.Array], KeysAndValues],
    first: jax.Array,
    last: jax.Array,
    buffers: KeysAndValues,
) -> KeysAndValues:
    """The buffers with every chunk that has a position of ``[first, last)`` read anew."""

    def one_chunk(index: jax.Array, buffers: KeysAndValues) -> KeysAndValues:
        start = index * KEY_CHUNK
        key, value = read(start + jnp.arange(KEY_CHUNK, dtype=jnp.int32))
        return _update(buffers[0], key, (0, start, 0)), _update(buffers[1], value, (0, start, 0))

    begin, end = _chunk_range(first, last)
    filled: KeysAndValues = lax.fori_loop(begin, end, one_chunk, buffers)
    return filled


def _chunk_range(first: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The chunks of keys that have a position of ``[first, last)``."""
    return lax.div(first, KEY_CHUNK), lax.div(last + (KEY_CHUNK - 1), KEY_CHUNK)


def _scores(
    queries: jax.Array,
    key: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    start: jax.Array | int,
    softcap: jax.Array | None,
    bias: Bias | None,
) -> jax.Array:
    """Scores ``[h, m, keys]`` of the keys from position ``start``, −inf where not visible."""
    score = _dot(queries, key, _BY_HEAD_QK)
    if softcap is not None:
        score = softcap * jnp.tanh(score / softcap)
    if bias is not None:
        score = bias(score, start)
    position = start + jnp.arange(key.shape[1], dtype=jnp.int32)
    return jnp.where(_inside(position, lo[:, None], hi[:, None]), score, _MINUS_INFINITY)


def _inside(position: jax.Array, lo: jax.Array, hi: jax.Array) -> jax.Array:
    """Whether ``lo <= position < hi``, by the distance to the middle, doubled to stay whole.

    One comparison instead of two: XLA on the CPU takes ten times as long to compile two
    against a ramp of positions, half of a whole program's time. Positions are below 2**30.
    """
    return jnp.abs(2 * position - (lo + hi - 1)) < hi - lo


def _finite(largest: jax.Array) -> jax.Array:
    """What to subtract from scores: a query that sees nothing must not give −inf − −inf."""
    return jnp.maximum(largest, _LEAST_FINITE)


def _finish(output: jax.Array, base: jax.Array, total: jax.Array) -> OutputAndLSE:
    return output / jnp.where(total == 0, 1, total)[..., None], base + jnp.log(total)


def _attend_at_once(
    queries: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    softcap: jax.Array | None = None,
    bias: Bias | None = None,
) -> OutputAndLSE:
    """Attention of scaled queries ``[h, m, D]`` over all keys, which start at position 0.

    ``lo``, ``hi`` ``[m]`` are the same for all heads; ``key`` and ``value`` are ``[h, keys, ...]``.

    Returns:
        ``(output [h, m, Dv], log of the sum of exponentials [h, m])``, float32.
    """
    score = _scores(queries, key, lo, hi, 0, softcap, bias)
    base = _finite(jnp.max(score, axis=2))
    weight = jnp.exp(score - base[..., None])
    output = _dot(weight, value, _BY_HEAD_WV)
    return _finish(output, base, jnp.sum(weight, axis=2))


def _attend_in_chunks(
    queries: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    key_buffer: jax.Array,
    value_buffer: jax.Array,
    *,
    softcap: jax.Array | None = None,
    bias: Bias | None = None,
    seen: tuple[jax.Array, jax.Array] | None = None,
) -> OutputAndLSE:
    """As :func:`_attend_at_once`, over only the chunks of keys that any of the queries sees.

    ``seen`` is ``None`` where the buffers hold zeros outside the row's visible range ``[first,
    last)``, else that range.
    """
    sees = lo < hi
    last = jnp.max(jnp.where(sees, hi, 0))
    first = jnp.minimum(jnp.min(jnp.where(sees, lo, _INT32_MAX)), last)

    def one_chunk(
        index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        largest, total, output = state
        start = index * KEY_CHUNK
        key, value = (
            _slice(buffer, (0, start, 0), (buffer.shape[0], KEY_CHUNK, buffer.shape[2]))
            for buffer in (key_buffer, value_buffer)
        )
        if seen is not None:
            shown = _inside(start + jnp.arange(KEY_CHUNK, dtype=jnp.int32), *seen)[:, None]
            key, value = jnp.where(shown, key, 0), jnp.where(shown, value, 0)
        score = _scores(queries, key, lo, hi, start, softcap, bias)
        new_largest = jnp.maximum(largest, jnp.max(score, axis=2))
        base = _finite(new_largest)
        weight = jnp.exp(score - base[..., None])
        shrink = jnp.exp(largest - base)
        total = total * shrink + jnp.sum(weight, axis=2)
        output = output * shrink[..., None] + _dot(weight, value, _BY_HEAD_WV)
        return new_largest, total, output

    count = queries.shape[:2]
    state = (
        jnp.full(count, _MINUS_INFINITY, _FLOAT),
        jnp.zeros(count, _FLOAT),
        jnp.zeros((*count, value_buffer.shape[2]), _FLOAT),
    )
    largest, total, output = lax.fori_loop(*_chunk_range(first, last), one_chunk, state)
    return _finish(output, _finite(largest), total)


def dense_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rows: jax.Array,
    key_ranges: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    mask: jax.Array | None,
    *,
    scale: float,
) -> jax.Array:
    """Attention over contiguous K/V, by the same steps as over pages. Forward only.

    Args:
        query: ``[B, Sq, Hq, D]``.
        key, value: ``[B, Sk, Hkv, D]`` and ``[B, Sk, Hkv, Dv]``.
        rows: int32 ``[R, 2]``, the half-open range of queries of each row, ascending: packed
            documents, or one row of all queries. Other queries give zeros.
        key_ranges: int32 ``[B, R, 2]``, the union of the intervals of a row's queries. What lies
            outside, NaN in another document say, never reaches the row.
        lo, hi: int32 ``[B, Sq]``, the half-open interval of keys that each query sees.
        mask: ``None``, or what broadcasts to ``[B, Hq, Sq, Sk]``: boolean, true for keys that
            stay visible, or a float that is added to the scores, −inf for those that do not.

    Returns:
        ``[B, Sq, Hq, Dv]`` in the query's dtype; zero where a query sees nothing.
    """
    batch, tokens, num_heads, size = query.shape
    num_keys, heads = key.shape[1:3]
    num_rows = rows.shape[0]
    group = num_heads // max(heads, 1)
    if batch == 0 or tokens == 0 or num_keys == 0 or num_rows == 0:
        return jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype)
    chunk = query_chunk(tokens, num_rows, group)
    chunked = num_keys > WHOLE_TABLE
    key_rest = -num_keys % KEY_CHUNK if chunked else 0

    key, value = (x.astype(_FLOAT) for x in (key, value))
    if mask is not None:
        used = _used_keys(lo, hi, mask, num_keys)[:, :, None, None]
        key, value = jnp.where(used, key, 0), jnp.where(used, value, 0)
    # [B, H, Sk, D]
    key, value = (
        jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, key_rest), (0, 0)))
        for x in (key, value)
    )
    # [B, H, (Sq + chunk) * group, D]: the last chunk of the last row is a whole slice
    queries = (query.astype(_FLOAT) * scale).reshape(batch, tokens, heads, group, size)
    queries = jnp.pad(
        queries.transpose(0, 2, 1, 3, 4), ((0, 0), (0, 0), (0, chunk), (0, 0), (0, 0))
    )
    queries = queries.reshape(batch, heads, (tokens + chunk) * group, size)
    lo, hi = (jnp.pad(x, ((0, 0), (0, chunk))) for x in (lo, hi))
    if mask is not None:
        mask = jnp.broadcast_to(mask, (*mask.shape[:3], num_keys))
        more = chunk if mask.shape[2] > 1 else 0
        mask = jnp.pad(mask, ((0, 0), (0, 0), (0, more), (0, key_rest)))
    position = jnp.arange(num_keys + key_rest, dtype=jnp.int32)

    width = heads_at_once(heads)

    def of_heads(array: jax.Array, sample: jax.Array, head: jax.Array) -> jax.Array:
        part: jax.Array = _slice(array, (sample, head, 0, 0), (1, width, *array.shape[2:]))[0]
        return part

    def some_heads(index: jax.Array) -> jax.Array:
        sample, head = lax.div(index, heads), lax.rem(index, heads)
        own_queries, own_lo, own_hi = of_heads(queries, sample, head), lo[sample], hi[sample]

        def one_row(row: jax.Array, output: jax.Array) -> jax.Array:
            first, last = key_ranges[sample, row]
            own_key, own_value = (of_heads(x, sample, head) for x in (key, value))
            attend: Callable[..., OutputAndLSE] = _attend_at_once
            if chunked:  # a walk sets its chunks to zero as it reads them
                attend = partial(_attend_in_chunks, seen=(first, last))
            else:
                seen = _inside(position, first, last)[:, None]
                own_key, own_value = jnp.where(seen, own_key, 0), jnp.where(seen, own_value, 0)
            begin, end = rows[row]

            def one_chunk(at: jax.Array, output: jax.Array) -> jax.Array:
                start = begin + at * chunk
                bias = None
                if mask is not None:
                    at_query = (sample, head * group, start)
                    bias = partial(_apply_mask, mask, at_query, (width, group, chunk))
                # queries past the row's end see nothing here; their own row writes them later
                inside = start + jnp.arange(chunk, dtype=jnp.int32) < end
                part, _ = attend(
                    _slice(own_queries, (0, start * group, 0), (width, chunk * group, size)),
                    jnp.repeat(jnp.where(inside, _slice(own_lo, (start,), (chunk,)), 0), group),
                    jnp.repeat(jnp.where(inside, _slice(own_hi, (start,), (chunk,)), 0), group),
                    own_key,
                    own_value,
                    bias=bias,
                )
                part = part.astype(query.dtype)
                written: jax.Array = _update(output, part, (0, start * group, 0))
                return written

            chunks = lax.div(end - begin + (chunk - 1), chunk)
            filled: jax.Array = lax.fori_loop(0, chunks, one_chunk, output)
            return filled

        nothing = jnp.zeros((width, (tokens + chunk) * group, value.shape[3]), query.dtype)
        outputs: jax.Array = lax.fori_loop(0, num_rows, one_row, nothing)
        return outputs[:, : tokens * group]

    first = jnp.arange(0, batch * heads, width, dtype=jnp.int32)
    output: jax.Array = lax.map(some_heads, first)
    output = output.reshape(batch, heads, tokens, group, -1)
    return output.transpose(0, 2, 1, 3, 4).reshape(batch, tokens, num_heads, -1)


def _used_keys(lo: jax.Array, hi: jax.Array, mask: jax.Array, num_keys: int) -> jax.Array:
    """``[B, Sk]``: whether the mask and the intervals leave a key to any query of any head."""
    position = jnp.arange(num_keys, dtype=jnp.int32)
    shown = _inside(position, lo[..., None], hi[..., None])  # [B, Sq, Sk]
    stays = mask if mask.dtype == jnp.bool_ else mask != _MINUS_INFINITY
    seen: jax.Array = jnp.any(shown & jnp.any(stays, axis=1), axis=1)
    return seen


def _apply_mask(
    mask: jax.Array,
    at: tuple[jax.Array, jax.Array, jax.Array],
    heads: tuple[int, int, int],
    score: jax.Array,
    start: jax.Array | int,
) -> jax.Array:
    """The part of a mask at (sample, query head, query), applied to the scores of a chunk.

    ``heads`` is (KV heads, query heads of each, queries) of the chunk.
    """
    width, group, chunk = heads
    keys = score.shape[2]
    full = (1, width * group, chunk, keys)
    sizes = [1 if b == 1 else a for a, b in zip(full, mask.shape, strict=True)]
    begin = tuple(
        jnp.int32(0) if size == 1 else jnp.int32(i)
        for i, size in zip((*at, start), mask.shape, strict=True)
    )
    part = jnp.broadcast_to(_slice(mask, begin, sizes)[0], full[1:])
    part = part.reshape(width, group, chunk, keys).transpose(0, 2, 1, 3).reshape(score.shape)
    if mask.dtype == jnp.bool_:
        return jnp.where(part, score, _MINUS_INFINITY)
    return score + part.astype(_FLOAT)
