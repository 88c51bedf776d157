"""Tile shapes and splits: every choice that a launch makes, by written rules.

The shapes are judged from what the compiler reports, not tuned: no measurement stands behind
them yet. What they were judged by:

- No register is spilled, but for the one entry that says so. The accumulator ``[block_m, DV]``
  and the scores ``[block_m, block_n]`` are float32 in registers: 128 x 128 of each over 8 warps
  is 128 registers a thread, of 255, and addresses take many of the others.
- K and V tiles are staged in shared memory. With 2 stages the copy of the next tile starts when
  the last product of this one does, and is waited for after it; with 3 it has a whole step. 128
  x 128 of both in 16 bits and 3 stages is 192 KB, beside 32 KB of queries; 227 KB are there on
  sm_90 and sm_100, 163 KB on sm_80.
- More rows share each key that is loaded; with 16 rows or fewer reading the keys is all there is
  to do, and small programs of which several run at once hide its latency.
- Where a page holds a tile of keys, its address is one number for the tile; else each key has
  a number of its own. So 128 keys become 64 where a page is a multiple of 64 alone.
- Float32 over float32 is multiplied without tensor cores, from registers: tiles are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from backends.triton_kernels.tiles import TILE_FIELDS

MAX_HEAD_SIZE: Final = 256
POOL_DTYPES: Final = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
QUERY_DTYPES: Final = ("float32", "float16", "bfloat16")
ITEM_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}
VECTOR_BYTES: Final = 16
"""The widest load of a thread."""

MAX_SPLITS: Final = 16
SPLIT_STEPS: Final = 3
"""What a program costs beside its key tiles, counted in them: start, first loads, storing."""
MERGE_STEPS: Final = 3
"""What the merge costs, counted in key tiles: a launch, and reading the parts."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """How the work of an attention step is cut."""

    block_m: int  #: rows of a program: queries times heads of a group
    block_n: int  #: keys of a step
    queries: int  #: tokens of a program
    heads: int  #: query heads of a program, all of one KV head
    head_chunks: int  #: programs that share the query heads of a KV head
    num_warps: int
    num_stages: int
    programs_per_sm: int  #: that run at once


def padded(size: int) -> int:
    """The power of two that holds ``size`` columns; at least 16, as matrix products want."""
    return max(16, 1 << (size - 1).bit_length())


def refuse(*, head_size: int, head_size_v: int, dtype: str, query_dtype: str) -> str | None:
    """Why the attention kernel cannot serve such a layer; ``None`` where it can."""
    for name, size in (("head_size", head_size), ("head_size_v", head_size_v)):
        if not 1 <= size <= MAX_HEAD_SIZE:
            return f"{name} {size} is outside [1, {MAX_HEAD_SIZE}]"
    if dtype not in POOL_DTYPES:
        return f"a pool of {dtype} is none of {', '.join(POOL_DTYPES)}"
    if query_dtype not in QUERY_DTYPES:
        return f"queries of {query_dtype} are none of {', '.join(QUERY_DTYPES)}"
    if ITEM_BYTES[dtype] > 1 and query_dtype != dtype:
        return f"queries of {query_dtype} over a pool of {dtype}; they must be equal"
    return None


def alignment_unit(itemsize: int, *numbers: int) -> int:
    """The largest power of two of elements that divides all numbers, up to one vector.

    Args:
        itemsize: bytes of an element.
        numbers: offset and strides of a layer, in elements.
    """
    unit = VECTOR_BYTES // itemsize
    while any(number % unit for number in numbers):
        unit //= 2
    return unit


def is_uniform(block_stride: int, token_stride: int, block_size: int) -> bool:
    """Whether a token of the next block is one token stride further: adjacent blocks are dense."""
    return block_stride == block_size * token_stride


def vector_bytes(itemsize: int, unit: int, head_size: int) -> tuple[int, int]:
    """Bytes that one load of K, and one of V, can take: 16 unless the layout costs some.

    Args:
        itemsize: bytes of an element.
        unit: elements that divide offset and strides.
        head_size: elements of K in a cell; V follows.
    """
    elements = VECTOR_BYTES // itemsize
    return tuple(  # type: ignore[return-value]
        min(elements, _power_of_two_in(number)) * itemsize
        for number in (unit, _common(unit, head_size))
    )


def choose_tile(
    *,
    max_query_len: int,
    query_heads: int,
    kv_heads: int,
    head_size: int,
    head_size_v: int,
    query_dtype: str,
    dtype: str,
    block_size: int,
    capability: tuple[int, int],
    extents: bool = False,
) -> TileShape:
    """The tile shape of a step.

    Args:
        max_query_len: queries of the longest row; a bucket's tokens where that may change.
        capability: compute capability, ``(9, 0)`` for an H200.
        extents: keys are read as dense stretches, whatever the page.
    """
    group = query_heads // kv_heads
    block_m, block_n, warps, stages, per_sm = _block(
        rows=max_query_len * group,
        columns=padded(max(head_size, head_size_v)),
        query_dtype=query_dtype,
        dtype=dtype,
        block_size=block_size,
        capability=capability,
        extents=extents,
    )
    chunks, heads, queries = _pack(group, max_query_len, block_m)
    return TileShape(block_m, block_n, queries, heads, chunks, warps, stages, per_sm)


Block = tuple[int, int, int, int, int]
"""``block_m, block_n, num_warps, num_stages, programs_per_sm``."""

MANY_ROWS: Final[dict[tuple[int, int, int], Block]] = {
    # chip, bytes of a pool element, columns
    (80, 2, 64): (128, 64, 8, 3, 1),
    (80, 2, 128): (128, 32, 8, 3, 1),
    (80, 2, 256): (64, 32, 8, 3, 1),
    (80, 1, 64): (128, 32, 8, 3, 1),
    (80, 1, 128): (128, 32, 8, 3, 1),
    (80, 1, 256): (32, 32, 8, 3, 1),
    (90, 2, 64): (128, 128, 8, 3, 1),
    (90, 2, 128): (128, 128, 8, 3, 1),
    (90, 2, 256): (128, 32, 8, 3, 1),
    (90, 1, 64): (128, 64, 8, 3, 1),
    (90, 1, 128): (128, 64, 8, 3, 1),
    (90, 1, 256): (64, 32, 8, 3, 1),
    (100, 2, 64): (128, 64, 8, 3, 1),
    (100, 2, 128): (128, 64, 8, 3, 1),
    (100, 2, 256): (128, 32, 8, 3, 1),
    (100, 1, 64): (128, 64, 8, 3, 1),
    (100, 1, 128): (128, 64, 8, 3, 1),
    (100, 1, 256): (128, 32, 8, 3, 1),
}
"""Tiles of more than :data:`FEW_ROWS` rows, 16-bit queries. Columns are rounded up, 64 at least."""

FEW_ROWS: Final = 16
FEW: Final[dict[tuple[int, int], Block]] = {
    # bytes of a pool element, columns
    (2, 64): (16, 64, 4, 3, 2),
    (2, 128): (16, 32, 4, 3, 2),
    (2, 256): (16, 32, 4, 3, 2),
    (1, 64): (16, 32, 4, 3, 2),
    (1, 128): (16, 32, 8, 3, 2),
    (1, 256): (16, 32, 8, 3, 1),
}
"""Tiles of few rows, 16-bit queries; on any chip."""

FLOAT32: Final[dict[tuple[int, int], Block]] = {
    # bytes of a pool element, columns
    (4, 64): (32, 32, 8, 2, 1),
    (4, 128): (32, 32, 4, 2, 1),
    (4, 256): (32, 32, 8, 2, 1),
    (1, 64): (32, 32, 8, 2, 1),
    (1, 128): (32, 32, 8, 2, 1),
    (1, 256): (16, 16, 8, 2, 1),  # spills some registers even so
}
"""Float32 queries; on any chip. Few rows take 16 of these."""


def product_precision(*, query_dtype: str, dtype: str, precision: str = "ieee") -> str:
    """How float32 queries are multiplied; of no meaning for others.

    8-bit values are exact in TF32, and a float32 is the sum of three TF32 numbers to 2^-22 of it,
    so over 8-bit storage ``ieee`` becomes ``tf32x3``: the same numbers, from tensor cores, for
    operands that have to be decoded and would not fit the registers otherwise.
    """
    if query_dtype == "float32" and ITEM_BYTES[dtype] == 1 and precision == "ieee":
        return "tf32x3"
    return precision


def generation(capability: tuple[int, int]) -> int:
    """The chip whose shapes are taken: 80, 90 or 100.

    Others take those of sm_80, which ask for least. A launch that needs more shared memory
    than a chip has is refused by Triton.
    """
    return {9: 90, 10: 100}.get(capability[0], 80)


def _block(
    *,
    rows: int,
    columns: int,
    query_dtype: str,
    dtype: str,
    block_size: int,
    capability: tuple[int, int],
    extents: bool,
) -> Block:
    columns = max(columns, 64)
    few = rows <= FEW_ROWS
    if query_dtype == "float32":
        block_m, block_n, warps, stages, per_sm = FLOAT32[ITEM_BYTES[dtype], columns]
        return FEW_ROWS if few else block_m, block_n, warps, stages, per_sm
    if few:
        return FEW[ITEM_BYTES[dtype], columns]
    block = MANY_ROWS[generation(capability), ITEM_BYTES[dtype], columns]
    block_m, block_n, warps, stages, per_sm = block
    page_of_64 = block_size % 128 != 0 and block_size % 64 == 0
    if block_n == 128 and (page_of_64 or extents):  # with extents 128 would spill registers
        return block_m, 64, warps, stages, per_sm
    return block


def _pack(group: int, max_query_len: int, block_m: int) -> tuple[int, int, int]:
    """``head_chunks, heads, queries``: the cut of a group that fills most rows of a program.

    With fewer queries than rows, all heads of a group that fit share a program; with many,
    a chunk of heads that leaves fewer rows empty is better. Fewer chunks win a tie.
    """
    best = (0.0, 0, 0, 0)
    for chunks in range(1, group + 1):
        heads = -(-group // chunks)
        if heads > block_m or heads * (chunks - 1) >= group:
            continue
        queries = block_m // heads
        tiles = max(-(-max_query_len // queries), 1)
        filled = max_query_len * group / (tiles * chunks * block_m)
        if filled > best[0] * 1.05:
            best = (filled, chunks, heads, queries)
    if best[1] == 0:  # no queries
        chunks = -(-group // block_m)
        heads = -(-group // chunks)
        return chunks, heads, block_m // heads
    return best[1], best[2], best[3]


def choose_splits(tiles: Sequence[int], *, shape: TileShape, kv_heads: int, num_sms: int) -> int:
    """Into how many shares the keys of each tile are cut: what takes the fewest steps.

    ``num_sms * programs_per_sm`` programs run at once, so they come in waves. One share has the
    longest programs and no merge; more fill the last wave, and each adds its own start. A step
    whose tiles fill the chip many times over is not split.

    Args:
        tiles: see :func:`~backends.triton_kernels.tiles.query_tiles`.
        shape: the tile shape.
        kv_heads: of the pool.
        num_sms: processors of the chip.

    Returns:
        At least 1, at most :data:`MAX_SPLITS`.
    """
    lengths = [
        -(-(high - low) // shape.block_n)
        for low, high in zip(tiles[3::TILE_FIELDS], tiles[4::TILE_FIELDS])
        if low < high
    ]
    if not lengths:
        return 1
    programs = len(lengths) * kv_heads * shape.head_chunks
    mean, most = sum(lengths) / len(lengths), max(lengths)
    slots = num_sms * shape.programs_per_sm
    best, fewest = 1, _steps(programs, mean, most, slots, 1)
    for splits in range(2, min(MAX_SPLITS, most) + 1):
        steps = _steps(programs, mean, most, slots, splits)
        if steps < fewest * 0.97:  # a merge needs memory too
            best, fewest = splits, steps
    return best


def _steps(programs: int, mean: float, most: int, slots: int, splits: int) -> float:
    waves = -(-programs * splits // slots)
    extra = MERGE_STEPS if splits > 1 else 0
    longest = -(-most // splits) + SPLIT_STEPS
    return max(waves * (mean / splits + SPLIT_STEPS), longest) + extra


def _power_of_two_in(number: int) -> int:
    """The largest power of two that divides a number; 0 is divisible by any."""
    return number & -number if number else 1 << 30


def _common(unit: int, head_size: int) -> int:
    return min(_power_of_two_in(unit), _power_of_two_in(head_size))
