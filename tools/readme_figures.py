"""Write the README's table of figures from the committed results.

``make figures`` writes it; ``--check`` compares and exits with status 1 where it differs. Every
figure stands in a file under ``bench/results`` that the command beside it wrote.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: make figures -->", "<!-- end of figures -->"
VLLM = "0.29.0"

Row = tuple[str, str, str]


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def span(values: list[float], digits: int = 2) -> str:
    low, high = f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"
    return low if low == high else f"{low} to {high}"


def pictures() -> Iterator[Row]:
    compare = load("compare.json")
    worst = max(run["max_abs_diff"] for run in compare["runs"])
    what = f"largest pixel difference over {len(compare['runs'])} runs (2 engines, 6 layouts)"
    yield f"{what}, float32", f"{worst:.1e}", "make demo"
    for backend in ("torch_cuda", "jax_gpu"):
        score = load(f"score-{backend}.json")
        yield (
            f"generated digits that an independent classifier reads as asked, {backend}",
            f"{score['agreed']} of {score['count']}",
            "make score",
        )


def conformance() -> Iterator[Row]:
    for path in sorted(RESULTS.glob("conformance-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        yield (
            f"random cases against the real vLLM {result['vllm']}: strides, views, sizing, "
            "resolution, block manager",
            f"{result['cases']:,}, {result['disagreements']} disagreements",
            "make conformance-record",
        )


def ratios(comparison: Any) -> dict[str, float]:
    return {t["name"]: t["ratio"]["median"] for t in comparison["timings"]}


def of_engine(comparison: Any, engine: str) -> list[float]:
    """The ratios of an engine's layouts."""
    return [r for name, r in ratios(comparison).items() if name.startswith(engine + " ")]


def core(peers: Any) -> Iterator[Row]:
    """What vLLM's own takes, in the time of ours."""
    for comparison in peers["comparisons"]:
        if comparison["suite"] != "core":
            continue
        for name, ratio in ratios(comparison).items():
            if "vllm" in name.lower():
                what = f"{comparison['case']}: {name} / {comparison['base']}"
                yield what, f"{ratio:.1f}", "make vllm-peers"


def attention(cpu: Any, peers: Any) -> Iterator[Row]:
    theirs = {c["case"]: ratios(c).get("vLLM's CPU kernel") for c in peers["comparisons"]}
    for comparison in cpu["comparisons"]:
        if comparison["suite"] != "attention":
            continue
        case, found = comparison["case"], ratios(comparison)
        beside = [
            f"{name} {found[full]:.2f}"
            for name, full in (
                ("gather + SDPA", "torch gather + SDPA"),
                ("FlexAttention", "torch FlexAttention"),
                ("jax.nn", "jax.nn.dot_product_attention"),
            )
            if full in found
        ]
        kernel = theirs.get(case)
        if kernel is not None:
            beside.append(f"vLLM's kernel {kernel:.2f}")
        for engine in ("torch_cuda", "jax_gpu"):
            what = f"{engine} paged / torch dense, {case}"
            if engine == "torch_cuda":
                what += f" (beside it: {', '.join(beside)})"
            yield what, span(of_engine(comparison, engine)), "make bench"


def moving(cpu: Any) -> Iterator[Row]:
    for comparison in cpu["comparisons"]:
        if comparison["suite"] in ("write", "copy"):
            for engine in ("torch_cuda", "jax_gpu"):
                share = [1 / ratio for ratio in of_engine(comparison, engine)]
                what = f"{engine} {comparison['suite']}, {comparison['case']}: share of memcpy"
                yield what, span(share), "make bench"


def denoise(cpu: Any) -> Iterator[Row]:
    for comparison in cpu["comparisons"]:
        if comparison["suite"] != "denoise":
            continue
        found, details = ratios(comparison), comparison["details"]
        if "bound_by_operations" not in details:
            jax = found["jax_gpu, prefix reused"]
            yield f"{comparison['case']}: jax_gpu / torch_cuda", f"{jax:.2f}", "make bench"
            continue
        for engine, speedup in details["speedup_of_a_run"].items():
            yield (
                f"a run of {details['steps']} steps with {details['prefix']} of "
                f"{details['prefix'] + details['target']} tokens reused / recomputed, {engine} "
                f"(bound by operations {details['bound_by_operations']:.2f})",
                f"{speedup:.2f} times faster",
                "make bench",
            )


def memory(cpu: Any) -> Iterator[Row]:
    for entry in cpu["memories"]:
        base = entry["bytes"][entry["base"]]
        padded = entry["bytes"]["dense, padded to the longest row"] / base
        yield (
            f"dense caches padded to the longest row / pages, {entry['case']}",
            (f"{padded:.2f}"),
            "make bench",
        )


def growth(cpu: Any) -> Iterator[Row]:
    for entry in cpu["growths"]:
        sizes = entry["sizes"]
        yield (
            f"growth of {entry['name']} with {entry['axis']}, {sizes[0]:,.0f} to {sizes[-1]:,.0f}",
            f"exponent {entry['exponent']:.2f}",
            "make bench",
        )


def diffusers() -> Iterator[Row]:
    for entry in load("diffusers.json")["results"]:
        what = f"diffusers {entry['case']}, {entry['text_tokens']} text tokens: step / stock"
        ratio = entry["ratio"]
        yield what, f"later {ratio['later']:.2f}, first {ratio['first']:.2f}", "make bench"


def table() -> str:
    cpu, peers = load("cpu.json"), load(f"vllm-{VLLM}.json")
    where, shape = (
        cpu["machine"],
        next(c["details"] for c in cpu["comparisons"] if c["suite"] == "attention"),
    )
    lines = [
        BEGIN,
        "",
        f"On {where['cores']} CPU cores ({where['processor']}), torch threads {where['threads']}, "
        f"Python {where['python']}, torch {where['versions']['torch']}, jax "
        f"{where['versions']['jax']}, vLLM {VLLM}. Ratios are medians over interleaved rounds; "
        f"{shape['num_heads']} query and {shape['num_kv_heads']} KV heads of "
        f"{shape['head_size']}, blocks of {shape['block_size']} tokens, {shape['tables']} block "
        'tables, six layouts. Above 1.0 in a "paged / dense" row is a loss.',
        "",
        "| what | figure | command |",
        "| --- | --- | --- |",
    ]
    rows = [
        *pictures(),
        *conformance(),
        *core(peers),
        *attention(cpu, peers),
        *moving(cpu),
        *denoise(cpu),
        *memory(cpu),
        *growth(cpu),
        *diffusers(),
    ]
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
