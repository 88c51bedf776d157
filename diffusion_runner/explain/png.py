"""A scene as PNG, at twice its size in pixels, in the font that comes with matplotlib."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import matplotlib
from PIL import Image, ImageColor, ImageDraw, ImageFont

from diffusion_runner.explain.scene import Rect, Scene, Text, Theme, mixed

SCALE = 2
"""Pixels of the picture for each unit of the scene."""

_HATCH_STEP = 10  # pixels


def png_bytes(scene: Scene, theme: Theme) -> bytes:
    """The scene as the bytes of a PNG file."""
    size = (round(scene.width * SCALE), round(scene.height * SCALE))
    image = Image.new("RGB", size, theme["ground"])
    draw = ImageDraw.Draw(image)
    fonts: Fonts = {}
    for shape in scene.shapes:
        if isinstance(shape, Rect):
            _rect(image, draw, shape, theme)
        else:
            _text(draw, shape, theme, fonts)
    out = BytesIO()
    image.save(out, format="PNG")
    return out.getvalue()


def _rect(image: Image.Image, draw: ImageDraw.ImageDraw, rect: Rect, theme: Theme) -> None:
    left, top = round(rect.x * SCALE), round(rect.y * SCALE)
    right = max(round((rect.x + rect.width) * SCALE), left + 1) - 1
    bottom = max(round((rect.y + rect.height) * SCALE), top + 1) - 1
    fill = theme.get(rect.fill, rect.fill)
    if rect.opacity != 1:  # over a panel, the only ground that pale cells have
        fill = mixed(theme["panel"], fill, rect.opacity)
    stroke = theme.get(rect.stroke, rect.stroke) if rect.stroke else None
    if stroke and rect.opacity != 1:
        stroke = mixed(theme["panel"], stroke, rect.opacity)
    draw.rectangle((left, top, right, bottom), fill=fill, outline=stroke, width=3 if stroke else 0)
    if rect.hatch:
        _hatch(image, (left, top, right + 1, bottom + 1), fill, theme[rect.hatch])


def _hatch(image: Image.Image, box: tuple[int, int, int, int], fill: str, colour: str) -> None:
    """Diagonal lines, drawn larger and scaled down, so that their edges are smooth."""
    width, height = box[2] - box[0], box[3] - box[1]
    large = Image.new("RGB", (3 * width, 3 * height), fill)
    draw = ImageDraw.Draw(large)
    for shift in range(-3 * height, 3 * width, 3 * _HATCH_STEP):
        draw.line((shift, 3 * height, shift + 3 * height, 0), ImageColor.getrgb(colour), 6)
    image.paste(large.resize((width, height), Image.Resampling.LANCZOS), box[:2])


Fonts = dict[tuple[float, bool, bool], ImageFont.FreeTypeFont]


def font_of(text: Text, fonts: Fonts) -> ImageFont.FreeTypeFont:
    """The font that a text is drawn in, at the picture's scale; kept in ``fonts``."""
    key = (text.size, text.bold, text.mono)
    if key not in fonts:
        name = "DejaVuSans" + ("Mono" if text.mono else "") + ("-Bold" if text.bold else "")
        folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        fonts[key] = ImageFont.truetype(str(folder / f"{name}.ttf"), text.size * SCALE)
    return fonts[key]


_ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}


def _text(draw: ImageDraw.ImageDraw, text: Text, theme: Theme, fonts: Fonts) -> None:
    draw.text(
        (text.x * SCALE, text.y * SCALE),
        text.text,
        fill=theme.get(text.fill, text.fill),
        font=font_of(text, fonts),
        anchor=_ANCHORS[text.anchor],
    )
