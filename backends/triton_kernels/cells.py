"""Cells moved bit for bit: writes at slots, copies of blocks, pages gathered to dense K and V."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from backends.triton_kernels.memory import load_place, typed_pointer


@triton.jit(
    do_not_specialize=[
        "num_tokens", "key_stride_t", "key_stride_h", "value_stride_t", "value_stride_h",
    ]
)  # fmt: skip
def write_kernel(
    pool_before, place, key, value, slots,
    num_tokens, key_stride_t, key_stride_h, value_stride_t, value_stride_h,
    pool,
    WORD: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr,
    KEY_UNIT: tl.constexpr, VALUE_UNIT: tl.constexpr, KEY_STEP: tl.constexpr,
    VALUE_STEP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store K and V of tokens at slots; a slot of −1 is skipped. A row is one head of one token.

    Grid: ``(cdiv(tokens * HEADS, ROWS), 1, 1)``. ``pool_before`` is the pool too.
    """
    offset, block_stride, head_stride, token_stride = load_place(place)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # 2^31 of them would be 64 GiB at least
    tokens = (rows // HEADS).to(tl.int64)
    heads = rows % HEADS
    slot = tl.load(slots + tokens, mask=tokens < num_tokens, other=-1).to(tl.int64)
    kept = slot >= 0
    k_columns = tl.arange(0, BLOCK_D)
    v_columns = tl.arange(0, BLOCK_DV)
    k_mask = kept[:, None] & (k_columns < D)[None, :]
    v_mask = kept[:, None] & (v_columns < DV)[None, :]
    k_rows = (tokens * key_stride_t + heads * key_stride_h) * KEY_UNIT
    v_rows = (tokens * value_stride_t + heads * value_stride_h) * VALUE_UNIT
    k_from = typed_pointer(key, WORD) + k_rows[:, None] + (k_columns * KEY_STEP)[None, :]
    v_from = typed_pointer(value, WORD) + v_rows[:, None] + (v_columns * VALUE_STEP)[None, :]
    k = tl.load(k_from, mask=k_mask)
    v = tl.load(v_from, mask=v_mask)
    block = slot // BLOCK_SIZE
    inside = slot % BLOCK_SIZE
    cell = (offset + block * block_stride + heads * head_stride + inside * token_stride) * UNIT
    target = typed_pointer(pool, WORD) + cell[:, None]
    tl.store(target + k_columns[None, :], k, mask=k_mask)
    tl.store(target + D + v_columns[None, :], v, mask=v_mask)


@triton.jit(do_not_specialize=["place_width"])
def copy_blocks_kernel(
    pool_before, places, source, destination, place_width,
    pool,
    WORD: tl.constexpr, HEADS: tl.constexpr, CONTENT: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Copy all cells of blocks to other blocks, in several layers; what pads a page stays.

    Grid: ``(pairs, cdiv(HEADS * BLOCK_SIZE, ROWS), layers)``. ``pool_before`` is the pool too.
    """
    layer = tl.program_id(2)
    offset, block_stride, head_stride, token_stride = load_place(places + layer * place_width)
    pair = tl.program_id(0)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    heads = rows // BLOCK_SIZE
    inside = rows % BLOCK_SIZE
    columns = tl.arange(0, BLOCK_C)
    mask = (rows < HEADS * BLOCK_SIZE)[:, None] & (columns < CONTENT)[None, :]
    cell = offset + heads * head_stride + inside * token_stride
    read = (cell + tl.load(source + pair).to(tl.int64) * block_stride) * UNIT
    write = (cell + tl.load(destination + pair).to(tl.int64) * block_stride) * UNIT
    words = typed_pointer(pool, WORD)
    content = tl.load(words + read[:, None] + columns[None, :], mask=mask)
    tl.store(words + write[:, None] + columns[None, :], content, mask=mask)


@triton.jit(
    do_not_specialize=[
        "table_width",
        "out_stride_t",
        "out_stride_h",
        "out_v_stride_t",
        "out_v_stride_h",
    ]
)
def gather_kernel(
    pool, place, block_table, first_key, cu_keys,
    table_width, out_stride_t, out_stride_h, out_v_stride_t, out_v_stride_h,
    key_out, value_out,
    WORD: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr,
    OUT_UNIT: tl.constexpr, OUT_V_UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Read the keys of rows from their pages to dense K and V.

    Grid: ``(cdiv(max_keys * HEADS, ROWS), rows, 1)``.
    """
    offset, block_stride, head_stride, token_stride = load_place(place)
    row = tl.program_id(1)
    start = tl.load(cu_keys + row)
    count = tl.load(cu_keys + row + 1) - start
    first = tl.load(first_key + row)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    keys = rows // HEADS
    heads = rows % HEADS
    real = keys < count
    positions = first + keys
    table_row = block_table + row.to(tl.int64) * table_width
    block = tl.load(table_row + positions // BLOCK_SIZE, mask=real, other=0).to(tl.int64)
    cell = (
        offset
        + block * block_stride
        + heads * head_stride
        + (positions % BLOCK_SIZE) * token_stride
    ) * UNIT
    k_columns = tl.arange(0, BLOCK_D)
    v_columns = tl.arange(0, BLOCK_DV)
    k_mask = real[:, None] & (k_columns < D)[None, :]
    v_mask = real[:, None] & (v_columns < DV)[None, :]
    words = typed_pointer(pool, WORD) + cell[:, None]
    k = tl.load(words + k_columns[None, :], mask=k_mask)
    v = tl.load(words + D + v_columns[None, :], mask=v_mask)
    at = (start + keys).to(tl.int64)
    k_to = (at * out_stride_t + heads * out_stride_h) * OUT_UNIT
    v_to = (at * out_v_stride_t + heads * out_v_stride_h) * OUT_V_UNIT
    tl.store(typed_pointer(key_out, WORD) + k_to[:, None] + k_columns[None, :], k, mask=k_mask)
    tl.store(typed_pointer(value_out, WORD) + v_to[:, None] + v_columns[None, :], v, mask=v_mask)
