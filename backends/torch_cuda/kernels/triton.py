"""Kernel ``triton``: one launch over pages for all rows and spans, and the moves of a GPU.

The kernels of :mod:`backends.triton_kernels` take a layer's place (offset and strides) as data, the
step's intervals, and a table of tiles that is refilled in place; so a step can be captured in a
CUDA graph and replayed after updates. Nothing here looks at a tensor's values.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from backends.torch_cuda.allocator import PLACE_WIDTH, LayerTensors, place_units
from backends.torch_cuda.dtypes import as_bits, is_float8
from backends.torch_cuda.kernels.base import Chip, KernelCase, Scalars, StepTensors
from backends.torch_cuda.paging import PageGeometry
from backends.torch_cuda.staging import Staging, check_not_captured, integers
from backends.triton_kernels.configs import (
    TileShape,
    choose_splits,
    choose_tile,
    refuse,
    vector_bytes,
)
from backends.triton_kernels.launch import Launch
from backends.triton_kernels.plans import plan_attention, plan_copy_blocks, plan_write
from backends.triton_kernels.tiles import TILE_FIELDS, pad_tiles, query_tiles, tile_capacity
from layout_core.dtypes import DType
from layout_core.errors import TensorError
from layout_core.rows import PAD_SLOT
from layout_core.step import StepPlan
from layout_core.views import LayerView

QUERY_DTYPES: Final = ("float32", "float16", "bfloat16")

FLOAT8_QUERY: Final = "bfloat16"
"""What queries over 8-bit storage are expected to be, where a choice is made before they come."""

WIDE_LOAD: Final = 16
"""Bytes that a thread loads at once where the layout allows it."""


def start(launch: Launch, buffers: Mapping[str, Any], scalars: Mapping[str, float] = {}) -> None:
    """Launch on the current stream of the device that the buffers are on."""
    if launch.is_empty:
        return
    device = next(iter(buffers.values())).device
    arguments = launch.bind(buffers, scalars)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):  # Triton launches on the current device
            _call(launch, arguments)
    else:
        _call(launch, arguments)


def _call(launch: Launch, arguments: list[Any]) -> None:
    launch.kernel[launch.grid](
        *arguments,
        **launch.constexprs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


# --- moves -------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class StoreWork:
    """The slots of a step, and the launches that were planned for its shapes."""

    slots: torch.Tensor
    launches: dict[tuple[Any, ...], Launch] = field(default_factory=dict)


class TritonMoves:
    """Moves by kernels: K and V in one launch, padded slots skipped where they lie."""

    def plan(
        self, step: StepPlan, tensors: StepTensors, geometries: Mapping[PageGeometry, int]
    ) -> StoreWork:
        return StoreWork(tensors.slots)

    def update(
        self,
        work: StoreWork,
        step: StepPlan,
        tensors: StepTensors,
        geometries: Mapping[PageGeometry, int],
    ) -> StoreWork:
        return work  # the slots were refilled where they lie

    def store(
        self,
        layer: LayerTensors,
        key: torch.Tensor,
        value: torch.Tensor,
        work: StoreWork,
        geometry: int,
    ) -> None:
        known = (layer.view.shape, layer.unit, key.stride(), value.stride())
        launch = work.launches.get(known)
        if launch is None:
            launch = work.launches[known] = _write_launch(layer, key, value)
        _write(launch, layer, key, value, work.slots)

    def write(
        self, layer: LayerTensors, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
    ) -> None:
        # the host cannot look at a slot without waiting; one past the pool must not be written
        limit = layer.view.shape[0] * layer.view.block_size
        inside = torch.where((slots >= 0) & (slots < limit), slots, PAD_SLOT)
        _write(_write_launch(layer, key, value), layer, key, value, inside)

    def copy_blocks(
        self, layers: Sequence[LayerTensors], sources: Sequence[int], destinations: Sequence[int]
    ) -> None:
        device = layers[0].storage.device
        check_not_captured(device, "copy_blocks")
        for run in _equal_runs(layers):
            view, ratio = run[0].view, run[0].view.blocks_per_manager_block
            source, destination = (
                integers(
                    array("i", (b * ratio + part for b in blocks for part in range(ratio))), device
                )
                for blocks in (sources, destinations)
            )
            word, words = words_of(run[0])
            launch = plan_copy_blocks(
                num_pairs=len(source),
                num_layers=len(run),
                kv_heads=view.num_kv_heads,
                block_size=view.block_size,
                head_size=view.head_size * words,
                head_size_v=view.head_size_v * words,
                dtype=word,
                unit=run[0].unit * words,
                place_width=PLACE_WIDTH,
            )
            first = run[0].place
            places = first.as_strided((len(run), *first.shape), (*first.shape, 1))
            start(
                launch,
                {
                    "pool": run[0].storage,
                    "places": places,
                    "source": source,
                    "destination": destination,
                },
            )


def _equal_runs(layers: Sequence[LayerTensors]) -> list[list[LayerTensors]]:
    """Neighbouring layers that differ by their place alone; their places lie side by side."""
    runs: list[list[LayerTensors]] = []
    for layer in layers:
        if runs and kind_of(runs[-1][0].view) == kind_of(layer.view):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


WORDS: Final = {1: "float8_e4m3fn", 2: "float16", 4: "float32"}
"""A type of each size that the moving kernels know; they look at no value."""


def words_of(layer: LayerTensors) -> tuple[str, int]:
    """A type of words that elements are moved as, and how many words an element is."""
    size = layer.view.dtype.itemsize
    word = min(size, max(WORDS))
    return WORDS[word], size // word


def _write_launch(layer: LayerTensors, key: torch.Tensor, value: torch.Tensor) -> Launch:
    view = layer.view
    word, words = words_of(layer)
    return plan_write(
        num_tokens=key.shape[0],
        kv_heads=view.num_kv_heads,
        head_size=view.head_size * words,
        head_size_v=view.head_size_v * words,
        block_size=view.block_size,
        dtype=word,
        unit=layer.unit * words,
        key_strides=_word_strides(key, words),
        value_strides=_word_strides(value, words),
    )


def _word_strides(tensor: torch.Tensor, words: int) -> tuple[int, int, int]:
    token, head, column = tensor.stride()
    if words > 1 and column != 1:
        raise TensorError(
            f"key, value: {tensor.dtype} is stored on CUDA devices where its last axis is dense, "
            f"got strides {list(tensor.stride())}"
        )
    return token * words, head * words, column


def _write(
    launch: Launch,
    layer: LayerTensors,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    start(
        launch,
        {
            "pool": layer.storage,
            "place": layer.place,
            "key": as_bits(key.detach()),
            "value": as_bits(value.detach()),
            "slots": slots,
        },
    )


# --- attention ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What a program depends on: layers of one kind share it."""

    kv_heads: int
    head_size: int
    head_size_v: int
    block_size: int
    dtype: str


def kind_of(view: LayerView) -> LayerKind:
    """The kind of a layer."""
    return LayerKind(
        view.num_kv_heads, view.head_size, view.head_size_v, view.block_size, view.dtype.name
    )


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """Tiles of the step for one kind of layer and one type of query, at a fixed address."""

    shape: TileShape
    staging: Staging
    capacity: int  #: tiles that there is room for, and that are launched
    splits: int
    launches: dict[tuple[Any, ...], tuple[Launch, ...]]
    scratch: dict[str, torch.Tensor]  #: what a split kernel writes for the one that merges

    def fill(self, tiles: array[int]) -> None:
        padded = pad_tiles(tiles, self.capacity)
        self.staging.fill({"tiles": (padded, (self.capacity, TILE_FIELDS))})


@dataclass(slots=True, eq=False)
class TritonWork:
    """The plan of a step; its tables are refilled in place."""

    case: KernelCase
    tables: dict[tuple[LayerKind, str], TileTable] = field(default_factory=dict)


class TritonKernel:
    """See the module.

    Args:
        chip: what tiles and splits are chosen for.
        device_type: where it runs. Tests name ``cpu``, where Triton's interpreter runs it.
        upcast: multiply in float32, as that interpreter multiplies bfloat16 wrongly.
    """

    name = "triton"
    capturable = True

    def __init__(self, chip: Chip, *, device_type: str = "cuda", upcast: bool = False) -> None:
        self._chip = chip
        self._device_type = device_type
        self._upcast = upcast

    def refuse(self, case: KernelCase) -> str | None:
        if case.device.type != self._device_type:
            return f"it runs on {self._device_type} devices, not on {case.device}"
        for view in case.layers:
            reason = refuse(
                head_size=view.head_size,
                head_size_v=view.head_size_v,
                dtype=view.dtype.name,
                query_dtype=_expected_query(view.dtype),
            )
            if reason is not None:
                return f"layer {view.name!r}: {reason}"
        return None

    def notes(self, case: KernelCase) -> tuple[str, ...]:
        """What the strides of a layout cost in loads narrower than 16 bytes."""
        units = place_units(case.resolved)
        out: dict[str, None] = {}
        for view in case.layers:
            size = view.dtype.itemsize
            for what, got, head in zip(
                "KV",
                vector_bytes(size, units[view.dtype], view.head_size),
                (view.head_size, view.head_size_v),
                strict=True,
            ):
                if got < min(WIDE_LOAD, head * size):
                    out[
                        f"{what} of layer {view.name!r} is loaded {got} bytes at a time instead of "
                        f"{WIDE_LOAD}: its places are multiples of {units[view.dtype]} elements"
                    ] = None
        return tuple(out)

    def plan(
        self, case: KernelCase, tensors: StepTensors, geometries: Mapping[PageGeometry, int]
    ) -> TritonWork:
        work = TritonWork(case)
        for view in case.layers:
            self._table(work, view, _expected_query(view.dtype))
        return work

    def update(
        self,
        work: TritonWork,
        case: KernelCase,
        tensors: StepTensors,
        geometries: Mapping[PageGeometry, int],
    ) -> TritonWork:
        work.case = case
        cut: dict[int, array[int]] = {}
        for table in work.tables.values():
            queries = table.shape.queries
            if queries not in cut:
                cut[queries] = _tiles(case.step, queries)
            table.fill(cut[queries])
        return work

    def _table(self, work: TritonWork, view: LayerView, query_dtype: str) -> TileTable:
        """The table of a kind of layer; made where queries of a type are seen first."""
        kind = kind_of(view)
        table = work.tables.get((kind, query_dtype))
        if table is not None:
            return table
        case = work.case
        step = case.step
        bucket = step.bucket
        shape = choose_tile(
            max_query_len=max(step.query_lens, default=0) if bucket is None else step.num_tokens,
            query_heads=case.num_heads,
            kv_heads=view.num_kv_heads,
            head_size=view.head_size,
            head_size_v=view.head_size_v,
            query_dtype=query_dtype,
            dtype=view.dtype.name,
            block_size=view.block_size,
            capability=self._chip.capability,
        )
        tiles = _tiles(step, shape.queries)
        capacity = tile_capacity(step.num_tokens, step.num_rows, shape.queries)
        splits = choose_splits(
            tiles if bucket is None else _tiles_of_room(step, shape.queries),
            shape=shape,
            kv_heads=view.num_kv_heads,
            num_sms=self._chip.num_sms,
        )
        staging = Staging({"tiles": ("i", (capacity, TILE_FIELDS))}, case.device)
        table = TileTable(shape, staging, capacity, splits, {}, {})
        table.fill(tiles)
        work.tables[kind, query_dtype] = table
        return table

    def run(
        self,
        layer: LayerTensors,
        query: torch.Tensor,
        work: TritonWork,
        tensors: StepTensors,
        geometry: int,
        scalars: Scalars,
        *,
        return_lse: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        view = layer.view
        table = self._table(work, view, str(query.dtype).removeprefix("torch."))
        launches = self._launches(table, layer, query, tensors, scalars.softcap > 0)
        out = query.new_empty((*query.shape[:2], view.head_size_v))
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        buffers = {
            "pool": layer.storage,
            "place": layer.place,
            "query": query,
            "tiles": table.staging.tables["tiles"],
            "lo": tensors.lo,
            "hi": tensors.hi,
            "block_table": tensors.block_table,
            "out": out,
            "lse": lse,
            **table.scratch,
        }
        numbers = {
            "score_scale": scalars.softmax_scale * scalars.k_scale,
            "value_scale": scalars.v_scale,
            "softcap": scalars.softcap,
        }
        for launch in launches:
            start(launch, buffers, numbers)
        return out, lse if return_lse else None

    def _launches(
        self,
        table: TileTable,
        layer: LayerTensors,
        query: torch.Tensor,
        tensors: StepTensors,
        has_softcap: bool,
    ) -> tuple[Launch, ...]:
        known = (layer.unit, query.stride(), has_softcap)
        launches = table.launches.get(known)
        if launches is not None:
            return launches
        view = layer.view
        launches = plan_attention(
            shape=table.shape,
            num_tokens=query.shape[0],
            num_tiles=table.capacity,
            query_heads=query.shape[1],
            kv_heads=view.num_kv_heads,
            head_size=view.head_size,
            head_size_v=view.head_size_v,
            block_size=view.block_size,
            table_width=tensors.block_table.shape[1],
            dtype=view.dtype.name,
            query_dtype=str(query.dtype).removeprefix("torch."),
            unit=layer.unit,
            query_strides=(query.stride(0), query.stride(1), query.stride(2)),
            num_splits=table.splits,
            has_softcap=has_softcap,
            capability=self._chip.capability,
            upcast=self._upcast,
        )
        for launch in launches[:-1]:  # what the last one merges
            for buffer in launch.outputs:
                if buffer.shape is not None and buffer.buffer not in table.scratch:
                    table.scratch[buffer.buffer] = torch.empty(
                        buffer.shape, dtype=getattr(torch, buffer.dtype), device=query.device
                    )
        table.launches[known] = launches
        return launches


def _expected_query(dtype: DType) -> str:
    return FLOAT8_QUERY if is_float8(dtype) else dtype.name


def _tiles_of_room(step: StepPlan, queries: int) -> array[int]:
    """A bucket's tiles as if each saw as many keys as a row may have: other rows will come."""
    keys = step.max_blocks * step.block_size
    one = array("i", (0, 0, queries, 0, keys, 0, keys, 0))
    return one * -(-step.num_tokens // queries)


def _tiles(step: StepPlan, queries: int) -> array[int]:
    return query_tiles(step.cu_seqlens, step.num_tokens, step.lo, step.hi, queries)
