"""JSON Schema of a report, checked in as ``docs/bench-report.schema.json``.

``python -m millrace.bench.report.schema`` prints it; a test fails when the file is stale.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

from millrace.bench.report.report import SCHEMA, LoadReport


def report_schema() -> dict[str, Any]:
    """Return the schema of the output of ``--json``."""
    schema = msgspec.json.schema(LoadReport)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"Report of millrace bench ({SCHEMA})",
        **schema,
    }


def to_text(schema: dict[str, Any]) -> str:
    """Format the schema as it is checked in."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(to_text(report_schema()))
