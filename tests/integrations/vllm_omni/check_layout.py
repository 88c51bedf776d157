"""The layout functions beside vLLM-Omni's own, on the same random inputs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CacheConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm_omni.diffusion.diffusion_kv import initialization, model_runner_backend
from vllm_omni.diffusion.diffusion_kv import layout as theirs

from integrations.vllm import build_native_kv_cache_configs
from integrations.vllm_omni import install, layout, remove
from layout_core import LayoutError, resolve_layout
from layout_core.foreign import as_config
from tests.integrations.vllm_omni import peers

NAMES = tuple(member.name for member in KVCacheLayout)
ALIASES = {"NHD": "LBNHC", "HND": "LBHNC"}
"""Old names: we take them everywhere, vLLM-Omni looks them up in the enum and finds none."""
CASES = 1500
THEIR_REFUSALS = (ValueError, TypeError, KeyError, AssertionError)

CONFIG = VllmConfig(cache_config=CacheConfig(block_size=16))


def real_config(pinned: str | None) -> Any:
    CONFIG.cache_config.kv_cache_layout = pinned
    return CONFIG


def outcome(call: Callable[[], Any], refusals: Any) -> tuple[str, Any]:
    """``("value", ...)`` or ``("refused", None)``, and what is pinned afterwards."""
    try:
        value = call()
    except refusals:
        return ("refused", CONFIG.cache_config.kv_cache_layout)
    return (value if value is None else str(value), CONFIG.cache_config.kv_cache_layout)


def compare(name: str, pinned: str | None, call: Callable[[Any, Any], Any]) -> str:
    """One call on both sides; they must agree, in what they pin too."""
    answers = []
    for module, refusals in ((layout, LayoutError), (theirs, THEIR_REFUSALS)):
        config = real_config(pinned)
        function = getattr(module, name)
        answers.append(outcome(lambda c=config, f=function: call(f, c), refusals))
    mine, peer = answers
    assert mine == peer, f"{name}, pinned {pinned}: ours {mine}, vLLM-Omni {peer}"
    return "refused" if mine[0] == "refused" else "equal"


def demand(rng: random.Random) -> Any:
    return rng.choice((False, True))


def test_the_defaults_are_theirs() -> None:
    for name in ("DEFAULT_DIFFUSION_KV_CACHE_LAYOUT", "BLOCK_STRIDE_DIFFUSION_KV_CACHE_LAYOUT"):
        assert getattr(layout, name) is getattr(theirs, name)


def test_resolution_agrees() -> None:
    rng, seen = random.Random(0), Counter[str]()
    for _ in range(CASES):
        pinned = rng.choice((None, *(member.name for member in KVCacheLayout)))
        required = rng.choice((None, *NAMES, *KVCacheLayout, "LBXNC"))
        stride = demand(rng)
        seen[
            compare(
                "resolve_diffusion_kv_cache_layout",
                pinned,
                lambda f, c, s=stride, r=required: f(
                    c, indexes_kv_by_block_stride=s, required_layout=r
                ),
            )
        ] += 1
    assert min(seen["equal"], seen["refused"]) > CASES // 10, seen


@pytest.mark.parametrize("alias", sorted(ALIASES))
def test_old_names_are_taken_by_us_alone(alias: str) -> None:
    for module, config in ((layout, real_config(None)), (theirs, real_config(None))):
        call = {"required_layout": alias}
        if module is theirs:
            with pytest.raises(KeyError):
                module.resolve_diffusion_kv_cache_layout(config, **call)
        else:
            chosen = module.resolve_diffusion_kv_cache_layout(config, **call)
            assert chosen is KVCacheLayout[ALIASES[alias]]
            assert config.cache_config.kv_cache_layout == ALIASES[alias]


def test_a_backends_demand_agrees() -> None:
    rng, seen = random.Random(1), Counter[str]()
    for _ in range(CASES):
        pinned = rng.choice((None, *(member.name for member in KVCacheLayout)))
        says = rng.choice((True, False, None))
        backend: Any = rng.choice(
            (
                None,
                type("Silent", (), {}),
                type("Nothing", (), {"indexes_kv_by_block_stride": None}),
                type("Says", (), {"indexes_kv_by_block_stride": classmethod(lambda _, s=says: s)}),
            )
        )
        if says is None and backend is not None and backend.__name__ == "Says":
            continue  # "nothing" in our words, and False in theirs
        seen[
            compare("assert_backend_layout_supported", pinned, lambda f, c, b=backend: f(c, b))
        ] += 1
    assert seen["refused"] > CASES // 20, seen


def test_adoption_agrees() -> None:
    """On configs that vLLM-Omni's control plane made; carried names canonical, as it sets them."""
    rng, seen = random.Random(2), Counter[str]()
    configs = {member.name: carried(member) for member in KVCacheLayout}
    for _ in range(CASES):
        pinned = rng.choice((None, *(member.name for member in KVCacheLayout)))
        config = configs[rng.choice(tuple(configs))]
        seen[compare("adopt_kv_cache_layout", pinned, lambda f, c, k=config: f(c, k))] += 1
    assert min(seen["equal"], seen["refused"]) > CASES // 10, seen
    for pinned in (None, "LBNHC", "BLNHC"):  # a config that carries no name
        bare = carried(KVCacheLayout.LBNHC)
        bare.kv_cache_layout = None
        compare("adopt_kv_cache_layout", pinned, lambda f, c, k=bare: f(c, k))


def test_a_config_that_contradicts_its_layout_is_refused_by_us_alone() -> None:
    edited, other = carried(KVCacheLayout.LBNHC), carried(KVCacheLayout.LBNHC)
    edited.kv_cache_tensors[0].block_stride += 16
    other.kv_cache_layout = "BLNHC"  # not the one that it was made in
    for config, at in ((edited, r"\[0\]\.block_stride"), (other, r"\[0\]\.")):
        theirs.adopt_kv_cache_layout(real_config(None), config)
        with pytest.raises(LayoutError, match=f"kv_cache_tensors{at}"):
            layout.adopt_kv_cache_layout(real_config(None), config)
        assert CONFIG.cache_config.kv_cache_layout is None


def carried(member: KVCacheLayout) -> Any:
    """A worker's config, sized by vLLM-Omni's control plane under a layout."""
    specs = {f"l.{i}": random_spec(random.Random(7)) for i in range(3)}
    config = real_config(member.name)
    config.model_config = SimpleNamespace(
        max_model_len=64, original_max_model_len=64, is_mm_prefix_lm=False
    )
    workers, _ = initialization.build_native_kv_cache_configs(
        config,
        [specs],
        [9 * sum(s.page_size_bytes for s in specs.values())],
        indexes_kv_by_block_stride=member.is_block_outermost,
    )
    return workers[0]


def random_spec(rng: random.Random) -> Any:
    values: dict[str, Any] = {
        "block_size": rng.choice((8, 16, 32)),
        "num_kv_heads": rng.choice((1, 2, 4)),
        "head_size": rng.choice((16, 64)),
        "dtype": rng.choice((torch.bfloat16, torch.float32)),
    }
    if rng.random() < 0.3:
        values["head_size_v"] = rng.choice((16, 32))
    kind: Any = FullAttentionSpec
    if rng.random() < 0.2:
        kind, values["sliding_window"] = SlidingWindowSpec, 24
    return kind(**values)


def test_tensors_agree() -> None:
    rng = random.Random(3)
    for _ in range(CASES):
        spec = random_spec(rng)
        member = rng.choice((None, *KVCacheLayout))
        count, blocks = rng.randint(1, 4), rng.randint(1, 40)
        layers = [f"l.{i}" for i in range(count)]
        offset = rng.choice((0, 0, 4096))
        call = {"layout": member, "offset": offset}
        mine = layout.build_kv_cache_tensor(spec, blocks, layers, **call)
        peer = theirs.build_kv_cache_tensor(spec, blocks, layers, **call)
        assert mine == peer, f"{spec}, {member}, {blocks} blocks, {layers}, offset {offset}"


def test_connectors_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in (None, *NAMES, *KVCacheLayout, "LBXNC", 7):
        connector = type(
            "Connector",
            (),
            {"get_required_kvcache_layout": classmethod(lambda _cls, _config, a=answer: a)},
        )
        monkeypatch.setattr(
            KVConnectorFactory, "get_connector_class", staticmethod(lambda _c, k=connector: k)
        )
        config = real_config(None)
        monkeypatch.setattr(config, "kv_transfer_config", SimpleNamespace(kv_connector="C"))
        compare("get_connector_required_kv_cache_layout", None, lambda f, c: f(c))


def test_native_configs_agree() -> None:
    rng = random.Random(4)
    for _ in range(60):
        member = rng.choice(tuple(KVCacheLayout))
        one = random_spec(rng)
        specs = {f"l.{i}": one for i in range(rng.randint(1, 4))}
        memory = rng.randint(20, 80) * sum(s.page_size_bytes for s in specs.values())
        answers = []
        for build in (
            build_native_kv_cache_configs,
            initialization.build_native_kv_cache_configs,
        ):
            config = real_config(member.name)
            config.model_config = SimpleNamespace(
                max_model_len=64, original_max_model_len=64, is_mm_prefix_lm=False
            )
            answers.append(
                build(
                    config,
                    [specs, specs],
                    [memory, memory + 5000],
                    indexes_kv_by_block_stride=member.is_block_outermost,
                )
            )
        (ours, our_scheduler), (peers_, their_scheduler) = answers
        assert [c.num_blocks for c in ours] == [c.num_blocks for c in peers_]
        for mine, peer in zip([*ours, our_scheduler], [*peers_, their_scheduler], strict=True):
            assert mine.kv_cache_tensors == peer.kv_cache_tensors
            assert mine.kv_cache_groups == peer.kv_cache_groups
            assert mine.kv_cache_layout == peer.kv_cache_layout == member.name
        resolve_layout(as_config(peers_[0]))


def test_ours_stand_in_for_theirs() -> None:
    original = theirs.resolve_diffusion_kv_cache_layout
    installed = install("torch_cuda", layout_functions=True)
    try:
        for module in (theirs, initialization):
            assert (
                module.resolve_diffusion_kv_cache_layout is layout.resolve_diffusion_kv_cache_layout
            )
        assert model_runner_backend.adopt_kv_cache_layout is layout.adopt_kv_cache_layout
        carried(KVCacheLayout.BLNHC)  # vLLM-Omni's own control plane over our functions
        shape = peers.Shape()
        worker = peers.Worker(shape, "TORCH_SDPA", layout="BHLNC")
        configs, _, _ = peers.control_plane(worker, 9, outermost=True)
        configs[0].kv_cache_tensors[0].block_stride += 64
        with pytest.raises(LayoutError, match="block_stride"):
            worker.allocate(configs[0])
    finally:
        remove(installed)
    assert theirs.resolve_diffusion_kv_cache_layout is original
    assert initialization.resolve_diffusion_kv_cache_layout is original
