"""The prompt's K/V in pages: the same pictures as the stock processors, projected once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from integrations.diffusers import install
from integrations.diffusers.context_cache import PagedContextProcessor
from tests.cases import LAYOUTS
from tests.integrations.diffusers_models import (
    STEPS,
    PixArtInputs,
    WanInputs,
    counted,
    pixart,
    wan,
)
from tests.oracle import dense_attention
from tests.tolerances import assert_close

ENGINES = ("torch_cuda", "jax_gpu")
KV = ("attn2.to_k", "attn2.to_v")


@pytest.fixture(scope="module")
def pixart_reference() -> Any:
    """The stock transformer in float64: what every engine and dtype is held against."""
    return PixArtInputs.make(torch.float64).denoise(pixart().double())


@pytest.fixture(scope="module")
def wan_reference() -> dict[bool, Any]:
    return {
        image: WanInputs.make(torch.float64, image=image).denoise(wan(image=image).double())
        for image in (False, True)
    }


def test_float64_leaves_nothing_to_rounding(pixart_reference: Any) -> None:
    model = pixart().double()
    cache = install(model, max_tokens=48)
    with cache.request():
        got = PixArtInputs.make(torch.float64).denoise(model)
    assert_close(got, pixart_reference, "20 denoise steps", "float64")


@pytest.mark.parametrize("backend", ENGINES)
def test_pixart_guided_in_one_batch(pixart_reference: Any, backend: str) -> None:
    model, inputs = pixart(), PixArtInputs.make()
    assert_close(inputs.denoise(model), pixart_reference, "20 denoise steps", "float32", "stock")
    cache = install(model, max_tokens=48, backend=backend)
    with counted(model, *KV, "attn1.to_k") as calls, cache.request() as request:
        got = inputs.denoise(model)
        assert request.num_contexts == 2  # the two rows of guidance
    assert_close(got, pixart_reference, "20 denoise steps", "float32", backend)
    for layer in range(3):
        for name in KV:  # once for the request, and only what the mask shows: 3 + 17 tokens
            assert calls.times[f"transformer_blocks.{layer}.{name}"] == 1
            assert calls.tokens[f"transformer_blocks.{layer}.{name}"] == 20
        assert calls.times[f"transformer_blocks.{layer}.attn1.to_k"] == STEPS
    cache.remove()
    with counted(model, *KV) as calls:
        inputs.denoise(model)
    assert set(calls.times.values()) == {STEPS}
    assert set(calls.tokens.values()) == {STEPS * 40}


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("image", [False, True], ids=["text", "text and image"])
def test_wan_guided_in_two_calls(wan_reference: dict[bool, Any], backend: str, image: bool) -> None:
    model, inputs = wan(image=image), WanInputs.make(image=image)
    cache = install(model, max_tokens=1100, backend=backend)
    added = ("attn2.add_k_proj", "attn2.add_v_proj") if image else ()
    with counted(model, *KV, *added) as calls, cache.request(prompts=2) as request:
        got = inputs.denoise(model)
        assert request.num_contexts == (4 if image else 2)
    assert_close(got, wan_reference[image], "20 denoise steps", "float32", backend)
    # once for each layer and prompt; the stock processors: 2 * STEPS times
    assert len(calls.times) == 2 * (4 if image else 2)
    assert set(calls.times.values()) == {2}


@pytest.mark.parametrize(
    ("backend", "layout"),
    # JAX compiles for each of its layouts; tests/equivalence holds the engines to each other in all
    [*(("torch_cuda", layout) for layout in LAYOUTS), ("jax_gpu", "BHLNC")],
)
def test_every_layout_gives_the_same_call(backend: str, layout: str) -> None:
    model, inputs = pixart(num_layers=2), PixArtInputs.make()
    with torch.no_grad():
        expected = inputs.call(model, inputs.noise, 500)
        cache = install(model, max_tokens=48, backend=backend, layout=layout, block_size=4)
        assert cache.resolved.layout.name == layout
        with cache.request():
            for _ in range(2):  # written and read, then only read
                got = inputs.call(model, inputs.noise, 500)
                assert_close(got, expected, "transformer call", "float32", layout)


@pytest.mark.parametrize("backend", ENGINES)
def test_bfloat16(backend: str) -> None:
    model, inputs = pixart().to(torch.bfloat16), PixArtInputs.make(torch.bfloat16)
    cache = install(model, max_tokens=48, backend=backend)
    assert cache.resolved.layers[0].dtype.name == "bfloat16"
    with torch.no_grad(), cache.request():
        got = inputs.call(model, inputs.noise, 500)
    cache.remove()
    wide = PixArtInputs.make(torch.bfloat16)
    wide = PixArtInputs(wide.text.double(), wide.mask.double(), wide.noise.double())
    with torch.no_grad():
        expected = wide.call(model.double(), wide.noise, 500)
    assert_close(got.float(), expected, "transformer call", "bfloat16")


@pytest.mark.parametrize("backend", ENGINES)
def test_one_layer_against_the_oracle(backend: str) -> None:
    """Dense attention in float64 over the tokens that the mask shows, in any order."""
    model, inputs = pixart(num_layers=1), PixArtInputs.make()
    mask = inputs.mask.clone()
    mask[1, :5], mask[1, 9] = 0, 0  # holes, and hidden tokens before visible ones
    attn = model.transformer_blocks[0].attn2
    with torch.no_grad():
        attn.to_out[0].weight.copy_(torch.eye(64))
        attn.to_out[0].bias.zero_()
    taken: dict[str, Any] = {}
    attn.register_forward_hook(
        lambda module, args, kwargs, output: taken.update(
            hidden=args[0], states=kwargs["encoder_hidden_states"], output=output
        ),
        with_kwargs=True,
    )
    cache = install(model, max_tokens=48, backend=backend)
    with torch.no_grad(), cache.request():
        PixArtInputs(inputs.text, mask, inputs.noise).call(model, inputs.noise, 7)
        heads = [
            project(x).unflatten(-1, (4, 16)).numpy()
            for project, x in (
                (attn.to_q, taken["hidden"]),
                (attn.to_k, taken["states"]),
                (attn.to_v, taken["states"]),
            )
        ]
    for row in range(2):
        query, key, value = (x[row] for x in heads)
        seen = np.broadcast_to(mask[row].numpy() == 1, (len(query), 20))
        expected, _ = dense_attention(query, key, value, seen)
        got = taken["output"][row].unflatten(-1, (4, 16))
        assert_close(got, expected, "attention", "float32", f"row {row}")


def test_pictures_of_one_prompt_share_its_contexts() -> None:
    """4 pictures under guidance are 8 rows and 2 contexts."""
    model, inputs = pixart(), PixArtInputs.make()
    text, mask = (x.repeat_interleave(4, dim=0) for x in (inputs.text, inputs.mask))
    samples = torch.randn(8, 4, 16, 16, generator=torch.Generator().manual_seed(5))
    arguments: dict[str, Any] = {
        "encoder_hidden_states": text,
        "timestep": torch.full((8,), 300),
        "encoder_attention_mask": mask,
    }
    with torch.no_grad():
        expected = model(samples, **arguments).sample
        cache = install(model, max_tokens=48)
        with counted(model, *KV) as calls, cache.request() as request:
            got = model(samples, **arguments).sample
            assert request.num_contexts == 2
            assert cache.num_free_blocks == 0  # 3 tokens and 17: one block and two
    assert_close(got, expected, "transformer call", "float32")
    assert set(calls.tokens.values()) == {20}


def test_the_mask_as_a_bias() -> None:
    """diffusers takes ``[B, 1, S]``: 0 is seen, -10000 is hidden."""
    model, inputs = pixart(num_layers=1), PixArtInputs.make()
    bias = (1 - inputs.mask)[:, None] * -10000.0
    with torch.no_grad():
        expected = inputs.call(model, inputs.noise, 5)
        cache = install(model, max_tokens=48)
        with cache.request():
            biased = PixArtInputs(inputs.text, bias, inputs.noise)
            assert_close(
                biased.call(model, inputs.noise, 5), expected, "transformer call", "float32"
            )


@pytest.mark.parametrize("make", [pixart, wan])
def test_fused_projections(make: Callable[[], Any]) -> None:
    model = make()
    inputs = PixArtInputs.make() if make is pixart else WanInputs.make()
    expected = inputs.denoise(model, steps=2)
    model.fuse_qkv_projections()
    cache = install(model, max_tokens=1100)
    with counted(model, "attn2.to_kv") as calls, cache.request(prompts=2):
        got = inputs.denoise(model, steps=2)
    assert_close(got, expected, "transformer call", "float32")
    assert calls.times
    assert set(calls.times.values()) == {1 if make is pixart else 2}


def test_requests_in_turns() -> None:
    """Two requests step in turns; each reads its own pages, also after a third was freed."""
    model = pixart()
    cache = install(model, max_tokens=200)
    inputs = [PixArtInputs.make() for _ in range(3)]
    inputs = [PixArtInputs(x.text * (1 + at), x.mask, x.noise + at) for at, x in enumerate(inputs)]
    cache.remove()
    with torch.no_grad():
        expected = [x.call(model, x.noise, 100) for x in inputs]
        cache = install(model, max_tokens=200)
        free = cache.num_free_blocks
        requests = [cache.new_request() for _ in inputs]
        for turn in range(3):
            for at, (request, x) in enumerate(zip(requests, inputs)):
                if turn == 1 and at == 0:
                    request.free()
                if request.freed:
                    continue
                with request:
                    got = x.call(model, x.noise, 100)
                assert_close(got, expected[at], "transformer call", "float32", f"{turn} {at}")
    for request in requests:
        request.free()
        request.free()
    assert cache.num_free_blocks == free


def test_remove_restores_the_very_objects() -> None:
    model, inputs = pixart(), PixArtInputs.make()
    before = dict(model.attn_processors)
    expected = inputs.denoise(model, steps=2)
    cache = install(model, max_tokens=48)
    changed = {name for name, each in model.attn_processors.items() if each is not before[name]}
    assert changed == {f"transformer_blocks.{layer}.attn2.processor" for layer in range(3)}
    assert all(isinstance(model.attn_processors[name], PagedContextProcessor) for name in changed)
    with cache.request():
        inputs.denoise(model, steps=2)
    cache.remove()
    assert all(each is before[name] for name, each in model.attn_processors.items())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert torch.equal(inputs.denoise(model, steps=2), expected)
    again = install(model, max_tokens=48)  # and it can be installed anew
    again.remove()
