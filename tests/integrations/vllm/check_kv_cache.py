"""``init_kv_cache`` beside vLLM's own: the same views, address for address, in its own form."""

from __future__ import annotations

import inspect
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker import utils as worker_utils
from vllm.v1.worker.gpu import attn_utils

import backends
import integrations.vllm as ours
import integrations.vllm.kv_cache as kv_cache_module
from integrations.vllm.kv_cache import check_form
from layout_core import (
    ConfigError,
    IllegalCombinationError,
    LayoutConflictError,
    LayoutError,
    PagedAttentionRow,
    StrideError,
    UnresolvedLayoutError,
    UnsupportedError,
    Visibility,
)
from tests import oracle
from tests.conformance import peers
from tests.conformance.sizing import (
    ConfigCase,
    build_model,
    config_cases,
    config_options,
    memory_of,
    workers_of,
)
from tests.integrations.vllm.check_convert import run_random
from tests.integrations.vllm.real import (
    LAYOUTS,
    VERSION,
    VllmLayout,
    cache_of,
    config_of,
    copy_of,
    layers_of,
    place_of,
    spec,
)
from tests.tolerances import assert_close

CPU = torch.device("cpu")
PARAMETERS = list(inspect.signature(attn_utils.init_kv_cache).parameters)


def call(
    function: Any, config: Any, context: dict[str, Any], cache: Any, sizes: list[int], **more: Any
) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """``init_kv_cache`` of either side, by position as the model runner of the version calls."""
    if VERSION < (0, 30):
        filled: list[Any] = []
        return function(filled, context, cache, CPU, sizes, config, **more), filled
    if VERSION >= (0, 32):
        more.setdefault("attn_groups", ())
    return function(context, cache, CPU, sizes, config, block_tables=None, **more), []


def both(config: Any, cache: Any, sizes: list[int], **more: Any) -> tuple[Any, Any]:
    """Their views and ours, compared with each other, with the layers and with the list."""
    their_layers, our_layers = layers_of(cache), layers_of(cache)
    theirs, their_list = call(attn_utils.init_kv_cache, config, their_layers, cache, sizes, **more)
    mine, our_list = call(ours.init_kv_cache, config, our_layers, cache, sizes, **more)
    assert list(mine) == list(theirs)
    assert {name: place_of(view) for name, view in mine.items()} == {
        name: place_of(view) for name, view in theirs.items()
    }
    for name, layer in our_layers.items():
        bound, peer = layer.kv_cache, their_layers[name].kv_cache
        assert bound is not None
        assert peer is not None
        assert place_of(bound) == place_of(peer)
        assert bound.untyped_storage().data_ptr() == mine.pool.storage.data_ptr()
    for one, peer in zip(our_list, their_list, strict=True):
        assert place_of(one) == place_of(peer)
    assert not mine.pool.storage.any()
    return theirs, mine


def test_the_form_is_that_of_the_version() -> None:
    wanted = {
        (0, 29): ["runner_kv_caches", *PARAMETERS[1:6]],
        (0, 30): PARAMETERS[:5],
        (0, 32): PARAMETERS[:5],
    }[VERSION]
    assert PARAMETERS[: len(wanted)] == wanted
    assert ("block_tables" in PARAMETERS) is (VERSION >= (0, 30))
    assert ("attn_groups" in PARAMETERS) is (VERSION >= (0, 32))
    check_form(PARAMETERS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", [16, 8, 4])
def test_one_group_in_each_layout(layout: VllmLayout, kernel: int) -> None:
    """Whole blocks and kernel blocks; where one side refuses a split, both do."""
    layers = {f"layers.{index}.attention": spec() for index in range(3)}
    cache = cache_of(layers, layout)
    if kernel == 16 or (layout.is_layer_compact and layout.is_block_compact):
        _, mine = both(config_of(layout), cache, [kernel])
        assert mine["layers.1.attention"].shape == (5 * 16 // kernel, 2, kernel, 16)
        assert mine.pool.storage.numel() == 3 * 5 * 1024
        return
    _refused_by_both(layout, cache, kernel)


def _refused_by_both(layout: VllmLayout, cache: Any, kernel: int) -> None:
    config = config_of(layout)
    context, filled = layers_of(cache), []  # type: ignore[var-annotated]
    with pytest.raises((StrideError, IllegalCombinationError)):
        _, filled = call(ours.init_kv_cache, config, context, cache, [kernel])
    assert filled == []
    assert all(layer.kv_cache is None for layer in context.values())
    with pytest.raises((ValueError, AssertionError)):
        call(attn_utils.init_kv_cache, config, layers_of(cache), cache, [kernel])


def test_random_models() -> None:
    """Groups, windows, padding, mixed pages and element types, sized by vLLM itself."""
    seen: Counter[str] = Counter()

    @settings(run_random, max_examples=400)
    @given(config_cases())
    def compare(case: ConfigCase) -> None:
        case = replace(
            case, dcp=1, override=5, memory=tuple(400 for _ in case.memory), max_model_len=1
        )
        model = build_model(case.model)
        if isinstance(model, str):
            return
        mine, peer = model
        workers = workers_of(case, list(mine))
        config = peers.vllm_config(**config_options(case))
        try:
            made = peers.utils.get_kv_cache_configs(
                config,
                [{name: peer[name] for name in names} for names in workers],
                memory_of(case, mine, workers),
            )
        except peers.REFUSALS:
            return
        config.model_config.hf_config = SimpleNamespace(model_type="digits")
        for cache in made:
            cache.kv_cache_layout = config.cache_config.kv_cache_layout
            held = {name for group in cache.kv_cache_groups for name in group.layer_names}
            cache.kv_cache_tensors = [
                tensor for tensor in cache.kv_cache_tensors if not held.isdisjoint(tensor.layers)
            ]
            if cache.kv_cache_tensors and cache.kv_cache_tensors[0].size > 1 << 24:
                continue
            sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
            try:
                ours.allocate_kv_cache(cache, CPU, cache.kv_cache_layout, sizes)
            except LayoutError as error:
                seen[f"we refuse: {type(error).__name__}"] += 1
                continue
            try:
                worker_utils.allocate_kv_cache(
                    cache, CPU, config.cache_config.get_resolved_kv_cache_layout(), sizes
                )
            except peers.REFUSALS:
                seen["they refuse"] += 1
                continue
            both(config, cache, sizes)
            seen[case.layout.name] += 1
            seen["several groups"] += len(cache.kv_cache_groups) > 1
            seen["wrapper"] += any(
                type(group.kv_cache_spec).__name__ == "UniformTypeKVCacheSpecs"
                for group in cache.kv_cache_groups
            )

    compare()
    for layout in LAYOUTS:
        assert seen[layout.name] >= 4, seen
    assert seen["several groups"] >= 10, seen
    assert seen["wrapper"] >= 3, seen


def attention_layers(config: Any, targets: Mapping[str, str | None]) -> dict[str, Any]:
    """vLLM's own attention layers, registered in the config; name -> layer whose K/V it uses."""
    with set_current_vllm_config(config):
        for name, target in targets.items():
            Attention(
                4,
                64,
                0.125,
                num_kv_heads=2,
                cache_config=config.cache_config,
                prefix=name,
                kv_sharing_target_layer_name=target,
            )
    context: dict[str, Any] = config.compilation_config.static_forward_context
    return context


def test_real_attention_layers_on_the_cpu(real_config: Any) -> None:
    """vLLM's own layers: their specs, its sizing, its function and ours, one after the other."""
    config = copy_of(real_config)
    config.cache_config.kv_cache_layout = "LBNHC"
    names = [f"layers.{index}.self_attn.attn" for index in range(2)]
    context = attention_layers(config, dict.fromkeys(names))
    specs = attn_utils.get_kv_cache_spec(config)
    assert list(specs) == names
    cache = cache_of(specs, VllmLayout.LBNHC, blocks=12, config=config)
    theirs, _ = call(attn_utils.init_kv_cache, config, context, cache, [8])
    places = {name: place_of(context[name].kv_cache) for name in names}
    mine, filled = call(ours.init_kv_cache, config, context, cache, [8])
    assert {name: place_of(context[name].kv_cache) for name in names} == places
    assert {name: place_of(view) for name, view in theirs.items()} == places
    for name in names:
        kept = context[name].kv_cache
        assert kept.untyped_storage().data_ptr() == mine.pool.storage.data_ptr()  # type: ignore[attr-defined]
    assert len(filled) == (2 if VERSION < (0, 30) else 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_that_the_engine_writes_are_read_through_vllms_views(layout: VllmLayout) -> None:
    """One token through ``forward_paged``; then the cell in the bound view is ``K ‖ V``."""
    layers = {"layers.0.attention": spec(), "layers.1.attention": spec()}
    cache = cache_of(layers, layout)
    context = layers_of(cache)
    made, _ = call(ours.init_kv_cache, config_of(layout), context, cache, [16])
    engine = backends.load("torch_cuda", device="cpu")
    generator = torch.Generator().manual_seed(7)
    key, value = torch.randn((2, 3, 2, 8), generator=generator).half()
    slots = torch.tensor([16, 31, 4 * 16 + 5])
    engine.write(made.pool, "layers.1.attention", key, value, slots)  # type: ignore[attr-defined]
    view = context["layers.1.attention"].kv_cache
    assert view is not None
    for token, (block, place) in enumerate(((1, 0), (1, 15), (4, 5))):
        assert torch.equal(view[block, :, place, :8], key[token])
        assert torch.equal(view[block, :, place, 8:], value[token])
    assert int(view.count_nonzero()) == 3 * 2 * 16
    other = context["layers.0.attention"].kv_cache
    assert other is not None
    assert not other.any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_paged_attention_over_the_bound_pool_equals_the_oracle(layout: VllmLayout) -> None:
    """Two rows, their blocks interleaved: a causal one written here, and attended by the engine."""
    layers = {"layers.0.attention": spec(), "layers.1.attention": spec()}
    cache = cache_of(layers, layout, blocks=7)
    made, _ = call(ours.init_kv_cache, config_of(layout), layers_of(cache), cache, [16])
    pool: Any = made.pool  # type: ignore[attr-defined]
    engine = backends.load("torch_cuda", device="cpu")
    rows = [
        PagedAttentionRow("a", query_len=37, seq_len=37, sequence_id=0),
        PagedAttentionRow("b", query_len=20, seq_len=20, sequence_id=0),
    ]
    batch = engine.prepare(
        pool.resolved,
        rows,
        Tables({"a": [3, 6, 1], "b": [5, 2]}),
        visibility=Visibility(causal=True),
        num_heads=4,
    )
    generator = torch.Generator().manual_seed(11)
    query = torch.randn((57, 4, 8), generator=generator).half()
    key, value = torch.randn((2, 57, 2, 8), generator=generator).half()
    output, _ = engine.forward_paged(pool, "layers.1.attention", query, key, value, batch)
    for start, stop in ((0, 37), (37, 57)):
        mask = oracle.visible(stop - start, stop - start, causal=True)
        expected, _ = oracle.dense_attention(
            *(part[start:stop].numpy() for part in (query, key, value)), mask
        )
        assert_close(output[start:stop].numpy(), expected, "attention", "float16", layout.name)


class Tables:
    """Block tables that do not change."""

    version = 0

    def __init__(self, blocks: Mapping[str, list[int]]) -> None:
        self._blocks = {name: array("i", ids) for name, ids in blocks.items()}

    def block_ids(self, row: PagedAttentionRow, group: int) -> array[int]:
        return self._blocks[row.request_id]


def test_layers_that_share_kv_get_the_view_of_their_target(real_config: Any) -> None:
    config = copy_of(real_config)
    config.cache_config.kv_cache_layout = "LBHNC"
    names = ["layers.0.attn", "layers.1.attn"]
    context = attention_layers(config, {names[0]: None, names[1]: names[0]})
    specs = attn_utils.get_kv_cache_spec(config)
    assert list(specs) == names[:1]
    cache = cache_of(specs, VllmLayout.LBHNC, blocks=12, config=config)
    shared = attn_utils.get_shared_kv_cache_layers(config)
    worker_utils.add_kv_sharing_layers_to_kv_cache_groups(shared, cache.kv_cache_groups)
    assert cache.kv_cache_groups[0].layer_names == names
    theirs, _ = call(attn_utils.init_kv_cache, config, context, cache, [8])
    mine, _ = call(ours.init_kv_cache, config, context, cache, [8])
    assert {name: place_of(view) for name, view in mine.items()} == {
        name: place_of(view) for name, view in theirs.items()
    }
    assert context[names[0]].kv_cache.data_ptr() == context[names[1]].kv_cache.data_ptr()
    assert cache.kv_cache_groups[0].layer_names == names  # a caller's config is not changed


def test_memory_is_allocated_inside_the_given_context() -> None:
    entered = []

    @contextmanager
    def pool_of_memory() -> Iterator[None]:
        entered.append("in")
        yield
        entered.append("out")

    cache = cache_of({"layers.0.attention": spec()}, VllmLayout.LBNHC)
    context = layers_of(cache)
    call(
        ours.init_kv_cache,
        config_of(VllmLayout.LBNHC),
        context,
        cache,
        [16],
        kv_cache_allocation_context=pool_of_memory(),
    )
    assert entered == ["in", "out"]
    assert context["layers.0.attention"].kv_cache is not None


def test_a_worker_without_attention_layers() -> None:
    cache = cache_of({}, VllmLayout.LBNHC)
    assert cache.kv_cache_tensors == []
    theirs, filled = call(attn_utils.init_kv_cache, config_of(VllmLayout.LBNHC), {}, cache, [])
    mine, own = call(ours.init_kv_cache, config_of(VllmLayout.LBNHC), {}, cache, [])
    assert dict(mine) == theirs == {}
    assert own == filled == []
    assert mine.pool.storage.numel() == 0  # type: ignore[attr-defined]


# Refusals: nothing is allocated, nothing is bound.


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was allocated: ``torch.zeros`` inside the engine."""
    from backends.torch_cuda import allocator

    made: list[Any] = []
    real = allocator.allocate

    def counting(*args: Any) -> Any:
        made.append(args)
        return real(*args)

    monkeypatch.setattr(allocator, "allocate", counting)
    return made


def test_a_worker_of_another_layout_raises_before_it_allocates(allocations: list[Any]) -> None:
    cache = cache_of({"layers.0.attention": spec()}, VllmLayout.BLNHC)
    context = layers_of(cache)
    with pytest.raises(LayoutConflictError, match="BLNHC disagrees with the layout that the w"):
        call(ours.init_kv_cache, config_of(VllmLayout.LBNHC), context, cache, [16])
    with pytest.raises(UnresolvedLayoutError, match="not resolved yet"):
        call(ours.init_kv_cache, config_of(), context, cache, [16])
    cache.kv_cache_layout = None  # then the adopted one counts, and the strides contradict it
    with pytest.raises(ConfigError, match=r"kv_cache_tensors\[0\]"):
        call(ours.init_kv_cache, config_of(VllmLayout.LHBNC), context, cache, [16])
    assert allocations == []
    assert context["layers.0.attention"].kv_cache is None


def test_an_edited_config_raises(allocations: list[Any]) -> None:
    cache = cache_of({"layers.0.attention": spec(), "layers.1.attention": spec()}, LAYOUTS[0])
    cache.kv_cache_tensors[0].layer_stride += 16
    with pytest.raises(ConfigError, match="layer_stride"):
        call(ours.init_kv_cache, config_of(LAYOUTS[0]), layers_of(cache), cache, [16])
    assert allocations == []


def test_what_the_engine_does_not_serve_is_refused_by_name(allocations: list[Any]) -> None:
    cache = cache_of({"layers.0.attention": spec("MLAAttentionSpec", num_kv_heads=1)}, LAYOUTS[0])
    with pytest.raises(UnsupportedError, match=r"layer 'layers\.0\.attention'.*MLAAttentionSpec"):
        call(ours.init_kv_cache, config_of(LAYOUTS[0]), layers_of(cache), cache, [16])
    config = config_of(LAYOUTS[0])
    object.__setattr__(config.attention_config, "hisparse_config", SimpleNamespace())
    with pytest.raises(UnsupportedError, match="hisparse_config: expected None"):
        call(ours.init_kv_cache, config, layers_of(cache), cache, [16])


def test_a_layer_that_is_not_there(allocations: list[Any]) -> None:
    """0.29 demands every layer; from 0.30 on those of another runner may be missing."""
    cache = cache_of({"layers.0.attention": spec(), "layers.1.attention": spec()}, LAYOUTS[0])
    context = layers_of(cache)
    del context["layers.1.attention"]
    config = config_of(LAYOUTS[0])
    if VERSION < (0, 30):
        with pytest.raises(ConfigError, match=r"missing: \['layers\.1\.attention'\]"):
            call(ours.init_kv_cache, config, context, cache, [16])
        with pytest.raises(ConfigError, match="expected an empty list, got 1 entries"):
            ours.init_kv_cache([1], layers_of(cache), cache, CPU, [16], config)
        assert context["layers.0.attention"].kv_cache is None
        return
    made, _ = call(ours.init_kv_cache, config, context, cache, [16])
    assert list(made) == ["layers.0.attention", "layers.1.attention"]
    assert context["layers.0.attention"].kv_cache is not None


def test_arguments_that_the_version_does_not_take() -> None:
    cache = cache_of({"layers.0.attention": spec()}, LAYOUTS[0])
    with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
        call(ours.init_kv_cache, config_of(LAYOUTS[0]), layers_of(cache), cache, [16], nonsense=1)
    with pytest.raises(TypeError, match="missing a required argument"):
        ours.init_kv_cache()


def test_a_form_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="missing: none, not known here: host_pool"):
        check_form([*PARAMETERS, "host_pool"])
    with pytest.raises(UnsupportedError, match="missing: kernel_block_sizes, not known"):
        check_form([name for name in PARAMETERS if name != "kernel_block_sizes"])


if VERSION >= (0, 32):

    def test_groups_may_want_other_views() -> None:
        """0.32 binds what its attention group makes of a view; the dict keeps the view itself."""
        cache = cache_of({"layers.0.attention": spec()}, VllmLayout.BLNHC)

        class Group:
            layer_names = ("layers.0.attention",)
            kernel_block_size = 16

            def map_kv_cache_to_kernel_blocks(self, view: torch.Tensor) -> torch.Tensor:
                return view[1:]

        _, mine = both(config_of(VllmLayout.BLNHC), cache, [16], attn_groups=[Group()])
        assert mine["layers.0.attention"].shape[0] == 5


def test_a_view_moved_by_one_element_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: a fault planted into our views."""
    real = kv_cache_module.allocate_kv_cache

    def moved(*args: Any) -> Any:
        made = real(*args)
        name = next(iter(made))
        view = made[name]
        made[name] = view.as_strided(view.shape, view.stride(), view.storage_offset() + 1)
        return made

    monkeypatch.setattr(kv_cache_module, "allocate_kv_cache", moved)
    layers = {"layers.0.attention": spec(), "layers.1.attention": spec()}
    cache = cache_of(layers, LAYOUTS[0])  # the second layer gives the moved view room
    with pytest.raises(AssertionError, match="'offset': 1"):
        both(config_of(LAYOUTS[0]), cache, [16])
