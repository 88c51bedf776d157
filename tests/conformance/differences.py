"""The documented differences from vLLM, by name. A comparison may end in one of these alone.

Each name must stand in ``docs/vllm-differences.md``, in backquotes; the run checks it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "vllm-differences.md"

WE_REFUSE: Final[frozenset[str]] = frozenset(
    {
        "block-without-whole-state",
        "split-loses-states",
        "unlike-groups-overlaid",
        "unequal-pitches-overlaid",
        "bhlnc-split",
        "prefix-match-unit-of-one-group",
        "request-over-recorded-layout",
        "double-free",
    }
)
"""What vLLM accepts and we refuse."""

WE_ANSWER: Final[frozenset[str]] = frozenset(
    {
        "sliding-window-mla-merge",
        "sink-merge-compressed",
        "stale-alignment-padding",
        "tensors-of-absent-layers",
        "window-mla-promotion",
    }
)
"""Where vLLM goes wrong or gives up, and we answer otherwise."""

WE_FOLLOW: Final[frozenset[str]] = frozenset(
    {"window-buckets-split", "draft-mla-merge", "hidden-state-page"}
)
"""Where vLLM's versions differ among themselves, and we follow one of them."""


def undocumented() -> list[str]:
    """Names that the document does not mention."""
    text = DOCUMENT.read_text(encoding="utf-8")
    return sorted(name for name in WE_REFUSE | WE_ANSWER | WE_FOLLOW if f"`{name}`" not in text)
