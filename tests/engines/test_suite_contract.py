"""The attention contract around the numbers: flags, platforms, paged calls in a cell, reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from layout_core.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    PackedPaddingMetadata,
    PagedAttentionContext,
    PoolCell,
    VideoTokenLayout,
    check_backend_available,
    check_backend_serves,
)
from layout_core.errors import (
    MissingPackageError,
    PlatformError,
    StaleBatchError,
    UnsupportedError,
)
from tests.cases import GROUPS, LAYOUTS, Tables, assign_blocks, plan_of, room_for, steps
from tests.engines.host_reads import host_reads
from tests.engines.suite import (
    ENGINE_KERNELS,
    draw,
    draw_queries,
    padded,
    poisoned_pool,
    run_step,
    step_tokens,
    write_history,
)
from tests.engines.suite_dense import FEATURES, expected, on_device, run_case
from tests.tolerances import assert_close, assert_same_bits, assert_same_bytes

LoadEngine = Callable[[str], Any]
CountCase = Callable[[str, str, str, str], None]

engines = pytest.mark.parametrize(("engine", "kernel"), ENGINE_KERNELS)

STEP = {s.name: s for s in steps(4)}[
    "spans that differ, one row without any, one with an empty list"
]

# --- flags -------------------------------------------------------------------------------------

PROOFS: dict[str, tuple[str, ...]] = {
    "supports_attention_mask": ("mask of keys", "additive mask of heads"),
    "supports_piecewise_spans": ("spans of each sample",),
    "supports_prefix_kv_slicing": ("valid keys",),
    "supports_packed_mask_free": ("padding by packed_padding",),
    "supports_multi_doc_packed_varlen": ("documents",),
}
"""Which feature of the dense suite shows that a flag that says yes is true."""


@engines
@pytest.mark.parametrize("flag", PROOFS)
def test_a_flag_that_says_yes_is_true(
    load_engine: LoadEngine, engine: str, kernel: str, flag: str
) -> None:
    loaded = load_engine(engine)
    said = getattr(loaded.attention_backend(), flag)
    assert (said() if callable(said) else said) is True
    for feature in PROOFS[flag]:
        case = FEATURES[feature]("float32")
        assert_close(run_case(loaded, case), expected(case), "attention", "float32", flag)


@engines
def test_what_a_backend_says_of_itself(load_engine: LoadEngine, engine: str, kernel: str) -> None:
    """All flags are here or in :data:`PROOFS`, so that a new one is not forgotten."""
    backend = load_engine(engine).attention_backend()
    assert (
        backend.get_name()
        == {"torch_cuda": "PAGESTRIDE_TORCH", "jax_gpu": "PAGESTRIDE_JAX"}[engine]
    )
    assert backend.supports_paged_kv is True  # shown by the tests of forward_paged below
    assert backend.accept_output_buffer is False
    assert backend.indexes_kv_by_block_stride is None  # shown by every layout of the suite
    assert backend.get_supported_head_sizes() == []  # any: the dense suite has 32 to 256
    assert all(backend.supports_head_size(size) for size in (1, 32, 72, 256))
    assert backend.supported_platforms == ("cuda", "cpu")
    assert issubclass(backend.get_impl_cls(), AttentionImpl)
    assert backend.get_metadata_cls() is AttentionMetadata
    known = {
        "accept_output_buffer", "supports_paged_kv", "supported_platforms", "supports_head_size",
        "get_supported_head_sizes", "indexes_kv_by_block_stride", *PROOFS,
    }  # fmt: skip
    said = {n for n in dir(AttentionBackend) if n.startswith(("support", "accept", "index"))}
    assert said <= known, said - known


@engines
def test_what_a_backend_says_no_to_raises(
    load_engine: LoadEngine, engine: str, kernel: str
) -> None:
    loaded = load_engine(engine)
    layer = loaded.attention_backend().get_impl_cls()(4, 32, 0.2, num_kv_heads=2)
    case = FEATURES["full"]("float32")
    q, k, v = (loaded.from_numpy(x) for x in (case.q, case.k, case.v))
    assert not layer.supports_kv_cache_dtype("fp8", "cpu")
    assert layer.supports_kv_cache_dtype(None, "cpu")
    metadata: AttentionMetadata[Any] = AttentionMetadata(extra={"kv_cache_dtype": "fp8"})
    with pytest.raises(
        UnsupportedError, match=r"kv_cache_dtype'\] needs supports_kv_cache_dtype\('fp8', 'c"
    ):
        layer.forward(q, k, v, metadata)
    with pytest.raises(TypeError, match="output"):  # accept_output_buffer
        layer.forward(q, k, v, None, output=q)


class Nothing(AttentionBackend):
    """Says no to everything."""

    supported_platforms = ("npu",)

    @staticmethod
    def get_name() -> str:
        return "NOTHING"

    @staticmethod
    def get_impl_cls() -> Any:
        return NothingImpl

    @staticmethod
    def get_metadata_cls() -> Any:
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> Any:
        raise AssertionError("not asked for here")

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        return [64, 128]


class NothingImpl(AttentionImpl[Any]):
    def __init__(self) -> None:
        pass


@engines
@pytest.mark.parametrize(
    ("fields", "flag"),
    [
        ({"attn_mask": object()}, r"attn_mask needs supports_attention_mask\(\)"),
        ({"joint_attn_mask": object()}, r"attn_mask needs supports_attention_mask\(\)"),
        ({"full_attn_spans": [[]]}, "full_attn_spans needs supports_piecewise_spans"),
        (
            {"extra": {"valid_kv_length": 3}},
            r"extra\['valid_kv_length'\] needs supports_prefix_kv_slicing",
        ),
        (
            {"extra": {"cu_seqlens_q": [0, 3, 5, 9]}},
            r"3 documents in extra\['cu_seqlens_q'\] need supports_multi_doc_packed_varlen\(\)",
        ),
        (None, "a paged call needs supports_paged_kv"),
    ],
)
def test_flags_name_themselves_where_they_say_no(
    load_engine: LoadEngine, engine: str, kernel: str, fields: dict[str, Any] | None, flag: str
) -> None:
    metadata = None if fields is None else AttentionMetadata(**fields)
    with pytest.raises(UnsupportedError, match=f"backend NOTHING: {flag}, which is False"):
        check_backend_serves(Nothing, metadata, paged=fields is None)
    check_backend_serves(load_engine(engine).attention_backend(), metadata, paged=fields is None)


def test_advisory_fields_need_no_flag() -> None:
    """``[real, pad]`` bounds, a video layout, unknown keys: any backend takes them."""
    metadata: AttentionMetadata[Any] = AttentionMetadata(
        video_layout=VideoTokenLayout(used_len=3),
        packed_padding=PackedPaddingMetadata(3, 3, object(), object()),
        extra={"cu_seqlens_q": [0, 3, 5], "cu_seqlens_k": [0, 3, 5], "unknown": 1},
    )
    check_backend_serves(Nothing, metadata)


@engines
def test_a_backend_that_cannot_run_here_fails_early(
    load_engine: LoadEngine, monkeypatch: pytest.MonkeyPatch, engine: str, kernel: str
) -> None:
    backend = load_engine(engine).attention_backend()
    for platform in ("cpu", "cuda", "gpu"):
        check_backend_available(backend, platform, [32, 80, 256])
    with pytest.raises(PlatformError, match=r"'npu' is not in supported_platforms.*cuda, cpu"):
        check_backend_available(backend, "npu")
    check_backend_available(Nothing, "npu", [64])
    with pytest.raises(UnsupportedError, match=r"supports_head_size\(80\) is False; it serves 64"):
        check_backend_available(Nothing, "npu", [64, 80])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    extra = {"torch_cuda": "torch", "jax_gpu": "jax"}[engine]
    with pytest.raises(
        MissingPackageError,
        match=rf"backend PAGESTRIDE_\w+ needs {extra}.*pip install 'pagestride\[{extra}\]'",
    ):
        check_backend_available(backend, "cpu")


# --- platforms ---------------------------------------------------------------------------------


def test_platforms_dispatch_through_one_table() -> None:
    class Impl(AttentionImpl[Any]):
        def __init__(self) -> None:  # no arguments are needed to dispatch
            self.kind = "cuda"

        def platform(self, query: Any) -> str:
            return self.kind

        def forward_cuda(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
            return "cuda"

        def forward_cpu(self, query: Any, key: Any, value: Any, attn_metadata: Any = None) -> Any:
            return "cpu"

    layer = Impl()
    got = {}
    for layer.kind in ("cuda", "rocm", "musa", "cpu"):
        got[layer.kind] = layer.forward(1, 2, 3)
    assert got == {"cuda": "cuda", "rocm": "cuda", "musa": "cuda", "cpu": "cpu"}
    for layer.kind in ("npu", "xpu", "tpu"):
        with pytest.raises(PlatformError, match=f"Impl: no implementation for .*{layer.kind}"):
            layer.forward(1, 2, 3)
        with pytest.raises(NotImplementedError, match="it has one for cuda, cpu"):
            layer.forward(1, 2, 3)
    with pytest.raises(UnsupportedError, match="Impl: a paged call needs supports_paged_kv"):
        layer.forward_paged(None)  # type: ignore[arg-type]


# --- paged calls -------------------------------------------------------------------------------


class Paged:
    """A step of four layers in two groups, ready to run through the contract."""

    def __init__(self, engine: Any, kernel: str, layout: str, dtype: str = "float32") -> None:
        self.engine = engine
        self.plan = plan_of(GROUPS, layout, dtype)
        self.dense = draw(GROUPS, STEP, dtype, seed=1)
        self.tables: Tables = assign_blocks(GROUPS, STEP.rows, np.random.default_rng(1))
        pool = poisoned_pool(engine, self.plan)
        pool = write_history(engine, pool, GROUPS, STEP, self.dense, self.tables, range(4))
        self.cell = PoolCell(pool)
        room = room_for(4)
        self.batches = [
            engine.prepare(
                self.plan, STEP.rows, self.tables, visibility=STEP.visibility, num_heads=4,
                group=group, spans=STEP.spans, kernel=kernel, bucket=room.bucket(4),
            )
            for group in range(2)
        ]  # fmt: skip
        self.layer = engine.attention_backend().get_impl_cls()(4, 32, 32**-0.5, num_kv_heads=2)
        self.query = engine.from_numpy(padded(draw_queries(STEP, 4, 32, dtype, 1), 48, np.nan))
        self.new = [
            tuple(engine.from_numpy(x) for x in step_tokens(STEP, self.dense, layer, 48))
            for layer in range(4)
        ]

    def forward(self, layer: int, *, read: bool = False) -> Any:
        key, value = (None, None) if read else self.new[layer]
        return self.layer.forward_paged(
            PagedAttentionContext(
                self.cell, layer, self.query, key, value, self.batches[layer // 2]
            )
        )

    def update(self) -> None:
        self.batches = [self.engine.update(b, STEP.rows, self.tables) for b in self.batches]


@engines
@pytest.mark.parametrize("layout", LAYOUTS)
def test_forward_paged_keeps_the_pool_in_its_cell(
    load_engine: LoadEngine, count_case: CountCase, engine: str, kernel: str, layout: str
) -> None:
    """The same bits, in output and pool, as the engine's own function gives."""
    loaded = load_engine(engine)
    paged = Paged(loaded, kernel, layout)
    got = [np.asarray(loaded.to_numpy(paged.forward(layer))) for layer in range(4)]
    want = run_step(
        loaded, GROUPS, paged.plan, STEP, paged.dense, paged.tables, dtype="float32",
        kernel=kernel, num_heads=4, seed=1, room=room_for(4),
    )  # fmt: skip
    total = len(want.outputs[0])
    for layer in range(4):
        assert_same_bits(got[layer][:total], want.outputs[layer], f"layer {layer}")
    assert_same_bytes(loaded.pool_bytes(paged.cell.pool), want.pool, "the pool in the cell")
    held = paged.cell.pool
    again = np.asarray(loaded.to_numpy(paged.forward(3, read=True)))
    assert paged.cell.pool is held, "a call that only reads leaves the pool as it is"
    assert_same_bits(again, got[3], "read back")
    count_case(engine, kernel, layout, "float32")


@engines
def test_a_refused_paged_call_leaves_the_cell(
    load_engine: LoadEngine, engine: str, kernel: str
) -> None:
    loaded = load_engine(engine)
    paged = Paged(loaded, kernel, "LBNHC")
    held, data = paged.cell.pool, loaded.pool_bytes(paged.cell.pool)
    paged.tables.version += 1
    with pytest.raises(StaleBatchError):
        paged.forward(0)
    assert paged.cell.pool is held
    assert_same_bytes(loaded.pool_bytes(held), data, "after a refused call")
    paged.update()
    assert np.isfinite(loaded.to_numpy(paged.forward(0))).all()


# --- reads -------------------------------------------------------------------------------------


@engines
def test_a_step_of_unchanged_rows_reads_nothing_back(
    load_engine: LoadEngine, engine: str, kernel: str
) -> None:
    """Update and four layers of a piecewise step, twice: no value of the device is asked for."""
    loaded = load_engine(engine)
    paged = Paged(loaded, kernel, "LBNHC")
    for layer in range(4):
        paged.forward(layer)  # what compiles, compiles here
    before = list(paged.batches)
    with host_reads(loaded) as seen:
        for _ in range(2):
            paged.update()
            outputs = [paged.forward(layer) for layer in range(4)]
    assert seen == []
    assert all(a is b for a, b in zip(paged.batches, before)), "unchanged: the same batches"
    assert np.isfinite(loaded.to_numpy(outputs[3])).all()


READS: dict[str, Callable[[Any], Any]] = {
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.sum() > 0),
    "int": lambda x: int(x.sum()),
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "asarray": lambda x: np.asarray(x),
}


@engines
@pytest.mark.parametrize("how", READS)
def test_the_double_counts_a_read(
    load_engine: LoadEngine, engine: str, kernel: str, how: str
) -> None:
    loaded = load_engine(engine)
    array = loaded.from_numpy(np.ones(3, np.float32))
    guarded = () if loaded.device == "cpu" else (RuntimeError,)  # a GPU's own guard raises
    with host_reads(loaded) as seen, suppress(*guarded):
        READS[how](array)
    assert seen != []


@engines
@pytest.mark.parametrize(
    "feature",
    ["full", "one video", "several videos and a mask", "padding by packed_padding", "valid keys"],
)
def test_what_is_stated_in_ints_costs_no_read(
    load_engine: LoadEngine, engine: str, kernel: str, feature: str
) -> None:
    """A video layout, packed padding, a valid length: read on the host, nothing on the device."""
    loaded = load_engine(engine)
    case = FEATURES[feature]("float32")
    run_case(loaded, case)
    with host_reads(loaded) as seen:
        backend = loaded.attention_backend()
        layer = backend.get_impl_cls()(4, 32, 0.2, num_kv_heads=2)
        arrays = dense_arrays(loaded, case)
        seen.clear()
        layer.forward(*arrays)
        assert seen == []


def dense_arrays(engine: Any, case: Any) -> tuple[Any, ...]:
    q, k, v = (engine.from_numpy(x) for x in (case.q, case.k, case.v))
    return q, k, v, AttentionMetadata(**on_device(engine, case.metadata))
