"""Row filters: `score>=3`, `language=en`, `source!=x`, `title~regex`.

One meaning, two ways to get it: `holds` asks a value, `mask` asks a whole Arrow column. The
columnar way is taken only for types where Arrow's comparison is Python's; everything else goes
value by value, so that Parquet and JSONL of the same rows keep the same rows. `!=` is exactly the
opposite of `=`: a row without a value passes it, and fails every other filter.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundling.config.errors import ConfigError

_FORM = re.compile(r"([^<>=!~]+?)\s*(>=|<=|!=|==|=|>|<|~)\s*(.*)", re.DOTALL)
_ORDER: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_ARROW = {"=": "equal", "!=": "not_equal"} | {
    ">=": "greater_equal",
    "<=": "less_equal",
    ">": "greater",
    "<": "less",
}
_EXACT = 1 << 53
"""Whole numbers up to here are the same as floats."""


@dataclass(frozen=True)
class Filter:
    """One condition on one column."""

    column: str
    """A name, or names joined by dots for a value inside a value."""
    sign: str
    value: str

    def holds(self, value: object) -> bool:
        """Whether a row with this value is kept."""
        if self.sign == "!=":
            return not _equal(value, self.value)
        if self.sign == "=":
            return _equal(value, self.value)
        if value is None or isinstance(value, list | dict | tuple | bytes):
            return False
        if self.sign == "~":
            return re.search(self.value, _spelt(value)) is not None
        wanted = _spells(self.value)
        if wanted is None:
            return _ORDER[self.sign](_spelt(value), self.value)
        own = _number(value)
        return own is not None and _ORDER[self.sign](own, wanted)

    def accepts(self, row: Mapping[str, Any]) -> bool:
        """Whether a row is kept."""
        return self.holds(lookup(row, self.column))

    def mask(self, column: Any, values: Callable[[], Sequence[object]]) -> NDArray[np.bool_]:
        """Which rows of an Arrow array are kept; `values` gives them to Python when it must."""
        import pyarrow.compute as pc

        scalar, cast = self._columnar(column.type)
        if scalar is None:
            return np.fromiter((self.holds(value) for value in values()), np.bool_, len(column))
        if cast is not None:
            column = column.cast(cast)
        kept = getattr(pc, _ARROW[self.sign])(column, scalar).fill_null(self.sign == "!=")
        result: NDArray[np.bool_] = kept.to_numpy(zero_copy_only=False)
        return result

    def _columnar(self, kind: Any) -> tuple[Any, Any]:
        """What to compare a column of this type with, and what to cast it to first."""
        import pyarrow as pa

        number = _spells(self.value)
        if self.sign not in _ARROW or pa.types.is_nested(kind):
            return None, None
        # A text column against a number is compared as numbers, text by text.
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if is_text and number is None:
            return pa.scalar(self.value, kind), None
        if number is None or not abs(number) <= _EXACT:
            return None, None
        if pa.types.is_floating(kind):
            return pa.scalar(float(number), pa.float64()), pa.float64()
        signed = pa.types.is_signed_integer(kind)
        if not isinstance(number, int):
            return None, None
        if signed or (pa.types.is_integer(kind) and number >= 0):
            wide = pa.int64() if signed else pa.uint64()
            return pa.scalar(number, wide), wide
        return None, None


def parse_filters(texts: Sequence[str]) -> tuple[Filter, ...]:
    """Filters as the user writes them."""
    return tuple(map(_parse, texts))


def _parse(text: str) -> Filter:
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"the filter {text!r} is not understood; write COLUMN, one of = != > >= < <= ~,"
            " and a value, such as score>=3."
        )
    column, sign, value = match.groups()
    if not value and sign not in ("=", "==", "!="):
        raise ConfigError(f"the filter {text!r} compares with nothing; write a value, as score>=3.")
    if sign == "~":
        try:
            re.compile(value)
        except re.error as error:
            raise ConfigError(f"the filter {text!r} has no valid pattern ({error}).") from None
    return Filter(column, "=" if sign == "==" else sign, value)


def lookup(row: Mapping[str, Any], column: str) -> Any:
    """The value under a name, or under names joined by dots; None where there is none."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _equal(value: object, wanted: str) -> bool:
    if isinstance(value, bool):
        return _spelt(value) == wanted.lower()
    if isinstance(value, int | float | Decimal):
        return value == _number(wanted)
    if not isinstance(value, str) or value == wanted:
        return isinstance(value, str)
    # A CSV spells what JSON holds: 3 is 3.0 in both.
    number = _spells(wanted)
    return number is not None and _spells(value) == number


def _spelt(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _number(value: object) -> int | float | Decimal | None:
    """A number, or what a text spells."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float | Decimal):
        return value
    return _spells(value) if isinstance(value, str) else None


def _spells(text: str) -> int | float | None:
    """The number that a text spells."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None
