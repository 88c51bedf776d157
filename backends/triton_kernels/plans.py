"""From shapes to launches: one function for each operation. Integers in, nothing read.

Numbers are elements unless said otherwise. A layer's *place* is data, an array that holds
``offset, block_stride, head_stride, token_stride`` in units of ``unit`` elements, so that
equal layers share a launch and a program.
"""

from __future__ import annotations

from backends.triton_kernels import attention, cells
from backends.triton_kernels.configs import (
    ITEM_BYTES,
    TileShape,
    alignment_unit,
    padded,
    product_precision,
)
from backends.triton_kernels.launch import Buffer, Constant, Launch, Parameter, Scalar

Strides = tuple[int, int, int]

MERGE_ROWS = 16
MOVED_BYTES = 16 * 1024
"""What a program of the moving kernels holds in registers at most: 128 bytes a thread."""


def plan_write(
    *,
    num_tokens: int,
    kv_heads: int,
    head_size: int,
    head_size_v: int,
    block_size: int,
    dtype: str,
    unit: int,
    key_strides: Strides | None = None,
    value_strides: Strides | None = None,
) -> Launch:
    """Store K and V at slots, in place, bit for bit; slots of −1 are skipped.

    Buffers: ``pool``, ``place``, ``key [T, H, D]``, ``value [T, H, Dv]``, ``slots [T]``.

    Args:
        num_tokens: ``T``.
        kv_heads, head_size, head_size_v, block_size: of the layer.
        dtype: of the pool.
        unit: elements that divide the layer's offset and strides.
        key_strides, value_strides: of tokens, heads, columns; ``None`` is contiguous.
    """
    size = ITEM_BYTES[dtype]
    key_strides = key_strides or (kv_heads * head_size, head_size, 1)
    value_strides = value_strides or (kv_heads * head_size_v, head_size_v, 1)
    key_unit = alignment_unit(size, *key_strides[:2])
    value_unit = alignment_unit(size, *value_strides[:2])
    block_d, block_dv = padded(head_size), padded(head_size_v)
    rows = _rows((block_d + block_dv) * size)
    return Launch(
        kernel=cells.write_kernel,
        grid=(-(-num_tokens * kv_heads // rows), 1, 1),
        parameters=(
            Buffer("pool_before", "pool", "pool", "in"),
            Buffer("place", "place", "int", "in"),
            Buffer("key", "key", dtype, "in"),
            Buffer("value", "value", dtype, "in"),
            Buffer("slots", "slots", "int", "in"),
            Scalar("num_tokens", "int", num_tokens),
            Scalar("key_stride_t", "int", key_strides[0] // key_unit),
            Scalar("key_stride_h", "int", key_strides[1] // key_unit),
            Scalar("value_stride_t", "int", value_strides[0] // value_unit),
            Scalar("value_stride_h", "int", value_strides[1] // value_unit),
            Buffer("pool", "pool", "pool", "out"),
        ),
        constants=_constants(
            WORD=f"uint{8 * size}",
            HEADS=kv_heads,
            D=head_size,
            DV=head_size_v,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            BLOCK_SIZE=block_size,
            UNIT=unit,
            KEY_UNIT=key_unit,
            VALUE_UNIT=value_unit,
            KEY_STEP=key_strides[2],
            VALUE_STEP=value_strides[2],
            ROWS=rows,
        ),
        num_warps=4,
        num_stages=1,
    )


def plan_copy_blocks(
    *,
    num_pairs: int,
    num_layers: int,
    kv_heads: int,
    head_size: int,
    head_size_v: int,
    block_size: int,
    dtype: str,
    unit: int,
    place_width: int = 4,
) -> Launch:
    """Copy whole blocks in layers of one shape, bit for bit; padding of pages stays as it is.

    Buffers: ``pool``, ``places [num_layers, place_width]``, ``source [P]``,
    ``destination [P]``: block ids as the layers' views count them.

    Args:
        num_pairs: ``P``.
        num_layers: how many layers.
        place_width: integers from one layer's place to the next; the first 4 are used.
    """
    size = ITEM_BYTES[dtype]
    content = head_size + head_size_v
    block_c = padded(content)
    rows = min(_rows(block_c * size), padded(kv_heads * block_size))
    return Launch(
        kernel=cells.copy_blocks_kernel,
        grid=(num_pairs, -(-kv_heads * block_size // rows), num_layers),
        parameters=(
            Buffer("pool_before", "pool", "pool", "in"),
            Buffer("places", "places", "int", "in"),
            Buffer("source", "source", "int", "in"),
            Buffer("destination", "destination", "int", "in"),
            Scalar("place_width", "int", place_width),
            Buffer("pool", "pool", "pool", "out"),
        ),
        constants=_constants(
            WORD=f"uint{8 * size}",
            HEADS=kv_heads,
            CONTENT=content,
            BLOCK_C=block_c,
            BLOCK_SIZE=block_size,
            UNIT=unit,
            ROWS=rows,
        ),
        num_warps=4,
        num_stages=1,
    )


def plan_gather(
    *,
    num_rows: int,
    max_keys: int,
    total_keys: int,
    table_width: int,
    kv_heads: int,
    head_size: int,
    head_size_v: int,
    block_size: int,
    dtype: str,
    unit: int,
    head_major: bool = False,
) -> Launch:
    """Read the keys of rows from their pages to dense K and V, one row after another.

    Buffers: ``pool``, ``place``, ``block_table [R, table_width]``, ``first_key [R]``,
    ``cu_keys [R + 1]``; out: ``key_out``, ``value_out``, ``[total, H, D]`` or, head-major,
    ``[H, total, D]``. Row ``r``'s keys are the positions from ``first_key[r]`` on.

    Args:
        num_rows: ``R``.
        max_keys: of the longest row.
        total_keys: of all rows, ``cu_keys[R]``.
        table_width: entries of a block table row.
    """
    size = ITEM_BYTES[dtype]
    block_d, block_dv = padded(head_size), padded(head_size_v)
    rows = _rows((block_d + block_dv) * size)
    strides: list[tuple[int, int]] = []
    shapes: list[tuple[int, int, int]] = []
    for columns in (head_size, head_size_v):
        if head_major:
            shapes.append((kv_heads, total_keys, columns))
            strides.append((columns, total_keys * columns))
        else:
            shapes.append((total_keys, kv_heads, columns))
            strides.append((kv_heads * columns, columns))
    units = [alignment_unit(size, *pair) for pair in strides]
    word = f"uint{8 * size}"
    return Launch(
        kernel=cells.gather_kernel,
        grid=(-(-max_keys * kv_heads // rows), num_rows, 1),
        parameters=(
            Buffer("pool", "pool", "pool", "in"),
            Buffer("place", "place", "int", "in"),
            Buffer("block_table", "block_table", "int32", "in"),
            Buffer("first_key", "first_key", "int32", "in"),
            Buffer("cu_keys", "cu_keys", "int32", "in"),
            Scalar("table_width", "int", table_width),
            Scalar("out_stride_t", "int", strides[0][0] // units[0]),
            Scalar("out_stride_h", "int", strides[0][1] // units[0]),
            Scalar("out_v_stride_t", "int", strides[1][0] // units[1]),
            Scalar("out_v_stride_h", "int", strides[1][1] // units[1]),
            Buffer("key_out", "key_out", dtype, "out", shapes[0]),
            Buffer("value_out", "value_out", dtype, "out", shapes[1]),
        ),
        constants=_constants(
            WORD=word,
            HEADS=kv_heads,
            D=head_size,
            DV=head_size_v,
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            BLOCK_SIZE=block_size,
            UNIT=unit,
            OUT_UNIT=units[0],
            OUT_V_UNIT=units[1],
            ROWS=rows,
        ),
        num_warps=4,
        num_stages=1,
    )


def plan_attention(
    *,
    shape: TileShape,
    num_tokens: int,
    num_tiles: int,
    query_heads: int,
    kv_heads: int,
    head_size: int,
    head_size_v: int,
    block_size: int,
    table_width: int,
    dtype: str,
    query_dtype: str,
    unit: int,
    query_strides: Strides | None = None,
    num_splits: int = 1,
    extents: bool = False,
    has_softcap: bool = False,
    scalars_in_memory: bool = False,
    precision: str = "ieee",
    capability: tuple[int, int] = (9, 0),
    upcast: bool = False,
) -> tuple[Launch, ...]:
    """Attention of packed rows over their pages: one launch, or two where keys are split.

    Buffers: ``pool``, ``place``, ``query [T, Hq, D]``, ``tiles [num_tiles, 8]``, ``lo [T]``,
    ``hi [T]``, ``block_table [R, table_width]`` (the last four int32); out: ``out [T, Hq, Dv]``
    in the query's dtype and ``lse [T, Hq]`` in float32. With splits, ``partial_out`` and
    ``partial_lse`` between the two launches.

    Every entry of the outputs is written if the tiles cover all ``T`` queries, as those of
    :func:`~backends.triton_kernels.tiles.query_tiles` do; zero and −∞ where nothing is seen.

    Args:
        shape: of :func:`~backends.triton_kernels.configs.choose_tile`.
        num_tokens: ``T``, padding included.
        num_tiles: entries of the work list, padding included.
        query_heads, kv_heads, head_size, head_size_v, block_size: of the layer.
        table_width: entries of a block table row.
        dtype, query_dtype: of pool and queries.
        unit: elements that divide the layer's offset and strides.
        query_strides: of tokens, heads, columns; ``None`` is contiguous.
        num_splits: of :func:`~backends.triton_kernels.configs.choose_splits`.
        extents: read the keys of each tile as one dense stretch. The layer's strides must be
            uniform (:func:`~backends.triton_kernels.configs.is_uniform`) and the tiles marked
            (:func:`~backends.triton_kernels.tiles.mark_extents`); the block table is not read.
        has_softcap: whether scores are capped.
        scalars_in_memory: ``score_scale`` (softmax scale times K's scale), ``value_scale`` and
            ``softcap`` are float32 arrays of one element; else numbers given at each call.
        precision: of float32 products: ``ieee``, ``tf32x3`` or ``tf32``; see
            :func:`~backends.triton_kernels.configs.product_precision`.
        capability: compute capability of the chip.
        upcast: multiply in float32, for the interpreter, which multiplies bfloat16 wrongly.
    """
    query_size = ITEM_BYTES[query_dtype]
    query_strides = query_strides or (query_heads * head_size, head_size, 1)
    query_unit = alignment_unit(query_size, *query_strides[:2])
    split = num_splits > 1
    out_shape = (num_tokens, query_heads, head_size_v)
    lse_shape = (num_tokens, query_heads)
    scalars: tuple[Parameter, ...] = tuple(
        Buffer(name, name, "float32", "in") if scalars_in_memory else Scalar(name, "float", None)
        for name in ("score_scale", "value_scale", "softcap")
    )
    if split:
        outputs = (
            Buffer("out", "partial_out", "float32", "out", (num_splits, *out_shape)),
            Buffer("lse", "partial_lse", "float32", "out", (num_splits, *lse_shape)),
        )
    else:
        outputs = (
            Buffer("out", "out", query_dtype, "out", out_shape),
            Buffer("lse", "lse", "float32", "out", lse_shape),
        )
    block_dv = padded(head_size_v)
    attend = Launch(
        kernel=attention.paged_attention_kernel,
        grid=(num_tiles, kv_heads * shape.head_chunks, num_splits),
        parameters=(
            Buffer("pool", "pool", "pool", "in"),
            Buffer("place", "place", "int", "in"),
            Buffer("query", "query", query_dtype, "in"),
            Buffer("tiles", "tiles", "int32", "in"),
            Buffer("lo", "lo", "int32", "in"),
            Buffer("hi", "hi", "int32", "in"),
            Buffer("block_table", "block_table", "int32", "in"),
            *scalars,
            Scalar("query_stride_t", "int", query_strides[0] // query_unit),
            Scalar("query_stride_h", "int", query_strides[1] // query_unit),
            Scalar("table_width", "int", table_width),
            Scalar("num_tokens", "int", num_tokens),
            *outputs,
        ),
        constants=_constants(
            DTYPE=_read_as(dtype, capability),
            QUERY_HEADS=query_heads,
            KV_HEADS=kv_heads,
            D=head_size,
            DV=head_size_v,
            BLOCK_D=padded(head_size),
            BLOCK_DV=block_dv,
            BLOCK_SIZE=block_size,
            UNIT=unit,
            QUERY_UNIT=query_unit,
            QUERY_STEP=query_strides[2],
            BLOCK_M=shape.block_m,
            BLOCK_N=shape.block_n,
            HEADS=shape.heads,
            HEAD_CHUNKS=shape.head_chunks,
            NUM_SPLITS=num_splits,
            SOFTCAP=has_softcap,
            SCALARS_IN_MEMORY=scalars_in_memory,
            PRECISION=product_precision(query_dtype=query_dtype, dtype=dtype, precision=precision),
            EXTENTS=extents,
            UPCAST=upcast,
        ),
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if not split:
        return (attend,)
    num_rows = num_tokens * query_heads
    merge = Launch(
        kernel=attention.merge_kernel,
        grid=(-(-num_rows // MERGE_ROWS), 1, 1),
        parameters=(
            Buffer("partial_out", "partial_out", "float32", "in"),
            Buffer("partial_lse", "partial_lse", "float32", "in"),
            Scalar("num_rows", "int", num_rows),
            Buffer("out", "out", query_dtype, "out", out_shape),
            Buffer("lse", "lse", "float32", "out", lse_shape),
        ),
        constants=_constants(
            DV=head_size_v, BLOCK_DV=block_dv, ROWS=MERGE_ROWS, NUM_SPLITS=num_splits
        ),
        num_warps=4,
        num_stages=1,
    )
    return attend, merge


def _read_as(dtype: str, capability: tuple[int, int]) -> str:
    """How the kernel reads pool elements: chips before sm_89 know no float8 e4m3."""
    if dtype == "float8_e4m3fn" and capability >= (8, 9):
        return "native_float8_e4m3fn"
    return dtype


def _rows(row_bytes: int) -> int:
    """Rows of a program that moves cells; a power of two."""
    fit = max(1, min(64, MOVED_BYTES // row_bytes))
    return 1 << (fit.bit_length() - 1)


def _constants(**constants: Constant) -> tuple[tuple[str, Constant], ...]:
    return tuple(constants.items())
