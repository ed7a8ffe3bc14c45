"""``analytics``: time of each saved query over a million rows.

Asks every query of ``telemetry/queries`` like the operations page, over the last 15 minutes, day
and 30 days of the rows that ``fill`` makes, on the embedded engine. ``--path`` names a store made
earlier by ``fill``. The goal is 300 ms each.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from benchmarks.telemetry.fill import fill
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.control import TelemetryQuery
from millrace.telemetry.http.answers import SavedQuery, SavedQueryAnswers, load_queries
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.store import Store

_GOAL_MS = 300.0
_RANGES_S = {"15 min": 900, "1 day": 86_400, "30 days": 30 * 86_400}
_STEPS_S = {900: 60, 86_400: 900, 30 * 86_400: 21_600}


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Timing of a query over a range, in ms, with the bytes of its answer.

    ``cpu_ms`` is the time of all threads in the cheapest run, which other load disturbs least.
    """

    query: str
    span: str
    p50_ms: float
    max_ms: float
    cpu_ms: float
    answer_bytes: int


def parameters(query: SavedQuery, span_s: int, request_id: str) -> dict[str, str | int | float]:
    """Return the parameters of a query; optional ones without effect here keep their defaults."""
    known: dict[str, str | int | float] = {
        "from_s": -span_s,
        "step_s": _STEPS_S[span_s],
        "id": request_id,
    }
    wanted = {"from_s", "step_s", *query.parameters.keys() - query.defaults.keys()}
    return {name: known[name] for name in query.parameters if name in wanted and name in known}


async def time_query(
    answers: SavedQueryAnswers, query: SavedQuery, span: str, request_id: str, runs: int
) -> Timing:
    """Ask once to warm up, then ``runs`` times. Raises RuntimeError for a query that fails."""
    params = parameters(query, _RANGES_S[span], request_id)
    took_ms = []
    cpu_ms = []
    num_bytes = 0
    for _ in range(runs + 1):
        started_s, cpu_s = time.perf_counter(), time.process_time()
        answer = await answers.answer(TelemetryQuery(name=query.name, params=params))
        took_ms.append((time.perf_counter() - started_s) * 1000)
        cpu_ms.append((time.process_time() - cpu_s) * 1000)
        if answer.error:
            raise RuntimeError(f"{query.name} over {span}: {answer.error}")
        num_bytes = len(answer.rows_json)
    return Timing(
        query=query.name,
        span=span,
        p50_ms=statistics.median(took_ms[1:]),
        max_ms=max(took_ms[1:]),
        cpu_ms=min(cpu_ms[1:]),
        answer_bytes=num_bytes,
    )


async def measure(store: Store, runs: int, only: Sequence[str]) -> list[Timing]:
    """Time all saved queries, or the named ones, over all ranges that they support."""
    queries = load_queries()
    answers = SavedQueryAnswers(store.reader)
    ((request_id,),) = await store.rows("SELECT request_id FROM requests LIMIT 1 OFFSET 1000")
    asked = [
        (queries[name], span)
        for name in only or sorted(queries)
        for span in (_RANGES_S if "from_s" in queries[name].parameters else ("15 min",))
    ]
    return [await time_query(answers, *each, str(request_id), runs) for each in asked]


def render(timings: list[Timing]) -> str:
    """Format a table, and the queries above the goal."""
    lines = [f"{'query':<22}{'range':<10}{'p50 ms':>9}{'max ms':>9}{'cpu ms':>9}{'answer':>12}"]
    for each in timings:
        mark = "  over the goal" if each.p50_ms > _GOAL_MS else ""
        lines.append(
            f"{each.query:<22}{each.span:<10}{each.p50_ms:>9.1f}{each.max_ms:>9.1f}"
            f"{each.cpu_ms:>9.1f}{each.answer_bytes:>10,} B{mark}"
        )
    over = sum(each.p50_ms > _GOAL_MS for each in timings)
    lines.append(f"{len(timings) - over} of {len(timings)} within {_GOAL_MS:.0f} ms (p50)")
    return "\n".join(lines)


def run(
    path: Path | None = None,
    queries: Sequence[str] = (),
    rows: int = 1_000_000,
    runs: int = 5,
    smoke: bool = False,
) -> None:
    """Time ``queries`` by name, or all; ``path`` has a filled store."""

    async def measured(folder: Path) -> None:
        store = await Store.open(ClickHouseConfig(path=str(folder)))
        try:
            if path is not None:
                await migrate(store)
                await Rollups(store, SystemClock(), interval_s=1.0).reconcile()
            elif smoke:
                await fill(store, 5_000, days=1.0, sample_s=60)
            else:
                await fill(store, rows)
            ((count,),) = await store.rows("SELECT count() FROM requests FINAL")
            print(f"{count:,} requests")
            print(render(await measure(store, 1 if smoke else runs, queries)))
        finally:
            await store.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measured(path or Path(folder)))
