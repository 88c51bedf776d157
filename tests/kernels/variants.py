"""Every kernel variant that the rules choose, as launches to compile ahead of time.

The tables of :mod:`backends.triton_kernels.configs` are gone through entry by entry. What is
no entry of a table (how a page lies to a tile, splits, a softcap, scalars in memory, extents)
is rotated through them, so that each appears on each chip.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from backends.triton_kernels.compiling import CAPABILITIES, Compiled, compile_launch
from backends.triton_kernels.configs import (
    FEW,
    FLOAT32,
    ITEM_BYTES,
    MANY_ROWS,
    TileShape,
    choose_tile,
    generation,
)
from backends.triton_kernels.launch import Launch
from backends.triton_kernels.plans import plan_attention, plan_copy_blocks, plan_gather, plan_write

PAGES = (128, 16, 24)
"""A page that holds a tile of keys, one that divides it, one that does neither."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A launch for a chip, described so that it can be made in another process."""

    name: str
    capability: tuple[int, int]
    kernel: str  #: attention, merge, write, copy or gather
    dtype: str
    query_dtype: str
    head_size: int
    head_size_v: int
    max_query_len: int
    block_size: int
    splits: int = 1
    softcap: bool = False
    scalars_in_memory: bool = False
    extents: bool = False
    unit: int | None = None  #: ``None``: of 16 bytes
    shape: TileShape | None = None  #: ``None``: what the rule chooses

    def launch(self) -> Launch:
        """The launch, as an engine would plan it: 16 query and 8 KV heads."""
        unit = self.unit or 16 // ITEM_BYTES[self.dtype]
        if self.kernel == "write":
            return plan_write(num_tokens=512, unit=unit, **self._layer())
        if self.kernel == "copy":
            return plan_copy_blocks(num_pairs=4, num_layers=2, unit=unit, **self._layer())
        if self.kernel == "gather":
            return plan_gather(
                num_rows=2, max_keys=512, total_keys=900, table_width=32, unit=unit, **self._layer()
            )
        shape = self.shape or self.chosen()
        launches = plan_attention(
            shape=shape,
            num_tokens=self.max_query_len,
            num_tiles=8,
            query_heads=16,
            table_width=64,
            query_dtype=self.query_dtype,
            unit=unit,
            num_splits=self.splits,
            extents=self.extents,
            has_softcap=self.softcap,
            scalars_in_memory=self.scalars_in_memory,
            capability=self.capability,
            **self._layer(),
        )
        return launches[1 if self.kernel == "merge" else 0]

    def chosen(self) -> TileShape:
        """The tile shape that the rule chooses."""
        return choose_tile(
            max_query_len=self.max_query_len,
            query_heads=16,
            kv_heads=8,
            head_size=self.head_size,
            head_size_v=self.head_size_v,
            query_dtype=self.query_dtype,
            dtype=self.dtype,
            block_size=self.block_size,
            capability=self.capability,
            extents=self.extents,
        )

    def _layer(self) -> dict[str, object]:
        return {
            "kv_heads": 8,
            "head_size": self.head_size,
            "head_size_v": self.head_size_v,
            "block_size": self.block_size,
            "dtype": self.dtype,
        }


def compile_variant(variant: Variant) -> Compiled:
    """For a pool of processes."""
    return compile_launch(variant.launch(), variant.capability)


def variants() -> list[Variant]:
    """All of them, for all chips."""
    return [v for capability in CAPABILITIES for v in _of_chip(capability)]


def _of_chip(capability: tuple[int, int]) -> Iterator[Variant]:
    chip = capability[0] * 10 + capability[1]
    assert generation(capability) == chip, "a chip without shapes of its own"
    many = [key for key in MANY_ROWS if key[0] == chip]
    half = ("bfloat16", "float16")
    turn = 0

    def attention(
        dtype: str, query_dtype: str, size: int, queries: int, page: int | None = None
    ) -> Variant:
        nonlocal turn
        turn += 1
        page = PAGES[turn % 3] if page is None else page
        head = size - 16 if turn % 5 == 0 and size > 64 else size  # columns that are masked
        return Variant(
            f"sm_{chip} attention {dtype} q {query_dtype} D {head} T {queries} page {page}",
            capability,
            "attention",
            dtype,
            query_dtype,
            head,
            size,
            queries,
            page,
            splits=1 + 3 * (turn % 2),
            softcap=turn % 4 == 3,
            scalars_in_memory=turn % 3 == 1,
        )

    for _, item_bytes, size in many:
        query_dtype = half[turn % 2]
        dtype = query_dtype if item_bytes == 2 else "float8_e4m3fn"
        yield attention(dtype, query_dtype, size, 4096)
    for page in (*PAGES, 64):
        yield attention("bfloat16", "bfloat16", 128, 4096, page)
    for item_bytes, size in FEW:
        dtype = "bfloat16" if item_bytes == 2 else "float8_e4m3fn"
        yield attention(dtype, "bfloat16", size, 1)
    yield attention("float8_e5m2", "float16", 128, 4096)
    for item_bytes, size in FLOAT32:
        if item_bytes == 1 and chip == 90:
            yield attention("float8_e4m3fn", "float32", size, 4096)
        elif item_bytes == 4 and (chip == 80 or size == 64):  # the same on all, and slow to compile
            yield attention("float32", "float32", size, 4096)
    yield attention("float32", "float32", 64, 1)
    yield Variant(
        f"sm_{chip} attention over extents", capability, "attention", "bfloat16", "bfloat16",
        128, 128, 4096, 16, extents=True,
    )  # fmt: skip
    for kernel in ("write", "copy", "gather"):
        for dtype in ("bfloat16", "float32", "float8_e4m3fn"):
            yield Variant(
                f"sm_{chip} {kernel} {dtype}", capability, kernel, dtype, "bfloat16",
                128, 64, 4096, 16,
            )  # fmt: skip
    yield Variant(
        f"sm_{chip} merge", capability, "merge", "bfloat16", "bfloat16", 128, 128, 4096, 16,
        splits=4,
    )  # fmt: skip
