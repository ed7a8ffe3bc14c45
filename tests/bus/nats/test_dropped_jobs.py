"""Detection of jobs that the server dropped, from messages in any order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import pytest

from millrace.bus.nats import dropped_jobs, jetstream
from millrace.bus.nats.connection import Connection
from millrace.bus.nats.dropped_jobs import DroppedJobs
from millrace.bus.nats.jetstream import StoredAt
from millrace.bus.transport import Message, OnMessage
from tests.support.manual_clock import ManualClock

_SUBJECT = "jobs.demo.free.acme"


class Server:
    """Fake server: a test publishes and announces messages, and reads the messages stored anew."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = ManualClock()
        self.stored: list[tuple[str, bytes, Mapping[str, str]]] = []
        self._listeners: dict[str, OnMessage] = {}
        monkeypatch.setattr(jetstream, "get", self._get)
        monkeypatch.setattr(jetstream, "store", self._store)
        self.dropped = DroppedJobs(cast(Connection, self), self.clock)

    async def subscribe(self, subject: str, on_message: OnMessage) -> Server:
        self._listeners[subject] = on_message
        return self

    async def close(self) -> None:
        """Do nothing: the server stands in for its subscriptions too."""

    async def _get(self, *_: object) -> None:
        return None

    async def _store(
        self, _: object, subject: str, payload: bytes, headers: Mapping[str, str]
    ) -> StoredAt:
        self.stored.append((subject, payload, headers))
        return StoredAt(seq=len(self.stored))

    def publish(self, payload: bytes, message_id: str = "m", **headers: str) -> None:
        headers = {"Nats-Msg-Id": message_id, "Content-Type": "application/json", **headers}
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        message = Message(_SUBJECT, payload, None, f"_INBOX.{payload!r}", headers)
        self._listeners["jobs.*.*.*"](message)

    def announce(self, message_id: str = "m", subject: str = _SUBJECT) -> None:
        headers = {"Nats-Msg-Id": message_id, "Nats-Sequence": "7"}
        self._listeners["stored.jobs.>"](Message(f"stored.{subject}", b"", None, "", headers))

    async def pass_s(self, seconds: float) -> list[bytes]:
        """The payloads that were stored anew by then."""
        await self.clock.advance(seconds)
        return [payload for _, payload, _ in self.stored]


@pytest.fixture
async def server(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Server(monkeypatch)
    await made.dropped.open()
    yield made
    await made.dropped.close()


async def test_a_dropped_message_is_stored_anew(server: Server) -> None:
    server.publish(b"1")
    server.announce()
    assert await server.pass_s(5.0) == []
    server.publish(b"2")
    assert await server.pass_s(0.5) == []
    assert await server.pass_s(1.5) == [b"2"]
    subject, _, headers = server.stored[0]
    assert subject == _SUBJECT
    assert headers["Content-Type"] == "application/json"
    assert headers["Nats-Msg-Id"].startswith("repeat:")


async def test_an_announcement_may_overtake(server: Server) -> None:
    """An announcement may arrive before its message, by another server of the cluster."""
    server.announce()
    server.publish(b"1")
    assert await server.pass_s(5.0) == []
    server.publish(b"2")
    assert await server.pass_s(5.0) == [b"2"]


async def test_messages_refused_by_the_server_are_ignored(server: Server) -> None:
    server.publish(b"never announced")
    server.publish(b"1", "n")
    server.announce("n")
    server.publish(b"under a condition", "n", Nats_Expected_Last_Sequence="3")
    server.publish(b"stored anew by another", "n", Millrace_Repeat="job")
    server.announce("o", "jobs.demo.free.acme.reserved")
    server.publish(b"a gateway's id", "o")
    assert await server.pass_s(5.0) == []


async def test_ids_are_kept_as_long_as_the_server_keeps_them(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dropped_jobs, "_MAX_KNOWN", 2)
    for message_id in ("a", "b", "c"):
        server.publish(message_id.encode(), message_id)
        server.announce(message_id)
    server.publish(b"again", "a")
    server.publish(b"again", "b")
    assert await server.pass_s(5.0) == [b"again"]
    await server.pass_s(600.0)
    server.publish(b"after the window", "c")
    assert await server.pass_s(5.0) == [b"again"]
    server.announce("c")


async def test_more_than_can_be_checked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropped_jobs, "_MAX_PENDING", 2)
    server.publish(b"1")
    server.announce()
    for payload in (b"2", b"3", b"4"):
        server.publish(payload)
    assert await server.pass_s(5.0) == [b"2", b"3"]
    server.publish(b"5")
    assert await server.pass_s(5.0) == [b"2", b"3", b"5"]


async def test_more_bytes_than_can_be_kept(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dropped_jobs, "_MAX_PENDING_BYTES", 2)
    server.publish(b"1")
    server.announce()
    for payload in (b"22", b"3", b"4"):
        server.publish(payload)
    assert await server.pass_s(5.0) == [b"22"]
    counts = [vars(record).get("num_unchecked", 0) for record in caplog.records]
    assert sum(counts) == 2
    server.publish(b"55")
    assert await server.pass_s(5.0) == [b"22", b"55"]


async def test_an_announcement_while_others_are_looked_up(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def get(*_: object) -> None:
        server.announce("late")

    monkeypatch.setattr(jetstream, "get", get)
    server.publish(b"1")
    server.announce()
    server.publish(b"2")
    server.publish(b"3", "late")
    assert await server.pass_s(5.0) == [b"2"]
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_ids_of_any_length(server: Server) -> None:
    message_id = "long" * 1000
    server.publish(b"1", message_id)
    server.announce(message_id)
    server.publish(b"2", message_id)
    server.publish(b"3", message_id + "er")
    assert await server.pass_s(5.0) == [b"2"]
