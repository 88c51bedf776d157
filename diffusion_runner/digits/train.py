"""Trains the digits model: `python -m diffusion_runner.digits.train --out digits.safetensors`.

Rectified flow on the training digits, with the prompt dropped now and then for classifier-free
guidance. What is saved, and what is scored, is the moving average of the weights in float16.
"""

from __future__ import annotations

import json
import math
import platform
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from diffusion_runner.digits.batch import SharedPromptBatch, shared_prompt_batch
from diffusion_runner.digits.data import Digits, load_digits_split
from diffusion_runner.digits.evaluate import evaluate
from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.model.patches import patchify, to_model_range
from diffusion_runner.model.text import encode_prompt, phrasings
from diffusion_runner.model.torch_model import Params, forward, load_params
from diffusion_runner.model.weights import DEFAULT_WEIGHTS, Weights, save_weights, weight_shapes

BATCH_SIZE = 128
PROMPTS_PER_DIGIT = 1
PROMPT_DROPOUT = 0.12
LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
WEIGHT_DECAY = 0.01
EMA_DECAY = 0.998
GRADIENT_CLIP = 1.0


def initial_weights(config: DigitsConfig, generator: np.random.Generator) -> Weights:
    """Random weights to start from: norms at one, modulation and output at zero."""
    weights: Weights = {}
    for name, shape in weight_shapes(config).items():
        if name.endswith("_norm"):
            weights[name] = np.ones(shape, np.float32)
        elif name.endswith(".bias") or name in ("modulation.weight", "patch_out.weight"):
            weights[name] = np.zeros(shape, np.float32)
        else:
            deviation = 0.5 if name.endswith(("_embedding", "_positions")) else shape[0] ** -0.5
            if name.endswith(("attention_out.weight", "mlp_down.weight")):
                # 2 * num_layers branches add up in the residual stream; keep their sum near 1.
                deviation *= (2 * config.num_layers) ** -0.5
            weights[name] = (generator.standard_normal(shape) * deviation).astype(np.float32)
    return weights


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to zero."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    return LEARNING_RATE * warm * 0.5 * (1 + math.cos(math.pi * step / steps))


def draw_prompts(
    labels: NDArray[np.int64], config: DigitsConfig, generator: np.random.Generator
) -> SharedPromptBatch:
    """A few phrasings of each digit, the empty prompt, and a choice among them for each label."""
    prompts = [encode_prompt("", config)]
    for digit in range(10):
        for text in generator.choice(phrasings(digit), PROMPTS_PER_DIGIT, replace=False):
            # Half of them start with a capital letter, as people write.
            written = str(text).capitalize() if generator.random() < 0.5 else str(text)
            prompts.append(encode_prompt(written, config))
    choice = (
        1 + labels * PROMPTS_PER_DIGIT + generator.integers(PROMPTS_PER_DIGIT, size=len(labels))
    )
    choice[generator.random(len(labels)) < PROMPT_DROPOUT] = 0
    return shared_prompt_batch(prompts, choice.tolist(), config)


def flow_loss(
    params: Params,
    config: DigitsConfig,
    clean: NDArray[np.float32],
    batch: SharedPromptBatch,
    generator: np.random.Generator,
) -> torch.Tensor:
    """Mean squared error of the velocity, over images `clean` `[R, P, patch_dim]`."""
    rows = len(clean)
    # One time in each of R equal slices of [0, 1]: less variance than R free draws.
    times = (generator.permutation(rows) + generator.random(rows)) / rows
    noise = generator.standard_normal(clean.shape, dtype=np.float32)
    mix = times.astype(np.float32)[:, None, None]
    noisy = torch.from_numpy((1 - mix) * noise + mix * clean)
    target = torch.from_numpy(clean - noise)

    prompt_tokens = batch.num_prompt_tokens
    pad = torch.zeros(prompt_tokens, config.patch_dim)
    token_times = torch.from_numpy(times.astype(np.float32)).repeat_interleave(
        config.num_image_tokens
    )
    velocity, _ = forward(
        params,
        config,
        batch.token_ids,
        batch.is_image,
        batch.position_ids,
        torch.cat([pad, noisy.reshape(-1, config.patch_dim)]),
        torch.cat([torch.zeros(prompt_tokens), token_times]),
        batch.attend,
        None,
    )
    return torch.mean((velocity[prompt_tokens:] - target.reshape(-1, config.patch_dim)) ** 2)


def train_weights(
    digits: Digits, config: DigitsConfig, *, steps: int, seed: int, progress: Progress
) -> tuple[Weights, float]:
    """Trains for `steps` batches; returns the averaged weights and the loss of the last tenth."""
    generator = np.random.default_rng(seed)
    clean = patchify(to_model_range(digits.images), config)
    params = load_params(initial_weights(config, generator))
    names = list(weight_shapes(config))  # the time frequencies are no weight
    tensors = [params[name] for name in names]
    averages = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.requires_grad_(True)
    matrices = [tensor for tensor in tensors if tensor.ndim > 1]
    vectors = [tensor for tensor in tensors if tensor.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.99))
    task = progress.add_task("training", total=steps, loss=math.nan)
    last: list[float] = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        chosen = generator.integers(len(clean), size=BATCH_SIZE)
        batch = draw_prompts(digits.labels[chosen], config, generator)
        loss = flow_loss(params, config, clean[chosen], batch, generator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(tensors, GRADIENT_CLIP)
        optimizer.step()
        with torch.no_grad():
            # A short average at first, so that the start is forgotten soon.
            torch._foreach_lerp_(averages, tensors, 1 - min(EMA_DECAY, (1 + step) / (10 + step)))
        last = [*last, loss.item()][-max(1, steps // 10) :]
        progress.update(task, advance=1, loss=float(np.mean(last)))
    weights = {name: average.numpy() for name, average in zip(names, averages, strict=True)}
    return weights, float(np.mean(last))


def main(
    out: Annotated[Path, typer.Option(help="Where the weights go (safetensors).")] = (
        DEFAULT_WEIGHTS
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything that is random.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Batches to train on.")] = 2500,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 2,
) -> None:
    """Train the digits model, score it, and write the weights and a JSON of scores."""
    torch.set_num_threads(threads)
    config = DigitsConfig()
    train, _ = load_digits_split()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.4f}"),
        TimeRemainingColumn(),
    )
    start = time.perf_counter()
    with Progress(*columns) as progress:
        weights, loss = train_weights(train, config, steps=steps, seed=seed, progress=progress)
    seconds = time.perf_counter() - start
    save_weights(out, config, weights)

    typer.echo("scoring ...")
    report: dict[str, Any] = {
        "seed": seed,
        "steps": steps,
        "batch_size": BATCH_SIZE,
        "train_loss": round(loss, 5),
        "train_seconds": round(seconds, 1),
        "hardware": f"CPU, {platform.machine()}, {threads} threads",
        "num_weights": sum(weight.size for weight in weights.values()),
        "file_bytes": out.stat().st_size,
        "scores": evaluate(out),
    }
    scores_path = out.with_suffix(".json")
    scores_path.write_text(json.dumps(report, indent=2) + "\n")
    typer.echo(
        f"{report['scores']['agreement']:.1%} of {report['scores']['count']} digits agree with "
        f"their prompt; wrote {out} and {scores_path}"
    )


if __name__ == "__main__":
    typer.run(main)
