"""The JAX engine alone: dense calls in programs and over many chunks of keys.

The numbers of every feature are in the shared suite.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backends.jax_gpu import create_engine
from layout_core.attention import AttentionMetadata, VideoTokenLayout
from layout_core.errors import TensorError
from tests.engines.suite_dense import DenseCase, draw, expected, run_case
from tests.oracle import visible
from tests.tolerances import assert_close

ENGINE = create_engine("cpu")
IMPL = ENGINE.attention_backend().get_impl_cls()


def test_a_dense_call_inside_a_program() -> None:
    """Ints of the metadata are constants there; boundaries as arrays are refused."""
    q, k, v = (jnp.asarray(x) for x in draw("float32", batch=1, queries=12))
    layer = IMPL(4, 32, 0.2, num_kv_heads=2)

    def packed(q: jax.Array, bounds: Any) -> jax.Array:
        metadata = AttentionMetadata(extra={"cu_seqlens_q": bounds})
        return layer.forward(q, k, v, metadata)

    inside = jax.jit(lambda q: packed(q, [0, 5, 12]))(q)
    np.testing.assert_allclose(inside, packed(q, [0, 5, 12]), rtol=1e-6, atol=1e-6)
    with pytest.raises(TensorError, match="inside a program expected ints, got a traced array"):
        jax.jit(packed)(q, jnp.asarray([0, 5, 12]))


def test_ints_of_the_metadata_need_no_value_of_any_array() -> None:
    """Traced with shapes alone, where a read of a value is impossible."""
    layer = IMPL(4, 32, 0.2, num_kv_heads=2)
    q, k, v = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in draw("float32"))
    mask = jax.ShapeDtypeStruct((2, 24), jnp.bool_)

    def call(q: Any, k: Any, v: Any, mask: Any) -> Any:
        layout = VideoTokenLayout(prefix_len=3, latent_grid=(2, 2, 3))
        return layer.forward(q, k, v, AttentionMetadata(attn_mask=mask, video_layout=layout))

    assert jax.eval_shape(call, q, k, v, mask).shape == (2, 24, 4, 32)


@pytest.mark.parametrize("masked", [False, True])
def test_long_rows_walk_chunks_of_keys(masked: bool) -> None:
    """More keys than a chunk: gaps, a mask, causality, and NaN in keys that nobody sees."""
    q, k, v = draw("float32", batch=1, queries=600, keys=1300, heads=2, kv_heads=1)
    k[:, 1200:] = v[:, 1200:] = np.nan
    shown = visible(600, 1300, kv_start_pos=700, causal=True)
    shown[:, 1200:] = False
    metadata: dict[str, Any] = {"extra": {"valid_kv_length": 1200}}
    if masked:
        metadata["attn_mask"] = np.random.default_rng(8).random((600, 1300)) < 0.5
        shown &= metadata["attn_mask"]
    case = DenseCase(q, k, v, shown, metadata, causal=True)
    assert_close(run_case(ENGINE, case), expected(case), "attention", "float32")


def test_long_documents_walk_their_own_chunks_of_keys() -> None:
    """Documents that share a chunk of keys, one of them NaN: the others never see it."""
    q, k, v = draw("float32", batch=1, queries=700, heads=2, kv_heads=1)
    bounds = [0, 300, 310, 700]
    k[:, 300:310] = v[:, 300:310] = np.nan
    shown = np.zeros((700, 700), bool)
    shown[:300, :300] = shown[310:, 310:] = True
    case = DenseCase(q, k, v, shown, {"extra": {"cu_seqlens_q": bounds}})
    got = run_case(ENGINE, case)
    assert np.isnan(got[:, 300:310]).all()
    got[:, 300:310] = 0
    assert_close(got, expected(case), "attention", "float32")
