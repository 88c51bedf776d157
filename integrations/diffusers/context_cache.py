"""The pages of a transformer's text contexts, and the processors that read them.

A *request* is a generation: within its scope the transformer is called many times with the same
prompt. A *prompt* is what one call is given: the hidden states of all batch rows, a mask, an
image. Each distinct row of it is a *context* of the block manager, so that the rows of
classifier-free guidance are contexts of their own and pictures of one prompt share one. Every row
of a call is a read-only row of paged attention on its context.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

import backends
from block_manager import (
    DiffusionKVCacheManager,
    DiffusionKVContext,
    DiffusionKVRequest,
    RowTable,
)
from integrations.diffusers.errors import StaleContextError
from integrations.diffusers.models import Layer, ModelKind, check_version, kind_of, layers_of
from integrations.diffusers.prompts import Cut, Given, Snapshot, cut_contexts, read_given
from integrations.tensors import bridge_for
from layout_core import (
    DEFAULT_DIFFUSION_KV_CACHE_LAYOUT,
    CrossAttentionSpec,
    DType,
    InsufficientMemoryError,
    LayoutError,
    PagedAttentionRow,
    RequestError,
    TensorError,
    UnsupportedError,
    Visibility,
    resolve_layout,
    single_group_config,
)
from layout_core.rows import compute_slot_mapping

if TYPE_CHECKING:
    from layout_core import Engine, KVCacheLayout, ResolvedLayout

SEES_ALL = Visibility(causal=False)
"""Cross-attention: every query sees every token of its context."""


@dataclass(eq=False)
class _Part:
    """The contexts of one part of a prompt, in pages."""

    cut: Cut
    slots: Any  #: ``[T]``, an array of the engine's: where each packed token lies
    rows: tuple[tuple[str, int], ...]  #: for each batch row: context and its tokens
    batches: dict[int, tuple[Any, list[PagedAttentionRow]]] = field(default_factory=dict)


@dataclass(eq=False)
class _Prompt:
    """One prompt of a request. It has parts once its blocks are reserved."""

    request_id: str  #: the manager's
    given: Given
    snapshots: tuple[Snapshot | None, ...]
    parts: tuple[_Part, ...] = ()
    #: layers whose K/V lies in the pages, with the weights that it was projected by
    projected: dict[int, list[tuple[Any, Any]]] = field(default_factory=dict)

    def same(self, given: Given) -> bool:
        for snapshot, tensor in zip(self.snapshots, given.tensors(), strict=True):
            if (snapshot is None) != (tensor is None):
                return False
            if snapshot is not None and tensor is not None and not snapshot.same(tensor):
                return False
        return True


class PagedRequest:
    """A generation. ``with request:`` makes it the one that calls belong to; ``free`` ends it."""

    def __init__(self, cache: ContextCache, name: str, prompts: int) -> None:
        self._cache = cache
        self.name = name
        self.max_prompts = prompts
        self.prompts: list[_Prompt] = []
        self.freed = False

    def __enter__(self) -> PagedRequest:
        if self.freed:
            raise RequestError(f"request {self.name!r}: it was freed; make a new one")
        self._cache._active.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._cache._active.remove(self)

    @property
    def num_contexts(self) -> int:
        """Contexts in pages: distinct rows of all prompts, text and image apart."""
        return sum(len(part.cut.lengths) for prompt in self.prompts for part in prompt.parts)

    def free(self) -> None:
        """Give its blocks back. A second time changes nothing."""
        if self in self._cache._active:
            raise RequestError(f"request {self.name!r}: leave its scope before it is freed")
        self._cache._free(self)


class ContextCache:
    """What ``install`` gives: the pool, who owns which block, and the way back.

    It serves one thread. The transformer's weights do not change within a request.
    """

    def __init__(
        self,
        transformer: Any,
        kind: ModelKind,
        layers: Sequence[Layer],
        engine: Engine[Any, Any, Any],
        resolved: ResolvedLayout,
        manager: DiffusionKVCacheManager,
        tables: RowTable,
        kernel: str,
    ) -> None:
        self.transformer = transformer
        self.engine = engine
        self.resolved = resolved
        self.pool = engine.allocate(resolved)
        self._kind = kind
        self._layers = layers
        self._manager = manager
        self._tables = tables
        self._kernel = kernel
        self._bridge = bridge_for(engine)
        self._signature = inspect.signature(transformer.forward)
        self._active: list[PagedRequest] = []
        self._open: dict[str, PagedRequest] = {}
        self._names = count()
        self._call: tuple[PagedRequest, _Prompt] | None = None
        self._installed = [
            (layer, layer.module.processor, PagedContextProcessor(self, index))
            for index, layer in enumerate(layers)
        ]
        self._hooks: list[Any] = []

    # -- requests -----------------------------------------------------------------------

    @contextmanager
    def request(self, *, prompts: int = 1) -> Iterator[PagedRequest]:
        """The scope of one generation; its blocks are free again at the end.

        Args:
            prompts: how many different prompts its calls bring: 1 where guidance is a batch,
                2 where it is two calls a step (Wan's pipelines).
        """
        request = self.new_request(prompts=prompts)
        try:
            with request:
                yield request
        finally:
            request.free()

    def new_request(self, *, prompts: int = 1) -> PagedRequest:
        """A request to enter step by step, in turns with others; ``free`` ends it."""
        if type(prompts) is not int or prompts < 1:
            raise RequestError(f"prompts: expected an int >= 1, got {prompts!r}")
        if not self._hooks:
            raise LayoutError("new_request: the cache was removed from its transformer")
        request = PagedRequest(self, f"request-{next(self._names)}", prompts)
        self._open[request.name] = request
        return request

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no context holds."""
        return self._manager.num_free_blocks

    def _free(self, request: PagedRequest) -> None:
        for prompt in request.prompts:
            self._tables.remove(prompt.request_id)
            self._manager.free_request(prompt.request_id)
        request.prompts.clear()
        request.freed = True
        self._open.pop(request.name, None)

    # -- install, remove ----------------------------------------------------------------

    def _install(self) -> None:
        for layer, _, ours in self._installed:
            layer.module.set_processor(ours)
        self._hooks = [
            self.transformer.register_forward_pre_hook(self._before, with_kwargs=True),
            self.transformer.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Put the former processors back, the very objects, and let the pool go.

        Raises:
            RequestError: a request is open. Nothing is changed.
            LayoutError: a layer has got another processor since, or this was called before.
        """
        if not self._hooks:
            raise LayoutError("remove: the cache was removed from its transformer before")
        if self._open:
            raise RequestError(f"remove: requests are open: {', '.join(self._open)}; free them")
        for layer, _, ours in self._installed:
            if layer.module.processor is not ours:
                raise LayoutError(
                    f"remove: {layer.name}: its processor was replaced by "
                    f"{type(layer.module.processor).__name__} after the install; put the "
                    "installed one back first"
                )
        for layer, former, _ in self._installed:
            layer.module.set_processor(former)
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.pool = None

    # -- one call of the transformer ----------------------------------------------------

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Which request and which prompt a call belongs to. Nothing is changed yet."""
        if not self._active:
            raise RequestError(
                f"{type(module).__name__}: no request is open; call it inside `with "
                "cache.request():`, or take the cache off with cache.remove()"
            )
        request = self._active[-1]
        given = read_given(
            self._signature.bind(*args, **kwargs).arguments,
            mask=self._kind.mask,
            image=self._kind.image,
        )
        for prompt in request.prompts:
            if prompt.same(given):
                self._call = (request, prompt)
                return
        if len(request.prompts) == request.max_prompts:
            raise StaleContextError(
                f"request {request.name!r}: encoder_hidden_states, its mask or its image is "
                f"another than the {request.max_prompts} that this request was opened for; open "
                "a new request for another prompt, or this one with a larger prompts="
            )
        prompt = _Prompt(
            f"{request.name}/{len(request.prompts)}",
            given,
            tuple(None if each is None else Snapshot(each) for each in given.tensors()),
        )
        self._call = (request, prompt)

    def _after(self, *_: Any) -> None:
        self._call = None

    def attend(
        self, index: int, attn: Any, hidden_states: torch.Tensor, states: torch.Tensor
    ) -> torch.Tensor:
        """Cross-attention of one layer, the output projection included.

        Args:
            index: of the layer.
            attn: its module.
            hidden_states: ``[B, Q, C]`` of the image.
            states: ``[B, S, C]``, the contexts as this layer is given them.
        """
        layer = self._layers[index]
        if self._call is None:
            raise RequestError(
                f"{layer.name}: called outside of its transformer; the cache learns the prompt "
                f"from a call of {type(self.transformer).__name__}"
            )
        request, prompt = self._call
        if hidden_states.dim() != 3 or hidden_states.shape[0] != states.shape[0]:
            raise TensorError(
                f"hidden_states: {layer.name} expects [{states.shape[0]}, tokens, channels], as "
                f"many rows as the prompt, got {list(hidden_states.shape)}"
            )
        query = layer.family.query(attn, hidden_states)
        if torch.is_grad_enabled() and query.requires_grad:
            raise UnsupportedError(
                f"{layer.name}: no gradient flows through pages; call the transformer under "
                "torch.no_grad()"
            )
        if not prompt.parts:
            self._reserve(request, prompt, states)
        self._project(index, attn, prompt, states)
        length = query.shape[1]
        packed = self._bridge.to_engine(query.reshape(-1, *query.shape[2:]))
        total: torch.Tensor | None = None
        for part in prompt.parts:
            batch = self._batch(prompt, part, length, query.shape[2])
            output, self.pool = self.engine.forward_paged(
                self.pool, index, packed, None, None, batch
            )
            attended = self._bridge.to_torch(output)
            total = attended if total is None else total + attended
        assert total is not None  # a prompt has at least its text
        merged = total.reshape(*query.shape[:2], -1)
        projected: torch.Tensor = attn.to_out[1](attn.to_out[0](merged))
        return projected

    def _reserve(self, request: PagedRequest, prompt: _Prompt, states: torch.Tensor) -> None:
        """Blocks for a prompt's contexts, all or none."""
        cuts = cut_contexts(prompt.given, states.shape[0], states.shape[1])
        contexts = [
            DiffusionKVContext(f"{cut.part}/{at}", cut.part, length)
            for cut in cuts
            for at, length in enumerate(cut.lengths)
        ]
        name = prompt.request_id
        # the manager's requests have rows; this one's stand for no tokens of the pool
        row = DiffusionKVRequest(
            f"{name}/row",
            sequence_id=0,
            prefix_len=0,
            target_len=1,
            seq_len=1,
            kv_contexts=contexts,
        )
        needed = self._manager.required_blocks([row])
        usable = self._manager.block_pool.num_usable_blocks
        if needed > usable:
            raise InsufficientMemoryError(
                f"{name}: its contexts need {needed} blocks, the pool has {usable}; install with "
                f"max_tokens={needed * self.resolved.group(0).block_size} or more"
            )
        metadata = self._manager.reserve_request(name, [row])
        if metadata is None:
            raise InsufficientMemoryError(
                f"{name}: its contexts need {needed} blocks, {self.num_free_blocks} of {usable} "
                "are free; free a request, or install with a larger max_tokens"
            )
        try:
            self._tables.install(metadata)
            prompt.parts = tuple(self._part(name, cut, states.device) for cut in cuts)
        except BaseException:
            self._tables.remove(name)
            self._manager.free_request(name)
            raise
        request.prompts.append(prompt)

    def _part(self, name: str, cut: Cut, device: torch.device) -> _Part:
        slots: list[int] = []
        contexts = [(f"{cut.part}/{at}", length) for at, length in enumerate(cut.lengths)]
        for context_id, length in contexts:
            row = _read(name, context_id, 0, length)
            blocks = self._tables.block_ids(row, 0)
            block_size = self.resolved.group(0).block_size
            slots.extend(compute_slot_mapping(blocks, range(length), block_size))
        on_device = torch.tensor(slots, dtype=torch.int32, device=device)
        return _Part(cut, self._bridge.to_engine(on_device), tuple(contexts[at] for at in cut.rows))

    def _project(self, index: int, attn: Any, prompt: _Prompt, states: torch.Tensor) -> None:
        """Write a layer's K/V at the first call that reaches it; later see that it still holds."""
        layer = self._layers[index]
        weights = list(layer.weights())
        known = prompt.projected.get(index)
        if known is not None:
            if not _unchanged(known, weights):
                raise StaleContextError(
                    f"{layer.name}: its weights changed since the request's K/V was projected; "
                    "open a new request"
                )
            return
        packed = states.reshape(-1, states.shape[-1])
        for part in prompt.parts:
            family = layer.family
            project = family.image if part.cut.part == "image" else family.text
            assert project is not None  # only kinds with an image argument have such a part
            key, value = project(attn, packed.index_select(0, part.cut.tokens))
            to_engine = self._bridge.to_engine
            self.pool = self.engine.write(
                self.pool, index, to_engine(key), to_engine(value), part.slots
            )
        prompt.projected[index] = weights

    def _batch(self, prompt: _Prompt, part: _Part, length: int, num_heads: int) -> Any:
        """The step of ``length`` queries a row; prepared once and refilled where tables moved."""
        found = part.batches.get(length)
        if found is None:
            rows = [
                _read(prompt.request_id, context_id, length, tokens)
                for context_id, tokens in part.rows
            ]
            batch = self.engine.prepare(
                self.resolved,
                rows,
                self._tables,
                visibility=SEES_ALL,
                num_heads=num_heads,
                kernel=self._kernel,
            )
        else:
            batch, rows = found
            batch = self.engine.update(batch, rows, self._tables)
        part.batches[length] = (batch, rows)
        return batch


class PagedContextProcessor:
    """diffusers' attention processor of one cross-attention layer."""

    def __init__(self, cache: ContextCache, index: int) -> None:
        self._cache = cache
        self._index = index

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
    ) -> torch.Tensor:
        """As diffusers calls it; the mask was read where the transformer was called."""
        if encoder_hidden_states is None:
            raise TensorError("encoder_hidden_states: cross-attention expects them, got None")
        if rotary_emb is not None:
            raise UnsupportedError("rotary_emb: the context's keys have no positions, got some")
        return self._cache.attend(self._index, attn, hidden_states, encoder_hidden_states)


def _read(request_id: str, context_id: str, queries: int, tokens: int) -> PagedAttentionRow:
    return PagedAttentionRow(request_id, queries, tokens, context_id=context_id, read_only=True)


def _unchanged(known: list[tuple[Any, Any]], now: list[tuple[Any, Any]]) -> bool:
    return len(known) == len(now) and all(
        was is is_now and before == after
        for (was, before), (is_now, after) in zip(known, now, strict=True)
    )


def install_cache(
    transformer: Any,
    *,
    max_tokens: int,
    backend: str | Engine[Any, Any, Any],
    layout: KVCacheLayout | str | None,
    block_size: int,
    dtype: DType | str | None,
    kernel: str,
) -> ContextCache:
    """See :func:`integrations.diffusers.install`."""
    if type(max_tokens) is not int or max_tokens < 1:
        raise LayoutError(f"max_tokens: expected an int >= 1, got {max_tokens!r}")
    check_version()
    kind = kind_of(transformer)
    layers = layers_of(transformer, kind)
    attn = layers[0].module
    weight = attn.to_k.weight
    engine = (
        backends.load(backend, device=str(weight.device)) if isinstance(backend, str) else backend
    )
    spec = CrossAttentionSpec(
        block_size=block_size,
        num_kv_heads=attn.heads,
        head_size=attn.inner_dim // attn.heads,
        dtype=DType.parse(weight.dtype if dtype is None else dtype),
    )
    usable = -(-max_tokens // block_size)
    config = single_group_config(
        spec,
        usable + 1,  # and the null block
        [layer.name for layer in layers],
        DEFAULT_DIFFUSION_KV_CACHE_LAYOUT if layout is None else layout,
    )
    longest = usable * block_size
    manager = DiffusionKVCacheManager(
        config, max_model_len=longest, scheduler_block_size=block_size, hash_block_size=block_size
    )
    tables = RowTable(config, max_model_len=longest)
    cache = ContextCache(
        transformer, kind, layers, engine, resolve_layout(config), manager, tables, kernel
    )
    cache._install()
    return cache
