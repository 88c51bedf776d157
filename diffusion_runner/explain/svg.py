"""A scene as SVG text: no script, no external resource."""

from __future__ import annotations

from html import escape

from diffusion_runner.explain.scene import Rect, Scene, Shape, Text, Theme

SANS = "'Inter','Segoe UI','Helvetica Neue',Arial,'DejaVu Sans',sans-serif"
MONO = "'SFMono-Regular',Consolas,'DejaVu Sans Mono',monospace"


def svg_text(scene: Scene, theme: Theme, *, prefix: str = "p") -> str:
    """The scene as one ``<svg>`` element.

    Args:
        scene: what to draw.
        theme: what the colour names mean.
        prefix: of the ids inside, distinct for each element of one page.
    """
    hatch = f"{prefix}-hatch"
    lines = theme["padding"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(scene.width)} '
        f'{_n(scene.height)}" width="{_n(scene.width)}" height="{_n(scene.height)}" '
        f'role="img" aria-label="{escape(scene.title)}" font-family="{SANS}">',
        f"<title>{escape(scene.title)}</title>",
        f'<defs><pattern id="{hatch}" width="5" height="5" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="1.4" height="5" fill="{lines}"/>'
        "</pattern></defs>",
    ]
    parts += [_shape(shape, theme, hatch) for shape in scene.shapes]
    parts.append("</svg>\n")
    return "\n".join(parts)


def _shape(shape: Shape, theme: Theme, hatch: str) -> str:
    return _rect(shape, theme, hatch) if isinstance(shape, Rect) else _text(shape, theme)


def _rect(rect: Rect, theme: Theme, hatch: str) -> str:
    place = (
        f'x="{_n(rect.x)}" y="{_n(rect.y)}" width="{_n(max(rect.width, 0.5))}" '
        f'height="{_n(rect.height)}"'
    )
    marks = "".join(f' data-{name}="{escape(value)}"' for name, value in rect.data.items())
    if rect.data:
        marks += ' class="cell"'
    if rect.stroke:
        marks += f' stroke="{_colour(rect.stroke, theme)}" stroke-width="1.4"'
    if rect.opacity != 1:
        marks += f' opacity="{rect.opacity:g}"'
    title = f"<title>{escape(rect.title)}</title>" if rect.title else ""
    out = f'<rect {place} fill="{_colour(rect.fill, theme)}"{marks}>{title}</rect>'
    if rect.hatch:
        out += f'<rect {place} fill="url(#{hatch})"/>'
    return out


def _text(text: Text, theme: Theme) -> str:
    marks = ' font-weight="600"' if text.bold else ""
    if text.mono:
        marks += f' font-family="{MONO}"'
    if text.anchor != "start":
        marks += f' text-anchor="{text.anchor}"'
    return (
        f'<text x="{_n(text.x)}" y="{_n(text.y)}" font-size="{text.size:g}" '
        f'fill="{_colour(text.fill, theme)}" pointer-events="none"{marks}>'
        f"{escape(text.text)}</text>"
    )


def _colour(name: str, theme: Theme) -> str:
    return theme.get(name, name)


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
