"""The torch engine's CUDA side, as far as a machine without a GPU can tell.

The kernels run in Triton's interpreter, in processes of their own; what is planned, refilled and
bound is looked at here, with launches recorded instead of run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

from backends.torch_cuda import create_engine, paged, staging
from backends.torch_cuda.engine import TorchEngine
from backends.torch_cuda.kernels import select
from backends.torch_cuda.kernels import triton as kernels
from backends.torch_cuda.kernels.base import Chip
from backends.torch_cuda.kernels.gather import GatherKernel
from backends.torch_cuda.kernels.sdpa import SdpaKernel
from backends.torch_cuda.kernels.select import Toolkit, against_gather, explain
from backends.torch_cuda.kernels.triton import TritonKernel, TritonMoves
from layout_core.errors import DeviceError, MissingPackageError, PoolError, UnsupportedError
from layout_core.resolve import resolve_layout, single_group_config
from layout_core.rows import Bucket
from layout_core.specs import FullAttentionSpec
from layout_core.visibility import Visibility
from tests.cases import LAYOUTS
from tests.engines.test_torch_kernels import Watch
from tests.engines.test_torch_paged import Tables, plan, row
from tests.manager import helpers

ROOT = Path(__file__).resolve().parents[2]
FULL, CAUSAL = Visibility(causal=False), Visibility(causal=True)


def interpreted(*arguments: str) -> str:
    """Run the suite in the interpreter; its output."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.engines.interpreted", "-q", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SUITES = ("steps", "isolation", "quantised", "blocks")


def test_the_shared_suite_in_the_interpreter() -> None:
    """A fixed slice of it, which meets every layout and every dtype with both kernels."""
    out = interpreted(
        "--every", "29", "--from", "3",
        *(f"tests/engines/test_suite_{name}.py" for name in SUITES),
    )  # fmt: skip
    rows = re.findall(r"torch_cuda +(triton|gather) +(\w+) +((?:[LBHNC]{5} +\d+ *)+)", out)
    seen = {
        (kernel, dtype, layout): int(count)
        for kernel, dtype, cells in rows
        for layout, count in re.findall(r"([LBHNC]{5}) +(\d+)", cells)
    }
    for kernel in ("triton", "gather"):
        mine = {key: count for key, count in seen.items() if key[0] == kernel and count}
        assert {layout for _, _, layout in mine} == set(LAYOUTS)
        assert {dtype for _, dtype, _ in mine} >= {"float32", "float16", "bfloat16"}
        assert sum(mine.values()) >= 12
    assert "failed" not in out


def test_replays_and_planted_faults_in_the_interpreter() -> None:
    """Captures and replays, field case 30, slots past the pool, every dtype that is moved; then
    twelve faults where the engine meets the kernels."""
    files = (f"tests/engines/interpreted_{name}.py" for name in ("replay", "faults"))
    out = interpreted(*files)
    assert re.search(r"\b22 passed", out), out


# --- what is planned and refilled --------------------------------------------------------------


def planning_engine(chip: Chip | None = None) -> TorchEngine:
    """An engine on the CPU that plans as on CUDA; its launches must be recorded."""
    toolkit = Toolkit(
        torch.device("cpu"),
        (GatherKernel("cpu"), TritonKernel(chip or Chip((9, 0), 132), device_type="cpu")),
        TritonMoves(),
    )
    return TorchEngine("cpu", toolkit=toolkit)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """Launches with what they were given, instead of run."""
    seen: list[tuple[Any, dict[str, Any]]] = []

    def record(launch: Any, buffers: Any, scalars: Any = {}) -> None:  # noqa: B006
        launch.bind(buffers, scalars)  # raises where one is missing
        seen.append((launch, dict(buffers)))

    monkeypatch.setattr(kernels, "start", record)
    return seen


CALLERS = {"query", "key", "value", "out", "lse"}
"""Buffers that a caller gives, or that a call makes."""


def bound(launch: Any, buffers: dict[str, Any]) -> tuple[Any, ...]:
    """All that a capture of a launch keeps."""
    kept = {name: b.data_ptr() for name, b in buffers.items() if name not in CALLERS}
    return launch.kernel, launch.grid, launch.constants, kept


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_address_stays_and_nothing_is_read_or_planned_anew(
    launched: list[tuple[Any, dict[str, Any]]], layout: str
) -> None:
    """Three updates of a bucket: the same launches, the same addresses, new numbers in them."""
    engine = planning_engine()
    resolved = plan(layout)
    pool = engine.allocate(resolved)
    tables = Tables({("r", 0): [7, 3, 12, 5], ("r", 1): [8, 10]})
    batch = engine.prepare(
        resolved, [], tables, visibility=CAUSAL, num_heads=4, kernel="triton",
        bucket=Bucket(tokens=24, rows=2, blocks=4),
    )  # fmt: skip
    assert (batch.kernel, batch.capturable) == ("triton", True)
    query, key = torch.zeros(24, 4, 32), torch.zeros(24, 2, 32)
    addresses, numbers = [], []
    for rows in ([], [row(17, 17), row(5, 5, sequence_id=1)], [row(9, 9, sequence_id=1)]):
        launched.clear()
        tables.change()
        with Watch() as watch:
            engine.update(batch, rows, tables)
            engine.forward_paged(pool, 1, query, key, key, batch)
        assert watch.reads == {}
        assert "index_select" not in watch.seen
        addresses.append([bound(launch, buffers) for launch, buffers in launched])
        numbers.append(launched[1][1]["tiles"].clone())
        assert launched[0][1]["slots"].tolist() == list(batch.plan.slots)
    assert addresses[0] == addresses[1] == addresses[2]
    assert len(addresses[0]) == 2  # one launch writes K and V, one attends, for all rows
    assert not torch.equal(numbers[0], numbers[1])
    tile_rows, counts = numbers[1][:, 0], numbers[1][:, 2]
    assert int(counts[tile_rows == 0].sum()) == 17
    assert int(counts[tile_rows == 1].sum()) == 5


def test_equal_layers_share_their_launches(launched: list[tuple[Any, dict[str, Any]]]) -> None:
    engine = planning_engine()
    resolved = plan("BHLNC", layers=3)
    pool = engine.allocate(resolved)
    tables = Tables({("r", 0): [7, 3]})
    batch = engine.prepare(
        resolved, [row(16, 16)], tables, visibility=FULL, num_heads=4, kernel="triton"
    )
    query, key = torch.zeros(16, 4, 32), torch.zeros(16, 2, 32)
    for layer in range(3):
        engine.forward_paged(pool, layer, query, key, key, batch)
    by_layer = [launched[i : i + 2] for i in (0, 2, 4)]
    assert all(a[0] is b[0] for a, b in zip(by_layer[0], by_layer[2], strict=True))
    places = [part[1][1]["place"].tolist() for part in by_layer]
    unit = pool.layers[0].unit * 4
    for view, place in zip(resolved.layers, places, strict=True):
        assert [n * unit for n in place] == [view.offset, *view.strides[:3]]


def test_one_launch_copies_blocks_in_all_equal_layers(
    launched: list[tuple[Any, dict[str, Any]]],
) -> None:
    engine = planning_engine()
    pool = engine.allocate(plan(layers=3))
    engine.copy_blocks(pool, [(4, 9), (2, 3)])
    ((launch, buffers),) = launched
    assert launch.grid[0] == 2
    assert launch.grid[2] == 3
    assert buffers["places"].data_ptr() == pool.places.data_ptr()
    assert buffers["places"].shape == (3, 4)
    assert (buffers["source"].tolist(), buffers["destination"].tolist()) == ([4, 2], [9, 3])


def test_addresses_pass_32_bits() -> None:
    """A plan of 2^33 elements, which nobody allocates here: its places are 64 bits wide."""
    from backends.torch_cuda.allocator import place_of, place_units

    spec = FullAttentionSpec(block_size=64, num_kv_heads=8, head_size=128, dtype="bfloat16")
    resolved = resolve_layout(single_group_config(spec, 1 << 14, ["a", "b", "c", "d"], "LBNHC"))
    last = resolved.layers[-1]
    units = place_units(resolved)
    assert units[last.dtype] == 8
    assert place_of(last, 1)[0] == 3 * (1 << 31)
    small = create_engine("cpu").allocate(plan())
    assert small.places.dtype == torch.int64


@pytest.mark.parametrize(
    ("head_size", "padding", "expected"),
    [(32, 0, ()), (32, 4, ("K", "V")), (20, 0, ("V",))],
)
def test_a_layout_that_costs_vector_loads_is_told(
    head_size: int, padding: int, expected: tuple[str, ...]
) -> None:
    """bfloat16: pages padded by 4 bytes, or a cell of 20 elements of K."""
    page = 8 * 2 * 2 * head_size * 2
    resolved = plan(dtype="bfloat16", head_size=head_size,
                    page_size_padded=page + padding if padding else None)  # fmt: skip
    engine = planning_engine()
    batch = engine.prepare(
        resolved, [row(8, 8)], Tables({("r", 0): [4]}), visibility=FULL, num_heads=2,
        kernel="triton",
    )  # fmt: skip
    for what in "KV":
        said = [note for note in batch.notes if note.startswith(f"{what} of layer 'layer.0'")]
        assert len(said) == (what in expected)
        assert all("bytes at a time instead of 16" in note for note in said)
    assert create_engine("cpu").prepare(
        resolved, [row(8, 8)], Tables({("r", 0): [4]}), visibility=FULL, num_heads=2
    ).notes == ()  # fmt: skip


# --- which kernel ------------------------------------------------------------------------------


def case_of(queries: int, keys: int, *, heads: int = 4, rule: Visibility = FULL,
            block_size: int = 16, bucket: Bucket | None = None, dtype: str = "bfloat16",
            spans: Any = None, device: str = "cpu") -> Any:  # fmt: skip
    blocks = -(-keys // block_size)
    resolved = plan(dtype=dtype, num_blocks=blocks + 1, block_size=block_size)
    tables = Tables({("r", 0): list(range(1, blocks + 1))})
    return paged.kernel_case(
        resolved,
        [row(queries, keys, keys - queries)],
        tables,
        visibility=rule,
        num_heads=heads,
        device=torch.device(device),
        spans=spans,
        bucket=bucket,
    )


@pytest.mark.parametrize(
    ("wins", "arguments"),
    [
        (True, {"queries": 900, "keys": 2000}),  # 900 queries of 2 heads a group
        (False, {"queries": 800, "keys": 2000}),
        (True, {"queries": 450, "keys": 2000, "heads": 8}),
        (False, {"queries": 900, "keys": 2000, "block_size": 128}),  # paging costs 1 % there
        (False, {"queries": 900, "keys": 2000, "bucket": Bucket(1000, 2, 130)}),
        (True, {"queries": 2000, "keys": 2000, "rule": CAUSAL}),
        (False, {"queries": 900, "keys": 2000, "rule": CAUSAL}),  # not square: a mask
        (False, {"queries": 2000, "keys": 2000, "rule": CAUSAL, "spans": [[(1000, 2000)]]}),
        (False, {"queries": 0, "keys": 20}),
    ],
)
def test_gather_is_chosen_by_arithmetic(wins: bool, arguments: dict[str, Any]) -> None:
    assert (against_gather(case_of(**arguments)) is None) is wins
    toolkit = planning_engine().toolkit
    chosen = select.select_kernel("auto", case_of(**arguments), toolkit)
    assert chosen.name == ("gather" if wins else "triton")


def test_what_triton_does_not_serve_goes_to_sdpa_by_the_rule() -> None:
    toolkit = planning_engine().toolkit
    toolkit = Toolkit(toolkit.device, (*toolkit.kernels, SdpaKernel()), toolkit.moves)
    wide = case_of(8, 8, dtype="float64")
    assert select.select_kernel("auto", wide, toolkit).name == "sdpa"
    longer = case_of(2000, 2000, dtype="float64")
    assert select.select_kernel("auto", longer, toolkit).name == "gather"
    with pytest.raises(UnsupportedError, match=r"'triton' cannot serve .* a pool of float64"):
        select.select_kernel("triton", wide, toolkit)
    assert dict(explain(wide, toolkit))["sdpa"] is None
    lines = dict(explain(case_of(8, 8), toolkit))
    assert lines["triton"] is None
    assert lines["sdpa"] == "it would serve; triton comes first"
    assert lines["gather"] == (
        "row 0 has 8 queries; with 2 heads a group and blocks of 16 tokens, copying pages is "
        "faster from 876 on"
    )


def test_cuda_kernels_are_refused_on_the_cpu_by_name() -> None:
    engine = create_engine("cpu")
    assert engine.kernels == ("sdpa",)
    for name in select.CUDA_KERNELS:
        with pytest.raises(
            UnsupportedError,
            match=f"torch_cuda on cpu expects one of auto, sdpa, got '{name}'; '{name}' runs on "
            "CUDA devices alone",
        ):
            engine.prepare(plan(), [], Tables({}), visibility=FULL, num_heads=2, kernel=name,
                           bucket=Bucket(1, 1, 1))  # fmt: skip
    for kernel in (TritonKernel(Chip((9, 0), 132)), GatherKernel()):
        assert kernel.refuse(case_of(8, 8)) == "it runs on cuda devices, not on cpu"


def test_a_cuda_device_without_triton_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else found(name)
    )
    with pytest.raises(
        MissingPackageError,
        match=r"torch_cuda on cuda:0 needs triton, .*pip install 'pagestride\[triton\]'",
    ):
        select.toolkit_for(torch.device("cuda", 0))


class TheirKernel(SdpaKernel):
    name = "theirs"


def test_third_parties_register_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Named in messages, loaded where they are asked for, never taken by ``auto``."""
    points = [
        EntryPoint("theirs", f"{__name__}:TheirKernel", select.ENTRY_POINT_GROUP),
        EntryPoint("broken", "no_such_module:Kernel", select.ENTRY_POINT_GROUP),
        EntryPoint("twice", f"{__name__}:TheirKernel", select.ENTRY_POINT_GROUP),
        EntryPoint("twice", "no_such_module:Kernel", select.ENTRY_POINT_GROUP),
    ]
    monkeypatch.setattr(
        select.metadata, "entry_points", lambda *, group: [p for p in points if p.group == group]
    )
    engine = create_engine("cpu")
    assert engine.kernels == ("sdpa", "broken", "theirs", "twice")

    def prepared(kernel: str) -> Any:
        return engine.prepare(
            plan(), [row(8, 8)], Tables({("r", 0): [4]}), visibility=FULL, num_heads=2,
            kernel=kernel,
        )  # fmt: skip

    assert prepared("auto").kernel == "sdpa"
    assert prepared("theirs").kernel == "theirs"
    with pytest.raises(UnsupportedError, match="expects one of auto, sdpa, broken, theirs, twice"):
        prepared("mine")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        prepared("broken")
    with pytest.raises(UnsupportedError, match="'twice' is registered more than once"):
        prepared("twice")


# --- captures ----------------------------------------------------------------------------------


def test_a_capture_refuses_what_its_replays_would_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = create_engine("cpu")
    resolved = plan()
    pool = engine.allocate(resolved)
    tables = Tables({("r", 0): [4]})
    batch = engine.prepare(resolved, [row(8, 8)], tables, visibility=FULL, num_heads=2)
    assert not batch.capturable
    ones = torch.ones(8, 2, 32)
    monkeypatch.setattr(paged, "capturing", lambda device: True)
    monkeypatch.setattr(staging, "capturing", lambda device: True)
    with pytest.raises(DeviceError, match=r"kernel 'sdpa' follows the rows of one step; kernel='t"):
        engine.forward_paged(pool, 0, ones, ones, ones, batch)
    assert engine.pool_bytes(pool) == bytes(resolved.size_bytes)
    tables.change()
    with pytest.raises(DeviceError, match="update: a CUDA graph is being captured, and its repl"):
        engine.update(batch, [row(8, 8)], tables)
    assert batch.plan.version == 0
    with pytest.raises(DeviceError, match="copy_blocks: a CUDA graph is being captured"):
        planning_engine().copy_blocks(pool, [(1, 2)])


# --- pools -------------------------------------------------------------------------------------


def test_clear_keeps_the_address_and_tells_the_prefix_index() -> None:
    class Index:
        forgot = 0

        def reset_prefix_cache(self) -> int:
            assert any(engine.pool_bytes(pool)), "it forgets before the bytes are gone"
            self.forgot += 1
            return 3

    engine, index = create_engine("cpu"), Index()
    resolved = plan()
    pool = engine.load_bytes(resolved, b"\x01" * resolved.size_bytes)
    address = pool.storage.data_ptr()
    assert engine.clear(pool, prefix_index=index) is pool
    assert (index.forgot, pool.storage.data_ptr()) == (1, address)
    assert engine.pool_bytes(pool) == bytes(resolved.size_bytes)


def test_a_cleared_pool_has_no_prefix_to_find() -> None:
    """With the manager itself as the index: what was published and freed is no hit any more."""
    the_manager = helpers.manager(12)
    engine = create_engine("cpu")
    pool = engine.allocate(resolve_layout(helpers.config(12)))
    for name, hit in (("a", 0), ("b", 8)):
        admitted = helpers.admit(the_manager, name, [helpers.row(name)])
        assert admitted.sequences[0].cached_prefix_len == hit
        the_manager.publish_request(name)
        the_manager.free_request(name)
    engine.clear(pool, prefix_index=the_manager)
    admitted = helpers.admit(the_manager, "c", [helpers.row("c")])
    assert admitted.sequences[0].cached_prefix_len == 0


def test_a_pool_on_foreign_memory() -> None:
    from backends.torch_cuda.allocator import pool_on

    resolved = plan()
    storage = torch.zeros(resolved.size_bytes, dtype=torch.uint8)
    pool = pool_on(resolved, storage)
    assert pool.layers[1].key.data_ptr() == storage.data_ptr() + resolved.layers[1].offset
    wide = torch.zeros(resolved.size_bytes + 16, dtype=torch.uint8)
    for bad, message in (
        (storage[:-1], "got torch.uint8"),
        (storage.to(torch.int8), "got torch.int8"),
        (wide[1 : 1 + resolved.size_bytes], "at another address"),
    ):
        with pytest.raises(PoolError, match=f"storage: expected contiguous uint8 .*{message}"):
            pool_on(resolved, bad)
