"""Panels of Grafana over saved queries and over Prometheus, in Grafana's JSON format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.telemetry.http.answers import load_queries, without_comments

QUERIES = load_queries()
CLICKHOUSE = {"type": "grafana-clickhouse-datasource", "uid": "clickhouse"}
PROMETHEUS = {"type": "prometheus", "uid": "prometheus"}

_COLUMNS = 24
_TABLE_ROWS = "200"
_PARAMETER = re.compile(r"\{(\w+):\s*\w+\}")

# Grafana's variables for a saved query's parameters.
PLACES = {
    "from_s": "${__from:date:seconds}",
    "to_s": "${__to:date:seconds}",
    "step_s": "$__interval_s",
    "tenant": "${tenant:sqlstring}",
    "model": "${model:sqlstring}",
    "ttft_ms": "${slo_ttft_ms}",
    "tpot_ms": "${slo_tpot_ms}",
    "by": "${slowest_by:sqlstring}",
    "rows": _TABLE_ROWS,
}


@dataclass(frozen=True)
class Panel:
    """JSON of a panel without its place, and its size on the grid."""

    body: dict[str, Any]
    width: int
    height: int


def saved(name: str) -> str:
    """Return a saved query with Grafana's variables for its parameters, without the comments."""
    return _PARAMETER.sub(lambda match: PLACES[match[1]], without_comments(QUERIES[name].sql))


def described(name: str) -> str:
    """Return a saved query's description from its comments."""
    lines = [line[2:].strip() for line in QUERIES[name].sql.splitlines() if line.startswith("--")]
    return " ".join(line for line in lines if not line.startswith("param "))


def series(
    title: str,
    query: str,
    columns: Mapping[str, str] | Sequence[str],
    *,
    unit: str = "short",
    by: Sequence[str] = (),
    width: int = 12,
    step: str = "10s",
    stack: bool = False,
    most: float | None = None,
    bars: bool = False,
) -> Panel:
    """Make a chart of a saved query's columns over time, with the columns ``by`` as labels; a
    mapping has SQL for each name."""
    named = columns if isinstance(columns, Mapping) else {name: name for name in columns}
    chosen = [f"CAST({label}, 'String') AS {label}" for label in by]
    chosen += [sql if sql == name else f"{sql} AS {name}" for name, sql in named.items()]
    inner = saved(query)
    sql = (
        "SELECT\n    t AS time,\n    "
        + ",\n    ".join(chosen)
        + f"\nFROM\n(\n{_indented(inner)}\n)\nORDER BY time"
    )
    return Panel(
        {
            **_head(title, "timeseries", described(query), CLICKHOUSE),
            "interval": step,
            "fieldConfig": _fields(unit, stack=stack, most=most, bars=bars, by=by),
            "options": _LEGEND,
            "targets": [_clickhouse(sql, is_series=True)],
        },
        width,
        8,
    )


def table(title: str, query: str, *, width: int = 24, height: int = 9) -> Panel:
    """Make a table of a saved query."""
    return Panel(
        {
            **_head(title, "table", described(query), CLICKHOUSE),
            "fieldConfig": {
                "defaults": {"custom": {"align": "auto", "filterable": True}},
                "overrides": _table_units(),
            },
            "options": {"cellHeight": "sm", "showHeader": True},
            "targets": [_clickhouse(saved(query), is_series=False)],
        },
        width,
        height,
    )


def stat(
    title: str, query: str, sql: str, *, unit: str = "short", width: int = 4, text: bool = False
) -> Panel:
    """Make a panel of one number, or a text, of a saved query with one row."""
    whole = f"SELECT {sql} AS value\nFROM\n(\n{_indented(saved(query))}\n)"
    return Panel(
        {
            **_head(title, "stat", described(query), CLICKHOUSE),
            "fieldConfig": {"defaults": {"unit": unit, "noValue": "-"}, "overrides": []},
            "options": {
                "graphMode": "none",
                "colorMode": "none",
                "reduceOptions": {
                    "calcs": ["lastNotNull"],
                    "fields": "/^value$/" if text else "",
                    "values": False,
                },
            },
            "targets": [_clickhouse(whole, is_series=False)],
        },
        width,
        4,
    )


def live(
    title: str,
    expressions: Mapping[str, str],
    *,
    description: str,
    unit: str = "short",
    width: int = 12,
    stack: bool = False,
    most: float | None = None,
) -> Panel:
    """Make a chart of Prometheus expressions by their legends."""
    targets = [
        {
            "datasource": PROMETHEUS,
            "expr": expression,
            "legendFormat": legend,
            "range": True,
            "refId": chr(ord("A") + i),
        }
        for i, (legend, expression) in enumerate(expressions.items())
    ]
    return Panel(
        {
            **_head(title, "timeseries", description, PROMETHEUS),
            "fieldConfig": _fields(unit, stack=stack, most=most, bars=False, by=()),
            "options": _LEGEND,
            "targets": targets,
        },
        width,
        8,
    )


def row(title: str) -> Panel:
    """Make a heading."""
    return Panel({"type": "row", "title": title, "collapsed": False, "panels": []}, _COLUMNS, 1)


def laid_out(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Place panels from left to right, line by line; ids follow their order."""
    placed: list[dict[str, Any]] = []
    x = y = height = 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > _COLUMNS:
            x, y, height = 0, y + height, 0
        place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
        placed.append({"id": number, **panel.body, "gridPos": place})
        x, height = x + panel.width, max(height, panel.height)
    return placed


_LEGEND = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
    "tooltip": {"mode": "multi", "sort": "desc"},
}


def _head(title: str, kind: str, description: str, source: dict[str, str]) -> dict[str, Any]:
    return {"type": kind, "title": title, "description": description, "datasource": source}


def _clickhouse(sql: str, *, is_series: bool) -> dict[str, Any]:
    return {
        "datasource": CLICKHOUSE,
        "editorType": "sql",
        "format": 0 if is_series else 1,
        "queryType": "timeseries" if is_series else "table",
        "rawSql": sql,
        "refId": "A",
    }


def _fields(
    unit: str, *, stack: bool, most: float | None, bars: bool, by: Sequence[str]
) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": unit,
        "min": 0,
        "custom": {
            "drawStyle": "bars" if bars else "line",
            "lineWidth": 1,
            "fillOpacity": 60 if bars else 25 if stack else 8,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if stack else "none"},
        },
    }
    if most is not None:
        defaults["max"] = most
    if by:
        names = " ".join(f"${{__field.labels.{label}}}" for label in by)
        defaults["displayName"] = f"${{__field.name}} {names}"
    return {"defaults": defaults, "overrides": []}


def _table_units() -> list[dict[str, Any]]:
    """Return the units of table columns, by patterns of column names."""
    units = {"/_ms$/": "ms", "/_us$/": "µs", "/_percent$/": "percent", "/_bytes$/": "bytes"}
    units |= {"/(_share|attainment)$/": "percentunit"}
    return [
        {
            "matcher": {"id": "byRegexp", "options": pattern},
            "properties": [{"id": "unit", "value": unit}, {"id": "decimals", "value": 1}],
        }
        for pattern, unit in units.items()
    ]


def _indented(sql: str) -> str:
    return "\n".join(f"    {line}" if line else line for line in sql.splitlines())
