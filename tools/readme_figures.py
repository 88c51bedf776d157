"""Write the README's figures from the committed results: ``make figures``.

``bench/results`` holds what ``make score``, ``make bench``, ``make conformance-record`` and
``make vllm-peers`` measured; nothing in the table is typed by hand. ``--check`` only says
whether the README is up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: make figures -->", "<!-- end of figures -->"

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def span(values: list[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def pictures() -> list[tuple[str, str, str]]:
    compare = load("compare.json")
    worst = max(run["max_abs_diff"] for run in compare["runs"])
    rows = [
        (
            f"largest pixel difference over {len(compare['runs'])} runs (2 engines, 6 layouts), "
            "float32",
            f"{worst:.1e}",
            "make demo",
        )
    ]
    for backend in ("torch_cuda", "jax_gpu"):
        score = load(f"score-{backend}.json")
        rows.append(
            (
                f"generated digits that an independent classifier reads as asked, {backend}",
                f"{score['agreed']} of {score['count']}",
                "make score",
            )
        )
    return rows


def conformance() -> list[tuple[str, str, str]]:
    rows = []
    for path in sorted(RESULTS.glob("conformance-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        rows.append(
            (
                f"random cases against the real vLLM {result['vllm']}: strides, views, sizing, "
                "resolution, block manager",
                f"{result['cases']:,}, {result['disagreements']} disagreements",
                "make conformance-record",
            )
        )
    return rows


def peers() -> list[tuple[str, str, str]]:
    result = load("vllm-peers.json")
    return [
        (
            f"{figure['name']}, vLLM {result['vllm']}'s time / ours",
            f"{figure['ratio']:.1f}" + ("" if figure["met"] else f" (aim: {figure['target']})"),
            "make vllm-peers",
        )
        for figure in result["figures"]
    ]


def torch_attention() -> list[tuple[str, str, str]]:
    rows = []
    for case in load("cpu_attention.json")["results"]:
        shapes = case["rows"]
        what = (
            f"T={shapes[0][0]}, S={shapes[0][1]}"
            if len(shapes) == 1
            else f"{len(shapes)} ragged rows"
        )
        rows.append(
            (
                f"torch paged / torch dense SDPA on contiguous K/V, {what}, {case['dtype']}, "
                "six layouts",
                span([case["ratio"][layout] for layout in LAYOUTS]),
                "make bench",
            )
        )
    return rows


def jax_attention() -> list[tuple[str, str, str]]:
    rows = []
    for case in load("jax_attention.json")["cases"]:
        if "tokens" in case:
            ratio = case["ratio"]
            paged = [ratio[layout] for layout in LAYOUTS if layout in ratio]
            full = "full" if case["keys"] == 2048 else f"{case['keys'] / 2048:.0%} full"
            rows.append(
                (
                    f"JAX paged / torch dense SDPA, T={case['tokens']}, bucket of 2,048 keys "
                    f"{full}, {case['dtype']} (jax.nn.dot_product_attention: "
                    f"{ratio['jax.nn.dot_product_attention']:.2f})",
                    span(paged),
                    "make bench",
                )
            )
        else:
            ratio = case["bandwidth_ratio"]
            rows.append(
                (
                    f"JAX write of 4,096 cells, share of memcpy's bandwidth, {case['dtype']}",
                    span([ratio[layout] for layout in LAYOUTS if layout in ratio]),
                    "make bench",
                )
            )
    return rows


def table() -> str:
    setting = load("cpu_attention.json")["setting"]
    lines = [
        BEGIN,
        "",
        f"On 2 CPU cores (x86-64, AVX2), Python {setting['python']}, torch {setting['torch']}, "
        f"jax {load('jax_attention.json')['setting']['jax']}. Ratios are medians of interleaved "
        f"rounds; {setting['heads']} query and {setting['kv_heads']} KV heads of "
        f"{setting['head_size']}, blocks of {setting['block_size']} tokens. Above 1.0 in a "
        '"paged / dense" row is a loss.',
        "",
        "| what | figure | command |",
        "| --- | --- | --- |",
    ]
    for rows in (pictures(), conformance(), peers(), torch_attention(), jax_attention()):
        lines += [f"| {what} | {figure} | `{command}` |" for what, figure, command in rows]
    return "\n".join([*lines, "", END])


def main() -> int:
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    new = before + table() + after
    if "--check" in sys.argv[1:]:
        if new != text:
            print("README.md: its figures differ from bench/results; run `make figures`")
        return int(new != text)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
