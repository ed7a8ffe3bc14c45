"""Accounts permit the bytes that publishers' libraries of other languages send.

``sent/`` has what tests/clients/publishers sent to a nats-server with accounts: a job, requests for
its result by the product's subject and by the stream's, a cancel, and a request for the result of
another tenant. Lines end in CRLF on the wire; the password stands as PASSWORD.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.bus.nats import connect
from millrace.bus.nats.permissions import Part
from millrace.schemas.control import Cancel
from millrace.schemas.jobs import JobResult
from tests.support.nats.users import ACME, NatsWithUsers, nats_with_users
from tests.support.waiting import eventually

SENT = Path(__file__).parent / "sent"
CLIENTS = {"async-nats": "rust", "nats-js": "node", "jnats": "java"}
_MESSAGE = re.compile(rb"H?MSG (\S+) \d+ (?:\d+ )?(\d+)\r\n")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsWithUsers]:
    with nats_with_users(tmp_path_factory.mktemp("nats")) as made:
        yield made


class Replayed:
    """Connection that sends recorded bytes and reads the server's answer."""

    def __init__(self, sent: bytes) -> None:
        self.sent = sent
        self.heard = b""

    async def run(self, server: NatsWithUsers, num_answers: int) -> None:
        host, _, port = server.url.removeprefix("nats://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(self.sent)
            async with asyncio.timeout(10.0):
                while len(self.answers()) < num_answers or b"-ERR" not in self.heard:
                    self.heard += await reader.read(65_536)
        finally:
            writer.close()

    def answers(self) -> dict[str, dict[str, Any]]:
        """The bodies of whole answers, by the subjects that were asked."""
        asked = {
            reply: subject for subject, reply in re.findall(rb"PUB (\S+) (_INBOX\S+) \d", self.sent)
        }
        found = {}
        for match in _MESSAGE.finditer(self.heard):
            whole = self.heard[match.end() : match.end() + int(match[2])]
            if len(whole) == int(match[2]):
                body = whole[whole.index(b"{") :]
                found[asked[match[1]].decode()] = json.loads(body)
        return found


@pytest.mark.parametrize("client", CLIENTS)
async def test_what_a_library_sends_is_permitted_and_answered(
    server: NatsWithUsers, client: str
) -> None:
    scheduler = await connect(server.config_of("scheduler"), "test", part=Part.SCHEDULER)
    request_id = f"{CLIENTS[client]}-1"
    cancels: list[Cancel] = []
    result = JobResult(request_id=request_id, tenant="acme", model="m", status="done", text="ok")

    async def find(tenant: str, request_id: str) -> JobResult:
        found = await scheduler.results.fetch(tenant, request_id)
        assert found is not None
        return found

    await scheduler.results.store(result)
    await scheduler.control.serve_results(find)
    await scheduler.control.subscribe_owner_cancels(cancels.append)
    lines = (SENT / f"{client}.txt").read_bytes().replace(b"\n", b"\r\n")
    replayed = Replayed(lines.replace(b"PASSWORD", server.passwords[ACME.user].encode()))
    await replayed.run(server, num_answers=3)
    answers = replayed.answers()
    assert answers["jobs.demo.free.acme"]["stream"] == "JOBS"
    stored = answers[f"$JS.API.DIRECT.GET.RESULTS.results.acme.{request_id}"]
    assert stored == answers[f"ctl.result.acme.{request_id}"]
    assert (stored["request_id"], stored["text"]) == (request_id, "ok")
    await eventually(lambda: [one.tenant for one in cancels] == ["acme"])
    refused = re.findall(rb"-ERR '([^']+)'", replayed.heard)
    assert [text.split(b'"')[1].decode() for text in refused] == [f"ctl.result.shop.{request_id}"]
    await scheduler.close()
