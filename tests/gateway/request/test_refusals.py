"""Refused requests: each is in one record, and a flood of them is in few."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from millrace.bus import codec
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.tenancy.tenants import TenantStore
from millrace.gateway.errors import Refusal
from millrace.gateway.metrics import Metrics
from millrace.gateway.request import failure_log
from millrace.gateway.request.failure_log import FailureLog
from millrace.gateway.request.refusals import MAX_KINDS, MAX_KINDS_OF_TENANT, RefusalRecords
from millrace.gateway.tenancy.identity import Caller
from millrace.runtime.metrics_server import render
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from millrace.schemas.errors import BusUnavailableError
from millrace.schemas.frames import Cancelled, Failed, Shed
from millrace.schemas.jobs import Tier
from millrace.schemas.records import MAX_REFUSED_IDS, OTHER_REFUSALS, Record, RefusalRecord
from millrace.schemas.tenants import LimitOverrides, TenantRecord
from tests.support.manual_clock import ManualClock
from tests.support.running_gateway import MODEL, RunningGateway, running_gateway
from tests.support.servers import RedisServer
from tests.support.waiting import eventually

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "a secret of mine"}]}
CONFIG = GatewayConfig(auth="required", max_body_bytes=4_096, max_generations_per_socket=1)


Told = Callable[[], list[dict[str, Any]]]


class Book:
    """The records of refusals that the outbox has got so far."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._outbox = MemoryBus(broker).outbox
        self.records: list[RefusalRecord] = []

    async def read(self) -> None:
        while messages := await self._outbox.pull(1_000, 0.0):
            for message in messages:
                record = codec.RECORD.decode(message.payload)
                if isinstance(record, RefusalRecord):
                    self.records.append(record)
            await self._outbox.ack(messages)

    async def until(self, count: int) -> None:
        """Wait until the records count at least so many requests."""

        async def there() -> bool:
            await self.read()
            return sum(record.count for record in self.records) >= count

        await eventually(there, 20.0, f"records of {count} refusals")

    def kinds(self) -> dict[tuple[str, str, int, str, str], int]:
        """Count refusals by tenant, entry point, status, code and limit."""
        found: dict[tuple[str, str, int, str, str], int] = {}
        for one in self.records:
            kind = (one.tenant, one.door, one.status, one.code, one.limit)
            found[kind] = found.get(kind, 0) + one.count
        return found


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """The gateway's log lines of refused and failed requests."""
    caplog.set_level(logging.INFO, failure_log.__name__)
    names = ("request_id", "tenant", "path", "status", "code", "num_left_out")

    def lines() -> list[dict[str, Any]]:
        records = [one for one in caplog.records if one.name == failure_log.__name__]
        return [
            {"what": one.getMessage(), "level": one.levelname}
            | {name: vars(one)[name] for name in names if name in vars(one)}
            for one in records
        ]

    return lines


@pytest.fixture
async def front(redis_server: RedisServer) -> AsyncIterator[RunningGateway]:
    async with running_gateway(CONFIG, redis=RedisConfig(url=redis_server.url)) as made:
        yield made


@pytest.fixture
def book(front: RunningGateway) -> Book:
    return Book(front.broker)


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[TenantStore]:
    link = RedisLink(RedisConfig(url=redis_server.url))
    made = TenantStore(link)
    await made.change_tenant("acme", lambda _known: TenantRecord(tier=Tier.PRO))
    yield made
    await link.close()


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_pages_and_probes_are_no_refused_requests(front: RunningGateway, book: Book) -> None:
    """Pages and probes ask repeatedly before a key is given."""
    async with httpx.AsyncClient(base_url=front.url, timeout=20) as http:
        for path in ("/ops/api/totals", "/ops/api/alerts", "/v1/models", "/v1/tools", "/v1/limits"):
            assert (await http.get(path)).status_code == 401, path
        assert (await http.get("/ops/api/totals", headers=bearer("mr-no"))).status_code == 401
        for path in ("/favicon.ico", "/robots.txt", "/ops/nothing.js", "/healthy"):
            assert (await http.get(path)).status_code == 404, path
        assert (await http.head("/nowhere")).status_code == 404
        # A key that opens nothing is a refusal, and so is each request for work.
        assert (await http.get("/v1/models", headers=bearer("mr-no"))).status_code == 401
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 401
        assert (await http.post("/nowhere", json={})).status_code == 404
    await book.until(3)
    assert book.kinds() == {
        ("", "/v1/models", 401, "invalid_api_key", ""): 1,
        ("", "/v1/chat/completions", 401, "invalid_api_key", ""): 1,
        ("", "unmatched", 404, "not_found", ""): 1,
    }
    metrics = render(front.gateway.metrics.registry).decode()
    assert 'millrace_refused_requests_total{code="invalid_api_key",route="/ops' not in metrics
    assert 'millrace_http_requests_total{route="/ops/api/{query}",status="401"} 3.0' in metrics


async def test_what_http_refuses(
    front: RunningGateway, book: Book, store: TenantStore, told: Told
) -> None:
    one_a_minute = LimitOverrides(requests_per_minute=1)
    record, limited_token = await store.create_key("acme", 0, limits=one_a_minute)
    _, token = await store.create_key("acme", 0)
    revoked, dead_token = await store.create_key("acme", 0)
    await store.revoke(revoked.key_id, 1)
    chat = "/v1/chat/completions"
    async with httpx.AsyncClient(base_url=front.url, timeout=20) as http:

        async def ask(path: str, status: int, token: str = token, **given: Any) -> httpx.Response:
            given.setdefault("headers", bearer(token) if token else {})
            answer = await http.request(given.pop("method", "POST"), path, **given)
            assert answer.status_code == status, answer.text
            return answer

        await ask(chat, 200, token=limited_token, json=CHAT)
        limited = await ask(chat, 429, token=limited_token, json=CHAT)
        await ask(chat, 429, token=limited_token, json=CHAT)
        await ask(chat, 400, content=b"{")
        await ask(chat, 404, json={**CHAT, "model": "a secret of mine"})
        await ask(chat, 413, content=b"x" * 5_000)
        await ask(chat, 401, token="", json=CHAT)
        await ask(chat, 401, token=dead_token, json=CHAT)
        await ask(chat, 405, method="GET")
        await ask("/v1/embeddings", 400, json={"model": MODEL, "input": []})
        await ask("/nowhere", 404, json={})
        await ask("/v1/tokenize", 401, token="", json={"model": MODEL, "prompt": "x"})
        await ask("/v1/completions", 403, headers={"origin": "https://evil.example"}, json={})
        await ask("/healthz", 200, method="GET")
    await book.until(12)
    assert book.kinds() == {
        ("acme", chat, 429, "requests_per_minute", "requests_per_minute"): 2,
        ("acme", chat, 400, "invalid_json", ""): 1,
        ("acme", chat, 404, "model_not_found", ""): 1,
        ("acme", chat, 413, "payload_too_large", ""): 1,
        ("", chat, 401, "invalid_api_key", ""): 1,
        ("acme", chat, 401, "invalid_api_key", ""): 1,
        ("", chat, 405, "method_not_allowed", ""): 1,
        ("acme", "/v1/embeddings", 400, "invalid_parameter", ""): 1,
        ("", "unmatched", 404, "not_found", ""): 1,
        ("", "/v1/tokenize", 401, "invalid_api_key", ""): 1,
        ("", "origin", 403, "origin_not_allowed", ""): 1,
    }
    of_limit = next(one for one in book.records if one.limit)
    assert (of_limit.key_id, of_limit.gateway_id) == (record.key_id, "gw-test")
    assert of_limit.request_id == limited.headers["x-request-id"]
    assert 0 < of_limit.first_ns <= of_limit.last_ns <= of_limit.recorded_ns
    assert {one.key_id for one in book.records if one.status == 401} == {"", revoked.key_id}
    # Nothing that a client wrote is in them.
    assert b"secret" not in b"".join(codec.encode(one) for one in book.records)
    assert _of_log(told()) == _of_book(book)
    assert {line["request_id"] for line in told()} == {
        request_id for one in book.records for request_id in one.request_ids or ("",)
    }
    assert {(line["what"], line["level"]) for line in told()} == {("a request was refused", "INFO")}
    assert "secret" not in str(told())
    shown = render(front.gateway.metrics.registry).decode()
    sample = 'millrace_refused_requests_total{code="requests_per_minute",route="%s",status="429"} 2'
    assert sample % chat in shown


async def test_what_a_websocket_refuses(
    front: RunningGateway, book: Book, store: TenantStore, told: Told
) -> None:
    _, token = await store.create_key("acme", 0)
    front.worker.gate.clear()
    with pytest.raises(InvalidStatus):
        await connect(front.ws_url, additional_headers=bearer("mr-000000000000-0")).__aenter__()
    async with connect(front.ws_url) as stranger:
        await _told(stranger, "generate", id="a", **CHAT)
        assert await _told(stranger, "authenticate", token="nonsense") == "invalid_api_key"
        with pytest.raises(ConnectionClosed):
            await stranger.recv()
    async with connect(front.ws_url, additional_headers=bearer(token)) as known:
        assert await _told(known, "nothing") == "unknown_message_type"
        assert await _told(known, "generate", id="a", **{**CHAT, "model": "no"}) == (
            "model_not_found"
        )
        await known.send(json.dumps({"type": "generate", "id": "a", **CHAT}))
        await eventually(lambda: front.worker.num_running == 1)
        assert await _told(known, "generate", id="b", **CHAT) == "too_many_generations"
        assert await _told(known, "cancel", id="nobody") == "unknown_id"
        front.worker.gate.set()
        assert await _until_end(known) == "done"
        assert await _told(known, "resume", id="c", request_id="x", next_index=0) == (
            "request_not_found"
        )
    await book.until(8)
    assert book.kinds() == {
        ("", "/v1/ws", 401, "invalid_api_key", ""): 3,
        ("acme", "/v1/ws", 400, "unknown_message_type", ""): 1,
        ("acme", "/v1/ws", 404, "model_not_found", ""): 1,
        ("acme", "/v1/ws", 429, "too_many_generations", "max_generations_per_socket"): 1,
        ("acme", "/v1/ws", 404, "unknown_id", ""): 1,
        ("acme", "/v1/ws", 404, "request_not_found", ""): 1,
    }
    assert _of_log(told()) == _of_book(book)


def _of_log(lines: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter((one["tenant"], one["path"], one["status"], one["code"]) for one in lines)


def _of_book(book: Book) -> Counter[tuple[Any, ...]]:
    """The same as the records have it."""
    return Counter({kind[:4]: count for kind, count in book.kinds().items()})


async def _told(connection: ClientConnection, kind: str, **fields: Any) -> str:
    """The code of the next error after a message."""
    await connection.send(json.dumps({"type": kind, **fields}))
    async with asyncio.timeout(20):
        while True:
            message = json.loads(await connection.recv())
            if message["type"] == "error":
                return str(message["code"])


async def _until_end(connection: ClientConnection) -> str:
    async with asyncio.timeout(20):
        while True:
            kind = json.loads(await connection.recv())["type"]
            if kind in ("done", "error"):
                return str(kind)


async def test_what_was_a_job_is_not_told_twice(
    front: RunningGateway, book: Book, store: TenantStore, told: Told
) -> None:
    """A shed job has its own record for every API, streamed or not."""
    _, token = await store.create_key("acme", 0)
    front.worker.end_with = Shed(retry_after_s=1.0)
    async with httpx.AsyncClient(base_url=front.url, headers=bearer(token), timeout=20) as http:
        for stream in (False, True):
            shed = await http.post("/v1/chat/completions", json={**CHAT, "stream": stream})
            assert shed.status_code == 429
        embedded = await http.post("/v1/embeddings", json={"model": MODEL, "input": "x"})
        assert embedded.status_code == 429
        async with connect(front.ws_url, additional_headers=bearer(token)) as socket:
            assert await _told(socket, "generate", id="a", **CHAT) == "overloaded"
        # A refused request, to know that all earlier ones were counted.
        assert (await http.post("/v1/chat/completions", content=b"{")).status_code == 400
    await book.until(1)
    assert list(book.kinds()) == [("acme", "/v1/chat/completions", 400, "invalid_json", "")]
    failed = [line for line in told() if line["what"] == "a request failed"]
    assert _of_log(failed) == {
        ("acme", "/v1/chat/completions", 429, "overloaded"): 2,
        ("acme", "/v1/embeddings", 429, "overloaded"): 1,
        ("acme", "/v1/ws", 429, "overloaded"): 1,
    }
    assert len({line["request_id"] for line in failed}) == 4
    assert len(told()) == 5


async def test_a_failure_of_ours_is_a_warning_and_a_cancel_is_none(
    front: RunningGateway, store: TenantStore, told: Told
) -> None:
    """Several choices of one request fail together, and are one line."""
    _, token = await store.create_key("acme", 0)
    async with httpx.AsyncClient(base_url=front.url, headers=bearer(token), timeout=20) as http:
        front.worker.end_with = Failed(code="worker_failed", message="of a secret of mine")
        answer = await http.post("/v1/chat/completions", json={**CHAT, "n": 3})
        assert answer.status_code == 500
        of_anthropic = await http.post("/v1/messages", json={**CHAT, "max_tokens": 4})
        assert of_anthropic.status_code == 500
        front.worker.end_with = Cancelled()
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 409
    assert [(line["path"], line["level"], line["status"]) for line in told()] == [
        ("/v1/chat/completions", "WARNING", 500),
        ("/v1/messages", "WARNING", 500),
    ]
    assert told()[0]["request_id"] == answer.headers["x-request-id"]
    assert "secret" not in str(told())


async def test_a_flood_over_http_leaves_few_records(
    front: RunningGateway, book: Book, store: TenantStore, told: Told
) -> None:
    """The gateway answers during a flood in which each request has another invalid key."""
    number = 600
    async with httpx.AsyncClient(base_url=front.url, timeout=60) as http:

        async def attack(first: int) -> None:
            for i in range(first, number, 20):
                token = f"mr-{i:012x}-0"
                answer = await http.post("/v1/chat/completions", json=CHAT, headers=bearer(token))
                assert answer.status_code == 401

        await asyncio.gather(*map(attack, range(20)))
        assert (await http.get("/healthz")).status_code == 200
    await book.until(number)
    [kind] = book.kinds().items()
    assert kind == (("", "/v1/chat/completions", 401, "invalid_api_key", ""), number)
    # One each second that it took.
    assert len(book.records) == len({record.recorded_ns for record in book.records})
    front.gateway.failure_log.flush()
    lines = [line for line in told() if "num_left_out" not in line]
    left_out = [line["num_left_out"] for line in told() if "num_left_out" in line]
    assert len(lines) <= failure_log.LINES_OF_A_KIND * len(left_out)
    assert len(lines) + sum(left_out) == number


# --- the bounds on refusals ----------------------------------------------------------------------


class FlakyOutbox:
    """Outbox that stores records or is unreachable.

    With ``is_late`` it stores a record and raises an error all the same.
    """

    def __init__(self) -> None:
        self.is_away = False
        self.is_late = False
        self.stored: dict[tuple[str, int, int], RefusalRecord] = {}
        self.num_published = 0

    async def publish(self, record: Record, _patience_s: float = 0.0) -> None:
        assert isinstance(record, RefusalRecord)
        if self.is_away and not self.is_late:
            raise BusUnavailableError("away")
        self.num_published += 1
        self.stored[record.gateway_id, record.recorded_ns, record.number] = record
        if self.is_late:
            raise BusUnavailableError("too late")

    @property
    def count(self) -> int:
        return sum(record.count for record in self.stored.values())


@asynccontextmanager
async def _refusals() -> AsyncIterator[tuple[RefusalRecords, FlakyOutbox, ManualClock]]:
    outbox, clock = FlakyOutbox(), ManualClock(1_000)
    made = RefusalRecords(outbox, clock, "gw", Metrics(), FailureLog(clock))  # type: ignore[arg-type]
    yield made, outbox, clock


def _refusal(code: str = "bad", status: int = 400) -> Refusal:
    return Refusal(status=status, code=code, message="never told")


async def test_however_many_kinds_come_the_lines_of_the_log_are_bounded_and_count_them_all(
    told: Told,
) -> None:
    log, number = FailureLog(ManualClock(1_000)), 10_000
    for i in range(number):
        log.refused(f"/v1/{i % 1_000}", _refusal(), "acme", f"r{i}")
    log.flush()
    lines = [line for line in told() if "num_left_out" not in line]
    left_out = [line for line in told() if "num_left_out" in line]
    assert len(lines) == failure_log.MAX_KINDS * 10
    assert [(line["path"], line["num_left_out"]) for line in left_out] == [
        ("others", number - len(lines))
    ]
    # An interval begins anew.
    log.refused("/v1/0", _refusal(), "acme", "later")
    assert told()[-1]["request_id"] == "later"
    log.flush()
    assert told()[-1]["request_id"] == "later"


async def test_however_many_kinds_come_the_records_are_bounded_and_count_them_all() -> None:
    async with _refusals() as (refusals, outbox, _):
        number = 100_000
        for i in range(number):
            caller = Caller(tenant=f"tenant-{i % 1_000}", key_id=f"{i:012x}")
            refusals.note("/v1/x", _refusal(status=400 + 100 * (i % 2)), caller)
        assert refusals.num_waiting <= MAX_KINDS + 1
        assert await refusals.flush()
        assert len(outbox.stored) <= MAX_KINDS + 1
        assert outbox.count == number
        rest = [one for one in outbox.stored.values() if one.door == OTHER_REFUSALS]
        assert {one.tenant for one in rest} == {""}


async def test_a_record_has_the_ids_of_the_first_few() -> None:
    async with _refusals() as (refusals, outbox, clock):
        refusals.note("/v1/x", _refusal(), None)  # a refusal without an id
        for number in range(20):
            refusals.note("/v1/x", _refusal(), None, f"id-{number}")
        await refusals.flush()
        await clock.advance(1.0)
        refusals.note("/v1/x", _refusal(), None, "id-20")
        await refusals.flush()
        ids = [one.request_ids for one in outbox.stored.values()]
        assert ids == [tuple(f"id-{number}" for number in range(MAX_REFUSED_IDS)), ("id-20",)]
        assert [one.request_id for one in outbox.stored.values()] == ["id-0", "id-20"]


async def test_one_tenant_takes_nobody_elses_room() -> None:
    async with _refusals() as (refusals, outbox, _):
        for i in range(10_000):
            refusals.note("/v1/x", _refusal(f"code-{i}"), Caller(tenant="flood", key_id="k"))
            refusals.note("/v1/x", _refusal(f"code-{i}"), None)
        refusals.note("/v1/x", _refusal("mine"), Caller(tenant="quiet", key_id="k"))
        await refusals.flush()
        mine = [one for one in outbox.stored.values() if one.tenant == "quiet"]
        assert [(one.code, one.count) for one in mine] == [("mine", 1)]
        for tenant in ("flood", ""):
            of_tenant = [one for one in outbox.stored.values() if one.tenant == tenant]
            assert len(of_tenant) == MAX_KINDS_OF_TENANT + 1
            assert sum(one.count for one in of_tenant) == 10_000
            [rest] = [one for one in of_tenant if one.door == OTHER_REFUSALS]
            assert rest.count == 10_000 - MAX_KINDS_OF_TENANT
            assert (rest.status, rest.code) == (400, "")


async def test_while_the_bus_is_away_counting_goes_on_within_the_same_bounds() -> None:
    async with _refusals() as (refusals, outbox, clock):
        outbox.is_away = True
        for _ in range(50):
            for i in range(2_000):
                refusals.note("/v1/x", _refusal(f"code-{i % 7}"), None)
            await clock.advance(1.0)
            assert not await refusals.flush()
        assert refusals.num_waiting <= 2 * 7
        outbox.is_away = False
        await refusals.close(1.0)
        assert outbox.count == 100_000
        assert refusals.num_waiting == 0


async def test_a_record_whose_answer_was_lost_is_stored_once() -> None:
    async with _refusals() as (refusals, outbox, clock):
        outbox.is_late = True
        refusals.note("/v1/x", _refusal(), None)
        assert not await refusals.flush()
        refusals.note("/v1/x", _refusal(), None)
        await clock.advance(1.0)
        outbox.is_late = False
        await refusals.flush()
        assert (outbox.num_published, len(outbox.stored), outbox.count) == (2, 1, 1)
        await refusals.flush()
        assert outbox.count == 2


async def test_a_client_that_left_was_not_refused() -> None:
    async with _refusals() as (refusals, outbox, _):
        refusals.note("/v1/x", _refusal(status=499), None)
        refusals.note("/v1/x", _refusal(status=200), None)
        await refusals.flush()
        assert outbox.stored == {}
