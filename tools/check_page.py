"""Check the page of ``pagestride explain`` in a headless browser.

The page finds cells and bytes by a script of its own. This asks it thousands of random
questions, and points and clicks at what it draws, and compares every answer with the core's.
Needs Chromium or Chrome; no part of the tests, which need no browser.

    python tools/check_page.py [--browser chromium] [--questions 2000]
"""

from __future__ import annotations

import argparse
import html
import json
import random
import re
import subprocess
import tempfile
from pathlib import Path

from diffusion_runner.explain.build import explain
from diffusion_runner.explain.geometry import Cache, Geometry
from diffusion_runner.explain.locate import CellQuery, find_cell
from diffusion_runner.explain.page import page_text
from layout_core import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheLayout,
    LayerView,
    ResolvedLayout,
    owners_of_byte,
)

# asks the page's own functions; then points at every tenth cell and types some questions
PROBE = """
<pre id="answers"></pre><script>
const questions = __QUESTIONS__, out = { cells: [], bytes: [], pointed: [], typed: [] };
for (const [plan, cell] of questions.cells)
  out.cells.push(cellStart(viewOf(data.plans[plan], cell[0]), cell));
for (const [plan, byte] of questions.bytes)
  out.bytes.push(owners(data.plans[plan], byte).map((o) => [o.cell, o.rest]));
const framed = () => [...document.querySelectorAll("rect.cell.on")].map((rect) => rect.dataset.c);
const state = () => [said.textContent, framed()];
document.querySelectorAll("rect.cell").forEach((rect, i) => {
  if (i % 10) return;
  rect.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
  out.pointed.push([rect.dataset.c, ...state()]);
});
for (const text of questions.typed) {
  query.value = text;
  document.getElementById("form").requestSubmit();
  out.typed.push(state());
}
document.getElementById("answers").textContent = JSON.stringify(out);
</script>
"""


def caches() -> dict[str, Cache]:
    def spec(heads: int, tokens: int) -> FullAttentionSpec:
        return FullAttentionSpec(
            block_size=tokens, num_kv_heads=heads, head_size=32, dtype="bfloat16"
        )

    unlike = (
        KVCacheGroupSpec(["a.0", "a.1"], spec(4, 4)),
        KVCacheGroupSpec(["b.0", "b.1", "b.2"], spec(1, 16)),
    )
    return {
        "small": Geometry().cache(),
        "padded groups": Geometry(layers=4, groups=2, page_size_padded=2304).cache(),
        "split": Geometry(layers=1, block_size=8, kernel_block_size=4).cache(),
        "unlike groups": Cache(unlike, 5, None),
        "real": Geometry(
            layers=128, blocks=1_000_000, heads=8, head_size=128, block_size=16
        ).cache(),
    }


def random_cell(plan: ResolvedLayout, rng: random.Random) -> list[int]:
    layer = rng.randrange(len(plan.layers))
    view: LayerView = plan.layers[layer]
    tokens = view.shape[2] * view.blocks_per_manager_block
    return [
        layer,
        rng.randrange(plan.num_blocks),
        rng.randrange(view.shape[1]),
        rng.randrange(tokens),
    ]


def check(name: str, cache: Cache, browser: str, count: int, folder: Path) -> int:
    """Questions asked of one page; a wrong answer ends the run."""
    rng = random.Random(0)
    shown = explain(cache, tuple(KVCacheLayout))
    plans = shown.plans
    numbers = [rng.randrange(len(plans)) for _ in range(count)]
    cells = [(plan, random_cell(plans[plan], rng)) for plan in numbers]
    bytes_ = [(plan, rng.randrange(plans[plan].size_bytes)) for plan in numbers]
    typed = [
        "0 1 0 0",
        "0,1,0,1",
        hex(bytes_[0][1]),
        "999 0 0 0",
        "0 1 0 99999",
        "what",
        "0xffffffffffff",
    ]
    questions = json.dumps({"cells": cells, "bytes": bytes_, "typed": typed})
    page = page_text(shown).replace(
        "</body>", PROBE.replace("__QUESTIONS__", questions) + "</body>"
    )
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = re.search(r'<pre id="answers">(.*?)</pre>', done.stdout, re.S)
    if found is None or not found.group(1):
        raise SystemExit(f"{name}: the page's script did not run to its end")
    answers = json.loads(html.unescape(found.group(1)))
    for (plan, cell), start in zip(cells, answers["cells"], strict=True):
        expect(f"{name}: cell {cell}", find_cell(plans[plan], CellQuery(*cell)).start, start)
    for (plan, byte), owners in zip(bytes_, answers["bytes"], strict=True):
        right = []
        for owner in owners_of_byte(plans[plan], byte).owners:
            view = plans[plan].layers[owner.layer]
            piece = owner.kernel_block % view.blocks_per_manager_block
            token = piece * view.shape[2] + owner.token
            right.append([[owner.layer, owner.block, owner.head, token], owner.offset])
        expect(f"{name}: {plans[plan].layout.name}, byte {byte:#x}", right, owners)
    for key, words, framed in answers["pointed"]:
        layer, block, head, token = key.split()
        expect(f"{name}: pointing at {key}", {key}, set(framed))
        told = f"block {block}, head {head}, token {token}"
        expect(
            f"{name}: words for {key}", True, words.startswith(f"layer {layer} (") and told in words
        )
    said = [words for words, _ in answers["typed"]]
    expect(f"{name}: typed a cell", True, said[0].startswith("layer 0 ("))
    expect(f"{name}: typed with commas", True, "block 1, head 0, token 1" in said[1])
    expect(f"{name}: typed a byte", True, said[2].startswith(f"byte {bytes_[0][1]:#x} ("))
    expect(f"{name}: no such layer", True, said[3].startswith("layer 999: expected one in [0, "))
    expect(f"{name}: no such token", True, said[4].startswith("token 99999: expected one in [0, "))
    expect(f"{name}: no question", True, said[5].startswith("expected l b h n, or a byte"))
    expect(f"{name}: no such byte", True, "expected one in [0, 0x" in said[6])
    return len(cells) + len(bytes_) + len(answers["pointed"]) + len(typed)


def expect(what: str, right: object, got: object) -> None:
    if right != got:
        raise SystemExit(f"{what}: expected {right!r}, the page says {got!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--questions", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, cache in caches().items():
            asked = check(name, cache, options.browser, options.questions, Path(folder))
            print(f"{name}: {asked:,} questions, all answered as the core does")


if __name__ == "__main__":
    main()
