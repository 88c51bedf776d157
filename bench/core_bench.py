"""How fast the layout core is: import, planning, and memory, as ratios.

``python -m bench.core_bench`` prints one line for each figure and exits with 1 where a target
is missed. Where a ``vllm`` can be imported, its own functions are timed in the same process
and the ratio is printed too. CPU time, not wall time, so that a busy machine changes little;
the best of several rounds, so that a first call's costs do not count.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from layout_core import (
    CacheConfig,
    FullAttentionSpec,
    ModelConfig,
    ResolvedLayout,
    RunConfig,
    get_kv_cache_configs,
    resolve_layout,
)

ROOT = Path(__file__).resolve().parent.parent

IMPORT_BUDGET_MS = 80.0
IMPORT_PEER_RATIO = 50.0
PLAN_PEER_RATIO = 5.0
NUM_LAYERS = 128
NUM_BLOCKS = 1_000_000


def child_cpu_ms(code: str, rounds: int) -> float:
    """Least CPU time, in ms, of a fresh interpreter that runs ``code``."""
    best = float("inf")
    for _ in range(rounds):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime)
        best = min(best, spent * 1e3)
    return best


def best_cpu_ms(work: Callable[[], object], rounds: int) -> float:
    """Least CPU time of one call, in ms."""
    best = float("inf")
    for _ in range(rounds):
        start = time.process_time_ns()
        work()
        best = min(best, (time.process_time_ns() - start) / 1e6)
    return best


def model_specs() -> dict[str, Any]:
    """Equal layers, each with a spec object of its own, as workers report them."""
    return {
        f"model.layers.{i}.attn": FullAttentionSpec(
            block_size=16,
            num_kv_heads=8,
            head_size=128,
            dtype="bfloat16",  # type: ignore[arg-type]
        )
        for i in range(NUM_LAYERS)
    }


def plan(specs: dict[str, Any], num_blocks: int, layout: str) -> ResolvedLayout:
    """From specs and memory to the plan that an engine executes."""
    page = next(iter(specs.values())).page_size_bytes
    config = RunConfig(ModelConfig(4096), CacheConfig(kv_cache_layout=layout))
    memory = page * NUM_LAYERS * num_blocks
    return resolve_layout(get_kv_cache_configs(config, [specs], [memory])[0])


def peak_bytes(specs: dict[str, Any], num_blocks: int) -> int:
    """Most memory that planning holds at a time."""
    tracemalloc.start()
    plan(specs, num_blocks, "LBNHC")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def third_party_modules() -> str:
    """Modules outside the standard library that loading every public name brings."""
    code = (
        "import sys; bare = set(sys.modules); import layout_core\n"
        "for name in layout_core.__all__: getattr(layout_core, name)\n"
        "names = {m.partition('.')[0] for m in set(sys.modules) - bare}\n"
        "print(*sorted(names - set(sys.stdlib_module_names) - {'layout_core'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def peer_plan() -> Callable[[], object]:
    """vLLM's ``get_kv_cache_configs`` on the same layers and memory."""
    import torch
    from vllm.v1.core import kv_cache_utils, single_type_kv_cache_manager
    from vllm.v1.kv_cache_interface import FullAttentionSpec as PeerSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout as PeerLayout

    specs = {
        f"model.layers.{i}.attn": PeerSpec(
            block_size=16, num_kv_heads=8, head_size=128, dtype=torch.bfloat16
        )
        for i in range(NUM_LAYERS)
    }
    page = next(iter(specs.values())).page_size_bytes
    cache_config = SimpleNamespace(
        num_gpu_blocks_override=None,
        prefix_cache_retention_interval=None,
        get_resolved_kv_cache_layout=lambda: PeerLayout["LBNHC"],
    )
    config = SimpleNamespace(  # what sizing reads of a VllmConfig, in 0.29 and in 0.32
        cache_config=cache_config,
        model_config=SimpleNamespace(max_model_len=4096, original_max_model_len=None),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, tensor_parallel_size=1),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        num_prefill_lookahead_tokens=0,
    )
    single_type_kv_cache_manager.register_all_kvcache_specs(config)
    memory = page * NUM_LAYERS * NUM_BLOCKS
    return lambda: kv_cache_utils.get_kv_cache_configs(config, [dict(specs)], [memory])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print(f"python {platform.python_version()}, {platform.machine()}, best of {rounds} rounds")
    missed: list[str] = []

    def check(met: bool, text: str) -> None:
        print(f"{'ok    ' if met else 'MISSED'}  {text}")
        if not met:
            missed.append(text)

    bare = child_cpu_ms("pass", rounds)
    ours = child_cpu_ms("import layout_core", rounds)
    everything = child_cpu_ms(
        "import layout_core\nfor name in layout_core.__all__: getattr(layout_core, name)", rounds
    )
    check(
        ours - bare <= IMPORT_BUDGET_MS,
        f"import layout_core: {ours - bare:.1f} ms of CPU above a bare interpreter "
        f"({bare:.1f} ms), at most {IMPORT_BUDGET_MS:.0f}; with every name loaded "
        f"{everything - bare:.1f} ms",
    )
    foreign = third_party_modules()
    check(not foreign, f"third-party modules loaded: {foreign or 'none'}")

    specs = model_specs()
    times = {
        layout: best_cpu_ms(lambda layout=layout: plan(specs, NUM_BLOCKS, layout), 5 * rounds)  # type: ignore[misc]
        for layout in ("LBNHC", "LHBNC", "BLNHC", "BHLNC")
    }
    shown = ", ".join(f"{name} {ms:.2f}" for name, ms in times.items())
    print(
        f"        specs and memory to a plan, {NUM_LAYERS} layers, {NUM_BLOCKS:,} blocks, in ms: "
        f"{shown}"
    )
    small, large = peak_bytes(specs, 1_000), peak_bytes(specs, NUM_BLOCKS)
    check(
        large <= small * 1.05,
        f"memory while planning: {large / 1024:.0f} KiB at {NUM_BLOCKS:,} blocks, "
        f"{large / small:.2f} times that at 1,000",
    )

    if importlib.util.find_spec("vllm") is None:
        print("        vllm is not installed here: no peer figures")
    else:
        peer_import = child_cpu_ms("import vllm.v1.kv_cache_interface", 2)
        ratio = (peer_import - bare) / (ours - bare)
        check(
            ratio >= IMPORT_PEER_RATIO,
            f"import: {ratio:.0f} times faster than vllm.v1.kv_cache_interface, at least "
            f"{IMPORT_PEER_RATIO:.0f}",
        )
        work = peer_plan()
        peer = best_cpu_ms(work, 5 * rounds)
        # ours again, now that as many modules and objects are loaded as vLLM has to live with
        ours_beside = best_cpu_ms(lambda: plan(specs, NUM_BLOCKS, "LBNHC"), 5 * rounds)
        check(
            peer / ours_beside >= PLAN_PEER_RATIO,
            f"specs to plan: {peer / ours_beside:.1f} times faster than vLLM's "
            f"get_kv_cache_configs alone ({peer:.2f} ms, ours {ours_beside:.2f}), at least "
            f"{PLAN_PEER_RATIO:.0f}",
        )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
