"""Kernels on the host: launches filled with CPU tensors and run by the Triton interpreter.

Import this only in a process that had ``TRITON_INTERPRET=1`` from its start. Arrays come and go
as NumPy's; the pool is plain bytes, so where a byte must lie is said by
:mod:`tests.equivalence.memory`, not by the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from backends.triton_kernels.configs import TileShape, alignment_unit, is_uniform
from backends.triton_kernels.launch import Launch
from backends.triton_kernels.plans import plan_attention, plan_copy_blocks, plan_gather, plan_write
from backends.triton_kernels.tiles import (
    TILE_FIELDS,
    mark_extents,
    pad_tiles,
    query_tiles,
    tile_capacity,
)
from layout_core.step import StepPlan
from layout_core.views import LayerView
from tests.cases import POISON, Array
from tests.kernels import interpreter

interpreter.mend()

_VIEWED_AS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TORCH = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.uint8,
    "float8_e5m2": torch.uint8,
}


def tensor(array: Array, dtype: str) -> torch.Tensor:
    """A tensor of the same bits; 8-bit floats stay bytes."""
    raw = np.ascontiguousarray(array)
    bits = torch.frombuffer(bytearray(raw.tobytes()), dtype=_VIEWED_AS[raw.dtype.itemsize])
    return bits.view(_TORCH[dtype]).reshape(raw.shape)


def integers(values: Sequence[int], dtype: Any = torch.int32) -> torch.Tensor:
    return torch.tensor(list(values), dtype=dtype)


@dataclass(frozen=True, slots=True)
class Place:
    """A layer's numbers as kernels take them."""

    unit: int
    numbers: torch.Tensor  #: int64 [4]


def place_of(view: LayerView, wide: bool = True) -> Place:
    size = view.dtype.itemsize
    numbers = [n // size for n in (view.offset, *view.strides[:3])]
    unit = alignment_unit(size, *numbers)
    kind = torch.int64 if wide else torch.int32
    return Place(unit, integers([n // unit for n in numbers], kind))


def poisoned(size: int) -> torch.Tensor:
    return torch.full((size,), POISON, dtype=torch.uint8)


def run(launch: Launch, buffers: dict[str, Any], scalars: dict[str, float] | None = None) -> None:
    """Launch as the torch engine does. Outputs that are not given are made, full of NaN."""
    for out in launch.outputs:
        if out.buffer not in buffers:
            assert out.shape is not None, out
            kind = _TORCH[out.dtype]
            junk = POISON if kind == torch.uint8 else float("nan")
            buffers[out.buffer] = torch.full(out.shape, junk, dtype=kind)
    if not launch.is_empty:
        launch.kernel[launch.grid](
            *launch.bind(buffers, scalars or {}),
            **launch.constexprs,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )


def layer_arguments(view: LayerView) -> dict[str, Any]:
    return {
        "kv_heads": view.num_kv_heads,
        "head_size": view.head_size,
        "head_size_v": view.head_size_v,
        "block_size": view.block_size,
        "dtype": view.dtype.name,
    }


def write(
    pool: torch.Tensor,
    view: LayerView,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    place = place_of(view)
    launch = plan_write(
        num_tokens=len(slots),
        unit=place.unit,
        key_strides=key.stride(),
        value_strides=value.stride(),
        **layer_arguments(view),
    )
    run(
        launch,
        {"pool": pool, "place": place.numbers, "key": key, "value": value, "slots": slots},
    )


def copy_blocks(
    pool: torch.Tensor, views: Sequence[LayerView], pairs: Sequence[tuple[int, int]]
) -> None:
    """Copy blocks, as the views count them, in layers of one shape."""
    places = [place_of(view) for view in views]
    unit = min(place.unit for place in places)
    numbers = torch.stack([place.numbers * (place.unit // unit) for place in places])
    launch = plan_copy_blocks(
        num_pairs=len(pairs), num_layers=len(views), unit=unit, **layer_arguments(views[0])
    )
    run(
        launch,
        {
            "pool": pool,
            "places": numbers,
            "source": integers([a for a, _ in pairs]),
            "destination": integers([b for _, b in pairs]),
        },
    )


def gather(
    pool: torch.Tensor,
    view: LayerView,
    table: Sequence[Sequence[int]],
    first_key: Sequence[int],
    num_keys: Sequence[int],
    *,
    head_major: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    place = place_of(view)
    width = max(len(ids) for ids in table)
    cu_keys = [0]
    for count in num_keys:
        cu_keys.append(cu_keys[-1] + count)
    launch = plan_gather(
        num_rows=len(table),
        max_keys=max(num_keys),
        total_keys=cu_keys[-1],
        table_width=width,
        unit=place.unit,
        head_major=head_major,
        **layer_arguments(view),
    )
    buffers: dict[str, Any] = {
        "pool": pool,
        "place": place.numbers,
        "block_table": torch.tensor(
            [[*ids, *[0] * (width - len(ids))] for ids in table], dtype=torch.int32
        ),
        "first_key": integers(first_key),
        "cu_keys": integers(cu_keys),
    }
    run(launch, buffers)
    return buffers["key_out"], buffers["value_out"]


def attend(
    pool: torch.Tensor,
    view: LayerView,
    query: torch.Tensor,
    plan: StepPlan,
    shape: TileShape,
    *,
    splits: int = 1,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    in_memory: bool = False,
    wide_place: bool = True,
    spare_tiles: bool = False,
    extents: bool = False,
    upcast: bool = False,
    capability: tuple[int, int] = (9, 0),
    tiles: Any = None,
) -> tuple[Array, Array]:
    """Output ``[T, Hq, Dv]`` and LSE ``[T, Hq]``, padding included, as float64."""
    place = place_of(view, wide_place)
    if tiles is None:
        tiles = query_tiles(plan.cu_seqlens, plan.num_tokens, plan.lo, plan.hi, shape.queries)
    elif callable(tiles):
        tiles = tiles(plan)
    if spare_tiles:
        room = tile_capacity(plan.num_tokens, plan.num_rows, shape.queries)
        tiles = pad_tiles(tiles, room)
    if extents:
        assert is_uniform(view.strides[0], view.strides[2], view.block_size)
        assert mark_extents(tiles, plan.block_table, plan.max_blocks, view.block_size)
    query_dtype = {v: k for k, v in _TORCH.items() if v != torch.uint8}[query.dtype]
    launches = plan_attention(
        shape=shape,
        num_tokens=plan.num_tokens,
        num_tiles=len(tiles) // TILE_FIELDS,
        query_heads=query.shape[1],
        table_width=plan.max_blocks,
        query_dtype=query_dtype,
        unit=place.unit,
        query_strides=query.stride(),
        num_splits=splits,
        extents=extents,
        has_softcap=softcap > 0,
        scalars_in_memory=in_memory,
        capability=capability,
        upcast=upcast,
        **layer_arguments(view),
    )
    scale = view.head_size**-0.5 if softmax_scale is None else softmax_scale
    numbers = {"score_scale": scale * k_scale, "value_scale": v_scale, "softcap": softcap}
    buffers: dict[str, Any] = {
        "pool": pool,
        "place": place.numbers,
        "query": query,
        "tiles": integers(tiles).reshape(-1, TILE_FIELDS),
        "lo": integers(plan.lo),
        "hi": integers(plan.hi),
        # extents are read without the table
        "block_table": integers(plan.block_table if not extents else [-1]),
    }
    if in_memory:
        buffers.update({name: torch.tensor([x]) for name, x in numbers.items()})
    for launch in launches:
        run(launch, buffers, numbers)
    return (
        buffers["out"].to(torch.float64).numpy(),
        buffers["lse"].to(torch.float64).numpy(),
    )


def small_shape(group: int, block_m: int = 16, block_n: int = 16, heads: int = 0) -> TileShape:
    """A tile shape for small steps; ``heads`` of a group share a program (0: all)."""
    heads = heads or group
    return TileShape(
        block_m=block_m,
        block_n=block_n,
        queries=block_m // heads,
        heads=heads,
        head_chunks=-(-group // heads),
        num_warps=4,
        num_stages=1,
        programs_per_sm=1,
    )
