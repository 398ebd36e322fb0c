"""The curves of same_losses.py as one picture: python tests/gpu/draw_losses.py IN.json OUT.svg

All variants of one model lie on one another, so each model gets two panels: the loss of bf16, and
how far every other run is from it, in per cent, as means over 25 steps. Another seed reads other
text at every step, and is left out.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from statistics import mean

from foundling.report.markup import Markup, tag, ticks

WIDTH, HEIGHT, LEFT, TOP, GAP, LEGEND = 520, 250, 56, 34, 24, 90
OVER = 25
BASE, OTHER_TEXT = "bf16", "another seed"
COLOURS = (
    *("#8c8c8c", "#1f6f78", "#b4552d", "#9a7b1c", "#2f7d4f", "#6a4c93"),
    *("#b3372f", "#4a6fa5", "#c07aa0", "#5b4b3a", "#6fae9b", "#d2a24c"),
)
Line = tuple[str, str, list[tuple[float, float]]]
"""Name, colour, points."""


def running(losses: Sequence[float]) -> list[tuple[float, float]]:
    """(step, mean of the steps before it)."""
    return [(end, mean(losses[end - OVER : end])) for end in range(OVER, len(losses) + 1, 5)]


def panel(title: str, lines: Sequence[Line], across: float, down: float) -> Iterator[Markup]:
    """Axes and lines, the left upper corner at (across, down)."""
    width, height = WIDTH - LEFT - GAP, HEIGHT - TOP - GAP
    values = [y for _, _, points in lines for _, y in points]
    low, high = min(values), max(values)
    last = max(x for _, _, points in lines for x, _ in points)

    def place(x: float, y: float) -> tuple[float, float]:
        part = (y - low) / ((high - low) or 1.0)
        return round(across + LEFT + x / last * width, 1), round(
            down + TOP + (1 - part) * height, 1
        )

    yield tag("text", title, x=across + LEFT, y=down + TOP - 12, font_weight="600")
    for value in ticks(low, high, 5):
        x, y = place(0, value)
        yield tag("path", d=f"M{x} {y}h{width}", stroke="#ddd8cc", fill="none")
        yield tag("text", f"{value:g}", x=x - 6, y=y + 4, text_anchor="end")
    for step in range(0, int(last) + 1, 100):
        x, _ = place(step, low)
        yield tag("text", str(step), x=x, y=down + HEIGHT - 6, text_anchor="middle")
    for _, colour, points in lines:
        path = " ".join(f"{x},{y}" for x, y in (place(*point) for point in points))
        yield tag("polyline", points=path, stroke=colour, stroke_width="1.4", fill="none")


def legend(names: dict[str, str], down: float) -> Iterator[Markup]:
    """What the colours are, four in a row."""
    for number, (name, colour) in enumerate(names.items()):
        x, y = LEFT + number % 4 * 240, down + 20 + number // 4 * 20
        yield tag("path", d=f"M{x} {y - 4}h18", stroke=colour, stroke_width="3")
        yield tag("text", name, x=x + 24, y=y)


def picture(found: dict[str, dict[str, dict[str, list[float]]]]) -> Markup:
    """Both panels of every model."""
    others = sorted({name for one in found.values() for name in one["losses"]} - {BASE, OTHER_TEXT})
    colours = dict(zip(others, cycle(COLOURS), strict=False))
    parts: list[Markup] = []
    for row, (model, one) in enumerate(found.items()):
        curves = {name: running(losses) for name, losses in one["losses"].items()}
        base = curves[BASE]
        off: list[Line] = [
            (name, colours[name], [(x, 100 * (y / z - 1)) for (x, y), (_, z) in pairs])
            for name in others
            if name in curves
            for pairs in [list(zip(curves[name], base, strict=True))]
        ]
        down = row * HEIGHT
        parts += panel(f"{model}: loss in {BASE}", [(BASE, "#201d19", base)], 0, down)
        parts += panel(f"{model}: off from {BASE}, per cent", off, WIDTH, down)
    height = len(found) * HEIGHT
    parts += legend(colours, height)
    return tag(
        "svg",
        tag("rect", width="100%", height="100%", fill="#fbfaf6"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {2 * WIDTH} {height + LEGEND}",
        font_family="system-ui, sans-serif",
        font_size="12",
    )


if __name__ == "__main__":
    everything = json.loads(Path(sys.argv[1]).read_text())
    models = {name: one for name, one in everything.items() if isinstance(one, dict)}
    Path(sys.argv[2]).write_text(f"{picture(models)}\n")
