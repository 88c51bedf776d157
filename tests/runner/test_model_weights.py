"""The weights file that we ship, and files that are refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diffusion_runner.model.config import DigitsConfig
from diffusion_runner.model.weights import (
    DEFAULT_WEIGHTS,
    WeightsError,
    layer_weights,
    load_weights,
    save_weights,
    weight_shapes,
)

TINY = DigitsConfig(num_layers=1, hidden_size=8, num_heads=2, num_kv_heads=1, head_size=4)


def tiny_weights() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        name: generator.standard_normal(shape).astype(np.float32)
        for name, shape in weight_shapes(TINY).items()
    }


def test_the_shipped_file_is_small_and_of_the_promised_kind() -> None:
    assert DEFAULT_WEIGHTS.stat().st_size <= 2_000_000
    config, weights = load_weights()
    assert config.num_layers >= 4
    assert config.num_kv_heads < config.num_heads
    assert all(weight.dtype == np.float32 for weight in weights.values())
    assert all(np.isfinite(weight).all() for weight in weights.values())
    assert {name: weight.shape for name, weight in weights.items()} == weight_shapes(config)


def test_weights_are_stored_in_half_precision(tmp_path: Path) -> None:
    path = tmp_path / "new" / "w.safetensors"
    written = tiny_weights()
    save_weights(path, TINY, written)
    config, read = load_weights(path)
    assert config == TINY
    for name, weight in written.items():
        np.testing.assert_array_equal(read[name], weight.astype(np.float16).astype(np.float32))


def test_layer_weights_are_those_of_one_layer() -> None:
    params = {"layers.1.a": 1, "layers.1.b.c": 2, "layers.10.a": 3, "d": 4}
    assert layer_weights(params, 1) == {"a": 1, "b.c": 2}


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no weights file at .*none\.safetensors"):
        load_weights(tmp_path / "none.safetensors")


def test_a_file_that_is_no_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"nonsense" * 9)
    with pytest.raises(WeightsError, match=r"w\.safetensors is not a safetensors file"):
        load_weights(path)


def test_a_file_without_a_config(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "w.safetensors"
    save_file(tiny_weights(), path)
    with pytest.raises(WeightsError, match=r"w\.safetensors: the weights' metadata lacks"):
        load_weights(path)


def test_weights_of_another_shape_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    weights = tiny_weights()
    weights["final_norm"] = np.ones(9, np.float32)
    with pytest.raises(WeightsError, match=r"'final_norm' is \[9\], expected \[8\]"):
        save_weights(path, TINY, weights)
    del weights["final_norm"]
    with pytest.raises(WeightsError, match="'final_norm' is missing"):
        save_weights(path, TINY, weights)
    with pytest.raises(WeightsError, match="'more' is not one of this model's"):
        save_weights(path, TINY, tiny_weights() | {"more": np.ones(1, np.float32)})
    assert not path.exists()
