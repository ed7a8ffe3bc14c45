"""Tables of ``millrace top``: pure functions from a snapshot to what rich draws."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from millrace.runtime.text_table import one_line, plain_text
from millrace.schemas.control import QueueStatus, WorkerStatus

_BAR_CELLS = 8
_NOTHING = "-"
_MAX_NAME = 28
_PLAIN_WIDTH = 10_000


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Displayed columns of the row of the saved query ``totals``."""

    requests: int = 0
    done: int = 0
    cancelled: int = 0
    failed: int = 0
    expired: int = 0
    shed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    ttft_p50_ms: float | None = None
    ttft_p95_ms: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p50_ms: float | None = None
    tpot_p95_ms: float | None = None
    tpot_p99_ms: float | None = None


class TenantRow(msgspec.Struct, frozen=True, kw_only=True):
    """Row of the saved query ``top_tenants``."""

    tenant: str
    requests: int
    other: int
    prompt_tokens: int
    completion_tokens: int
    ttft_p95_ms: float | None = None


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """Columns of a row of the saved query ``workers_now`` that heartbeats do not contain."""

    worker: str
    busy_share: float = 0.0


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """State of a system at a moment. ``totals`` and ``tenants`` cover the last ``window_s``;
    ``problems`` explain missing data."""

    at_s: float
    place: str
    window_s: int
    totals: Totals | None = None
    tenants: tuple[TenantRow, ...] = ()
    queues: tuple[QueueStatus, ...] = ()
    workers: tuple[WorkerStatus, ...] = ()
    samples: tuple[WorkerRow, ...] = ()
    problems: tuple[str, ...] = ()


def view(snapshot: Snapshot) -> list[RenderableType]:
    """Render the whole snapshot, the most important parts first."""
    now = datetime.fromtimestamp(snapshot.at_s, UTC)
    title = _line(f"millrace top  {snapshot.place}  {now:%Y-%m-%d %H:%M:%S} UTC", "reverse")
    title.justify = "left"  # as wide as the screen
    shown: list[RenderableType] = [title]
    shown += [_line(problem, "red") for problem in snapshot.problems]
    if snapshot.totals is not None:
        shown += _totals(snapshot.totals, snapshot.window_s)
    shown += _section(
        ("MODEL", "QUEUED", "BOUND", "OLDEST", "WORKERS", "WANTED", "TTFT NEXT"),
        [_queue(queue) for queue in sorted(snapshot.queues, key=lambda queue: queue.model)],
        "no scheduler was heard of",
    )
    shown += _workers(snapshot)
    if snapshot.totals is not None:
        shown += _section(
            ("TENANT", "REQ/S", "NOT DONE", "OUT TOK/S", "IN TOK/S", "TTFT P95"),
            [_tenant(row, snapshot.window_s) for row in snapshot.tenants],
            f"no request ended in the last {snapshot.window_s} s",
        )
    return shown


def as_text(shown: Sequence[RenderableType]) -> str:
    """Render as plain text, for output without a terminal."""
    return plain_text(*shown, width=_PLAIN_WIDTH)


def _totals(totals: Totals, window_s: int) -> list[RenderableType]:
    prompt = totals.prompt_tokens
    cached = f", {totals.cached_tokens / prompt:.0%} cached" if prompt else ""
    ends = [
        f"{name} {count / window_s:.2f}"
        for name, count in (
            ("cancelled", totals.cancelled),
            ("shed", totals.shed),
            ("failed", totals.failed),
            ("expired", totals.expired),
        )
        if count
    ]
    ttft = (totals.ttft_p50_ms, totals.ttft_p95_ms, totals.ttft_p99_ms)
    tpot = (totals.tpot_p50_ms, totals.tpot_p95_ms, totals.tpot_p99_ms)
    return [
        _line(
            f"requests  {totals.requests / window_s:.2f}/s over {window_s} s: "
            + ", ".join([f"done {totals.done / window_s:.2f}", *ends])
        ),
        _line(
            f"tokens    {_amount(totals.completion_tokens / window_s)}/s out, "
            f"{_amount(prompt / window_s)}/s in{cached}"
        ),
        _line(f"TTFT      {_percentiles(ttft)}"),
        _line(f"TPOT      {_percentiles(tpot)}"),
    ]


def _percentiles(values: tuple[float | None, ...]) -> str:
    names = ("p50", "p95", "p99")
    return "   ".join(f"{name} {_ms(value)}" for name, value in zip(names, values, strict=True))


def _queue(queue: QueueStatus) -> tuple[str, ...]:
    fastest = min(queue.ttft_ms.values(), default=None)
    return (
        queue.model,
        f"{queue.num_queued:,}",
        f"{queue.bound:,}",
        f"{queue.oldest_wait_s:.1f} s" if queue.num_queued else _NOTHING,
        str(queue.num_workers),
        str(queue.desired_workers) if queue.desired_workers else _NOTHING,
        _ms(fastest),
    )


def _workers(snapshot: Snapshot) -> list[RenderableType]:
    """Render workers; the devices column only if a worker has several, adapters only if one takes
    some."""
    names = ["WORKER", "MODEL", "BATCH", "", "WAITING", "KV", "", "BUSY", "", "STEP"]
    busy = {row.worker: row.busy_share for row in snapshot.samples}
    workers = sorted(snapshot.workers, key=lambda worker: worker.name)
    rows = [_worker(worker, busy.get(worker.worker_id)) for worker in workers]
    if any(worker.num_devices > 1 for worker in workers):
        names.append("DEVICES")
        rows = [(*row, str(one.num_devices)) for row, one in zip(rows, workers, strict=True)]
    if any(worker.max_adapters for worker in workers):
        names.append("ADAPTERS")
        rows = [(*row, _adapters(worker)) for row, worker in zip(rows, workers, strict=True)]
    return _section(names, rows, "no worker was heard of")


def _worker(worker: WorkerStatus, busy: float | None) -> tuple[str, ...]:
    num_used = worker.num_blocks - worker.num_free_blocks
    in_use = num_used / worker.num_blocks if worker.num_blocks else 0.0
    name = f"{worker.name} (draining)" if worker.draining else worker.name
    return (
        name,
        worker.model,
        f"{worker.num_running}/{worker.max_num_sequences}",
        _bar(worker.num_running / max(1, worker.max_num_sequences)),
        str(worker.num_waiting),
        f"{in_use:.0%}",
        _bar(in_use),
        _NOTHING if busy is None else f"{busy:.0%}",
        "" if busy is None else _bar(busy),
        _ms(worker.decode_step_ms or None),
    )


def _adapters(worker: WorkerStatus) -> str:
    return f"{len(worker.adapters)}/{worker.max_adapters}" if worker.max_adapters else _NOTHING


def _tenant(row: TenantRow, window_s: int) -> tuple[str, ...]:
    return (
        row.tenant,
        f"{row.requests / window_s:.2f}",
        str(row.other) if row.other else _NOTHING,
        _amount(row.completion_tokens / window_s),
        _amount(row.prompt_tokens / window_s),
        _ms(row.ttft_p95_ms),
    )


def _section(
    names: Sequence[str], rows: Sequence[tuple[str, ...]], if_empty: str
) -> list[RenderableType]:
    """Render a table: the first columns to the left, numbers to the right, bars beside them."""
    if not rows:
        return ["", _line(if_empty)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        is_left = name in {"", "MODEL", "WORKER", "TENANT"}
        table.add_column(name, justify="left" if is_left else "right", max_width=_MAX_NAME)
    for row in rows:
        table.add_row(*map(_line, row))
    return ["", table]


def _line(text: str, style: str = "") -> Text:
    return Text(one_line(text), style=style, no_wrap=True, overflow="ellipsis")


def _bar(share: float) -> str:
    num_full = round(min(1.0, max(0.0, share)) * _BAR_CELLS)
    return "█" * num_full + "░" * (_BAR_CELLS - num_full)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _ms(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return (
        f"{value / 1e3:.1f} s"
        if value >= 10_000
        else f"{value:,.0f} ms"
        if value >= 10
        else f"{value:.1f} ms"
    )
