"""What the diffusers integration refuses, in which words, and that nothing is left of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    ChromaTransformer2DModel,
    CogVideoXTransformer3DModel,
    CogView4Transformer2DModel,
    FluxTransformer2DModel,
    HunyuanImageTransformer2DModel,
    Lumina2Transformer2DModel,
    QwenImageTransformer2DModel,
    SanaTransformer2DModel,
    SD3Transformer2DModel,
)

from integrations.diffusers import install
from integrations.diffusers.errors import StaleContextError
from integrations.diffusers.models import check_version
from layout_core import (
    InsufficientMemoryError,
    LayoutError,
    RequestError,
    TensorError,
    UnsupportedError,
)
from tests.integrations.diffusers_models import PixArtInputs, WanInputs, pixart, wan

ROOT = Path(__file__).resolve().parents[2]


def flux() -> Any:
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def sd3() -> Any:
    return SD3Transformer2DModel(
        sample_size=32, patch_size=1, in_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32,
        pooled_projection_dim=64, out_channels=4,
    )  # fmt: skip


def hunyuan_image() -> Any:
    return HunyuanImageTransformer2DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=2,
        num_single_layers=1, num_refiner_layers=1, patch_size=(1, 1), text_embed_dim=16,
        text_embed_2_dim=8, rope_axes_dim=(8, 8),
    )  # fmt: skip


def qwen_image() -> Any:
    return QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def chroma() -> Any:
    return ChromaTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
        approximator_hidden_dim=32, approximator_layers=1, approximator_num_channels=16,
    )  # fmt: skip


def cogvideox() -> Any:
    return CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        time_embed_dim=2, text_embed_dim=8, num_layers=1, sample_width=2, sample_height=2,
        sample_frames=9, max_text_seq_length=8,
    )  # fmt: skip


def cogview4() -> Any:
    return CogView4Transformer2DModel(
        patch_size=2, in_channels=4, num_layers=1, attention_head_dim=4, num_attention_heads=4,
        out_channels=4, text_embed_dim=32, time_embed_dim=8, condition_dim=4,
    )  # fmt: skip


def lumina2() -> Any:
    return Lumina2Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, hidden_size=24, num_layers=1,
        num_refiner_layers=1, num_attention_heads=3, num_kv_heads=1, multiple_of=2,
        axes_dim_rope=(4, 2, 2), axes_lens=(128, 128, 128), cap_feat_dim=16,
    )  # fmt: skip


def sana() -> Any:
    return SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=4,
        num_attention_heads=2, num_cross_attention_heads=2, cross_attention_head_dim=4,
        cross_attention_dim=8, caption_channels=8, sample_size=32,
    )  # fmt: skip


QUERIES = r"in {}\.0\.attn the text tokens are queries \(add_q_proj\) and attend to image tokens"
MODULATED = r"{} modulates the text tokens by the timestep"
ONE_SEQUENCE = r"in {} text and image tokens are one sequence"
BLOCK = "transformer_blocks"


@pytest.mark.parametrize(
    ("make", "edges"),
    [
        (flux, [QUERIES.format(BLOCK), MODULATED.format(rf"{BLOCK}\.0\.norm1_context")]),
        (sd3, [QUERIES.format(BLOCK), MODULATED.format(rf"{BLOCK}\.0\.norm1_context")]),
        (hunyuan_image, [QUERIES.format(BLOCK), MODULATED.format(rf"{BLOCK}\.0\.norm1_context")]),
        (qwen_image, [QUERIES.format(BLOCK), MODULATED.format(rf"{BLOCK}\.0\.txt_mod")]),
        (chroma, [QUERIES.format(BLOCK)]),
        (cogvideox, [ONE_SEQUENCE.format(rf"{BLOCK}\.0\.attn1")]),
        (cogview4, [ONE_SEQUENCE.format(rf"{BLOCK}\.0\.attn1")]),
        (lumina2, [ONE_SEQUENCE.format(r"layers\.0\.attn")]),
    ],
)
def test_a_joint_transformer_is_refused_by_its_edges(
    make: Callable[[], Any], edges: list[str]
) -> None:
    model = make()
    before = dict(model.attn_processors) if hasattr(model, "attn_processors") else {}
    with pytest.raises(UnsupportedError) as raised:
        install(model, max_tokens=64)
    message = str(raised.value)
    assert re.search(rf"{type(model).__name__} has no text K/V that outlives a step", message)
    assert all(re.search(edge, message) for edge in edges), message
    assert "Served are PixArtTransformer2DModel, WanTransformer3DModel" in message
    assert all(each is before[name] for name, each in getattr(model, "attn_processors", {}).items())
    assert not model._forward_pre_hooks


def _text_keys(model: Any, name: str, *calls: Callable[[], Any]) -> list[torch.Tensor]:
    keys: list[torch.Tensor] = []
    hook = model.get_submodule(name).register_forward_hook(lambda m, a, out: keys.append(out))
    with torch.no_grad():
        for call in calls:
            call()
    hook.remove()
    return keys


def test_the_edges_are_real() -> None:
    """The same prompt and another timestep: joint text K changes, cross-attention's does not."""
    torch.manual_seed(0)
    model = sd3()
    text, pooled, x = torch.randn(1, 5, 32), torch.randn(1, 64), torch.randn(1, 4, 8, 8)

    def joint(t: float) -> Any:
        return model(x, text, pooled, torch.tensor([t]))

    first, second = _text_keys(
        model, "transformer_blocks.1.attn.add_k_proj", lambda: joint(1.0), lambda: joint(800.0)
    )
    assert not torch.allclose(first, second, atol=1e-3)

    cross, inputs = pixart(), PixArtInputs.make()
    first, second = _text_keys(
        cross,
        "transformer_blocks.2.attn2.to_k",
        lambda: inputs.call(cross, inputs.noise, 1),
        lambda: inputs.call(cross, -inputs.noise, 800),
    )
    assert torch.equal(first, second)


def test_a_class_that_nobody_looked_at_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match=r"SanaTransformer2DModel is not known to keep its text K/V"
    ):
        install(sana(), max_tokens=64)
    with pytest.raises(UnsupportedError, match=r"torch\.nn\.modules\.linear\.Linear is not known"):
        install(torch.nn.Linear(2, 2), max_tokens=64)

    class Mine(type(pixart())):  # type: ignore[misc]
        """Its forward may do anything."""

    with pytest.raises(UnsupportedError, match="Mine is not known"):
        install(Mine(num_layers=1, sample_size=16), max_tokens=64)


def test_layers_that_do_more_than_stock_are_refused() -> None:
    model = pixart()

    class Own:
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    model.transformer_blocks[1].attn2.set_processor(Own())
    with pytest.raises(
        UnsupportedError,
        match=r"transformer_blocks\.1\.attn2: expected a stock AttnProcessor2_0 or .*Own, whose",
    ):
        install(model, max_tokens=64)
    model = pixart()
    model.transformer_blocks[2].attn2.rescale_output_factor = 2.0
    with pytest.raises(
        UnsupportedError, match=r"blocks\.2\.attn2: rescale_output_factor: expected 1\.0, got 2\.0"
    ):
        install(model, max_tokens=64)
    with pytest.raises(UnsupportedError, match="there is no cross-attention here"):
        install(pixart(cross_attention_dim=None, caption_channels=None), max_tokens=64)
    with pytest.raises(UnsupportedError, match="there are no blocks"):
        install(pixart(num_layers=0), max_tokens=64)


def test_sizes_and_a_second_install() -> None:
    model = pixart()
    for wrong in (0, 1.5, True):
        with pytest.raises(LayoutError, match=f"max_tokens: expected an int >= 1, got {wrong!r}"):
            install(model, max_tokens=wrong)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="expected one of torch_cuda, jax_gpu"):
        install(model, max_tokens=64, backend="torch_cpu")
    assert not model._forward_pre_hooks
    cache = install(model, max_tokens=64)
    with pytest.raises(UnsupportedError, match=r"got integrations\.diffusers\..*PagedContext"):
        install(model, max_tokens=64)
    with pytest.raises(RequestError, match="prompts: expected an int >= 1, got 0"):
        cache.new_request(prompts=0)
    cache.remove()
    with pytest.raises(LayoutError, match="removed from its transformer before"):
        cache.remove()
    with pytest.raises(LayoutError, match="new_request: the cache was removed"):
        cache.new_request()


def test_a_call_belongs_to_a_request() -> None:
    model, inputs = pixart(), PixArtInputs.make()
    cache = install(model, max_tokens=64)
    with pytest.raises(RequestError, match="PixArtTransformer2DModel: no request is open"):
        inputs.denoise(model, steps=1)
    request = cache.new_request()
    with pytest.raises(RequestError, match="requests are open: request-0; free them"):
        cache.remove()
    with request, pytest.raises(RequestError, match="leave its scope before it is freed"):
        request.free()
    request.free()
    with pytest.raises(RequestError, match="it was freed; make a new one"), request:
        pass
    attn = model.transformer_blocks[0].attn2
    with (
        cache.request(),
        torch.no_grad(),
        pytest.raises(
            RequestError, match=r"transformer_blocks\.0\.attn2: called outside of its transformer"
        ),
    ):
        attn(torch.zeros(1, 4, 64), encoder_hidden_states=torch.zeros(1, 4, 64))
    cache.remove()


def test_another_prompt_is_never_read_from_old_pages() -> None:
    model, inputs = pixart(), PixArtInputs.make()
    cache = install(model, max_tokens=200)
    message = "is another than the 1 that this request was opened for; open a new request"
    changed = PixArtInputs(inputs.text + 1e-3, inputs.mask, inputs.noise)
    masked = PixArtInputs(inputs.text, torch.ones_like(inputs.mask), inputs.noise)
    bare = PixArtInputs(inputs.text, None, inputs.noise)  # type: ignore[arg-type]
    with torch.no_grad(), cache.request() as request:
        inputs.call(model, inputs.noise, 5)
        equal = PixArtInputs(inputs.text.clone(), inputs.mask.clone(), inputs.noise)
        equal.call(model, inputs.noise, 5)  # another tensor with the same values
        assert request.num_contexts == 2
        for other in (changed, masked, bare):
            with pytest.raises(StaleContextError, match=message):
                other.call(model, inputs.noise, 5)
        inputs.call(model, inputs.noise, 5)
        inputs.text[0, 0, 0] += 1  # in place
        with pytest.raises(StaleContextError, match=message):
            inputs.call(model, inputs.noise, 5)
    assert cache.num_free_blocks == 13
    with torch.inference_mode(), cache.request():
        quiet = PixArtInputs(inputs.text.clone(), inputs.mask.clone(), inputs.noise)
        assert quiet.text.is_inference()
        quiet.call(model, inputs.noise, 5)
        quiet.call(model, inputs.noise, 5)
        quiet.text[0, 0, 0] += 1  # torch keeps no count of it
        with pytest.raises(StaleContextError, match=message):
            quiet.call(model, inputs.noise, 5)


def test_changed_weights_are_noticed() -> None:
    model, inputs = pixart(), PixArtInputs.make()
    cache = install(model, max_tokens=64)
    with torch.no_grad(), cache.request():
        inputs.call(model, inputs.noise, 5)
        model.transformer_blocks[1].attn2.to_v.weight.mul_(2)
        with pytest.raises(
            StaleContextError, match=r"transformer_blocks\.1\.attn2: its weights changed since"
        ):
            inputs.call(model, inputs.noise, 5)
    with torch.no_grad(), cache.request():
        inputs.call(model, inputs.noise, 5)
        model.transformer_blocks[2].attn2.to_k = torch.nn.Linear(64, 64)
        with pytest.raises(StaleContextError, match=r"blocks\.2\.attn2: its weights changed"):
            inputs.call(model, inputs.noise, 5)


class Adapted(torch.nn.Module):
    """A projection under an adapter, with the attributes of peft's that change what it gives."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base
        self.scaling = {"style": 1.0}
        self.active_adapters = ["style"]
        self.disable_adapters = False

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.base(states)
        on = self.active_adapters and not self.disable_adapters
        return output * (1 + self.scaling["style"]) if on else output


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("scaling", {"style": 0.5}), ("active_adapters", []), ("disable_adapters", True)],
)
def test_a_changed_adapter_is_noticed(attribute: str, value: Any) -> None:
    model, inputs = pixart(num_layers=1), PixArtInputs.make()
    attn = model.transformer_blocks[0].attn2
    adapter = attn.to_v = Adapted(attn.to_v)
    cache = install(model, max_tokens=64)
    before = getattr(adapter, attribute)
    with torch.no_grad(), cache.request():
        expected = inputs.call(model, inputs.noise, 5)
        setattr(adapter, attribute, value)
        with pytest.raises(StaleContextError, match=r"blocks\.0\.attn2: its weights changed"):
            inputs.call(model, inputs.noise, 5)
        setattr(adapter, attribute, before)
        assert torch.equal(inputs.call(model, inputs.noise, 5), expected)


def test_a_pool_that_is_too_small_says_by_how_much_and_keeps_no_trace() -> None:
    model, inputs = pixart(), PixArtInputs.make()
    cache = install(model, max_tokens=64)
    with torch.no_grad():
        expected = None
        with cache.request() as first:
            expected = inputs.call(model, inputs.noise, 5)
            assert cache.num_free_blocks == 1
            other = PixArtInputs(inputs.text * 2, inputs.mask, inputs.noise)
            with (
                cache.request() as second,
                pytest.raises(
                    InsufficientMemoryError,
                    match="request-1/0: its contexts need 3 blocks, 1 of 4 are free; free",
                ),
            ):
                other.call(model, inputs.noise, 5)
            assert second.num_contexts == 0
            assert first.num_contexts == 2
            assert torch.equal(inputs.call(model, inputs.noise, 5), expected)
        with cache.request():
            other.call(model, inputs.noise, 5)
        cache.remove()
        cache = install(model, max_tokens=16)
        with (
            cache.request(),
            pytest.raises(
                InsufficientMemoryError,
                match="contexts need 3 blocks, the pool has 1; install with max_tokens=48 or more",
            ),
        ):
            inputs.call(model, inputs.noise, 5)
        assert cache.num_free_blocks == 1


def test_a_failed_projection_is_made_good() -> None:
    """A call that breaks in the second layer leaves a request that still gives the right value."""
    model, inputs = pixart(), PixArtInputs.make()
    with torch.no_grad():
        expected = inputs.call(model, inputs.noise, 5)
        cache = install(model, max_tokens=64)
        attn = model.transformer_blocks[1].attn2
        hook = attn.to_v.register_forward_pre_hook(lambda *_: 1 / 0)
        with cache.request():
            with pytest.raises(ZeroDivisionError):
                inputs.call(model, inputs.noise, 5)
            hook.remove()
            got = inputs.call(model, inputs.noise, 5)
    assert (got - expected).abs().max() < 1e-5


def test_gradients_are_refused() -> None:
    model, inputs = pixart(), PixArtInputs.make()
    cache = install(model, max_tokens=64)
    with (
        cache.request(),
        pytest.raises(
            UnsupportedError,
            match=r"blocks\.0\.attn2: no gradient flows through pages; call .*no_grad",
        ),
    ):
        inputs.call(model, inputs.noise, 5)


def test_prompts_of_wrong_shape() -> None:
    model, inputs = pixart(), PixArtInputs.make()
    cache = install(model, max_tokens=64)
    text, mask, noise = inputs.text, inputs.mask, inputs.noise
    weighed, nothing = mask.clone(), mask.clone()
    weighed[0, 1], nothing[1] = 0.5, 0
    cases: list[tuple[type[LayoutError], Any, Any, str]] = [
        (TensorError, None, mask, r"encoder_hidden_states: expected a tensor .*, got None"),
        (TensorError, text[0], mask, r"encoder_hidden_states: .* got a tensor \[20, 32\]"),
        (TensorError, text, mask[:, :9], r"mask: expected a tensor \[2, 20\] .* got .*\[2, 9\]"),
        (UnsupportedError, text, weighed, r"mask: expected 1 \(seen\) or 0 \(hidden\)"),
        (UnsupportedError, text, mask[:, None] * -5.0, r"a bias of 0 \(seen\) or -9000 and less"),
        (TensorError, text, nothing, "row 1 hides all of its 20 tokens"),
    ]
    for error, given, hidden, message in cases:
        with torch.no_grad(), cache.request(), pytest.raises(error, match=message):
            PixArtInputs(given, hidden, noise).call(model, noise, 5)
    assert cache.num_free_blocks == 4

    model, wan_inputs = wan(image=True), WanInputs.make(image=True)
    cache = install(model, max_tokens=600)
    short = WanInputs(wan_inputs.prompt[:, :100], wan_inputs.empty, wan_inputs.image, noise)
    with (
        torch.no_grad(),
        cache.request(),
        pytest.raises(
            UnsupportedError,
            match="takes the last 512 of all context tokens as text; got 109 in all",
        ),
    ):
        short.call(model, wan_inputs.noise, 5, short.prompt)


def test_half_precision_under_a_float32_pool_is_not_cast() -> None:
    model, inputs = pixart().to(torch.bfloat16), PixArtInputs.make(torch.bfloat16)
    cache = install(model, max_tokens=64, dtype="float32")
    with (
        torch.no_grad(),
        cache.request(),
        pytest.raises(TensorError, match="expects dtype float32, got bfloat16; nothing is cast"),
    ):
        inputs.call(model, inputs.noise, 5)


def test_a_replaced_processor_stops_the_removal() -> None:
    model = pixart()
    before = dict(model.attn_processors)
    cache = install(model, max_tokens=64)
    attn = model.transformer_blocks[1].attn2
    ours = attn.processor
    attn.set_processor(before["transformer_blocks.1.attn2.processor"])
    with pytest.raises(
        LayoutError, match=r"blocks\.1\.attn2: its processor was replaced by AttnProcessor2_0"
    ):
        cache.remove()
    attn.set_processor(ours)
    cache.remove()
    assert all(each is before[name] for name, each in model.attn_processors.items())


def test_versions_that_nobody_compared_are_refused() -> None:
    for served in ("0.40.0", "0.41.0.dev0", "0.42.1"):
        check_version(served)
    for other in ("0.39.0", "0.43.0", "1.0"):
        with pytest.raises(
            UnsupportedError, match=rf"expected one of 0\.40, 0\.41, 0\.42, .* got {other}"
        ):
            check_version(other)


def test_missing_packages_are_named() -> None:
    """In an interpreter that has the standard library and this project alone."""
    code = (
        "from integrations.diffusers import install\n"
        "try: install(None, max_tokens=1)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.strip() == (
        "MissingPackageError integrations.diffusers needs torch, diffusers, which are not "
        "installed; pip install 'pagestride[diffusers]'"
    )


def test_importing_the_integration_imports_no_framework() -> None:
    code = (
        "import sys, integrations.diffusers\n"
        "print(sorted({'torch', 'diffusers', 'jax', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"
