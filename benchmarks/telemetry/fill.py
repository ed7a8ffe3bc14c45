"""``fill --rows 1000000 --path DIR``: a store of synthetic requests: 30 days of 50
tenants, 2,000 users and 5 models, with their deliveries, worker samples and usage by the minute.

Traffic rises and falls with the day, and a few tenants make most of it. One row in a hundred is
stored twice, as after a crash. The same seed makes the same rows, except for their times, which end
now.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from millrace.registry.pricing import PriceBook, cost, device_cost
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.records import RECORD_VERSION
from millrace.telemetry.rollups.prices import TABLE as PRICES
from millrace.telemetry.rollups.rollups import Rollups
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.store import PlainTable, Store
from millrace.telemetry.store.tables import DELIVERIES, REQUESTS, WORKER_SAMPLES, Table

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Columns = dict[str, list[Any]]

_BATCH_ROWS = 50_000
_DAY_S = 86_400
_NUM_TENANTS = 50
_NUM_USERS = 2_000
_SAMPLED_DAYS = 14.0
# Power of an H200 at rest, and additional power while it computes.
_IDLE_WATTS, _BUSY_WATTS = 120.0, 480.0
_WORKERS_EACH = 2
_STEP = Decimal(10) ** -12


class Model(msgspec.Struct, frozen=True):
    """Model: its share of the traffic, times in ms, and price."""

    name: str
    share: float
    ttft_ms: float
    tpot_ms: float
    prices: PriceBook


def _model(name: str, share: float, ttft_ms: float, tpot_ms: float, scale: int) -> Model:
    unit = Decimal(scale)
    prices = PriceBook(
        version="2026-11",
        input_per_million=unit / 10,
        cached_input_per_million=unit / 20,
        output_per_million=unit * 4 / 10,
        device_per_hour=unit / 2,
    )
    return Model(name, share, ttft_ms, tpot_ms, prices)


MODELS = (
    _model("tiny-1b", 0.35, 40.0, 4.0, 1),
    _model("small-4b", 0.30, 70.0, 8.0, 2),
    _model("medium-8b", 0.20, 120.0, 14.0, 4),
    _model("large-32b", 0.10, 300.0, 28.0, 12),
    _model("giant-70b", 0.05, 600.0, 45.0, 30),
)
_TIERS = ("enterprise", "pro", "free", "batch")
_SOURCES = ("http", "websocket", "nats")
_TOOLS = ("search", "get_weather", "run_sql", "send_mail")
_ERRORS = ("engine_failed", "worker_lost", "context_too_long", "invalid_request")


async def fill(
    store: Store, num_rows: int, *, days: float = 30.0, sample_s: int = 10, seed: int = 0
) -> None:
    """Migrate an empty store and fill it up to now; workers are sampled every ``sample_s``."""
    await migrate(store)
    end_us = time.time_ns() // 1000
    draw = np.random.default_rng(seed)
    await _fill_prices(store, end_us - int(days * _DAY_S * 1e6))
    done_us = _times(draw, num_rows, days, end_us)
    for first in range(0, num_rows, _BATCH_ROWS):
        times = done_us[first : first + _BATCH_ROWS]
        sequences = np.arange(first, first + len(times)) + 1
        requests = _requests(draw, times, sequences)
        deliveries = _deliveries(draw, requests)
        await _insert(store, REQUESTS, requests, f"{seed}:{first}")
        await _insert(store, DELIVERIES, deliveries, f"{seed}:{first}")
        replayed = draw.choice(len(times), len(times) // 100, replace=False)
        again = {name: [column[i] for i in replayed] for name, column in requests.items()}
        await _insert(store, REQUESTS, again, f"{seed}:{first}:again")
    await _fill_samples(store, draw, min(days, _SAMPLED_DAYS), sample_s, end_us)
    await Rollups(store, SystemClock(), interval_s=1.0).reconcile()


def _times(draw: np.random.Generator, num_rows: int, days: float, end_us: int) -> Ints:
    """Return the ends of requests in order: most at noon, fewest at midnight."""
    span_us = days * _DAY_S * 1e6
    drawn = draw.random(num_rows * 3) * span_us
    load = 0.55 - 0.45 * np.cos(2 * np.pi * ((end_us - drawn) / 1e6 % _DAY_S) / _DAY_S)
    kept = drawn[draw.random(len(drawn)) < load]
    ages = np.resize(kept, num_rows)
    return np.sort(end_us - ages.astype(np.int64))


def _requests(draw: np.random.Generator, done_us: Ints, sequences: Ints) -> Columns:
    size = len(done_us)
    user = np.minimum(draw.zipf(1.3, size) - 1, _NUM_USERS - 1)
    user = np.where(user == _NUM_USERS - 1, draw.integers(0, _NUM_USERS, size), user)
    tenant = user * 7 % _NUM_TENANTS
    tier = np.where(draw.random(size) < 0.05, 3, tenant % 3)
    source = draw.choice(3, size, p=(0.6, 0.3, 0.1))
    model = draw.choice(len(MODELS), size, p=[each.share for each in MODELS])
    fate = draw.random(size)
    status = np.select(
        [fate < 0.955, fate < 0.975, fate < 0.985, fate < 0.993],
        ["done", "cancelled", "shed", "failed"],
        "expired",
    )
    ran = ~np.isin(status, ("shed", "expired"))
    prompt = np.clip(draw.lognormal(6.0, 1.1, size), 4, 30_000).astype(np.int64)
    cached = np.where(draw.random(size) < 0.4, prompt * 3 // 4 // 16 * 16, 0) * ran
    completion = np.clip(draw.lognormal(5.0, 0.9, size), 2, 4_000).astype(np.int64) * ran
    ttft_of = np.array([each.ttft_ms for each in MODELS])[model]
    tpot_of = np.array([each.tpot_ms for each in MODELS])[model]
    queue_ms = draw.lognormal(1.5, 1.2, size)
    ttft_ms = queue_ms + ttft_of * draw.lognormal(0.0, 0.4, size) * (0.5 + (prompt - cached) / 800)
    tpot_ms = tpot_of * draw.lognormal(0.0, 0.25, size)
    total_ms = np.where(ran, ttft_ms + tpot_ms * np.maximum(completion - 1, 0), queue_ms)
    # Some 24 sequences share a step.
    device_us = ((prompt - cached) * tpot_of * 2.0 + completion * tpot_ms * 1e3 / 24).astype(int)
    device_us *= ran
    received_us = done_us - (total_ms * 1e3).astype(np.int64)
    started_us = received_us + (queue_ms * 1e3).astype(np.int64)
    first_us = received_us + (ttft_ms * 1e3).astype(np.int64)
    moved = (draw.random(size) < 0.004) & ran
    pulled = np.where(moved, prompt // 16 * 16, 0)
    worker = draw.integers(0, _WORKERS_EACH, size)
    names = np.array([each.name for each in MODELS])[model]
    adapter = np.where(
        (tenant % 5 == 0) & (user % 3 == 0), np.char.add("lora-", tenant.astype(str)), ""
    )
    failed = status == "failed"
    num_calls = np.where(draw.random(size) < 0.1, draw.integers(1, 5, size), 0) * (status == "done")
    ids = [f"chatcmpl-{value.hex()}" for value in _tokens(draw, size)]
    costs = [
        (
            cost(MODELS[m].prices, p, c, o).quantize(_STEP),
            device_cost(MODELS[m].prices, d).quantize(_STEP),
        )
        for m, p, c, o, d in zip(
            model.tolist(),
            prompt.tolist(),
            cached.tolist(),
            completion.tolist(),
            device_us.tolist(),
            strict=True,
        )
    ]
    return {
        "request_id": ids,
        "tenant": [f"tenant-{n:02d}" for n in tenant.tolist()],
        "key_id": [f"key-{n:02d}" for n in tenant.tolist()],
        "user": [f"user-{n:04d}" for n in user.tolist()],
        "session": [f"session-{n}" for n in draw.integers(0, 50_000, size).tolist()],
        "source": [_SOURCES[n] for n in source.tolist()],
        "tier": [_TIERS[n] for n in tier.tolist()],
        "model_requested": names.tolist(),
        "model_served": np.where(ran, names, "").tolist(),
        "worker": _where(ran, np.char.add(np.char.add(names, "-"), worker.astype(str)), ""),
        "adapter": adapter.tolist(),
        "prompt_tokens": prompt.tolist(),
        "cached_tokens": cached.tolist(),
        "completion_tokens": completion.tolist(),
        "pulled_tokens": pulled.tolist(),
        "kv_source": _where(pulled > 0, np.char.add(names, "-9"), ""),
        "pulls": [
            [(2, f"{name}-9", num_tokens)] if num_tokens else []
            for name, num_tokens in zip(names.tolist(), pulled.tolist(), strict=True)
        ],
        "num_devices": [1] * size,
        "queue_ms": _where(ran, queue_ms, None),
        "ttft_ms": _where(ran, ttft_ms, None),
        "tpot_us": _where(ran & (completion > 1), tpot_ms * 1e3, None),
        "total_ms": total_ms.tolist(),
        "finish_reason": np.where(status == "done", "stop", "").tolist(),
        "status": status.tolist(),
        "error_code": _where(failed, np.array(_ERRORS)[draw.integers(0, 4, size)], ""),
        "cost": [cost for cost, _ in costs],
        "device_us": device_us.tolist(),
        "device_cost": [device_cost for _, device_cost in costs],
        "energy_j": (device_us / 1e6 * _BUSY_WATTS).tolist(),
        "currency": ["USD"] * size,
        "price_version": ["2026-11"] * size,
        "received_at": received_us.tolist(),
        "dispatched_at": _where(ran, started_us - 500, None),
        "started_at": _where(ran, started_us, None),
        "first_token_at": _where(ran, first_us, None),
        "done_at": done_us.tolist(),
        "epoch": (1 + moved).tolist(),
        "lives": [
            [(1, f"{name}-9", begin, end, 0)] if again else []
            for again, name, begin, end in zip(
                moved.tolist(), names.tolist(), started_us.tolist(), first_us.tolist(), strict=True
            )
        ],
        "cost_method": ["steps"] * size,
        "num_preemptions": (draw.random(size) < 0.002).astype(int).tolist(),
        "api": np.where(source == 2, "job", "chat").tolist(),
        "stream": (source == 1).tolist(),
        "called_tools": [list(_TOOLS[:n]) for n in num_calls.tolist()],
        "num_tool_calls": num_calls.tolist(),
        "record_version": [RECORD_VERSION] * size,
        "outbox_sequence": sequences.tolist(),
    }


def _deliveries(draw: np.random.Generator, requests: Columns) -> Columns:
    """Return the deliveries of requests over HTTP and WebSocket."""
    rows = [i for i, source in enumerate(requests["source"]) if source != "nats"]
    size = len(rows)

    def of(name: str) -> list[Any]:
        column = requests[name]
        return [column[i] for i in rows]

    total_ms = np.array(of("total_ms")) + draw.random(size) * 5
    ttft_ms = [
        ms if ms is not None else total for ms, total in zip(of("ttft_ms"), total_ms, strict=True)
    ]
    stalled = draw.random(size) < 0.01
    gap_ms = np.where(stalled, 1_000 + draw.exponential(800, size), draw.exponential(60, size))
    return {
        "request_id": of("request_id"),
        "gateway": [f"gw-{n}" for n in draw.integers(0, 2, size).tolist()],
        "tenant": of("tenant"),
        "source": of("source"),
        "model": of("model_requested"),
        "first_byte_ms": (np.array(ttft_ms, dtype=np.float64) + 1.5).tolist(),
        "total_ms": total_ms.tolist(),
        "tokens_delivered": of("completion_tokens"),
        "num_epochs": of("epoch"),
        "num_resumes": (draw.random(size) < 0.006).astype(int).tolist(),
        "num_stalls": stalled.astype(int).tolist(),
        "stalled_ms": np.where(stalled, gap_ms, 0.0).tolist(),
        "longest_gap_ms": gap_ms.tolist(),
        "intake_ms": draw.exponential(0.4, size).tolist(),
        "outcome": of("status"),
        "done_at": of("done_at"),
        "record_version": [RECORD_VERSION] * size,
        "outbox_sequence": of("outbox_sequence"),
    }


async def _fill_samples(
    store: Store, draw: np.random.Generator, days: float, sample_s: int, end_us: int
) -> None:
    size = int(days * _DAY_S / sample_s)
    sampled_us = end_us - np.arange(size)[::-1] * sample_s * 1_000_000
    for number, (model, worker) in enumerate(
        (model, worker) for model in MODELS for worker in range(_WORKERS_EACH)
    ):
        day = 2 * np.pi * (sampled_us / 1e6 % _DAY_S) / _DAY_S
        busy = np.clip(0.5 - 0.4 * np.cos(day) + draw.normal(0, 0.08, size), 0, 1)
        columns = _samples(draw, model, worker, sample_s, sampled_us, busy)
        for first in range(0, size, _BATCH_ROWS):
            batch = {name: column[first : first + _BATCH_ROWS] for name, column in columns.items()}
            await _insert(store, WORKER_SAMPLES, batch, f"{number}:{first}")


def _samples(
    draw: np.random.Generator,
    model: Model,
    worker: int,
    sample_s: int,
    sampled_us: Ints,
    busy: Floats,
) -> Columns:
    size = len(busy)
    period_us = sample_s * 1e6
    steps = (busy * period_us / 1e3 / model.tpot_ms).astype(np.int64)
    running = (busy * 32 + draw.random(size)).astype(np.int64)
    prefill = (busy * 9_000 * draw.random(size)).astype(np.int64)
    busy_us = (busy * period_us).astype(np.int64)
    return {
        "worker": [f"{model.name}-{worker}"] * size,
        "name": [f"{model.name}-{worker}"] * size,
        "model": [model.name] * size,
        "sampled_at": sampled_us.tolist(),
        "period_ms": [period_us / 1e3] * size,
        "num_running": running.tolist(),
        "num_waiting": (np.maximum(busy - 0.8, 0) * 40).astype(int).tolist(),
        "num_blocks": [8_192] * size,
        "num_free_blocks": (8_192 - running * 200).tolist(),
        "num_steps": steps.tolist(),
        "step_ms_mean": [model.tpot_ms] * size,
        "busy_share": busy.tolist(),
        "busy_us": busy_us.tolist(),
        "charged_us": busy_us.tolist(),
        "energy_j": (_IDLE_WATTS * period_us / 1e6 + _BUSY_WATTS * busy_us / 1e6).tolist(),
        "charged_j": (_BUSY_WATTS * busy_us / 1e6).tolist(),
        "prefill_tokens": prefill.tolist(),
        "decode_tokens": (steps * running).tolist(),
        "num_preemptions": (draw.random(size) < 0.001).astype(int).tolist(),
        "queue_depth": (np.maximum(busy - 0.7, 0) * 100).astype(int).tolist(),
        "prefix_query_tokens": (prefill * 2).tolist(),
        "prefix_hit_tokens": prefill.tolist(),
        "role": ["both"] * size,
        "device_name": ["H200"] * size,
        "device_share": busy.tolist(),
        "device_memory_bytes": [120 << 30] * size,
        "device_memory_total_bytes": [141 << 30] * size,
        "device_per_hour": [model.prices.device_per_hour] * size,
        "currency": ["USD"] * size,
        "num_devices": [1] * size,
        "record_version": [RECORD_VERSION] * size,
        "outbox_sequence": list(range(1, size + 1)),
    }


async def _fill_prices(store: Store, first_seen_us: int) -> None:
    books = [model.prices for model in MODELS]
    columns = {
        "model": [model.name for model in MODELS],
        **{
            name: [getattr(book, name) for book in books]
            for name in PRICES.column_names
            if name not in ("model", "first_seen")
        },
        "first_seen": [first_seen_us // 1000] * len(books),
    }
    await store.insert(PRICES, [columns[name] for name in PRICES.column_names], "")


async def _insert(store: Store, table: Table[Any], columns: Columns, token: str) -> None:
    """Insert columns; left-out columns have their defaults."""
    types = dict(zip(table.column_names, table.column_types, strict=True))
    into = PlainTable(table.name, tuple(columns), tuple(types[name] for name in columns))
    await store.insert(into, list(columns.values()), token)


def _tokens(draw: np.random.Generator, size: int) -> Sequence[bytes]:
    drawn = draw.bytes(12 * size)
    return [drawn[i : i + 12] for i in range(0, len(drawn), 12)]


def _where(there: npt.NDArray[np.bool_], values: npt.NDArray[Any], otherwise: Any) -> list[Any]:
    return [
        value if given else otherwise
        for given, value in zip(there.tolist(), values.tolist(), strict=True)
    ]


async def _make(path: Path, num_rows: int, days: float, sample_s: int, seed: int) -> None:
    started_s = time.perf_counter()
    store = await Store.open(ClickHouseConfig(path=str(path)))
    try:
        await fill(store, num_rows, days=days, sample_s=sample_s, seed=seed)
        for table in ("requests", "deliveries", "worker_samples", "usage_by_minute"):
            ((count,),) = await store.rows(f"SELECT count() FROM {table} FINAL")
            ((size,),) = await store.rows(
                "SELECT sum(bytes_on_disk) FROM system.parts "
                f"WHERE active AND database = currentDatabase() AND table = '{table}'"
            )
            each = f"{size / count:>6.1f} bytes each"
            print(f"{table:<16}{count:>12,} rows {size / 1e6:>8.1f} MB {each}")
    finally:
        await store.close()
    print(f"in {path}, made in {time.perf_counter() - started_s:.1f} s")


def run(
    path: Path, rows: int = 1_000_000, days: float = 30.0, sample_s: int = 10, seed: int = 0
) -> None:
    """Make a store in a folder; a worker's samples are ``sample_s`` apart."""
    asyncio.run(_make(path, rows, days, sample_s, seed))
