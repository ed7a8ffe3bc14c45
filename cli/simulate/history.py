"""Traces of real requests: a time range of the analytics store."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from millrace.cli.analytics.rows import parse_rows
from millrace.cli.analytics.store import ask
from millrace.schemas.errors import ConfigError
from millrace.schemas.jobs import Tier
from millrace.simulation.traces.trace import TraceRequest

_TIME = re.compile(r"\d{4}-\d\d-\d\d(?:[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,6})?)?Z?)?")
_PAGE_ROWS = 10_000


def read_history(data: Path, since: str, until: str) -> list[TraceRequest]:
    """Return the answered requests received from ``since`` until ``until`` (UTC) as a trace.

    The store has no prompts, so the only known shared prefixes are those of a session's turns.
    Raises ConfigError for invalid times, and if there were no requests.
    """
    begin, end = _time("--since", since), _time("--until", until)
    rows: list[tuple[Any, ...]] = []
    while len(rows) % _PAGE_ROWS == 0:
        page = parse_rows(ask(_sql(begin, end, len(rows)), data)).rows
        rows.extend(page)
        if not page:
            break
    if not rows:
        raise ConfigError(f"the store has no answered requests from {since} until {until}")
    start_us = int(rows[0][0])
    return [_request(row, start_us) for row in rows]


def _sql(begin: str, end: str, offset: int) -> str:
    return (
        "SELECT toUnixTimestamp64Micro(received_at) AS at_us, tenant, tier, model_served, session, "  # noqa: S608 (both times are checked)
        "prompt_tokens, completion_tokens FROM requests FINAL "
        f"WHERE received_at >= toDateTime64('{begin}', 6, 'UTC') "
        f"AND received_at < toDateTime64('{end}', 6, 'UTC') "
        "AND prompt_tokens > 0 AND completion_tokens > 0 "
        f"ORDER BY at_us, request_id LIMIT {_PAGE_ROWS} OFFSET {offset}"
    )


def _request(row: tuple[Any, ...], start_us: int) -> TraceRequest:
    at_us, tenant, tier, model, session, prompt_tokens, completion_tokens = row
    return TraceRequest(
        at_s=(int(at_us) - start_us) / 1e6,
        tenant=str(tenant),
        tier=Tier(str(tier)),
        model=str(model),
        session=str(session),
        prompt_tokens=int(prompt_tokens),
        output_tokens=int(completion_tokens),
    )


def _time(name: str, text: str) -> str:
    """Return a time in ClickHouse's format."""
    if not _TIME.fullmatch(text):
        raise ConfigError(f"{name}: {text!r} is no time; write 2026-01-31 or 2026-01-31T18:30:00")
    plain = text.removesuffix("Z").replace("T", " ")
    if len(plain) == len("2026-01-31"):
        return f"{plain} 00:00:00"
    return plain if plain.count(":") == 2 else f"{plain}:00"
