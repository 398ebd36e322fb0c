"""HTML in small pieces: text is escaped unless it is already Markup.

Everything a model has written ends up on this page, so escaping is the default and trust has to be
spelled out. Rejected: a template engine (a dependency for a handful of tags).
"""

import html
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def esc(value: object) -> Markup:
    """Any value as HTML text; Markup passes as it is."""
    return value if isinstance(value, Markup) else Markup(html.escape(str(value)))


def tag(name: str, *children: object, **attributes: object) -> Markup:
    """An element; `class_` and `data_x` become class and data-x, None leaves an attribute out."""
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(parts: Iterable[object]) -> Markup:
    """Pieces one after the other, each escaped unless it is Markup."""
    return Markup("".join(esc(part) for part in parts))


def table(
    caption: str,
    head: Sequence[object],
    rows: Iterable[Sequence[object]],
    class_: str = "",
    total: Sequence[object] = (),
) -> Markup:
    """A table whose first column names the row; `total` is a last row that sums the others up."""
    body = [_row(row) for row in rows]
    if total:
        body.append(_row(total, "total"))
    return tag(
        "div",
        tag(
            "table",
            tag("caption", caption),
            tag("thead", tag("tr", *(tag("th", cell, scope="col") for cell in head))),
            tag("tbody", *body),
            class_=class_ or None,
        ),
        class_="scroll",
        # A region that scrolls must be reachable by keyboard.
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def _row(cells: Sequence[object], class_: str | None = None) -> Markup:
    name = tag("th", cells[0], scope="row")
    return tag("tr", name, *(tag("td", cell) for cell in cells[1:]), class_=class_)


# Numbers as a person reads them: few digits, units, round ticks.

Format = Callable[[float], str]


def compact(value: float) -> str:
    """1234567 as 1.23M."""
    for limit, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit * 0.9995:
            return f"{value / limit:.3g}{suffix}"
    return f"{value:.4g}"


def plain(value: float) -> str:
    """Whole numbers with separators, others with four digits."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def three_digits(value: float) -> str:
    """1234.5 as 1.23e+03."""
    return f"{value:.3g}"


def scientific(value: float) -> str:
    """Learning rates: 0.003 as 3e-3."""
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def percent(share: float) -> str:
    """0.9834 as 98.3%."""
    return f"{100 * share:.1f}%"


def fixed(digits: int) -> Format:
    """A format with so many decimals."""
    return lambda value: f"{value:.{digits}f}"


def in_bytes(value: float) -> str:
    """1536000 as 1.54 MB."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= limit:
            return f"{value / limit:.3g} {unit}"
    return f"{value:.0f} B"


def duration(seconds: float) -> str:
    """4000 as 1 h 07 min."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def date(moment: float) -> str:
    """A time of day, to the minute, in the time zone of the machine that writes the report."""
    return time.strftime("%d %B %Y, %H:%M", time.localtime(moment)).lstrip("0")


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover [low, high], at most `wanted` + 1 of them inside it."""
    if high <= low:
        return [low]
    rough = (high - low) / wanted
    if rough < sys.float_info.min:  # so near to each other that no round number is between
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two positive ones, about evenly far apart on a log scale."""
    decades = math.log10(high / low)
    factors: tuple[float, ...] = (1, 2, 5)
    if decades < 1.3:
        factors = (1, 1.5, 2, 3, 5, 7)
    elif decades > 3:
        factors = (1,)
    every = math.ceil(decades / 8)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [f * 10.0**e for e in exponents if e % every == 0 for f in factors]
    return [value for value in found if low * 0.999 <= value <= high * 1.001]


# How the page looks and what the pointer does: one style sheet, one small script.
#
# Python strings, because the page must be one file and the package ships no data files for it.

CSS = """
:root {
  color-scheme: light dark;
  --paper: #fbfaf6; --card: #ffffff; --ink: #201d19; --soft: #6b655c; --line: #e4dfd5;
  --grid: #eeeae2; --a: #1f6f78; --b: #b4552d; --level: #9a7b1c; --good: #2f7d4f; --bad: #b3372f;
  --lightness: 38%; --wash: #f3f0e8;
  --shadow: 0 1px 2px rgb(60 50 30 / .06), 0 6px 20px rgb(60 50 30 / .05);
  --serif: "Iowan Old Style", "Palatino Linotype", Palatino, "Book Antiqua", Georgia, serif;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --mono: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #15171a; --card: #1c1f23; --ink: #e9e6df; --soft: #a09a8f; --line: #30343a;
    --grid: #282c31; --a: #62bcc5; --b: #e5916b; --level: #d9b64c; --good: #74c795;
    --bad: #ef8a80; --lightness: 66%; --wash: #22262b; --shadow: none;
  }
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 var(--sans); font-variant-numeric: tabular-nums;
}
main, header.top, footer { max-width: 1080px; margin: 0 auto; padding: 0 24px; }
header.top { padding-top: 56px; }
.mark { font: italic 17px var(--serif); color: var(--soft); margin: 0; }
h1, h2, h3 { font-family: var(--serif); font-weight: 600; line-height: 1.2; text-wrap: balance; }
h1 { font-size: clamp(34px, 6vw, 52px); margin: 6px 0 8px; letter-spacing: -.01em;
  overflow-wrap: anywhere; }
h2 { font-size: 30px; margin: 72px 0 4px; overflow-wrap: anywhere; }
h3 { font-size: 21px; margin: 44px 0 10px; }
h4 { font: 600 14px var(--sans); margin: 0; }
p { max-width: 68ch; margin: 0 0 12px; }
p.lead, p.note { color: var(--soft); }
p.lead { font: 19px/1.5 var(--serif); }
p.note { font-size: 14px; }
code { font: .88em var(--mono); }
section.run { border-top: 1px solid var(--line); margin-top: 72px; }
section.run > h2 { margin-top: 40px; }
.pill { display: inline-block; font: 600 12px/1 var(--sans); padding: 5px 9px; border-radius: 99px;
  background: var(--wash); color: var(--soft); vertical-align: middle; }
.pill.finished { color: var(--good); } .pill.failed { color: var(--bad); }
.pill.running { color: var(--a); }

.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 14px;
  margin: 30px 0 0; padding: 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 12px;
  padding: 16px 18px; box-shadow: var(--shadow); }
.tile dt { font-size: 13px; color: var(--soft); }
.tile dd { margin: 0; }
.tile .value { font: 600 30px/1.25 var(--serif); }
.tile .more { font-size: 13px; color: var(--soft); }

.lineage { display: flex; flex-wrap: wrap; gap: 12px 0; list-style: none; margin: 16px 0 0;
  padding: 0; align-items: stretch; }
.lineage li { display: flex; align-items: center; }
.lineage li + li::before { content: "\\2192"; color: var(--soft); padding: 0 14px;
  font-size: 20px; }
.lineage a, .lineage .gone { display: block; background: var(--card); border: 1px solid var(--line);
  border-radius: 12px; padding: 12px 18px; color: inherit; text-decoration: none;
  min-width: 180px; }
.lineage a:hover, .lineage a:focus-visible { border-color: var(--a); }
.lineage .gone { border-style: dashed; color: var(--soft); }
.lineage b { display: block; font: 600 18px var(--serif); overflow-wrap: anywhere; }
.lineage span { font-size: 13px; color: var(--soft); }

.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
  gap: 16px; margin-top: 16px; }
figure.chart { position: relative; margin: 0; background: var(--card); border-radius: 12px;
  border: 1px solid var(--line); padding: 16px 16px 10px; box-shadow: var(--shadow); }
figure.wide { margin-top: 18px; }
figcaption { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 4px 18px;
  margin-bottom: 8px; }
.plot { overflow-x: auto; }
.plot svg { display: block; width: 100%; height: auto; touch-action: pan-y; }
.wide .plot svg { min-width: 600px; }
.empty { color: var(--soft); font-size: 14px; margin: 24px 0; }
svg text { font: 12px var(--sans); fill: var(--soft); }
svg text.label { font-size: 11.5px; font-style: italic; paint-order: stroke;
  stroke: var(--card); stroke-width: 3px; }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--line); }
svg .level { stroke: var(--level); stroke-width: 1.6; stroke-dasharray: 6 4; }
svg .line { fill: none; stroke: var(--c); stroke-width: 1.8; stroke-linejoin: round;
  stroke-linecap: round; }
svg .band { opacity: .2; fill: var(--c); }
svg .marks .line { stroke-width: 1.2; opacity: .55; }
svg .boundary { stroke: var(--soft); stroke-dasharray: 2 4; }
svg .error { stroke: var(--c); }
svg .dot { fill: var(--c); stroke: var(--card); stroke-width: 1.2; }
svg .cursor line { stroke: var(--soft); stroke-dasharray: 2 3; }
svg .cursor circle { fill: var(--card); stroke: var(--ink); stroke-width: 1.6; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0; padding: 0;
  font-size: 13px; color: var(--soft); }
.key { display: inline-block; width: 18px; height: 0; border-top: 3px solid var(--c);
  margin: 0 7px 4px 0; }
.key.level { border-top-style: dashed; }
.tip { position: absolute; pointer-events: none; background: var(--ink); color: var(--paper);
  font-size: 12px; line-height: 1.45; padding: 5px 9px; border-radius: 7px; white-space: nowrap;
  z-index: 2; }
.tip[hidden] { display: none; }

.scroll { overflow-x: auto; margin: 8px 0 14px; }
table { border-collapse: collapse; font-size: 14.5px; min-width: 100%; }
caption { text-align: left; color: var(--soft); font-size: 13px; padding-bottom: 6px; }
th, td { text-align: right; padding: 8px 14px; border-bottom: 1px solid var(--line);
  vertical-align: baseline; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { font-size: 13px; font-weight: 600; color: var(--soft); white-space: nowrap; }
tbody th { font-weight: 500; }
table.text td { text-align: left; vertical-align: top; min-width: 220px; }
table.text th { vertical-align: top; }
table.text thead th { text-align: left; white-space: normal; }
table.samples td { font: 15px/1.45 var(--serif); overflow-wrap: anywhere; }
table.samples th[scope=col] { font: italic 15px var(--serif); }
td .was { color: var(--soft); }
.meter { display: inline-block; position: relative; width: 130px; height: 8px; border-radius: 4px;
  background: var(--wash); vertical-align: middle; overflow: hidden; }
.meter i { position: absolute; inset: 0 auto 0 0; background: var(--a); border-radius: 4px; }
.meter i.low { background: var(--level); }
.good { color: var(--good); } .bad { color: var(--bad); }
tr.total th, tr.total td { font-weight: 600; border-top: 2px solid var(--line); }
details th, details td { padding-top: 5px; padding-bottom: 5px; font-size: 14px; }
details { margin: 14px 0; } summary { cursor: pointer; color: var(--a); font-size: 15px; }
details[open] > summary { margin-bottom: 8px; }
:focus-visible { outline: 2px solid var(--a); outline-offset: 2px; border-radius: 4px; }
footer { margin-top: 88px; padding-top: 18px; padding-bottom: 56px; color: var(--soft);
  font-size: 14px; border-top: 1px solid var(--line); }
@media (max-width: 600px) {
  main, header.top, footer { padding-left: 16px; padding-right: 16px; }
  header.top { padding-top: 32px; }
  .meter { width: 64px; } tbody th { min-width: 130px; }
  .lineage { flex-direction: column; }
  .lineage li { flex-direction: column; align-items: stretch; }
  .lineage li + li::before { content: "\\2193"; text-align: center; padding: 2px 0 8px; }
}
@media print { .tip { display: none; } section.run { break-before: page; } }
"""

JS = """
for (const figure of document.querySelectorAll("figure.chart")) {
  const svg = figure.querySelector("svg"), data = figure.querySelector("script");
  if (!svg || !data) continue;
  const curves = JSON.parse(data.textContent), cursor = svg.querySelector(".cursor");
  const tip = figure.appendChild(document.createElement("div"));
  tip.className = "tip"; tip.hidden = true;
  const box = svg.viewBox.baseVal, shape = (name, values) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in values) made.setAttribute(key, values[key]);
    cursor.append(made);
  };
  const nearest = (points, x) => points.reduce(
    (best, p) => Math.abs(p[0] - x) < Math.abs(best[0] - x) ? p : best);
  const leave = () => { tip.hidden = true; cursor.replaceChildren(); };
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("pointermove", event => {
    const place = svg.getBoundingClientRect(), outer = figure.getBoundingClientRect();
    const x = (event.clientX - place.left) / place.width * box.width;
    const at = nearest(curves.flatMap(curve => curve.points), x);
    const here = ({points}) => points[0][0] <= at[0] + 1 && at[0] - 1 <= points.at(-1)[0];
    cursor.replaceChildren();
    shape("line", {x1: at[0], x2: at[0], y1: 8, y2: box.height - 40});
    const found = curves.filter(here).map(curve => [curve.label, nearest(curve.points, at[0])]);
    for (const [, p] of found) shape("circle", {cx: p[0], cy: p[1], r: 4});
    tip.textContent = at[2] + " tokens";
    for (const [label, p] of found) {
      tip.append(document.createElement("br"), label + " " + p[3]);
    }
    tip.hidden = false;
    const left = place.left - outer.left + at[0] / box.width * place.width;
    const flip = left + tip.offsetWidth + 24 > outer.width;
    tip.style.left = (flip ? left - tip.offsetWidth - 12 : left + 12) + "px";
    tip.style.top = (event.clientY - outer.top - 12) + "px";
  });
}
"""
