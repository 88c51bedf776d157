"""A transformer of diffusers, its prompt's K/V in pages: the same picture, projected once.

python examples/diffusers_runner.py --backend torch_cuda     (or jax_gpu)

The transformer is small and its weights are random, so that nothing is downloaded; a pipeline's own
(``pipe.transformer``) takes the same two lines.
"""

import argparse
import time

import torch
from diffusers import DDIMScheduler, PixArtTransformer2DModel

from integrations.diffusers import install

STEPS, GUIDANCE, TEXT_TOKENS = 20, 3.0, 120


def small_transformer():
    torch.manual_seed(0)
    return PixArtTransformer2DModel(
        num_attention_heads=4, attention_head_dim=16, cross_attention_dim=64, num_layers=4,
        sample_size=32, caption_channels=64, use_additional_conditions=False,
    ).eval()  # fmt: skip


@torch.no_grad()
def denoise(transformer, text, mask, noise):
    """Guidance as a batch of two rows: the empty prompt and the prompt."""
    scheduler = DDIMScheduler()
    scheduler.set_timesteps(STEPS)
    sample, started = noise, time.perf_counter()
    for timestep in scheduler.timesteps:
        output = transformer(
            torch.cat([sample, sample]),
            encoder_hidden_states=text,
            encoder_attention_mask=mask,
            timestep=timestep.expand(2),
        ).sample.chunk(2, dim=1)[0]
        empty, prompt = output.chunk(2)
        guided = empty + GUIDANCE * (prompt - empty)
        sample = scheduler.step(guided, timestep, sample).prev_sample
    return sample, time.perf_counter() - started


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--backend", default="torch_cuda")
    backend = options.parse_args().backend

    transformer = small_transformer()
    text, noise = torch.randn(2, TEXT_TOKENS, 64), torch.randn(1, 4, 32, 32)
    mask = torch.ones(2, TEXT_TOKENS)
    mask[0, 2:] = 0  # the empty prompt is mostly padding
    projections = []
    for block in transformer.transformer_blocks:
        block.attn2.to_k.register_forward_hook(lambda *_: projections.append(1))

    expected, stock_seconds = denoise(transformer, text, mask, noise)
    stock = len(projections)

    cache = install(transformer, max_tokens=256, backend=backend)  # one line to install
    with cache.request():
        picture, seconds = denoise(transformer, text, mask, noise)
    cache.remove()  # one line to remove

    paged, apart = len(projections) - stock, (picture - expected).abs().max().item()
    print(
        f"{backend}: {STEPS} steps, pictures {apart:.0e} apart, the prompt's K projected {paged} "
        f"times instead of {stock}, {seconds / stock_seconds:.2f} of the time"
    )
    assert apart < 1e-3, "the pages gave another picture"
    assert paged == len(transformer.transformer_blocks), "once for each layer"


if __name__ == "__main__":
    main()
