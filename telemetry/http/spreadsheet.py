"""Rows as CSV (RFC 4180) that a spreadsheet can open without running what is in them."""

from __future__ import annotations

import csv
import io
import re
from typing import Any

import msgspec

# A cell that begins with one of these is a formula to a spreadsheet, and the names of users come
# from anybody.
_FORMULA = re.compile(r"[=+\-@\t\r]")
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?\Z")


def csv_of(lines: bytes) -> bytes:
    """CSV of ClickHouse's JSONCompactEachRowWithNames: the names of the columns, then the rows.

    What is not there (NULL) is an empty cell; arrays are JSON in theirs. Text that a spreadsheet
    would take for a formula has an apostrophe before it.
    """
    text = io.StringIO()
    writer = csv.writer(text)
    for line in lines.splitlines():
        writer.writerow([_cell(value) for value in msgspec.json.decode(line)])
    return text.getvalue().encode()


def harmless(text: str) -> str:
    """A cell's text, with an apostrophe before it if a spreadsheet would take it for a formula."""
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.match(text) else text


def _cell(value: Any) -> object:
    match value:
        case None:
            return ""
        case bool():
            return int(value)
        case str():
            return harmless(value)
        case int() | float():
            return value
        case _:
            return msgspec.json.encode(value).decode()
