"""The planted faults: each is a patch of the library, and the check that must turn red.

Faults of the core are planted where both engines take the number from; faults of an engine in
that engine's own functions. None of them is meant to crash: each gives a plausible wrong
result, as the faults that people report do.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pytest

from layout_core import dense, resolve, serving, step, views
from layout_core.dense import DensePlan, DenseRow
from layout_core.rows import PAD_SLOT, PagedAttentionRow
from layout_core.step import StepPlan
from layout_core.views import LayerView, ResolvedLayout
from tests.faults import checks
from tests.faults.checks import Check

Plant = Callable[[pytest.MonkeyPatch], None]

TORCH, JAX = "torch_cuda", "jax_gpu"
BOTH = (TORCH, JAX)


@dataclass(frozen=True, slots=True)
class Fault:
    """One wrong thing, where it is planted, and what must notice."""

    name: str
    plant: Plant
    check: Check
    engines: tuple[str, ...] = BOTH
    compiled: bool = False  #: the fault lies in code that an engine compiles and keeps


# --- the plan: strides and offsets -------------------------------------------------------------


def _views(edit: Callable[[int, LayerView], LayerView]) -> Plant:
    """Every layer's view as ``edit(index, view)`` makes it, after it was resolved."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = resolve.resolve_layout

        def faulty(*args: Any, **kwargs: Any) -> ResolvedLayout:
            plan = original(*args, **kwargs)
            return replace(plan, layers=tuple(edit(i, v) for i, v in enumerate(plan.layers)))

        patch.setattr(resolve, "resolve_layout", faulty)

    return plant


def _strides(view: LayerView, b: int, h: int, n: int) -> LayerView:
    return replace(view, strides=(b, h, n, 1))


def _swap_head_and_token(index: int, view: LayerView) -> LayerView:
    b, h, n, _ = view.strides
    return _strides(view, b, n, h)


def _other_layout(index: int, view: LayerView) -> LayerView:
    """LBNHC addressed as LBHNC: a bijection too, so only the bytes can tell."""
    _, _, tokens, content = view.shape
    return _strides(view, view.strides[0], tokens * content, content)


def _offset_off_by_a_cell(index: int, view: LayerView) -> LayerView:
    return replace(view, offset=view.offset - view.shape[3]) if index == 1 else view


def _layers_aliased(index: int, view: LayerView) -> LayerView:
    return replace(view, offset=0)


def _swap_block_and_layer(index: int, view: LayerView) -> LayerView:
    """Blocks one page apart times the layers, layers one page apart: B outside L."""
    b, h, n, _ = view.strides  # b is a page: L is outermost here
    return replace(view, offset=index * b, strides=(2 * b, h, n, 1))


def _padding_ignored(index: int, view: LayerView) -> LayerView:
    _, h, n, _ = view.strides
    payload = view.shape[1] * view.shape[2] * view.shape[3]
    return _strides(view, 2 * payload, h, n)


def _block_stride_short(index: int, view: LayerView) -> LayerView:
    b, h, n, _ = view.strides
    return _strides(view, b - view.shape[3], h, n)


# --- visibility --------------------------------------------------------------------------------


Interval = tuple[int, int]


def _intervals(edit: Callable[[PagedAttentionRow, int, Interval], Interval]) -> Plant:
    """Every query's interval as ``edit(row, position, interval)`` makes it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = step.visible_intervals

        def faulty(rows: Sequence[PagedAttentionRow], *args: Any) -> tuple[Any, Any]:
            lo, hi = original(rows, *args)
            at = 0
            for row in rows:
                for position in range(row.kv_start_pos, row.kv_start_pos + row.query_len):
                    lo[at], hi[at] = edit(row, position, (lo[at], hi[at]))
                    at += 1
            return lo, hi

        patch.setattr(step, "visible_intervals", faulty)

    return plant


def _rule(edit: Callable[[Any, Any, Any], tuple[Any, Any, Any]]) -> Plant:
    """The rows, rule and spans that visibility is computed from, edited."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = step.visible_intervals
        patch.setattr(step, "visible_intervals", lambda *arguments: original(*edit(*arguments)))

    return plant


def _shift_spans(rows: Any, rule: Any, spans: Any) -> tuple[Any, Any, Any]:
    """Every span one token earlier."""
    moved = spans and [s and [(max(a - 1, 0), b - 1) for a, b in s] for s in spans]
    return rows, rule, moved


def _spans_of_the_next_row(rows: Any, rule: Any, spans: Any) -> tuple[Any, Any, Any]:
    rotated = list(spans[1:]) + list(spans[:1])
    fitting = [
        s and [(a, min(b, r.seq_len)) for a, b in s if a < r.seq_len] for r, s in zip(rows, rotated)
    ]
    return rows, rule, fitting


def _no_spans(rows: Any, rule: Any, spans: Any) -> tuple[Any, Any, Any]:
    return rows, rule, spans and [s if s is None else [] for s in spans]


def _always_causal(rows: Any, rule: Any, spans: Any) -> tuple[Any, Any, Any]:
    return rows, replace(rule, causal=True), spans


def _wider_window(rows: Any, rule: Any, spans: Any) -> tuple[Any, Any, Any]:
    return rows, replace(rule, window_left=rule.window_left + 1), spans


def _chunk_of_a_block(rows: Any, rule: Any, spans: Any) -> tuple[Any, Any, Any]:
    return rows, replace(rule, chunk=4), spans


def _top_left(rows: Any, rule: Any, spans: Any) -> tuple[Any, Any, Any]:
    """Bottom-right alignment forgotten: read-only queries start at position 0."""
    return [replace(r, kv_start_pos=0) if r.read_only else r for r in rows], rule, spans


# --- the step: slots and tables ----------------------------------------------------------------


def _rebind(patch: pytest.MonkeyPatch, original: Any, faulty: Any) -> None:
    """Put ``faulty`` in the place of a function of the core in every engine that imported it."""
    found = {
        module.__name__: name
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith("backends.")
        for name, value in vars(module).items()
        if value is original
    }
    for module_name, name in found.items():
        patch.setattr(sys.modules[module_name], name, faulty)
    if not found:
        raise LookupError(f"no engine uses {original.__qualname__}")


def _step_plan(edit: Callable[[StepPlan], StepPlan]) -> Plant:
    """The integers of every step, edited before an engine takes them."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = step.plan_step
        _rebind(patch, original, lambda *a, **kwargs: edit(original(*a, **kwargs)))

    return plant


def _slots(edit: Callable[[StepPlan, int, int], int]) -> Plant:
    """Slots of real queries as ``edit(plan, query, slot)`` makes them."""

    def edited(plan: StepPlan) -> StepPlan:
        real = plan.num_real_tokens
        slots = [edit(plan, i, s) if i < real else s for i, s in enumerate(plan.slots)]
        return replace(plan, slots=array("q", slots))

    return _step_plan(edited)


def _slot_one_late(plan: StepPlan, query: int, slot: int) -> int:
    return slot if slot == PAD_SLOT else slot + 1


def _wrap_padding(plan: StepPlan, query: int, slot: int) -> int:
    """-1 as NumPy and JAX index: the last slot of the pool."""
    return slot % (plan.resolved.num_blocks * plan.block_size)


def _slot_of_block_zero(plan: StepPlan, query: int, slot: int) -> int:
    """The block table is not followed when writing."""
    return slot if slot == PAD_SLOT else slot % plan.block_size + plan.block_size * (query % 3 + 1)


def _table(edit: Callable[[list[list[int]], StepPlan], list[list[int]]]) -> Plant:
    """The block table as a list of rows, edited."""

    def edited(plan: StepPlan) -> StepPlan:
        width, flat = plan.max_blocks, list(plan.block_table)
        rows = [flat[i * width : (i + 1) * width] for i in range(plan.num_rows)]
        return replace(plan, block_table=array("i", chain.from_iterable(edit(rows, plan))))

    return _step_plan(edited)


def _swap_table_rows(rows: list[list[int]], plan: StepPlan) -> list[list[int]]:
    return [rows[1], rows[0], *rows[2:]]


def _rotate_blocks(rows: list[list[int]], plan: StepPlan) -> list[list[int]]:
    """The blocks of a row in another order."""
    out = []
    for row, seq_len in zip(rows, plan.seq_lens):
        used = -(-seq_len // plan.block_size)
        out.append(row[1:used] + row[:1] + row[used:] if used else row)
    return out


def _first_query_of_a_row_dropped(plan: StepPlan) -> StepPlan:
    """Row boundaries one query late: the second row's first query reads the first row's keys."""
    cu = array("i", plan.cu_seqlens)
    cu[1] += 1
    return replace(plan, cu_seqlens=cu)


# --- the engines' own functions ----------------------------------------------------------------


def _copy_one_layer(patch: pytest.MonkeyPatch) -> None:
    original = views.ResolvedLayout.group_layers
    patch.setattr(
        views.ResolvedLayout, "group_layers", lambda self, group: original(self, group)[:1]
    )


def _copy_backwards(patch: pytest.MonkeyPatch) -> None:
    original = serving.check_copy_pairs
    _rebind(patch, original, lambda *arguments: original(*arguments)[::-1])


def _torch_fused(edit: Callable[..., tuple[Any, ...]]) -> Plant:
    """torch's attention call with ``edit(query, key, value, mode, mask, scale)`` applied."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from backends.torch_cuda.kernels import sdpa

        original = sdpa.fused_attention
        patch.setattr(sdpa, "fused_attention", lambda *arguments: original(*edit(*arguments)))

    return plant


def _torch_heads_modulo(patch: pytest.MonkeyPatch) -> None:
    """KV head of query head q is q % Hkv instead of q // (Hq // Hkv)."""
    from backends.torch_cuda.kernels import sdpa

    original = sdpa.attend

    def faulty(query: Any, key: Any, *rest: Any, **kwargs: Any) -> Any:
        heads, kv_heads = query.shape[-2], key.shape[-3]
        group = heads // kv_heads
        dealt = query.unflatten(-2, (group, kv_heads)).transpose(-3, -2).flatten(-3, -2)
        output, lse = original(dealt, key, *rest, **kwargs)
        return output.unflatten(-2, (kv_heads, group)).transpose(-3, -2).flatten(-3, -2), lse

    _rebind(patch, original, faulty)


def _torch_scale(query: Any, key: Any, value: Any, mode: Any, mask: Any, scale: float) -> Any:
    return query, key, value, mode, mask, scale * query.shape[-1] ** 0.5


def _torch_keys_as_values(query: Any, key: Any, value: Any, *rest: Any) -> tuple[Any, ...]:
    return (query, key, key, *rest)


def _torch_mask_one_wider(patch: pytest.MonkeyPatch) -> None:
    from backends.torch_cuda.kernels import sdpa

    original = sdpa.interval_mask
    patch.setattr(sdpa, "interval_mask", lambda lo, hi, *keys: original(lo, hi + 1, *keys))


def _torch_no_masks(patch: pytest.MonkeyPatch) -> None:
    from backends.torch_cuda.kernels import sdpa
    from backends.torch_cuda.kernels.segments import Mode

    original = sdpa.segment_row
    patch.setattr(
        sdpa,
        "segment_row",
        lambda lo, hi: [replace(s, mode=Mode.FULL) for s in original(lo, hi)],
    )


def _torch_store_swapped(patch: pytest.MonkeyPatch) -> None:
    from backends.torch_cuda import moves

    original = moves.store_rows
    patch.setattr(
        moves,
        "store_rows",
        lambda layer, key, value, tokens, rows: original(layer, value, key, tokens, rows),
    )


def _torch_bits_through_float(patch: pytest.MonkeyPatch) -> None:
    """A conversion on the way: a signalling NaN comes out quiet."""
    import torch

    from backends.torch_cuda import moves

    original = moves.as_bits
    patch.setattr(
        moves, "as_bits", lambda source: original(source.to(torch.float64).to(source.dtype))
    )


def _torch_no_softcap(patch: pytest.MonkeyPatch) -> None:
    from backends.torch_cuda.kernels import sdpa

    original = sdpa.attend
    patch.setattr(sdpa, "attend", lambda *a, softcap, **kwargs: original(*a, softcap=0.0, **kwargs))


def _jax_scores(edit: Callable[..., tuple[Any, ...]]) -> Plant:
    """JAX's scores with ``edit(queries, key, lo, hi, start, softcap)`` applied."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from backends.jax_gpu.kernels import xla

        original = xla._scores
        patch.setattr(xla, "_scores", lambda *arguments: original(*edit(*arguments)))

    return plant


def _jax_scale(queries: Any, *rest: Any) -> tuple[Any, ...]:
    return (queries * queries.shape[-1] ** 0.5, *rest)


def _jax_mask_one_wider(queries: Any, key: Any, lo: Any, hi: Any, *rest: Any) -> tuple[Any, ...]:
    return (queries, key, lo, hi + 1, *rest)


def _jax_no_softcap(patch: pytest.MonkeyPatch) -> None:
    from backends.jax_gpu.kernels import xla

    original = xla.paged_attention

    def faulty(*arguments: Any, softcap: Any, **kwargs: Any) -> Any:
        return original(*arguments, softcap=None, **kwargs)

    _rebind(patch, original, faulty)


def _jax_heads_modulo(patch: pytest.MonkeyPatch) -> None:
    """Query heads are dealt out to KV heads as q % Hkv."""
    from backends.jax_gpu.kernels import xla

    original = xla.paged_attention

    def faulty(words: Any, cell: Any, address: Any, query: Any, *rest: Any, **kwargs: Any) -> Any:
        t, heads, d = query.shape
        group = heads // cell.num_kv_heads
        dealt = query.reshape(t, group, cell.num_kv_heads, d).swapaxes(1, 2).reshape(query.shape)
        output, lse = original(words, cell, address, dealt, *rest, **kwargs)
        back = output.reshape(t, cell.num_kv_heads, group, -1).swapaxes(1, 2)
        return back.reshape(output.shape), lse

    _rebind(patch, original, faulty)


def _jax_write(edit: Callable[..., tuple[Any, ...]]) -> Plant:
    """JAX's writer with ``edit(address, key, value, slots)`` applied."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from backends.jax_gpu import paging

        original = paging.write_cells
        _rebind(
            patch,
            original,
            lambda words, cell, *arguments: original(words, cell, *edit(*arguments)),
        )

    return plant


def _jax_store_swapped(address: Any, key: Any, value: Any, slots: Any) -> tuple[Any, ...]:
    return address, value, key, slots


def _jax_wrap_padding(address: Any, key: Any, value: Any, slots: Any) -> tuple[Any, ...]:
    return address, key, value, slots % address.num_slots


def _jax_bits_through_float(address: Any, key: Any, value: Any, slots: Any) -> tuple[Any, ...]:
    import jax.numpy as jnp

    return address, *(jnp.where(jnp.isnan(a), jnp.nan, a) for a in (key, value)), slots


def _jax_reads_what_nobody_wrote(patch: pytest.MonkeyPatch) -> None:
    """Keys outside the visible range are not set to zero: 0 * NaN is NaN."""
    from backends.jax_gpu.kernels import xla

    original = xla._read_keys

    def faulty(words: Any, cell: Any, address: Any, head: Any, table: Any, *rest: Any) -> Any:
        everything = table.shape[0] * cell.block_size
        return original(words, cell, address, head, table, 0, everything, rest[-1])

    patch.setattr(xla, "_read_keys", faulty)


# --- the list ----------------------------------------------------------------------------------

# --- dense calls -------------------------------------------------------------------------------


def _engines_name(name: str, edit: Callable[[Any], Any]) -> Plant:
    """A name of both engines' dense modules, as ``edit(original)`` makes it."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for engine in BOTH:
            module = sys.modules.get(f"backends.{engine}.dense")
            if module is not None:
                patch.setattr(module, name, edit(getattr(module, name)))

    return plant


def _dense_rows(edit: Callable[[DenseRow], DenseRow]) -> Plant:
    """Every row of a dense plan as ``edit`` makes it."""

    def faulty(original: Any) -> Any:
        def plan(*args: Any, **kwargs: Any) -> DensePlan:
            made: DensePlan = original(*args, **kwargs)
            return replace(made, rows=tuple(edit(row) for row in made.rows))

        return plan

    return _engines_name("plan_dense", faulty)


def _documents_from_the_first_token(row: DenseRow) -> DenseRow:
    return replace(row, lo=array("i", [0]) * len(row.lo))


def _first_sample_alone_decides(row: DenseRow) -> DenseRow:
    return replace(row, sample=None) if row.sample == 0 else replace(row, sample=0)


def _one_key_less(row: DenseRow) -> DenseRow:
    return replace(row, hi=array("i", [max(a, b - 1) for a, b in zip(row.lo, row.hi)]))


def _padding_is_real(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dense, "_used_lengths", lambda metadata, extra, queries, keys: (queries, keys))


def _shards_stand_bottom_right(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        dense, "_placed_queries", lambda ranges, queries, keys: [(0, queries, keys - queries)]
    )


def _joint_at_the_other_end(original: Any) -> Any:
    def join(query: Any, key: Any, value: Any, metadata: Any) -> Any:
        other = "rear" if metadata.joint_strategy == "front" else "front"
        return original(query, key, value, replace(metadata, joint_strategy=other))

    return join


def _no_mask(original: Any) -> Any:
    return lambda *args: None


FAULTS: tuple[Fault, ...] = (
    Fault("strides of H and N swapped", _views(_swap_head_and_token), checks.check_causal),
    Fault("strides of L and B swapped", _views(_swap_block_and_layer), checks.check_causal),
    Fault("another layout than the config names", _views(_other_layout), checks.check_causal),
    Fault("a layer's offset one cell early", _views(_offset_off_by_a_cell), checks.check_causal),
    Fault("two layers on one offset", _views(_layers_aliased), checks.check_causal),
    Fault(
        "page padding ignored in the stride", _views(_padding_ignored), checks.check_padded_pages
    ),
    Fault("block stride one cell short", _views(_block_stride_short), checks.check_causal),
    Fault(
        "causal, own key not seen",
        _intervals(lambda row, p, i: (i[0], max(i[0], i[1] - 1))),
        checks.check_causal,
    ),
    Fault(
        "causal, one key of the future seen",
        _intervals(lambda row, p, i: (i[0], min(i[1] + 1, row.seq_len))),
        checks.check_causal,
    ),
    Fault(
        "first key of a row not seen",
        _intervals(lambda row, p, i: (min(i[0] + 1, i[1]), i[1])),
        checks.check_full,
    ),
    Fault(
        "seq_len forgotten: the tail of the last block seen",
        _intervals(lambda row, p, i: (i[0], -(-row.seq_len // 4) * 4)),
        checks.check_causal,
    ),
    Fault(
        "first_key ignored: evicted tokens seen",
        _intervals(lambda row, p, i: (0, i[1])),
        checks.check_evicted,
    ),
    Fault("spans one token early", _rule(_shift_spans), checks.check_cfg),
    Fault("spans of the next row", _rule(_spans_of_the_next_row), checks.check_spans),
    Fault("spans ignored: causal inside them", _rule(_no_spans), checks.check_spans),
    Fault("non-causal taken for causal", _rule(_always_causal), checks.check_full),
    Fault("window one key too wide", _rule(_wider_window), checks.check_window),
    Fault("chunks of a block instead of the rule's", _rule(_chunk_of_a_block), checks.check_chunk),
    Fault("bottom-right alignment forgotten", _rule(_top_left), checks.check_mixed_reads),
    Fault("slots one token late", _slots(_slot_one_late), checks.check_cfg),
    Fault("padded slot wrapped to the last", _slots(_wrap_padding), checks.check_mixed_reads),
    Fault("block table not followed when writing", _slots(_slot_of_block_zero), checks.check_cfg),
    Fault("two rows of the block table swapped", _table(_swap_table_rows), checks.check_full),
    Fault("blocks of a row in another order", _table(_rotate_blocks), checks.check_cfg),
    Fault(
        "row boundary one query late", _step_plan(_first_query_of_a_row_dropped), checks.check_full
    ),
    Fault("blocks copied in one layer alone", _copy_one_layer, checks.check_copy),
    Fault("blocks copied backwards", _copy_backwards, checks.check_copy),
    Fault("KV head q % Hkv", _torch_heads_modulo, checks.check_cfg, (TORCH,)),
    Fault("softmax scale missing", _torch_fused(_torch_scale), checks.check_cfg, (TORCH,)),
    Fault("K read as V", _torch_fused(_torch_keys_as_values), checks.check_cfg, (TORCH,)),
    Fault("mask one key too wide", _torch_mask_one_wider, checks.check_causal, (TORCH,)),
    Fault("masked calls made without masks", _torch_no_masks, checks.check_causal, (TORCH,)),
    Fault(
        "K and V stored in each other's place", _torch_store_swapped, checks.check_bits, (TORCH,)
    ),
    Fault(
        "a conversion between input and pool",
        _torch_bits_through_float,
        checks.check_bits,
        (TORCH,),
    ),
    Fault("softcap ignored", _torch_no_softcap, checks.check_softcap, (TORCH,)),
    Fault("KV head q % Hkv", _jax_heads_modulo, checks.check_cfg, (JAX,), True),
    Fault("softmax scale missing", _jax_scores(_jax_scale), checks.check_cfg, (JAX,), True),
    Fault(
        "mask one key too wide", _jax_scores(_jax_mask_one_wider), checks.check_cfg, (JAX,), True
    ),
    Fault("softcap ignored", _jax_no_softcap, checks.check_softcap, (JAX,), True),
    Fault(
        "bytes that nobody wrote are read",
        _jax_reads_what_nobody_wrote,
        checks.check_contexts,
        (JAX,),
        True,
    ),
    Fault(
        "K and V stored in each other's place",
        _jax_write(_jax_store_swapped),
        checks.check_bits,
        (JAX,),
        True,
    ),
    Fault(
        "a slot of −1 wrapped by the writer",
        _jax_write(_jax_wrap_padding),
        checks.check_bits,
        (JAX,),
        True,
    ),
    Fault(
        "a conversion between input and pool",
        _jax_write(_jax_bits_through_float),
        checks.check_bits,
        (JAX,),
        True,
    ),
    Fault(
        "documents see those before them",
        _dense_rows(_documents_from_the_first_token),
        checks.check_dense_documents,
    ),
    Fault("a dense query sees one key less", _dense_rows(_one_key_less), checks.check_dense_shard),
    Fault(
        "spans of one sample for all",
        _dense_rows(_first_sample_alone_decides),
        checks.check_dense_spans,
    ),
    Fault("padding of a packed call is real", _padding_is_real, checks.check_dense_padding),
    Fault(
        "a shard's queries stand bottom-right",
        _shards_stand_bottom_right,
        checks.check_dense_shard,
    ),
    Fault(
        "joint tokens at the other end",
        _engines_name("_join", _joint_at_the_other_end),
        checks.check_dense_joint,
    ),
    Fault("dense mask dropped", _engines_name("_joined_mask", _no_mask), checks.check_dense_mask),
)
