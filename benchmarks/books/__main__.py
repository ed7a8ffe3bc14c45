"""``python -m benchmarks.books``: check that all reports agree about one load.

A system serves two models, priced in dollars and in euros, to two tenants. Requests make several
generations in every way: choices, prompts, inputs, tool rounds, batch lines. Clients repeat
requests and leave, and a worker, a gateway and telemetry are killed meanwhile. Then the clients'
figures are compared with rows, generations, Kafka's records, usage by the minute, `millrace usage`,
invoices, budgets and the operations page. Exits with 1 if any figure differs.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import httpx
import msgspec
import yaml
from aiokafka import AIOKafkaConsumer

from benchmarks.books.load import BooksClient, ClientAnswers, Tenant
from benchmarks.support.command import PartResult, run_command
from millrace.bus import codec, subjects
from millrace.registry.pricing import PriceBook, cost
from millrace.schemas.records import RequestRecord
from tests.e2e.weather import weather_tools
from tests.support.system import System
from tests.support.waiting import eventually

_PRICES = {
    "dollars": {
        "version": "2026-11",
        "currency": "USD",
        "input_per_million": "100",
        "cached_input_per_million": "50",
        "output_per_million": "400",
        "device_per_hour": "0.05",
    },
    "euros": {
        "version": "2026-12",
        "currency": "EUR",
        "input_per_million": "30",
        "cached_input_per_million": "7",
        "output_per_million": "110",
        "device_per_hour": "0.04",
    },
}
_SETTLED_S = 180.0
_BETWEEN_KILLS_S = 2.0
_STAY_S = 8.0
_BEGIN = "2026-01-01"
_KILLED = ("worker-1", "gateway-1", "telemetry-1")


class Figures(msgspec.Struct, frozen=True):
    """Requests, tokens and money of one tenant."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    cost: Decimal


def run(rounds: int = 4, no_kills: bool = False) -> PartResult:
    """Take each way to ask at least ``rounds`` times; ``no_kills`` leaves all parts alive."""
    with tempfile.TemporaryDirectory(prefix="millrace-books-") as folder:
        kills = () if no_kills else _KILLED
        return PartResult(None, not asyncio.run(keep_books(Path(folder), rounds, kills)))


async def keep_books(folder: Path, rounds: int, kills: Sequence[str]) -> int:
    """Run the load and print each source's figures; return 1 if any figure differs, else 0."""
    with weather_tools() as tools:
        system = System(folder, arguments=_arguments(folder, tools)).start()
        try:
            tenants = [_tenant(system, f"of-{model}", model) for model in _PRICES]
            all_answers = [ClientAnswers() for _ in tenants]
            clients = [
                BooksClient(system, tenant, one)
                for tenant, one in zip(tenants, all_answers, strict=True)
            ]
            all_killed = asyncio.Event()
            load = asyncio.gather(*(client.ask_all(rounds, all_killed) for client in clients))
            await _kill(system, kills, load)
            all_killed.set()
            await load
            sources = [
                await _compare(system, tenant, one, client)
                for tenant, one, client in zip(tenants, all_answers, clients, strict=True)
            ]
            for client in clients:
                await client.close()
        finally:
            system.stop()
    return int(any(sources))


def _arguments(folder: Path, tools: str) -> tuple[str, ...]:
    demo = Path(sys.modules["millrace.registry"].__path__[0]) / "demo" / "model"
    models = {name: {"source": str(demo), "prices": prices} for name, prices in _PRICES.items()}
    files = {
        "models.yaml": yaml.safe_dump({"models": models}),
        "tools.yaml": tools,
        "settings.yaml": json.dumps({"gateway": {"tools": str(folder / "tools.yaml")}}),
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    return (
        *("--port", "0", "--gateways", "2", "--workers", "2"),
        *("--catalogue", str(folder / "models.yaml"), "--config", str(folder / "settings.yaml")),
        *("--model", *_PRICES),
    )


async def _kill(system: System, parts: Sequence[str], load: asyncio.Future[Any]) -> None:
    """``kill -9`` each part in turn while the load runs. A load that fails ends this."""
    for part in parts:
        await asyncio.wait([load], timeout=_BETWEEN_KILLS_S)
        if load.done():
            return
        print(f"kill -9 {part}", flush=True)
        system.kill(part)


def _command(system: System, *arguments: str) -> Any:
    command = [sys.executable, "-m", "millrace", *arguments, "--data", str(system.data)]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)


def _tenant(system: System, name: str, model: str) -> Tenant:
    made = _command(
        system, "keys", "create", "--tenant", name, "--admin", "--tier", "enterprise", "--json"
    )
    return Tenant(name, made["key"], model)


async def _compare(
    system: System, tenant: Tenant, answers: ClientAnswers, client: BooksClient
) -> int:
    """Print the figures of a tenant; return how many differ from those of its rows."""

    seen: list[tuple[Figures, float]] = []

    async def is_settled() -> bool:
        """Return whether the rows are stable for some seconds: they come late after a kill."""
        try:
            usage = _sums(system, "usage_by_minute FINAL", tenant, "toInt64(sum(requests))")
            rows = _sums(system, "requests FINAL", tenant, "toInt64(count())")
        except OSError:
            return False
        if not seen or seen[-1][0] != rows:
            seen.append((rows, time.monotonic()))
        stayed_s = time.monotonic() - seen[-1][1]
        return rows.requests >= len(answers.accepted) and usage == rows and stayed_s >= _STAY_S

    try:
        await eventually(is_settled, _SETTLED_S, "a row of each accepted request")
    except AssertionError as error:
        print(f"{tenant.name}: {error}", flush=True)  # the table says what differs
    rows = _sums(system, "requests FINAL", tenant, "toInt64(count())")
    of_answers = await asyncio.to_thread(_by_answers, system, tenant, answers)
    records = await _by_records(system, tenant)
    currency = str(_PRICES[tenant.model]["currency"])
    spent = await client.spent(currency)
    found: dict[str, Figures] = {
        "accepted, by clients": msgspec.structs.replace(rows, requests=_accepted(answers, rows)),
        "usage of answers": of_answers,
        "generations": _sums(system, "generations", tenant, "toInt64(uniqExact(request_id))"),
        "Kafka's records": records,
        "usage_by_minute": _sums(system, "usage_by_minute FINAL", tenant, "toInt64(sum(requests))"),
        "millrace usage": _by_command(system, tenant),
        "invoice": _by_invoice(system, tenant, rows),
        "budget": msgspec.structs.replace(rows, cost=spent),
        "operations page": await _by_page(system, tenant),
    }
    print(
        f"\n{tenant.name}, in {currency}: {len(answers.usage)} answers, "
        f"{answers.num_lost} interrupted requests"
    )
    print(f"{'':<22}{'requests':>10}{'prompt':>10}{'completion':>12}{'cost':>18}  difference")
    differing = 0
    for name, figures in {"rows of requests": rows, **found}.items():
        differs = _differs(figures, rows)
        differing += differs
        print(
            f"{name:<22}{figures.requests:>10}{figures.prompt_tokens:>10}"
            f"{figures.completion_tokens:>12}{figures.cost:>18.9f}  {'DIFFERS' if differs else 0}",
            flush=True,
        )
    return differing


def _accepted(answers: ClientAnswers, rows: Figures) -> int:
    """Count requests that have a row and broke off before their client knew the id."""
    num_known = len(answers.accepted)
    return num_known + min(max(rows.requests - num_known, 0), answers.num_lost)


def _differs(figures: Figures, rows: Figures) -> bool:
    counts = ("requests", "prompt_tokens", "completion_tokens")
    if any(getattr(figures, name) != getattr(rows, name) for name in counts):
        return True
    # Budgets count billionths of each reservation.
    return abs(figures.cost - rows.cost) > Decimal("1e-9") * max(rows.requests, 1)


def _sums(system: System, table: str, tenant: Tenant, requests: str) -> Figures:
    (row,) = system.sql(
        f"SELECT {requests} AS n, toInt64(sum(t.prompt_tokens)) AS prompt, "
        "toInt64(sum(t.completion_tokens)) AS completion, toString(sum(t.cost)) AS paid "
        f"FROM {table.replace(' FINAL', '')} AS t{' FINAL' * table.endswith('FINAL')} "
        f"WHERE tenant = '{tenant.name}'"
    )
    return Figures(int(row["n"]), int(row["prompt"]), int(row["completion"]), Decimal(row["paid"]))


def _by_answers(system: System, tenant: Tenant, answers: ClientAnswers) -> Figures:
    """Add up the usage in the answers, at the price book's prices.

    Requests whose client left are added by their rows.
    """
    prices = msgspec.convert(_PRICES[tenant.model], PriceBook)
    rows = system.sql(
        "SELECT request_id, toInt64(prompt_tokens) AS prompt, toInt64(completion_tokens) AS "
        "completion, toString(t.cost) AS paid FROM requests AS t FINAL "
        f"WHERE tenant = '{tenant.name}'"
    )
    left = [row for row in rows if row["request_id"] not in answers.usage]
    answered = answers.usage.values()
    return Figures(
        len(answered) + len(left),
        sum(one[0] for one in answered) + sum(int(row["prompt"]) for row in left),
        sum(one[2] for one in answered) + sum(int(row["completion"]) for row in left),
        sum((cost(prices, *one) for one in answered), Decimal(0))
        + sum((Decimal(row["paid"]) for row in left), Decimal(0)),
    )


async def _by_records(system: System, tenant: Tenant) -> Figures:
    """Add up the records in Kafka, the latest of each generation."""
    consumer = AIOKafkaConsumer(
        subjects.REQUESTS_TOPIC,
        bootstrap_servers=system.endpoints["kafka"],
        auto_offset_reset="earliest",
    )
    await consumer.start()
    records: dict[str, RequestRecord] = {}
    try:
        while polled := await consumer.getmany(timeout_ms=3_000):
            for message in (one for messages in polled.values() for one in messages):
                record = codec.RECORD.decode(message.value)
                if isinstance(record, RequestRecord) and record.tenant == tenant.name:
                    records[record.request_id] = record
    finally:
        await consumer.stop()
    return Figures(
        len({record.parent_id or record.request_id for record in records.values()}),
        sum(record.prompt_tokens for record in records.values()),
        sum(record.completion_tokens for record in records.values()),
        sum((record.cost for record in records.values()), Decimal(0)),
    )


def _by_command(system: System, tenant: Tenant) -> Figures:
    asked = ("usage", "--tenant", tenant.name, "--from", _BEGIN, "--format", "json")
    (total,) = _command(system, *asked)["totals"] or [{}]
    return Figures(
        total.get("requests", 0),
        total.get("prompt_tokens", 0),
        total.get("completion_tokens", 0),
        Decimal(total.get("cost", 0)),
    )


def _by_invoice(system: System, tenant: Tenant, rows: Figures) -> Figures:
    """Read the invoice, which counts the paid requests alone, by the price book."""
    asked = ("usage", "--tenant", tenant.name, "--from", _BEGIN, "--invoice", "--format", "json")
    lines = _command(system, *asked)["rows"]
    tokens = sum(line["computed_tokens"] + line["cached_tokens"] for line in lines)
    completion = sum(line["completion_tokens"] for line in lines)
    paid = sum((Decimal(line["by_price_book"]) for line in lines), Decimal(0))
    return Figures(rows.requests, tokens, completion, paid)


async def _by_page(system: System, tenant: Tenant) -> Figures:
    async with httpx.AsyncClient(headers=tenant.headers, timeout=30.0) as http:
        query = {"from_s": "-86400", "tenant": tenant.name}
        answer = await http.get(f"{system.http}/ops/api/totals", params=query)
    answer.raise_for_status()
    (row,) = answer.json()
    return Figures(
        int(row["requests"]),
        int(row["prompt_tokens"]),
        int(row["completion_tokens"]),
        sum(map(Decimal, row["costs"]), Decimal(0)),  # a tenant pays in one currency
    )


if __name__ == "__main__":
    raise SystemExit(run_command("books", run, __doc__))
