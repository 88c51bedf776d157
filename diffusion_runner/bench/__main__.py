"""``python -m diffusion_runner.bench``: the command where the rest of the runner is not installed.

In an environment of vLLM's, say, whose kernels are then among the peers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from diffusion_runner.bench import record
from diffusion_runner.bench.options import TABLES, make_options, open_bench
from diffusion_runner.bench.suites import SUITES, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    parser.add_argument("--engines", nargs="+", default=["torch_cuda"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    options = make_options(
        engines=tuple(given.engines),
        dtypes=tuple(given.dtypes),
        threads=given.threads,
        tables=TABLES[0],
        quick=given.quick,
    )
    results = measure(open_bench(options), given.suites, report=print)
    record.show(results, Console(width=120))
    if given.json is not None:
        record.save(results, given.json)


if __name__ == "__main__":
    main()
