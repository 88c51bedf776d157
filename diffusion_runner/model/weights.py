"""The weights file: names, shapes, reading and writing.

Both models multiply from the right (`x @ weight`), so every matrix is `[in, out]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from diffusion_runner.model.config import DigitsConfig

Weights = dict[str, NDArray[np.float32]]
T = TypeVar("T")

DEFAULT_WEIGHTS = Path(__file__).resolve().parent.parent / "weights" / "digits.safetensors"


class WeightsError(ValueError):
    """A weights file is missing, unreadable, or not of the model that its metadata names."""


def weight_shapes(config: DigitsConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight, in the order of use."""
    hidden, head = config.hidden_size, config.head_size
    shapes: dict[str, tuple[int, ...]] = {
        "token_embedding": (config.vocab_size, hidden),
        "prompt_positions": (config.max_prompt_tokens, hidden),
        "image_positions": (config.num_image_tokens, hidden),
        "patch_in.weight": (config.patch_dim, hidden),
        "time_in.weight": (config.time_features, hidden),
        "time_in.bias": (hidden,),
        # Six vectors for each layer: shift, scale and gate of attention, then of the MLP. One
        # matrix serves all layers; each layer adds its own bias.
        "modulation.weight": (hidden, 6 * hidden),
    }
    for layer in range(config.num_layers):
        shapes |= {
            f"layers.{layer}.modulation.bias": (6 * hidden,),
            f"layers.{layer}.attention_norm": (hidden,),
            f"layers.{layer}.query.weight": (hidden, config.num_heads * head),
            f"layers.{layer}.key.weight": (hidden, config.num_kv_heads * head),
            f"layers.{layer}.value.weight": (hidden, config.num_kv_heads * head),
            f"layers.{layer}.query_norm": (head,),
            f"layers.{layer}.key_norm": (head,),
            f"layers.{layer}.attention_out.weight": (config.num_heads * head, hidden),
            f"layers.{layer}.mlp_norm": (hidden,),
            f"layers.{layer}.mlp_gate.weight": (hidden, config.mlp_size),
            f"layers.{layer}.mlp_up.weight": (hidden, config.mlp_size),
            f"layers.{layer}.mlp_down.weight": (config.mlp_size, hidden),
        }
    shapes |= {
        "final_norm": (hidden,),
        "patch_out.weight": (hidden, config.patch_dim),
        "patch_out.bias": (config.patch_dim,),
    }
    return shapes


def time_frequencies(count: int) -> NDArray[np.float32]:
    """Angular frequencies of the time features, `[count]`, from 1 to 100.

    Time lies in [0, 1]. The lowest frequency is monotonic over that range, the highest tells
    apart times that differ by about 1/100. Fixed, hence computed here and not in the file.
    """
    return np.geomspace(1.0, 100.0, count).astype(np.float32)


def layer_weights(params: Mapping[str, T], layer: int) -> dict[str, T]:
    """The entries of one layer, without the `layers.N.` in front of their names."""
    prefix = f"layers.{layer}."
    return {
        name.removeprefix(prefix): value
        for name, value in params.items()
        if name.startswith(prefix)
    }


def num_layers(params: Mapping[str, Any]) -> int:
    """How many layers the names of `params` speak of."""
    return len({name.split(".")[1] for name in params if name.startswith("layers.")})


def save_weights(path: Path, config: DigitsConfig, weights: Mapping[str, NDArray[Any]]) -> None:
    """Writes `weights` as float16 safetensors with `config` in the metadata."""
    from safetensors.numpy import save_file

    _check_shapes(path, config, weights)
    half = {name: np.ascontiguousarray(value, np.float16) for name, value in weights.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(half, path, metadata=config.to_metadata())


def load_weights(path: Path | None = None) -> tuple[DigitsConfig, Weights]:
    """The config and the float32 weights of a file; by default the trained ones we ship."""
    from safetensors import SafetensorError, safe_open

    path = DEFAULT_WEIGHTS if path is None else Path(path)
    if not path.is_file():
        raise WeightsError(f"no weights file at {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            config = DigitsConfig.from_metadata(file.metadata() or {})
            names = file.keys()  # a list: the file itself is no mapping
            weights = {name: file.get_tensor(name).astype(np.float32) for name in names}
    except SafetensorError as error:
        raise WeightsError(f"{path} is not a safetensors file: {error}") from error
    except ValueError as error:
        raise WeightsError(f"{path}: {error}") from error
    _check_shapes(path, config, weights)
    return config, weights


def _check_shapes(path: Path, config: DigitsConfig, weights: Mapping[str, NDArray[Any]]) -> None:
    expected = weight_shapes(config)
    if missing := sorted(expected.keys() - weights.keys()):
        raise WeightsError(f"{path}: weight {missing[0]!r} is missing")
    if extra := sorted(weights.keys() - expected.keys()):
        raise WeightsError(f"{path}: weight {extra[0]!r} is not one of this model's")
    for name, shape in expected.items():
        if weights[name].shape != shape:
            raise WeightsError(
                f"{path}: weight {name!r} is {list(weights[name].shape)}, expected {list(shape)}"
            )
