"""Numbers as people say them, and tables."""

from collections.abc import Sequence


def size(count: float) -> str:
    """Bytes."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{count / 1e6:,.1f} MB"


def duration(hours: float) -> str:
    """Days, hours, minutes or seconds, whichever reads well."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    if hours >= 1:
        return f"{hours:,.2f} hours"
    return f"{hours * 60:,.1f} minutes" if hours * 60 >= 1 else f"{hours * 3600:,.1f} seconds"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they must be, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
