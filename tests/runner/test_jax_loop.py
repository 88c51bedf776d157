"""The denoise loop as one JAX program: exported, cached between processes, its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.jax_gpu import create_engine
from diffusion_runner import cli
from diffusion_runner.errors import RunError
from diffusion_runner.jax_loop import JaxLoop
from diffusion_runner.loop import KvCache, LoopResult, Wave
from diffusion_runner.run import Runner, generate
from diffusion_runner.settings import PICTURE_TOLERANCE, RunSettings
from layout_core import KVCacheLayout
from layout_core.errors import PoolError

ENGINE = create_engine("cpu")
SETTINGS = RunSettings(prompts=("7",), steps=3, backend="jax_gpu", layout=KVCacheLayout.LBNHC)


class Watched:
    """A loop that shows each cache and wave to a function before it runs."""

    def __init__(self, loop: JaxLoop, before: Callable[[JaxLoop, KvCache, Wave], None]) -> None:
        self._loop = loop
        self._before = before

    def run(self, cache: KvCache, wave: Wave) -> LoopResult:
        self._before(self._loop, cache, wave)
        return self._loop.run(cache, wave)


def watched(before: Callable[[JaxLoop, KvCache, Wave], None]) -> Runner:
    runner = Runner(ENGINE)
    runner._loop = Watched(runner._loop, before)  # type: ignore[arg-type]
    return runner


def test_an_exported_loop_draws_the_same_in_another_layout_and_traces_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Exported for CPU and CUDA with no GPU there, from one layout, loaded for another."""
    exported: list[bytes] = []

    def export(loop: JaxLoop, cache: KvCache, wave: Wave) -> None:
        exported.append(loop.export(cache, wave, platforms=("cpu", "cuda")))

    want = watched(export).generate(SETTINGS).images
    (data,) = exported

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the loop was traced again")

    monkeypatch.setattr(JaxLoop, "_denoise", refuse)
    runner = watched(lambda loop, cache, wave: loop.load(data))
    other = replace(SETTINGS, layout=KVCacheLayout.BHLNC)
    got = runner.generate(other)
    assert got.layout is KVCacheLayout.BHLNC
    np.testing.assert_allclose(got.images, want, atol=PICTURE_TOLERANCE, rtol=0)
    with pytest.raises(AssertionError, match="traced again"):  # it serves its own shapes alone
        runner.generate(replace(SETTINGS, steps=4))


def test_a_view_of_the_pool_stops_the_loop_and_is_named() -> None:
    views: list[Any] = []
    runner = watched(lambda loop, cache, wave: views.append(np.from_dlpack(cache.pool.words)))
    with pytest.raises(PoolError, match="the denoise loop copied it instead of changing it in pl"):
        runner.generate(SETTINGS)


POOL_BLOCKS = 8192  # of 16 KiB each

CHILD = f"""
import json, sys
import jax
from pathlib import Path
from backends.jax_gpu import create_engine
from backends.jax_gpu.caching import use_compilation_cache
from backends.jax_gpu.compiled import program_memory
from diffusion_runner.run import Runner
from diffusion_runner.settings import RunSettings

events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
use_compilation_cache(sys.argv[1])
runner = Runner(create_engine("cpu"))
loop = runner._loop
memory = {{}}

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [x for x in lines if x.startswith(field + ":")]
    return int(line.split()[1]) * 1024

class Measured:
    def run(self, cache, wave):
        pool, arguments = loop._arguments(cache, wave)
        loop._compile(wave.rows_per_request, pool, arguments)
        cache.pool.words.block_until_ready()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = resident("VmRSS")
        result = loop.run(cache, wave)
        memory["grown"] = resident("VmHWM") - before
        memory["pool"] = cache.resolved.size_bytes
        return result

runner._loop = Measured()
result = runner.generate(
    RunSettings(prompts=("7",), steps=3, backend="jax_gpu", pool_blocks={POOL_BLOCKS})
)
(program,) = loop.programs
own = program_memory(program)
memory |= {{"temporaries": own.temporaries, "peak": own.peak, "arguments": own.arguments}}
count = lambda end: sum(x.endswith(end) for x in events)
print(json.dumps({{
    "hits": count("/cache_hits"), "misses": count("/cache_misses"), **memory,
    "picture": result.images.tobytes().hex(),
}}))
"""


def child(folder: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return record


def test_a_warm_process_compiles_nothing_and_the_loop_needs_no_second_pool(tmp_path: Path) -> None:
    cold, warm = child(tmp_path / "cache"), child(tmp_path / "cache")
    assert cold["hits"] == 0
    assert cold["misses"] > 0
    assert (warm["hits"], warm["misses"]) == (cold["misses"], 0)
    assert warm["picture"] == cold["picture"]
    for record in (cold, warm):
        pool = record["pool"]
        assert pool == POOL_BLOCKS * 4 * 2 * 8 * 256  # layers, heads, tokens, bytes of a cell
        # by the program's own figures: the pool is an argument and the result lies in it
        assert record["peak"] <= 1.05 * pool + record["arguments"] - pool
        # by what the process held: the pool was there before, a copy would be seen
        assert record["grown"] <= 0.05 * pool + record["temporaries"]


def test_the_cache_is_asked_for_by_flag_or_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Path | None] = []

    def record(settings: RunSettings, **_: Any) -> None:
        asked.append(settings.compilation_cache)
        raise RunError("enough")

    monkeypatch.setattr("diffusion_runner.run.generate", record)

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["pagestride", "run", "--out", "x.png", *arguments])
        with pytest.raises(SystemExit):
            cli.main()

    monkeypatch.delenv(cli.CACHE_VARIABLE, raising=False)
    run("--backend", "jax_gpu")
    run("--backend", "jax_gpu", "--compilation-cache", str(tmp_path))
    monkeypatch.setenv(cli.CACHE_VARIABLE, str(tmp_path / "other"))
    run("--backend", "jax_gpu")
    run("--backend", "torch_cuda")
    assert asked == [None, tmp_path, tmp_path / "other", None]


def test_a_cache_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="compilation_cache: backend 'torch_cuda' compiles no loop"):
        replace(SETTINGS, backend="torch_cuda", compilation_cache=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"compilation_cache: cannot make .*file.*: File exists"):
        generate(replace(SETTINGS, compilation_cache=tmp_path / "file"), console=None)  # type: ignore[arg-type]
