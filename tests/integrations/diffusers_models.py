"""Small transformers of diffusers with random weights, and generations with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    PixArtTransformer2DModel,
    WanTransformer3DModel,
)
from torch import Tensor

STEPS = 20
GUIDANCE = 3.0


def pixart(**changes: Any) -> Any:
    """3 layers, 4 heads of 16; text of 32 channels, projected by the model to its 64."""
    torch.manual_seed(1)
    config: dict[str, Any] = {
        "num_attention_heads": 4, "attention_head_dim": 16, "in_channels": 4, "out_channels": 8,
        "num_layers": 3, "cross_attention_dim": 64, "sample_size": 16, "patch_size": 2,
        "caption_channels": 32, "use_additional_conditions": False,
    }  # fmt: skip
    return PixArtTransformer2DModel(**(config | changes)).eval()


def wan(*, image: bool = False) -> Any:
    """2 layers, 4 heads of 12; text of 16 channels; with ``image`` a second context of 24."""
    torch.manual_seed(2)
    added = {"image_dim": 24, "added_kv_proj_dim": 48} if image else {}
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=12, in_channels=4,
        out_channels=4, text_dim=16, freq_dim=32, ffn_dim=64, num_layers=2, rope_max_seq_len=32,
        **added,
    ).eval()  # fmt: skip


@dataclass(frozen=True)
class PixArtInputs:
    """Guidance in one batch: row 0 the empty prompt, row 1 the prompt; both padded."""

    text: Tensor
    mask: Tensor
    noise: Tensor

    @classmethod
    def make(cls, dtype: torch.dtype = torch.float32) -> PixArtInputs:
        make = torch.Generator().manual_seed(3)
        text = torch.randn(2, 20, 32, generator=make, dtype=torch.float64)
        mask = torch.ones(2, 20)
        mask[0, 3:] = 0
        mask[1, 17:] = 0
        noise = torch.randn(1, 4, 16, 16, generator=make, dtype=torch.float64)
        return cls(text.to(dtype), mask.to(dtype), noise.to(dtype))

    def call(self, model: Any, sample: Tensor, timestep: int | Tensor) -> Tensor:
        """One call of the model with both rows: ``[2, 8, 16, 16]``."""
        output: Tensor = model(
            torch.cat([sample, sample]),
            encoder_hidden_states=self.text,
            timestep=torch.as_tensor(timestep).expand(2),
            encoder_attention_mask=self.mask,
        ).sample
        return output

    @torch.no_grad()
    def denoise(self, model: Any, steps: int = STEPS) -> Tensor:
        scheduler = DDIMScheduler()
        scheduler.set_timesteps(steps)
        sample = self.noise
        for timestep in scheduler.timesteps:
            noise = self.call(model, sample, timestep).chunk(2, dim=1)[0]
            empty, prompt = noise.chunk(2)
            guided = empty + GUIDANCE * (prompt - empty)
            sample = scheduler.step(guided, timestep, sample).prev_sample
        return sample


@dataclass(frozen=True)
class WanInputs:
    """Guidance in two calls a step, as Wan's pipelines do it; with an image, a second context."""

    prompt: Tensor
    empty: Tensor
    image: Tensor | None
    noise: Tensor

    @classmethod
    def make(cls, dtype: torch.dtype = torch.float32, *, image: bool = False) -> WanInputs:
        make = torch.Generator().manual_seed(4)
        prompt, empty = (
            torch.randn(1, 512, 16, generator=make, dtype=torch.float64) for _ in range(2)
        )
        picture = torch.randn(1, 9, 24, generator=make, dtype=torch.float64)
        noise = torch.randn(1, 4, 2, 8, 8, generator=make, dtype=torch.float64)
        return cls(
            prompt.to(dtype), empty.to(dtype), picture.to(dtype) if image else None, noise.to(dtype)
        )

    def call(self, model: Any, sample: Tensor, timestep: int | Tensor, text: Tensor) -> Tensor:
        output: Tensor = model(
            sample,
            timestep=torch.as_tensor(timestep).reshape(1),
            encoder_hidden_states=text,
            encoder_hidden_states_image=self.image,
            return_dict=False,
        )[0]
        return output

    @torch.no_grad()
    def denoise(self, model: Any, steps: int = STEPS) -> Tensor:
        scheduler = FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(steps)
        sample = self.noise
        for timestep in scheduler.timesteps:
            prompt = self.call(model, sample, timestep, self.prompt)
            empty = self.call(model, sample, timestep, self.empty)
            guided = empty + GUIDANCE * (prompt - empty)
            sample = scheduler.step(guided, timestep, sample).prev_sample.to(sample.dtype)
        return sample


@dataclass
class Calls:
    """How often each projection ran, and the tokens that it was given in all."""

    times: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)


@contextmanager
def counted(model: Any, *suffixes: str) -> Iterator[Calls]:
    """Count the calls of the submodules whose dotted names end so."""
    calls, hooks = Calls(), []
    for name, module in model.named_modules():
        if name.endswith(suffixes):

            def count(_: Any, args: tuple[Tensor, ...], __: Any, name: str = name) -> None:
                calls.times[name] = calls.times.get(name, 0) + 1
                tokens = args[0].numel() // args[0].shape[-1]
                calls.tokens[name] = calls.tokens.get(name, 0) + tokens

            hooks.append(module.register_forward_hook(count))
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
