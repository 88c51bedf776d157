"""Paged attention: one program for each tile of queries, KV head and share of the keys.

The queries of a tile are those of some neighbouring tokens times the heads that share the KV
head, so that grouped heads fill the rows of a matrix product. A program sees intervals alone.
Keys outside what its queries see together are not loaded, keys that all of them see are not
masked; the tiles in between are, in a loop of their own.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from backends.triton_kernels.memory import decode, load_place, typed_pointer

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load_scalar(scalar, IN_MEMORY: tl.constexpr):
    if IN_MEMORY:  # noqa: SIM108  # two types: Triton needs the statement
        value = tl.load(scalar)
    else:
        value = scalar
    return value


@triton.jit
def _tanh(x):
    """The hyperbolic tangent by exponentials, by its series near 0 where they would cancel."""
    size = tl.abs(x)
    decay = tl.exp2(size * (-2.0 * LOG2_E))
    far = (1.0 - decay) / (1.0 + decay)
    square = x * x
    near = size * (
        1.0
        + square
        * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))))
    )
    result = tl.where(size < 0.25, near, far)
    return tl.where(x < 0.0, -result, result)


@triton.jit
def _block_ids(
    table_row, tile, key_end,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, EXTENTS: tl.constexpr,
):  # fmt: skip
    """Ids of the blocks of a tile of keys: one where a page holds the tile, else one a key."""
    if EXTENTS:
        ids = tile  # no block is looked up
    elif BLOCK_SIZE % BLOCK_N == 0:
        entry = tile // (BLOCK_SIZE // BLOCK_N)
        ids = tl.load(table_row + entry, mask=tile * BLOCK_N < key_end, other=0)
    else:
        keys = tl.arange(0, BLOCK_N)
        if BLOCK_N % BLOCK_SIZE == 0:
            # the part that depends on the key alone stays out of the loop
            entries = tile * (BLOCK_N // BLOCK_SIZE) + keys // BLOCK_SIZE
        else:
            entries = (tile * BLOCK_N + keys) // BLOCK_SIZE
        ids = tl.load(table_row + entries, mask=tile * BLOCK_N + keys < key_end, other=0)
    return ids


@triton.jit
def _key_offsets(
    ids, tile, block_stride, token_stride,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, EXTENTS: tl.constexpr,
):  # fmt: skip
    """Offsets of a tile's keys from the head's first cell, in units; 64 bits, ``[BLOCK_N]``."""
    keys = tl.arange(0, BLOCK_N)
    if EXTENTS:
        offsets = tile.to(tl.int64) * BLOCK_N * token_stride + keys * token_stride
    elif BLOCK_SIZE % BLOCK_N == 0:
        first = (tile % (BLOCK_SIZE // BLOCK_N)) * BLOCK_N
        offsets = (ids.to(tl.int64) * block_stride + first * token_stride) + keys * token_stride
    elif BLOCK_N % BLOCK_SIZE == 0:
        offsets = ids.to(tl.int64) * block_stride + (keys % BLOCK_SIZE) * token_stride
    else:
        offsets = (
            ids.to(tl.int64) * block_stride + ((tile * BLOCK_N + keys) % BLOCK_SIZE) * token_stride
        )
    return offsets


@triton.jit
def _attend(
    total, weight, top, queries, cells, table_row, block_stride, token_stride,
    score_scale, softcap, first_key, key_end, row_lo, row_hi, begin, left, resume, end,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, DTYPE: tl.constexpr, COMPUTE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
    EXTENTS: tl.constexpr,
):  # fmt: skip
    """Add the key tiles ``[begin, begin + left)`` and ``[resume, end)`` to the running softmax."""
    keys = tl.arange(0, BLOCK_N)
    k_columns = tl.arange(0, BLOCK_D)
    v_columns = tl.arange(0, BLOCK_DV)
    count = left + end - resume
    tile = tl.where(left > 0, begin, resume)
    # the ids of a tile are loaded while the one before is multiplied
    ids = _block_ids(table_row, tile, key_end, BLOCK_SIZE, BLOCK_N, EXTENTS)
    for step in range(count):
        offsets = (
            _key_offsets(ids, tile, block_stride, token_stride, BLOCK_SIZE, BLOCK_N, EXTENTS) * UNIT
        )
        k_pointers = cells + offsets[:, None] + k_columns[None, :]
        v_pointers = cells + D + offsets[:, None] + v_columns[None, :]
        if MASKED:
            positions = tile * BLOCK_N + keys
            inside = (positions >= first_key) & (positions < key_end)
            k_raw = tl.load(k_pointers, mask=inside[:, None] & (k_columns < D)[None, :], other=0)
            v_raw = tl.load(v_pointers, mask=inside[:, None] & (v_columns < DV)[None, :], other=0)
        else:
            if D == BLOCK_D:
                k_raw = tl.load(k_pointers)
            else:
                k_raw = tl.load(k_pointers, mask=(k_columns < D)[None, :], other=0)
            if DV == BLOCK_DV:
                v_raw = tl.load(v_pointers)
            else:
                v_raw = tl.load(v_pointers, mask=(v_columns < DV)[None, :], other=0)
        following = tl.where(step + 1 < left, begin + step + 1, resume + step + 1 - left)
        next_ids = _block_ids(table_row, following, key_end, BLOCK_SIZE, BLOCK_N, EXTENTS)
        k = decode(k_raw, DTYPE, COMPUTE)
        scores = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * score_scale
        if SOFTCAP:
            scores = softcap * _tanh(scores / softcap) * LOG2_E
        if MASKED:
            seen = (positions[None, :] >= row_lo[:, None]) & (positions[None, :] < row_hi[:, None])
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # none seen so far
        else:
            new_top = tl.maximum(top, tl.max(scores, 1))
            shift = new_top
        weights = tl.exp2(scores - shift[:, None])
        faded = tl.exp2(top - shift)
        weight = weight * faded + tl.sum(weights, 1)
        total = total * faded[:, None]
        v = decode(v_raw, DTYPE, COMPUTE)
        total = tl.dot(weights.to(COMPUTE), v, total, input_precision=PRECISION)
        top = new_top
        ids = next_ids
        tile = following
    return total, weight, top


@triton.jit(do_not_specialize=["query_stride_t", "query_stride_h", "table_width", "num_tokens"])
def paged_attention_kernel(
    pool, place, query, tiles, lo, hi, block_table,
    score_scale, value_scale, softcap,
    query_stride_t, query_stride_h, table_width, num_tokens,
    out, lse,
    DTYPE: tl.constexpr, QUERY_HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, QUERY_UNIT: tl.constexpr,
    QUERY_STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HEADS: tl.constexpr, HEAD_CHUNKS: tl.constexpr, NUM_SPLITS: tl.constexpr,
    SOFTCAP: tl.constexpr, SCALARS_IN_MEMORY: tl.constexpr, PRECISION: tl.constexpr,
    EXTENTS: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Attention of the tiles of a work list; see ``plans.plan_attention``.

    Grid: ``(tiles, KV_HEADS * HEAD_CHUNKS, NUM_SPLITS)``.
    """
    GROUP: tl.constexpr = QUERY_HEADS // KV_HEADS
    entry = tiles + tl.program_id(0) * 8
    split = tl.program_id(2)
    kv_head = tl.program_id(1) // HEAD_CHUNKS
    chunk = tl.program_id(1) % HEAD_CHUNKS
    row = tl.load(entry)
    first = tl.load(entry + 1)
    count = tl.load(entry + 2)
    first_key = tl.load(entry + 3)
    key_end = tl.load(entry + 4)
    full_begin = tl.load(entry + 5)
    full_end = tl.load(entry + 6)
    offset, block_stride, head_stride, token_stride = load_place(place)
    scale = _load_scalar(score_scale, SCALARS_IN_MEMORY)
    out_scale = _load_scalar(value_scale, SCALARS_IN_MEMORY)
    cap = _load_scalar(softcap, SCALARS_IN_MEMORY)
    if not SOFTCAP:
        scale = scale * LOG2_E
    COMPUTE: tl.constexpr = tl.float32 if UPCAST else query.dtype.element_ty

    rows = tl.arange(0, BLOCK_M)
    at = rows // HEADS
    in_group = chunk * HEADS + rows % HEADS
    real = (at < count) & (in_group < GROUP)
    tokens = (first + at).to(tl.int64)
    heads = kv_head * GROUP + in_group
    row_lo = tl.load(lo + tokens, mask=real, other=0)
    row_hi = tl.load(hi + tokens, mask=real, other=0)
    columns = tl.arange(0, BLOCK_D)
    query_rows = (tokens * query_stride_t + heads * query_stride_h) * QUERY_UNIT
    queries = tl.load(
        query + query_rows[:, None] + (columns * QUERY_STEP)[None, :],
        mask=real[:, None] & (columns < D)[None, :],
        other=0.0,
    ).to(COMPUTE)

    # tiles of keys: this program's share, and inside it the run that all queries see
    tile_begin = first_key // BLOCK_N
    tile_end = tl.cdiv(key_end, BLOCK_N)
    share = tl.cdiv(tile_end - tile_begin, NUM_SPLITS)
    begin = tl.minimum(tile_begin + split * share, tile_end)
    end = tl.minimum(begin + share, tile_end)
    full_first = tl.minimum(tl.maximum(tl.cdiv(full_begin, BLOCK_N), begin), end)
    full_last = tl.minimum(tl.maximum(full_end // BLOCK_N, full_first), end)

    cells = typed_pointer(pool, DTYPE) + (offset + kv_head * head_stride) * UNIT
    if EXTENTS:  # the row's blocks follow one another, as if the first were number `start`
        start = tl.load(entry + 7).to(tl.int64)
        cells = cells + start * block_stride * UNIT
    table_row = block_table + row.to(tl.int64) * table_width
    total = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total, weight, top = _attend(
        total, weight, top, queries, cells, table_row, block_stride, token_stride,
        scale, cap, first_key, key_end, row_lo, row_hi,
        full_first, full_last - full_first, end, end,
        False, SOFTCAP, DTYPE, COMPUTE, D, DV, BLOCK_D, BLOCK_DV,
        BLOCK_SIZE, BLOCK_N, UNIT, PRECISION, EXTENTS,
    )  # fmt: skip
    total, weight, top = _attend(
        total, weight, top, queries, cells, table_row, block_stride, token_stride,
        scale, cap, first_key, key_end, row_lo, row_hi,
        begin, full_first - begin, full_last, end,
        True, SOFTCAP, DTYPE, COMPUTE, D, DV, BLOCK_D, BLOCK_DV,
        BLOCK_SIZE, BLOCK_N, UNIT, PRECISION, EXTENTS,
    )  # fmt: skip

    nothing = weight == 0.0
    divisor = tl.where(nothing, 1.0, weight)
    result = total * (out_scale / divisor)[:, None]
    sums = tl.where(nothing, float("-inf"), (top + tl.log2(divisor)) * LN_2)
    out_rows = (split.to(tl.int64) * num_tokens + tokens) * QUERY_HEADS + heads
    tl.store(lse + out_rows, sums, mask=real)
    v_columns = tl.arange(0, BLOCK_DV)
    tl.store(
        out + (out_rows * DV)[:, None] + v_columns[None, :],
        result.to(out.dtype.element_ty),
        mask=real[:, None] & (v_columns < DV)[None, :],
    )


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    partial_out, partial_lse, num_rows,
    out, lse,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, ROWS: tl.constexpr, NUM_SPLITS: tl.constexpr,
):  # fmt: skip
    """Merge the shares of the keys by their LSE. Rows are tokens times query heads.

    Grid: ``(cdiv(num_rows, ROWS), 1, 1)``.
    """
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_DV)
    real = rows < num_rows
    total = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    at = rows
    for _ in range(NUM_SPLITS):
        part_lse = tl.load(partial_lse + at, mask=real, other=float("-inf"))
        some = part_lse > float("-inf")
        part = tl.load(
            partial_out + (at * DV)[:, None] + columns[None, :],
            mask=(real & some)[:, None] & (columns < DV)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, part_lse)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        faded = tl.exp2((top - shift) * LOG2_E)
        share = tl.exp2((part_lse - shift) * LOG2_E)
        total = total * faded[:, None] + part * share[:, None]
        weight = weight * faded + share
        top = new_top
        at += num_rows
    nothing = weight == 0.0
    divisor = tl.where(nothing, 1.0, weight)
    tl.store(lse + rows, tl.where(nothing, float("-inf"), top + tl.log(divisor)), mask=real)
    tl.store(
        out + (rows * DV)[:, None] + columns[None, :],
        (total / divisor[:, None]).to(out.dtype.element_ty),
        mask=real[:, None] & (columns < DV)[None, :],
    )
