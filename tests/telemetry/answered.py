"""Rows of answers as the operations page reads them."""

from __future__ import annotations

import json
import re
from typing import Any

from millrace.schemas.control import TelemetryAnswer
from tests.support.repository import ROOT

_SCRIPT = ROOT / "gateway" / "web" / "ops" / "integers.js"


def integer_columns() -> frozenset[str]:
    """The columns that the page reads as whole numbers."""
    listed = re.search(r"new Set\(\[(.*?)\]\)", _SCRIPT.read_text(), re.DOTALL)
    assert listed is not None
    return frozenset(re.findall(r'"(\w+)"', listed[1]))


def rows_of(answer: TelemetryAnswer) -> list[dict[str, Any]]:
    """The rows, with whole numbers where the page has them."""
    columns = integer_columns()
    return [
        {
            name: int(value) if name in columns and isinstance(value, str) else value
            for name, value in row.items()
        }
        for row in json.loads(answer.rows_json)
    ]
