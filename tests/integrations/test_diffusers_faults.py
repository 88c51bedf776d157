"""Planted faults of the diffusers integration: each must turn a comparison red."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from backends.torch_cuda.engine import TorchEngine
from integrations.diffusers import context_cache, install, models, prompts
from integrations.diffusers.context_cache import ContextCache
from layout_core.rows import PAD_SLOT
from tests.integrations.diffusers_models import PixArtInputs, WanInputs, pixart, wan
from tests.tolerances import Mismatch, assert_close


@torch.no_grad()
def guided_batch() -> None:
    """PixArt, two rows under a mask: a call that writes and one that reads."""
    model, inputs = pixart(), PixArtInputs.make()
    expected = [inputs.call(model, inputs.noise, t) for t in (500, 20)]
    cache = install(model, max_tokens=64)
    with cache.request():
        for t, each in zip((500, 20), expected):
            assert_close(inputs.call(model, inputs.noise, t), each, "transformer call", "float32")


@torch.no_grad()
def guided_calls() -> None:
    """Wan with an image, two prompts in turns."""
    model, inputs = wan(image=True), WanInputs.make(image=True)
    texts = (inputs.prompt, inputs.empty)
    expected = [inputs.call(model, inputs.noise, 500, text) for text in texts]
    cache = install(model, max_tokens=1100)
    with cache.request(prompts=2):
        for text, each in zip(texts * 2, expected * 2):
            got = inputs.call(model, inputs.noise, 500, text)
            assert_close(got, each, "transformer call", "float32")


Check = Callable[[], None]
Plant = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    check: Check
    plant: Plant


def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """Plant ``make(original)`` in place of ``owner.name``."""
    return lambda patch: patch.setattr(owner, name, make(getattr(owner, name)))


def _last_slot_lost(original: Any) -> Any:
    def faulty(*args: Any, **kwargs: Any) -> Any:
        slots = original(*args, **kwargs)
        slots[-1] = PAD_SLOT
        return slots

    return faulty


def _swapped(original: Any) -> Any:
    return lambda self, pool, layer, key, value, slots: original(
        self, pool, layer, value, key, slots
    )


def _one_layer_down(original: Any) -> Any:
    def faulty(self: Any, pool: Any, layer: int, *args: Any) -> Any:
        return original(self, pool, (layer + 1) % len(pool.resolved.layers), *args)

    return faulty


def _short(original: Any) -> Any:
    return lambda request_id, context_id, queries, tokens: original(
        request_id, context_id, queries, max(tokens - 1, 0)
    )


def _tokens_of_the_next_row(original: Any) -> Any:
    def faulty(part: str, start: int, positions: Any, unique: Any, *rest: Any) -> Any:
        return original(part, start, positions, [*unique[1:], unique[0]], *rest)

    return faulty


FAULTS = [
    Fault(
        "all rows read the first one's context",
        guided_batch,
        _replaced(prompts, "_first_equal", lambda _: lambda columns, batch: [0] * batch),
    ),
    Fault(
        "the mask is ignored",
        guided_batch,
        _replaced(
            prompts, "_kept", lambda _: lambda mask: torch.ones(mask.shape, dtype=torch.bool)
        ),
    ),
    Fault(
        "the mask is read the wrong way round",
        guided_batch,
        _replaced(prompts, "_kept", lambda original: lambda mask: ~original(mask)),
    ),
    Fault(
        "a context's last token is not written",
        guided_batch,
        _replaced(context_cache, "compute_slot_mapping", _last_slot_lost),
    ),
    Fault(
        "a context's last token is not read",
        guided_batch,
        _replaced(context_cache, "_read", _short),
    ),
    Fault("K and V change places", guided_batch, _replaced(TorchEngine, "write", _swapped)),
    Fault(
        "K and V go to the next layer",
        guided_batch,
        _replaced(TorchEngine, "write", _one_layer_down),
    ),
    Fault(
        "contexts hold another row's tokens",
        guided_batch,
        _replaced(prompts, "_cut", _tokens_of_the_next_row),
    ),
    Fault(
        "every prompt is taken for the first",
        guided_calls,
        _replaced(prompts.Snapshot, "same", lambda _: lambda self, tensor: True),
    ),
    Fault(
        "one image token is taken for text",
        guided_calls,
        lambda patch: patch.setattr(prompts, "WAN_TEXT_TOKENS", models.WAN_TEXT_TOKENS + 1),
    ),
    Fault(
        "the image is projected as text is",
        guided_calls,
        lambda patch: patch.setattr(ContextCache, "_project", _with_family(ContextCache._project)),
    ),
]


def _with_family(original: Any) -> Any:
    def faulty(self: Any, index: int, *args: Any) -> Any:
        layers = self._layers
        layer = layers[index]
        wrong = models.Family(
            layer.family.processors, layer.family.query, layer.family.text, layer.family.text,
            layer.family.projections,
        )  # fmt: skip
        self._layers = [models.Layer(each.name, each.module, wrong) for each in layers]
        try:
            return original(self, index, *args)
        finally:
            self._layers = layers

    return faulty


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_caught(fault: Fault, plant: Callable[[str], None]) -> None:
    plant(f"diffusers: {fault.name}")
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        with pytest.raises(Mismatch):
            fault.check()


@pytest.mark.parametrize("check", [guided_batch, guided_calls])
def test_the_checks_are_green_without_a_fault(check: Check) -> None:
    check()
