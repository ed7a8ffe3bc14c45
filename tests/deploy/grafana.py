"""Grafana's boards and their queries."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "grafana"
BOARDS = sorted(FOLDER.glob("boards/*.json"))


def read_board(file: Path) -> dict[str, Any]:
    tree = json.loads(file.read_text(encoding="utf-8"))
    assert isinstance(tree, dict)
    return tree


def targets(kind: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield each query of panels to a kind of data source: a unique name, the panel, the target."""
    for file in BOARDS:
        for panel in read_board(file)["panels"]:
            for target in panel.get("targets", ()):
                if target["datasource"]["type"] == kind:
                    name = f"{file.stem}: {panel['title']} {target['refId']}"
                    yield name, panel, target


def interpolated(
    sql: str, from_s: int, to_s: int, *, tenant: str = "", model: str = "", step_s: int = 60
) -> str:
    """Return SQL with a board's variables replaced as by Grafana and its plugin. Raise
    AssertionError for variables that they would leave as they are."""
    values = {
        "${__from:date:seconds}": str(from_s),
        "${__to:date:seconds}": str(to_s),
        "$__interval_s": str(step_s),
        "${tenant:sqlstring}": _quoted(tenant),
        "${model:sqlstring}": _quoted(model),
        "${slo_ttft_ms}": "1000",
        "${slo_tpot_ms}": "100",
        "${slowest_by:sqlstring}": "'total'",
    }
    for place, value in values.items():
        sql = sql.replace(place, value)
    assert "$" not in sql, sql
    assert not re.search(r"\{\w+:", sql), sql
    return sql


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
