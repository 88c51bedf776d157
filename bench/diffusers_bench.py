"""Denoise steps of diffusers' transformers with the prompt's K/V in pages, against stock.

Prints ratios, not seconds alone: every round runs one step with the stock processors and one with
pages, one after another, and a ratio is the median of the rounds' ratios. Widths are those of the
published models, two layers of them, with random weights; what a step saves does not depend on how
many layers there are. Also counted: calls of the text projections. ``--json`` writes it down.

    python -m bench.diffusers_bench [--rounds 9] [--threads 2] [--json out.json]
    python -m bench.diffusers_bench --threads 1 --clock cpu      # on a machine that is busy
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import PixArtTransformer2DModel, WanTransformer3DModel

from integrations.diffusers import install

LAYERS = 2
TOLERANCE = 1e-3
"""A step that is further from stock than this is no result."""


@dataclass(frozen=True)
class Case:
    """One model, one picture size."""

    name: str
    image_tokens: int  #: of one row
    text_tokens: int  #: of one row, padding included
    make: Callable[[], tuple[Any, Callable[[], torch.Tensor]]]


def pixart(size: int, text_tokens: int, seen: tuple[int, int]) -> Any:
    """A step under guidance in one batch; ``seen`` tokens of each row are no padding."""
    torch.manual_seed(0)
    model = PixArtTransformer2DModel(
        num_layers=LAYERS, sample_size=size, caption_channels=4096,
        use_additional_conditions=False,
    ).eval()  # fmt: skip
    text, mask = torch.randn(2, text_tokens, 4096), torch.zeros(2, text_tokens)
    for row, count in enumerate(seen):
        mask[row, :count] = 1
    arguments = {
        "hidden_states": torch.randn(2, 4, size, size),
        "encoder_hidden_states": text,
        "encoder_attention_mask": mask,
        "timestep": torch.full((2,), 500),
    }
    return model, lambda: model(**arguments).sample


def wan(height: int, width: int) -> Any:
    """A step's call of one branch, at the widths of the 1.3B model."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(num_attention_heads=12, num_layers=LAYERS, ffn_dim=8960).eval()
    arguments = {
        "hidden_states": torch.randn(1, 16, 1, height, width),
        "encoder_hidden_states": torch.randn(1, 512, 4096),
        "timestep": torch.full((1,), 500),
    }
    return model, lambda: model(**arguments).sample


CASES = (
    Case("PixArt, 256 px", 256, 300, lambda: pixart(32, 300, (1, 30))),
    Case("PixArt, 512 px", 1024, 300, lambda: pixart(64, 300, (1, 30))),
    Case("Wan 1.3B, 240p, one latent frame", 390, 512, lambda: wan(30, 52)),
)


@torch.no_grad()
def compare(case: Case, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Ratios of a step with pages to a stock one: the first, which projects, and later ones."""
    model, step = case.make()
    calls = {"n": 0}
    attention = [name for name, _ in model.named_modules() if name.endswith("attn2.to_k")]
    for name in attention:
        model.get_submodule(name).register_forward_hook(
            lambda *_: calls.__setitem__("n", calls["n"] + 1)
        )

    def timed() -> tuple[float, torch.Tensor]:
        start = clock()
        output = step()
        return clock() - start, output

    seconds: dict[str, list[float]] = {"stock": [], "first": [], "later": []}
    projections = {"stock": 0, "pages": 0}
    _, expected = timed()  # to warm up
    for _ in range(rounds):
        before = calls["n"]
        spent, _ = timed()
        seconds["stock"].append(spent)
        projections["stock"] += calls["n"] - before
        cache = install(model, max_tokens=2 * case.text_tokens + 32)
        with cache.request():
            before = calls["n"]
            for kind in ("first", "later"):
                spent, got = timed()
                seconds[kind].append(spent)
            projections["pages"] += calls["n"] - before
        cache.remove()
        error = float((got - expected).abs().max())
        if error > TOLERANCE:
            raise SystemExit(f"{case.name}: pages and stock differ by {error}")
    if projections["pages"] != LAYERS * rounds:
        raise SystemExit(f"{case.name}: K was projected {projections['pages']} times")
    ratios = {
        kind: statistics.median(a / b for a, b in zip(seconds[kind], seconds["stock"]))
        for kind in ("first", "later")
    }
    row = {
        "case": case.name,
        "image_tokens": case.image_tokens,
        "text_tokens": case.text_tokens,
        "layers": LAYERS,
        "stock_ms": statistics.median(seconds["stock"]) * 1e3,
        "ratio": ratios,
        "k_projections": {
            "stock, each step": projections["stock"] // rounds,
            "pages, each request": projections["pages"] // rounds,
        },
    }
    print(
        f"{case.name:<34} stock {row['stock_ms']:8.1f} ms   pages/stock: first step "
        f"{ratios['first']:.2f}, later ones {ratios['later']:.2f}",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: time of this thread alone, for a machine that is busy; needs --threads 1",
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.clock == "cpu" and options.threads != 1:
        parser.error("--clock cpu counts one thread: it needs --threads 1")
    clock = time.thread_time if options.clock == "cpu" else time.perf_counter
    torch.set_num_threads(options.threads)
    setting = {
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
        "python": platform.python_version(),
        "threads": options.threads,
        "clock": options.clock,
        "rounds": options.rounds,
    }
    print("  ".join(f"{key} {value}" for key, value in setting.items()))
    results = [compare(case, options.rounds, clock) for case in CASES]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"setting": setting, "results": results}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
