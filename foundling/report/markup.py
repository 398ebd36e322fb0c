"""HTML in small pieces: text is escaped unless it is already Markup.

Everything a model has written ends up on this page, so escaping is the default and trust has to be
spelled out. Rejected: a template engine (a dependency for a handful of tags).
"""

import html
from collections.abc import Iterable, Sequence


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
