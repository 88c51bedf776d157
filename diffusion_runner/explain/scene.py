"""A picture as a list of plain shapes, which SVG, PNG and HTML writers draw alike.

Units are pixels, y grows downwards. Colours are CSS colours, or names of the theme.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

Theme = Mapping[str, str]

LIGHT: Final[Theme] = {
    "ground": "#ffffff",
    "panel": "#f6f7f9",
    "ink": "#1c2530",
    "muted": "#5d6875",
    "faint": "#c3cad3",
    "padding": "#9aa5b1",
    "accent": "#c2410c",
    "null": "#e9ecf0",
}
DARK: Final[Theme] = {
    "ground": "#14181e",
    "panel": "#1c222b",
    "ink": "#e9edf2",
    "muted": "#9eaab8",
    "faint": "#46515f",
    "padding": "#6f7c8b",
    "accent": "#fb923c",
    "null": "#2a323d",
}
THEMES: Final = {"light": LIGHT, "dark": DARK}

CSS: Final[Theme] = {name: f"var(--{name})" for name in LIGHT}
"""For a page that brings its own colours, light and dark."""

HUES: Final = (
    "#3573bd",
    "#eda93e",
    "#2fae98",
    "#7e2a5c",
    "#24249c",
    "#5bd6df",
    "#b58be6",
    "#b0431f",
)
"""Layers. Any two differ for every kind of colour vision; a test simulates them."""


def mixed(colour: str, other: str, share: float) -> str:
    """``colour`` with a share of ``other``, both ``#rrggbb``."""
    pairs = zip(_channels(colour), _channels(other))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def luminance(colour: str) -> float:
    """Perceived lightness in [0, 1], near enough to choose black or white text."""
    red, green, blue = _channels(colour)
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


@dataclass(frozen=True, slots=True)
class Rect:
    x: float
    y: float
    width: float
    height: float
    fill: str
    stroke: str | None = None
    hatch: str | None = None  #: colour of diagonal lines over the fill
    dots: bool = False  #: the stroke is dotted
    opacity: float = 1.0
    title: str | None = None  #: said on pointing
    data: Mapping[str, str] = field(default_factory=dict)  #: ``data-`` attributes


@dataclass(frozen=True, slots=True)
class Text:
    x: float
    y: float  #: of the baseline
    text: str
    size: float = 12.0
    fill: str = "ink"
    anchor: str = "start"  #: ``start``, ``middle`` or ``end``
    bold: bool = False
    mono: bool = False


Shape = Rect | Text


@dataclass(frozen=True, slots=True)
class Scene:
    width: float
    height: float
    shapes: tuple[Shape, ...]
    title: str

    def moved(self, x: float, y: float) -> tuple[Shape, ...]:
        """The shapes, shifted: to compose scenes."""
        from dataclasses import replace

        return tuple(replace(s, x=s.x + x, y=s.y + y) for s in self.shapes)


_NARROW: Final = frozenset(" .,:;il|'()[]fjrtI·")


def text_width(text: str, size: float, *, bold: bool = False, mono: bool = False) -> float:
    """Pixels that a text takes, or a little more: by DejaVu Sans, wider than what browsers use."""
    if mono:
        return 0.603 * size * len(text)
    width = sum(0.4 if c in _NARROW else 0.77 if c.isupper() else 0.635 for c in text)
    return size * width * (1.12 if bold else 1.0)
