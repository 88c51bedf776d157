"""A paged call that vLLM-Omni's worker prepared, executed by an engine of ours.

Its worker keeps rows, blocks and step boundaries in an *adapter*, which prepares a batch for a
phase of the denoise loop and a context for each layer. A :class:`PagedWorker` reads the
adapter's rows on the host, as ints, and prepares one batch of ours for each of them: nothing is
read back from the device, and no slot or table that vLLM computed is used.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
from vllm_omni.diffusion.forward_context import (
    get_forward_context,
    is_forward_context_available,
)

import backends
from integrations.tensors import bridge_for
from integrations.vllm_omni.parallel import ulysses_degree
from layout_core.diffusion import adopt_kv_cache_layout
from layout_core.errors import (
    BlockTableError,
    ConfigError,
    PoolError,
    TensorError,
    UnsupportedError,
)
from layout_core.foreign import as_config
from layout_core.resolve import resolve_layout
from layout_core.rows import PagedAttentionRow
from layout_core.serving import check_servable
from layout_core.views import ResolvedLayout
from layout_core.visibility import Visibility

ATTRIBUTE: Final = "_pagestride"
"""Where an adapter keeps its workers, and a layer its adapter: they live as long as it does."""

MakePool = Callable[[Any, ResolvedLayout, Any], Any]
"""``(engine, plan, adapter) -> pool``: where an engine's bytes are."""


class AdapterTables:
    """The adapter's rows as ``BlockTables``: block ids that the scheduler handed out."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter

    @property
    def version(self) -> int:
        """The adapter's own count of preparations; each change of its rows adds to it."""
        return int(self._adapter._prepare_generation)

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        """Manager block ids of a row that the adapter has installed.

        Raises:
            BlockTableError: the adapter knows no block ids of the row, or not of the group.
        """
        binding = self._adapter.resolve_row(row.request_id, row.sequence_id, row.context_id)
        if not 0 <= group < len(binding.block_ids):
            raise BlockTableError(
                f"row {row.identity!r}: the adapter resolves it to blocks of "
                f"{len(binding.block_ids)} groups, expected those of group {group}"
            )
        return array("i", binding.block_ids[group])


class PagedWorker:
    """One engine behind one adapter: its plan, its pool, and the batches of the active step.

    Args:
        adapter: vLLM-Omni's ``DiffusionPagedAttentionAdapter``.
        backend: the engine's flag.
        make_pool: where its bytes are.

    Raises:
        UnsupportedError: ring, all-gather, decode context parallelism, a window, or a spec that
            no engine serves.
        LayoutConflictError, ConfigError: the carried config is not what the worker adopted.
    """

    def __init__(self, adapter: Any, backend: str, make_pool: MakePool) -> None:
        check_parallelism()
        layout = adopt_kv_cache_layout(adapter.vllm_config, adapter.kv_cache_config)
        config = replace(as_config(adapter.kv_cache_config), kv_cache_layout=layout.name)
        tables = adapter.block_tables
        self.adapter = adapter
        self.resolved = resolve_layout(config, kernel_block_sizes=tables.kernel_block_sizes)
        check_servable(self.resolved, decode_context_parallel_size=tables.cp_size)
        self.engine = backends.load(backend, device=str(adapter.device))
        self.bridge = bridge_for(self.engine)
        self.tables = AdapterTables(adapter)
        self.pool = make_pool(self.engine, self.resolved, adapter)
        self._active: Any = None
        self._batches: dict[tuple[object, ...], Any] = {}

    def forward(self, context: Any) -> torch.Tensor:
        """Write the context's K/V, attend, and give the output back in the model's shape.

        Args:
            context: ``DiffusionPagedAttentionContext``, prepared in the active step.

        Raises:
            ConfigError: no step is active.
            TensorError: heads of the layer that are not those of the plan.
            StaleBatchError: rows changed while the step was active.
        """
        layer = context.layer
        to_engine = self.bridge.to_engine
        output, self.pool = self.engine.forward_paged(
            self.pool,
            layer.layer_name,
            to_engine(context.query),
            to_engine(context.key_write),
            to_engine(context.value_write),
            self._batch(context),
            softmax_scale=layer.softmax_scale,
        )
        restored: torch.Tensor = context.restore_output(self.bridge.to_torch(output))
        return restored

    def _batch(self, context: Any) -> Any:
        """The batch of the active step for a layer's group, rule and spans; made once."""
        active = self.adapter._active_batch
        if active is None:
            raise ConfigError(
                f"layer {context.layer.layer_name!r}: a paged call runs inside "
                "adapter.activate(batch), and no batch is active"
            )
        if active is not self._active:
            self._active = active
            self._batches = {}
        layer = context.layer
        view = self.resolved.layer(layer.layer_name)
        if layer.num_kv_heads != view.num_kv_heads:
            raise TensorError(
                f"layer {layer.layer_name!r}: it has {layer.num_kv_heads} KV heads on this rank, "
                f"the plan {view.num_kv_heads}; the carried config wants the heads of one rank"
            )
        plan = context.piecewise_plan
        spans = None if plan is None else plan.spans
        key = (view.group, layer.num_heads, _visibility(layer), spans)
        batch = self._batches.get(key)
        if batch is None:
            batch = self.engine.prepare(
                self.resolved,
                [row_of(row) for row in active.rows],
                self.tables,
                visibility=_visibility(layer),
                num_heads=layer.num_heads,
                group=view.group,
                spans=spans,
            )
            self._batches[key] = batch
        return batch


def row_of(row: Any) -> PagedAttentionRow:
    """Our row of vLLM-Omni's ``DiffusionPagedAttentionRow``."""
    return PagedAttentionRow(
        request_id=row.request_id,
        query_len=row.query_len,
        seq_len=row.seq_len,
        kv_start_pos=row.kv_start_pos,
        sequence_id=row.sequence_id,
        context_id=row.context_id,
    )


def _visibility(layer: Any) -> Visibility:
    """The rule of a layer: causal or not, which is all that vLLM-Omni's adapter knows."""
    for field in ("sliding_window", "attention_chunk_size"):
        value = getattr(layer.spec, field, None)
        if value is not None:
            raise UnsupportedError(
                f"layer {layer.layer_name!r}: {field}: vLLM-Omni's paged calls have none, "
                f"got {value}"
            )
    return Visibility(causal=not getattr(layer.spec, "non_causal", False))


def check_parallelism() -> int:
    """The Ulysses degree of the forward that is under way; see :func:`ulysses_degree`."""
    if not is_forward_context_available():
        return 1
    config = get_forward_context().omni_diffusion_config
    return ulysses_degree(getattr(config, "parallel_config", None))


def attach(adapter: Any) -> None:
    """Let paged calls find an adapter without vLLM-Omni's forward context, as in a test."""
    for layer in adapter.layers.values():
        setattr(layer, ATTRIBUTE, adapter)


def find_worker(context: Any, backend: str, make_pool: MakePool) -> PagedWorker:
    """The worker of a context's adapter; the first call makes it.

    Raises:
        ConfigError: no adapter can be found.
        PoolError: the context's layer belongs to another adapter than the active one.
    """
    layer = context.layer
    adapter = getattr(layer, ATTRIBUTE, None)
    if is_forward_context_available():
        adapter = get_forward_context().paged_kv_adapter or adapter
    if adapter is None:
        raise ConfigError(
            f"layer {layer.layer_name!r}: no adapter is active; call inside vLLM-Omni's forward "
            "context and adapter.activate(batch), or attach(adapter) first"
        )
    if adapter.layers.get(layer.layer_name) is not layer:
        raise PoolError(
            f"layer {layer.layer_name!r}: it is not the active adapter's layer of that name"
        )
    workers = vars(adapter).setdefault(ATTRIBUTE, {})
    if backend not in workers:
        workers[backend] = PagedWorker(adapter, backend, make_pool)
    worker: PagedWorker = workers[backend]
    return worker
