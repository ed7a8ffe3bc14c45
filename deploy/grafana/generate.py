"""Generator of Grafana's boards from the saved queries: ``python deploy/grafana/generate.py``.

With ``--check`` it writes nothing and names the boards that are not up to date.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import boards
from panels import CLICKHOUSE, laid_out, saved

FOLDER = Path(__file__).parent / "boards"
_BOARDS = {
    "latency": ("Latency", boards.latency),
    "capacity": ("Capacity", boards.capacity),
    "cost": ("Cost and usage", boards.cost),
    "reliability": ("Reliability", boards.reliability),
}


def board(uid: str) -> dict[str, Any]:
    """Return a board in Grafana's JSON format."""
    title, make = _BOARDS[uid]
    panels = laid_out(make())
    sql = json.dumps(panels)
    return {
        "uid": f"millrace-{uid}",
        "title": f"Millrace: {title}",
        "tags": ["millrace"],
        "schemaVersion": 41,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timepicker": {},
        "graphTooltip": 1,
        "links": [
            {
                "title": "Millrace",
                "type": "dashboards",
                "tags": ["millrace"],
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "annotations": {"list": []},
        "templating": {"list": [one for one in _variables() if f"${{{one['name']}" in sql]},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    return [
        _filter("tenant", "Tenant"),
        _filter("model", "Model"),
        _number("slo_ttft_ms", "Promised: first token (ms)", "1000"),
        _number("slo_tpot_ms", "Promised: each further token (ms)", "100"),
        {
            "type": "custom",
            "name": "slowest_by",
            "label": "Slowest by",
            "query": "total,ttft,queue,tpot",
            "current": {"text": "total", "value": "total"},
            "options": [],
        },
    ]


def _filter(kind: str, label: str) -> dict[str, Any]:
    """Return a variable that selects one name or all; all is the empty text, which filters
    nothing."""
    names = f"SELECT name FROM\n(\n{saved('tenants_models')}\n)\nWHERE kind = '{kind}'"
    return {
        "type": "query",
        "name": kind,
        "label": label,
        "datasource": CLICKHOUSE,
        "definition": names,
        "query": {"editorType": "sql", "rawSql": names},
        "refresh": 2,
        "sort": 1,
        "multi": False,
        "includeAll": True,
        "allValue": "''",
        "current": {"text": "All", "value": "$__all"},
        "options": [],
    }


def _number(name: str, label: str, value: str) -> dict[str, Any]:
    return {
        "type": "textbox",
        "name": name,
        "label": label,
        "query": value,
        "current": {"text": value, "value": value},
        "options": [],
    }


def main() -> int:
    """Generate or check the boards; return 0, or 1 if a board is not up to date."""
    parser = argparse.ArgumentParser(prog="deploy/grafana/generate.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, say what is stale")
    is_check = parser.parse_args().check
    stale = []
    for uid in _BOARDS:
        file = FOLDER / f"{uid}.json"
        text = json.dumps(board(uid), indent=1, ensure_ascii=False) + "\n"
        if is_check:
            if not file.exists() or file.read_text(encoding="utf-8") != text:
                stale.append(file.name)
        else:
            file.write_text(text, encoding="utf-8")
    if stale:
        sys.stderr.write(f"{', '.join(stale)}: run python deploy/grafana/generate.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
