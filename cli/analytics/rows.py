"""Rows of a query as a table, as JSON objects or as CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import msgspec

from millrace.schemas.errors import MillraceError

_encode = msgspec.json.Encoder(decimal_format="number").encode
_MAX_PLAIN_DIGITS = 30
_INT64_MIN, _UINT64_MAX = -(2**63), 2**64 - 1


class Rows(msgspec.Struct, frozen=True):
    """Column names, rows of values, and the columns that hold numbers."""

    names: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    numeric: tuple[bool, ...]


def parse_rows(answer: bytes) -> Rows:
    """Parse ClickHouse's JSONCompact; numbers keep their digits."""
    try:
        parsed = json.loads(answer, parse_float=Decimal, parse_int=_integer)
        columns = [(str(column["name"]), str(column["type"])) for column in parsed["meta"]]
        data = parsed["data"]
    except (ValueError, KeyError, TypeError) as error:
        shown = answer[:200].decode(errors="replace")
        raise MillraceError(f"the store's answer is not JSONCompact: {shown!r}") from error
    rows = tuple(
        tuple(_unquoted(value, kind) for value, (_, kind) in zip(row, columns, strict=True))
        for row in data
    )
    return Rows(tuple(name for name, _ in columns), rows, tuple(_is_numeric(t) for _, t in columns))


def render(rows: Rows, form: str) -> str:
    """Render rows as table, json or csv, named by ``form``; the text ends with a line break."""
    if form == "json":
        return _json(rows)
    return _csv(rows) if form == "csv" else table(rows)


def _json(rows: Rows) -> str:
    lines = [_encode(dict(zip(rows.names, row, strict=True))).decode() for row in rows.rows]
    return "[\n  " + ",\n  ".join(lines) + "\n]\n" if lines else "[]\n"


def _csv(rows: Rows) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(rows.names)
    writer.writerows([_shown(value, null="") for value in row] for row in rows.rows)
    return out.getvalue()


def table(rows: Rows, totals: Sequence[Sequence[Any]] = ()) -> str:
    """Render columns with numbers aligned to the right, and ``totals`` below a separator line."""
    from millrace.runtime.text_table import text_table

    body = [[_shown(value, null="NULL") for value in row] for row in rows.rows]
    foot = [[_shown(value, null="") for value in row] for row in totals]
    shown = text_table(rows.names, body, rows.numeric, foot)
    return f"{shown}({len(body)} row{'' if len(body) == 1 else 's'})\n"


def _shown(value: Any, null: str) -> str:
    if value is None:
        return null
    if isinstance(value, str):
        return value
    if isinstance(value, Decimal) and abs(value.adjusted()) < _MAX_PLAIN_DIGITS:
        return format(value, "f")
    return str(value) if isinstance(value, Decimal) else _encode(value).decode()


def _integer(digits: str) -> int | str:
    """Parse an integer; keep it as text beyond 64 bits, since JSON readers would lose digits."""
    value = int(digits)
    return value if _INT64_MIN <= value <= _UINT64_MAX else digits


def _unquoted(value: Any, kind: str) -> Any:
    """Convert a 64-bit integer that older servers quote."""
    if isinstance(value, str) and _bare(kind) in {"Int64", "UInt64"}:
        return _integer(value)
    return value


def _is_numeric(kind: str) -> bool:
    return _bare(kind).startswith(("Int", "UInt", "Float", "Decimal")) and "Interval" not in kind


def _bare(kind: str) -> str:
    for wrapper in ("LowCardinality(", "Nullable("):
        kind = kind.removeprefix(wrapper)
    return kind.rstrip(")") if "(" not in kind else kind
