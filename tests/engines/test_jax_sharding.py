"""Several devices: heads and rows over a mesh give what one device gives, bytes included.

JAX fixes its number of devices once, so the checks run in a process with eight forced ones
(:mod:`tests.engines.sharded`); refusals need one device and run here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from backends.jax_gpu import create_engine
from backends.jax_gpu.sharding import sharded_engine
from backends.jax_gpu.spreading import gather_queries, spread_keys, spread_queries
from layout_core.errors import BlockTableError, DeviceError, PoolError, RowError, TensorError
from layout_core.heads import pad_heads
from tests.cases import CAUSAL, PLAIN, Tables, plan_of, row

ROOT = Path(__file__).parents[2]

DIVISIONS: tuple[tuple[int, int, int, int, str, int], ...] = (
    # data ranks, tensor ranks, query heads, KV heads, dtype, first step of the suite
    (1, 2, 8, 1, "float32", 0),
    (1, 4, 8, 1, "float32", 1),
    (1, 8, 8, 1, "float32", 2),
    (1, 1, 8, 2, "float32", 3),
    (1, 2, 8, 2, "float32", 4),
    (1, 4, 8, 2, "float32", 5),
    (1, 8, 8, 2, "float32", 6),
    (1, 2, 16, 8, "float16", 7),
    (1, 4, 16, 8, "float16", 8),
    (1, 8, 16, 8, "float16", 9),
    # padded heads: field case 15, and a group that replicas share unevenly
    (1, 2, 28, 7, "bfloat16", 10),
    (1, 4, 6, 2, "float32", 11),
    # rows over a data axis
    (8, 1, 8, 1, "float32", 12),
    (2, 4, 6, 2, "float32", 4),
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """What each check of :mod:`tests.engines.sharded` gave, by name."""
    flag = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.sharded", json.dumps(DIVISIONS)],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines}


def gave(outcomes: dict[str, Any], name: str) -> Any:
    assert "failed" not in outcomes[name], outcomes[name]["failed"]
    return outcomes[name]["gave"]


def test_there_are_eight_devices(outcomes: dict[str, Any]) -> None:
    assert gave(outcomes, "devices") == 8


@pytest.mark.parametrize("division", DIVISIONS, ids=str)
def test_ranks_equal_one_device_and_the_oracle(
    outcomes: dict[str, Any], division: tuple[Any, ...]
) -> None:
    result = gave(outcomes, json.dumps(list(division)))
    heads = pad_heads(division[2], division[3], division[1])
    assert result["owners"] == [list(own) for own in heads.owners]
    assert result["replicas"] == max(1, division[1] // heads.num_kv_heads)


def test_field_case_15_heads_find_their_kv_head(outcomes: dict[str, Any]) -> None:
    assert gave(outcomes, "field_case_15") == [0, 0, 0, 1, 1, 1]


def test_field_case_26_each_head_is_gathered_once(outcomes: dict[str, Any]) -> None:
    assert gave(outcomes, "field_case_26") == {"owners": [[0], [0], [1], [1]], "gathered": 2}


def test_blocks_are_copied_on_each_data_rank(outcomes: dict[str, Any]) -> None:
    gave(outcomes, "blocks_are_copied_on_each_data_rank")


def test_a_program_of_ones_own_works_in_place_and_is_traced_once(outcomes: dict[str, Any]) -> None:
    """Lowered and run for two lengths in one bucket; a stale table on one rank raises."""
    result = gave(outcomes, "a_program_of_ones_own_works_in_place")
    assert result["traced"] == 1
    assert "prepared under version 1 of the block tables, which are now at 2" in result["stale"]


def test_wrong_head_maps_are_caught(outcomes: dict[str, Any]) -> None:
    assert gave(outcomes, "wrong_head_maps_are_caught") == ["spread_queries", "spread_keys"]


# --- refusals ------------------------------------------------------------------------------------

ENGINE = sharded_engine(Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("data", "tensor")))


def test_a_mesh_with_another_axis_is_refused() -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:1]).reshape(1, 1), ("data", "model"))
    with pytest.raises(DeviceError, match=r"expected the axes 'data' and 'tensor'.*got \['data'"):
        sharded_engine(mesh)
    renamed = sharded_engine(mesh, tensor_axis="model")
    assert (renamed.ranks.data, renamed.ranks.tensor) == (1, 1)
    alone = Mesh(np.array(jax.devices("cpu")[:1]), ("tensor",))
    assert sharded_engine(alone).ranks.data_axis is None


def test_pools_of_others_and_consumed_ones_are_refused() -> None:
    plan = plan_of(PLAIN, "LBNHC", "float32")
    one = create_engine()
    key = jnp.ones((1, 2, 32), jnp.float32)
    with pytest.raises(PoolError, match=r"pool: expected one on ShardedEngine\(1 x 1 ranks\), got"):
        ENGINE.write(one.allocate(plan), 0, key, key, [4])  # type: ignore[arg-type]
    pool = ENGINE.allocate(plan)
    ENGINE.write(pool, 0, key, key, [4])
    with pytest.raises(PoolError, match="it was consumed by write"):
        ENGINE.pool_bytes(pool)
    with pytest.raises(PoolError, match=r"data: expected the bytes of 1 ranks, got 2"):
        ENGINE.load_bytes(plan, [b"", b""])
    with pytest.raises(PoolError, match=rf"data\[0\]: expected {plan.size_bytes} bytes.*got 3"):
        ENGINE.load_bytes(plan, [b"abc"])


def test_shapes_of_a_rank_are_checked() -> None:
    plan = plan_of(PLAIN, "LBNHC", "float32")
    r, tables = row("a", 2, 2), Tables()
    tables.put(r, 0, [3])
    with pytest.raises(RowError, match="rows: expected one entry for each of 1 data ranks, got 2"):
        ENGINE.prepare(plan, [[r], [r]], [tables], visibility=CAUSAL, num_heads=4)
    batch = ENGINE.prepare(plan, [[r]], [tables], visibility=CAUSAL, num_heads=4)
    pool = ENGINE.allocate(plan)
    query, key = (jnp.ones((2, n, 32), jnp.float32) for n in (4, 2))
    with pytest.raises(
        TensorError, match=r"query: .* expects shape \[2, 4, 32\], got \[2, 2, 32\]"
    ):
        ENGINE.forward_paged(pool, 0, key, key, key, batch)
    with pytest.raises(TensorError, match=r"key: .* expects shape \[2, 2, 32\], got \[2, 4, 32\]"):
        ENGINE.forward_paged(pool, 0, query, query, query, batch)
    with pytest.raises(BlockTableError, match="destination 4 is also a source"):
        ENGINE.copy_blocks(pool, [[(3, 4), (4, 3)]])
    with pytest.raises(RowError, match="pairs: expected one entry for each of 1 data ranks, got 0"):
        ENGINE.copy_blocks(pool, [])
    with pytest.raises(TensorError, match="2 KV heads on each of 1 ranks, got 4 on each of 2"):
        ENGINE.read_heads(pool, 0, [4], pad_heads(8, 8, 2))
    assert not any(ENGINE.pool_bytes(pool)[0]), "nothing was written, and the pool is not consumed"


def test_heads_of_another_count_are_refused() -> None:
    heads = pad_heads(6, 2, 4)
    for function, name, right in (
        (spread_queries, "query", 6),
        (spread_keys, "array", 2),
        (gather_queries, "output", 8),
    ):
        with pytest.raises(TensorError, match=rf"{name}: expected \[T, {right}, D\].*\[1, 5, 4\]"):
            function(jnp.ones((1, 5, 4)), heads)
