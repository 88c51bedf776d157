"""Cases that the suites share: pools, steps, block tables and numbers.

A *pool shape* says what a pool holds, without a layout or a dtype; a *step* says what the rows
of one step do. Sizes of steps are multiples of a block size, so that lengths of 1, block - 1,
block and block + 1 tokens appear whatever it is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from layout_core import resolve
from layout_core.dtypes import DType
from layout_core.layouts import KVCacheLayout
from layout_core.legality import LEGAL_COMBINATIONS
from layout_core.rows import NULL_BLOCK_ID, Bucket, PagedAttentionRow
from layout_core.specs import FullAttentionSpec, KVCacheSpec, UniformTypeKVCacheSpecs
from layout_core.tensors import KVCacheConfig, KVCacheGroupSpec
from layout_core.views import ResolvedLayout
from layout_core.visibility import Spans, Visibility

Array = npt.NDArray[Any]

LAYOUTS: tuple[str, ...] = tuple(KVCacheLayout.__members__)

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}

POISON = 0xFF
"""A byte that is NaN in every one of these dtypes when repeated."""


# --- pools -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cells:
    """What a layer's cells hold, and how far its pages are padded."""

    kv_heads: int
    head_size: int
    head_size_v: int | None = None  #: ``None``: as ``head_size``
    padding: int = 0  #: elements of nothing at the end of each page

    @property
    def value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v

    def page_elements(self, block_size: int) -> int:
        """Elements of one page, padding excluded."""
        return self.kv_heads * block_size * (self.head_size + self.value_size)


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share a block table."""

    layers: tuple[Cells, ...]
    block_size: int


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What a pool holds, before a layout and a dtype are chosen."""

    name: str
    groups: tuple[Group, ...]
    num_blocks: int

    @property
    def padded(self) -> bool:
        return any(c.padding for g in self.groups for c in g.layers)

    @property
    def mixed_pages(self) -> bool:
        """Layers of one group with different cells."""
        return any(len(set(g.layers)) > 1 for g in self.groups)

    @property
    def unlike_groups(self) -> bool:
        """Groups whose (H, N, C) differ: an overlay of unlike pages."""
        return len({(g.block_size, g.layers[0]) for g in self.groups}) > 1

    def can_lie_in(self, layout: str) -> bool:
        """Whether a layout can hold this shape, by the library's table of legal combinations.

        The table itself is tested against brute force over bytes elsewhere; suites iterate
        over it, and expect a refusal wherever it says no.
        """
        row = LEGAL_COMBINATIONS[KVCacheLayout[layout]]
        many_heads = any(c.kv_heads > 1 for g in self.groups for c in g.layers)
        return (
            (row.page_padding or not self.padded or not many_heads)
            and (row.mixed_pages_one_group or not self.mixed_pages)
            and (row.unlike_overlay or not self.unlike_groups)
        )


def _same(layers: int, block_size: int, cells: Cells) -> Group:
    return Group((cells,) * layers, block_size)


PLAIN = PoolShape("plain", (_same(2, 4, Cells(2, 32)),), 24)
"""One group, dense pages: the shape that most steps run on."""

GROUPS = PoolShape("groups", (_same(2, 4, Cells(2, 32)), _same(2, 4, Cells(2, 32))), 40)
"""Four layers in two groups that overlay each other."""

PADDED = PoolShape("padded", (_same(2, 4, Cells(2, 32, padding=24)),), 24)
"""As PLAIN with page padding."""

MIXED = PoolShape("mixed-pages", (Group((Cells(2, 32), Cells(2, 32, 16), Cells(2, 32)), 4),), 24)
"""Layers of unlike page sizes in one group."""

PADDED_GROUPS = PoolShape(
    "padded-groups",
    (_same(2, 4, Cells(2, 32, padding=24)), _same(2, 4, Cells(2, 32, padding=24))),
    40,
)
"""Two groups with padded pages."""

UNLIKE = PoolShape("unlike-groups", (_same(2, 2, Cells(4, 32)), _same(2, 8, Cells(1, 32))), 40)
"""As W3, small: other block sizes and head counts, pages of equal bytes."""

ONE_HEAD_PADDED = PoolShape("one-head-padded", (_same(2, 4, Cells(1, 32, padding=24)),), 24)
"""With one head, layouts that keep H outside the page can pad pages too."""

POOLS: tuple[PoolShape, ...] = (
    PLAIN,
    GROUPS,
    PADDED,
    MIXED,
    PADDED_GROUPS,
    UNLIKE,
    ONE_HEAD_PADDED,
)

GEOMETRIES: tuple[tuple[Cells, int, int], ...] = (
    # cells, query heads, block size
    (Cells(2, 32), 2, 16),  # group size 1
    (Cells(2, 64), 4, 16),  # 2
    (Cells(1, 80), 4, 8),  # 4
    (Cells(3, 96), 3, 8),
    (Cells(2, 128), 8, 16),  # 4
    (Cells(1, 256), 2, 4),
    (Cells(2, 64, 32), 4, 8),  # D != Dv
    (Cells(2, 40, 72), 2, 5),  # D < Dv, nothing a power of two
    (Cells(1, 32), 7, 1),  # one token a block
)


def spec_of(cells: Cells, block_size: int, dtype: str) -> FullAttentionSpec:
    """The spec of one layer. What a layer may see is no part of it: batches carry that."""
    kind = DType.parse(dtype)
    page = (cells.page_elements(block_size) + cells.padding) * kind.itemsize
    return FullAttentionSpec(
        block_size=block_size,
        num_kv_heads=cells.kv_heads,
        head_size=cells.head_size,
        dtype=kind,
        head_size_v=cells.value_size,
        page_size_padded=page if cells.padding else None,
    )


def layer_name(group: int, place: int) -> str:
    return f"group{group}.layer{place}"


def config_of(shape: PoolShape, layout: str, dtype: str) -> KVCacheConfig:
    """The config that carries ``shape`` in ``layout``; groups overlay each other from byte 0.

    Raises:
        IllegalCombinationError: the layout cannot hold the shape.
    """
    groups = []
    for index, group in enumerate(shape.groups):
        specs: dict[str, KVCacheSpec] = {
            layer_name(index, place): spec_of(cells, group.block_size, dtype)
            for place, cells in enumerate(group.layers)
        }
        first = next(iter(specs.values()))
        one = all(spec == first for spec in specs.values())
        groups.append(
            KVCacheGroupSpec(
                list(specs),
                first
                if one
                else UniformTypeKVCacheSpecs(block_size=group.block_size, kv_cache_specs=specs),
            )
        )
    return resolve.make_config(groups, shape.num_blocks, layout)


def plan_of(shape: PoolShape, layout: str, dtype: str) -> ResolvedLayout:
    """The resolved plan of :func:`config_of`."""
    return resolve.resolve_layout(config_of(shape, layout, dtype))


# --- steps -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """What the rows of one step do, and what they may see."""

    name: str
    rows: tuple[PagedAttentionRow, ...]
    visibility: Visibility
    spans: tuple[Spans | None, ...] | None = None

    @property
    def writes(self) -> bool:
        """Whether any row writes a token."""
        return any(not r.read_only and r.query_len for r in self.rows)


CAUSAL = Visibility(causal=True)
FULL = Visibility(causal=False)


def row(
    name: str,
    query_len: int,
    seq_len: int,
    start: int | None = None,
    *,
    branch: int = 0,
    first_key: int = 0,
    context: str | None = None,
    read_only: bool = False,
) -> PagedAttentionRow:
    """A row; ``start`` defaults to bottom-right alignment, ``seq_len - query_len``."""
    return PagedAttentionRow(
        name,
        query_len,
        seq_len,
        seq_len - query_len if start is None else start,
        first_key,
        None if context is not None else branch,
        context,
        read_only,
    )


def steps(n: int) -> tuple[Step, ...]:
    """The steps that every engine, kernel, layout and dtype runs, for blocks of ``n`` tokens.

    At most 6 rows, ``12 * n`` queries and 6 blocks a row, so that one bucket holds them all.
    """
    prefix = n + 1 if n > 1 else 2  # never a whole number of blocks for n > 1
    longer = 2 * n + 1
    return (
        Step(
            "first step, lengths around a block",
            tuple(
                row(f"r{i}", length, length)
                for i, length in enumerate((1, max(n - 1, 1), n, n + 1, 2 * n + 1))
            ),
            CAUSAL,
        ),
        Step(
            "two CFG rows of unlike prefixes, the target one full span",
            (
                row("cfg", n, prefix + n, branch=0),
                row("cfg", n, longer + n, branch=1),
            ),
            CAUSAL,
            (((prefix, prefix + n),), ((longer, longer + n),)),
        ),
        Step(
            "target in the middle, trailing tokens from an earlier step",
            (row("a", n, 3 * n, n), row("b", n + 1, 4 * n, 1)),
            FULL,
        ),
        Step(
            "spans that differ, one row without any, one with an empty list",
            (
                row("a", 3 * n, 4 * n),
                row("b", n, 3 * n, n),
                row("c", n + 1, 2 * n + 1),
                row("d", n, n),
            ),
            FULL,
            (((n, 2 * n), (3 * n, 4 * n)), ((0, 3 * n),), (), None),
        ),
        Step(
            "causal window",
            (row("a", n + 1, 5 * n), row("b", n, n), row("c", 1, 6 * n - 1)),
            Visibility.from_sliding_window(n + 2, causal=True),
        ),
        Step(
            "window on both sides, unlike",
            (row("a", 2 * n, 5 * n, n), row("b", n, n)),
            Visibility(causal=False, window_left=n + 1, window_right=2),
        ),
        Step(
            "window open to the right, narrow on the left",
            (row("a", n + 1, 4 * n, 2 * n - 1), row("b", 2, 2)),
            Visibility(causal=False, window_left=0),
        ),
        Step(
            "chunks that are no multiple of a block",
            (row("a", 3 * n, 5 * n), row("b", 2, 2 * n), row("c", n, n)),
            Visibility(causal=True, chunk=n + 1),
        ),
        Step(
            "contexts read by several rows, more queries than keys",
            (
                row("a", n + 2, n, context="text", read_only=True),
                row("a", 2, 2 * n + 1, 0, context="image", read_only=True),
                row("a", n, n, context="text", read_only=True),
            ),
            FULL,
        ),
        Step(
            "bottom-right causal reads that start before position 0, beside a writer",
            (
                row("a", 3 * n, n, context="text", read_only=True),
                row("b", n + 1, 3 * n),
                row("c", 3, 2 * n, read_only=True),
            ),
            CAUSAL,
        ),
        Step(
            "empty rows: no queries, no keys, neither",
            (
                row("a", 0, 2 * n),
                row("b", 2, 0, context="none", read_only=True),
                row("c", 0, 0),
                row("d", 2, n + 1),
            ),
            CAUSAL,
        ),
        Step(
            "evicted tokens at the start of a row",
            (
                row("a", n, 5 * n + 1, first_key=2 * n + 1),
                row("b", 2, 4 * n, first_key=n),
                row("c", 2, n + 2, first_key=n),
            ),
            CAUSAL,
        ),
        Step(
            "evicted tokens under a window and without causality",
            (row("a", 2, 5 * n, 4 * n - 1, first_key=n + 1), row("b", n, 3 * n, first_key=1)),
            Visibility(causal=False, window_left=2 * n, window_right=n),
        ),
    )


@dataclass(frozen=True, slots=True)
class Room:
    """A bucket for groups of any block size: its blocks are counted in tokens."""

    tokens: int  #: queries of all rows
    rows: int
    keys: int  #: of the longest row

    def bucket(self, block_size: int) -> Bucket:
        return Bucket(self.tokens, self.rows, -(-self.keys // block_size))


def room_for(n: int) -> Room:
    """Room for each of :func:`steps`."""
    return Room(tokens=12 * n, rows=6, keys=6 * n)


STEP_NAMES: tuple[str, ...] = tuple(s.name for s in steps(4))


# --- block tables ------------------------------------------------------------------------------

Identity = tuple[str, int | str]


@dataclass(slots=True)
class Tables:
    """Block tables from a dictionary: the smallest ``BlockTables``."""

    blocks: dict[tuple[Identity, int], array[int]] = field(default_factory=dict)
    version: int = 0

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        return self.blocks[row.identity, group]

    def put(self, row: PagedAttentionRow, group: int, ids: Sequence[int]) -> None:
        """Give ``row`` its blocks in ``group``, as a manager's install does."""
        self.blocks[row.identity, group] = array("i", ids)
        self.version += 1


def assign_blocks(
    shape: PoolShape, rows: Sequence[PagedAttentionRow], rng: np.random.Generator
) -> Tables:
    """Blocks for the rows in every group: shuffled, no block owned twice, none of them null.

    A block whose tokens are all evicted is the null block, as after an eviction.
    """
    free = rng.permutation(np.arange(1, shape.num_blocks)).tolist()
    tables = Tables()
    lengths: dict[Identity, tuple[PagedAttentionRow, int, int]] = {}
    for r in rows:
        _, most, first = lengths.get(r.identity, (r, 0, r.first_key))
        lengths[r.identity] = (r, max(most, r.seq_len), min(first, r.first_key))
    for index, group in enumerate(shape.groups):
        for r, seq_len, first_key in lengths.values():
            n = group.block_size
            ids = [
                NULL_BLOCK_ID if (at + 1) * n <= first_key else free.pop()
                for at in range(-(-seq_len // n))
            ]
            tables.put(r, index, ids)
    return tables


def slots_of(ids: Sequence[int], positions: Sequence[int], block_size: int) -> list[int]:
    """Slots by their definition; the positions must be the row's."""
    return [ids[p // block_size] * block_size + p % block_size for p in positions]


# --- numbers -----------------------------------------------------------------------------------


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Normal numbers of a dtype, the same draw for every dtype."""
    return rng.standard_normal(shape, dtype=np.float32).astype(NUMPY_DTYPES[dtype])


def nans(shape: tuple[int, ...], dtype: str) -> Array:
    """An array of poison: NaN throughout."""
    kind = NUMPY_DTYPES[dtype]
    raw = np.full((*shape, kind.itemsize), POISON, np.uint8)
    return raw.view(kind)[..., 0]


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Random bit patterns: NaN payloads, signalling NaNs, infinities and denormals among them."""
    kind = NUMPY_DTYPES[dtype]
    raw = rng.integers(0, 256, (*shape, kind.itemsize), dtype=np.uint8)
    return raw.view(kind)[..., 0]


def special_bits(dtype: str) -> list[bytes]:
    """Bit patterns that a conversion would change, as little-endian bytes."""
    quiet_and_signalling = {
        "float32": (0x7F800001, 0xFF80DEAD, 0x7FC12345, 0xFFFFFFFF, 0x00000001, 0x80000000),
        "float16": (0x7C01, 0xFC55, 0x7E12, 0xFFFF, 0x0001, 0x8000),
        "bfloat16": (0x7F81, 0xFFA5, 0x7FC1, 0xFFFF, 0x0001, 0x8000),
        "float8_e4m3fn": (0x7F, 0xFF, 0x01, 0x80, 0x7E, 0xFE),
    }
    size = NUMPY_DTYPES[dtype].itemsize
    return [bits.to_bytes(size, "little") for bits in quiet_and_signalling[dtype]]


def legal(shapes: Sequence[PoolShape] = POOLS) -> Iterator[tuple[PoolShape, str]]:
    """Every shape with every layout that can hold it."""
    return ((s, layout) for s in shapes for layout in LAYOUTS if s.can_lie_in(layout))


# --- random steps ------------------------------------------------------------------------------


@st.composite
def random_steps(
    draw: st.DrawFn, *, block_size: int, max_rows: int, max_blocks: int, max_queries: int = 12
) -> Step:
    """A step with any rule, any rows, and spans where the rule allows them.

    Each row has at most ``max_blocks * block_size`` keys and ``max_queries`` queries.
    """
    rule = draw(
        st.sampled_from(
            [
                FULL,
                CAUSAL,
                Visibility(causal=True, window_left=3),
                Visibility(causal=True, window_left=block_size, window_right=2),
                Visibility(causal=False, window_left=2, window_right=1),
                Visibility(causal=False, window_right=block_size),
                Visibility(causal=True, chunk=block_size + 1),
                Visibility(causal=True, chunk=1),
            ]
        )
    )
    with_spans = not rule.has_window and rule.chunk is None and draw(st.booleans())
    rows, spans = [], []
    for index in range(draw(st.integers(1, max_rows))):
        seq_len = draw(st.integers(0, max_blocks * block_size))
        first_key = draw(st.integers(0, seq_len)) if draw(st.booleans()) else 0
        read_only = draw(st.booleans())
        if read_only:
            query_len = draw(st.integers(0, max_queries))
            start = draw(st.integers(-max_queries, seq_len))
        else:
            query_len = draw(st.integers(0, min(max_queries, seq_len - first_key)))
            start = draw(st.integers(first_key, seq_len - query_len))
        rows.append(
            row(f"r{index}", query_len, seq_len, start, first_key=first_key, read_only=read_only)
        )
        edges = sorted(draw(st.sets(st.integers(0, seq_len), max_size=4)))
        pairs = list(zip(edges[::2], edges[1::2]))
        spans.append(draw(st.sampled_from([None, pairs])))
    return Step("random", tuple(rows), rule, tuple(spans) if with_spans else None)
