"""Paged attention on the CPU beside its peers, and whether the aims are reached.

    python -m bench.cpu_attention [OUT.json]

Suite ``attention`` of ``pagestride bench`` with both engines, judged by :mod:`bench.targets`. Run
it with vLLM in the environment (``tools/conformance.py bench 0.29.0``) for vLLM's kernel.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from bench.targets import judge
from diffusion_runner.bench import record
from diffusion_runner.bench.options import Options, open_bench
from diffusion_runner.bench.suites import measure


def main() -> int:
    results = measure(open_bench(Options(device="cpu")), ["attention"])
    record.show(results, Console(width=120))
    if len(sys.argv) > 1:
        record.save(results, Path(sys.argv[1]))
    found = list(judge(results))
    for met, line in found:
        print(f"{'ok    ' if met else 'MISSED'}  {line}")
    return 0 if all(met for met, _ in found) else 1


if __name__ == "__main__":
    sys.exit(main())
