"""The journal, objects in it, and word of results, on memory and on nats-server alike."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator

import pytest

from millrace.bus import subjects
from millrace.bus.api import Bus
from millrace.bus.store.objects import JournalConflictError, ObjectLostError
from millrace.schemas.errors import BusUnavailableError, PayloadTooLargeError
from millrace.schemas.jobs import JobResult
from tests.bus.conftest import Broker
from tests.support.waiting import eventually

CHUNK_BYTES = 128 * 1024
LOG = subjects.batch_log("b1")


def test_an_open_batch_is_named_by_its_tenant_and_id() -> None:
    name = subjects.open_batch("acme corp", "batch_1.2")
    assert subjects.open_batch_of(name) == ("acme corp", "batch_1.2")
    assert subjects.open_batch() == "batches.open.*.*"
    assert {subjects.journal_stream(name), subjects.journal_stream(LOG)} == {"BATCHES"}
    assert subjects.journal_stream(subjects.object_entry("t")) == "FILES"


async def pieces(*sizes: int) -> AsyncIterator[bytes]:
    for number, size in enumerate(sizes):
        yield bytes([number]) * size


async def read_all(bus: Bus, owner: str, name: str) -> bytes:
    stored = await bus.objects.info(owner, name)
    assert stored is not None
    return b"".join([chunk async for chunk in bus.objects.read(stored)])


class TestJournal:
    async def test_entries_come_in_order_and_only_behind_the_last(self, bus: Bus) -> None:
        assert await bus.journal.last(LOG) is None
        assert await bus.journal.next(LOG, 0) is None
        first = await bus.journal.append(LOG, b"one", after=0)
        await bus.journal.append(subjects.batch_log("other"), b"x", after=0)
        second = await bus.journal.append(LOG, b"two", after=first)
        for wrong in (0, first):
            with pytest.raises(JournalConflictError):
                await bus.journal.append(LOG, b"three", after=wrong)
        entry = await bus.journal.next(LOG, 0)
        assert entry is not None
        assert (entry.sequence, entry.payload) == (first, b"one")
        entry = await bus.journal.next(LOG, first)
        assert entry is not None
        assert (entry.sequence, entry.payload) == (second, b"two")
        assert await bus.journal.last(LOG) == entry
        assert await bus.journal.next(LOG, second) is None

    async def test_an_entry_may_take_the_place_of_those_before(self, bus: Bus) -> None:
        name = subjects.batch_state("acme corp", "b1")
        last = 0
        for payload in (b"one", b"two"):
            last = await bus.journal.append(name, payload, after=last, replace=True)
        entry = await bus.journal.next(name, 0)
        assert entry is not None
        assert (entry.sequence, entry.payload) == (last, b"two")

    async def test_many_names_at_once(self, bus: Bus) -> None:
        names = [subjects.batch_state("t.1", f"b{number}") for number in range(3)]
        for name in (*names, subjects.batch_state("other", "b9")):
            await bus.journal.append(name, name.encode(), after=0)
        assert await bus.journal.names(subjects.batch_state("t.1")) == names
        assert await bus.journal.names(subjects.batch_state("nobody")) == []
        found = await bus.journal.last_of([names[0], names[2], LOG])
        assert {name: entry.payload for name, entry in found.items()} == {
            names[0]: names[0].encode(),
            names[2]: names[2].encode(),
        }
        assert await bus.journal.last_of([LOG]) == {}
        assert await bus.journal.last_of([]) == {}

    async def test_a_dropped_name_starts_again(self, bus: Bus) -> None:
        last = await bus.journal.append(LOG, b"one", after=0)
        await bus.journal.drop(LOG)
        await bus.journal.drop(LOG)
        assert await bus.journal.last(LOG) is None
        with pytest.raises(JournalConflictError):
            await bus.journal.append(LOG, b"two", after=last)
        await bus.journal.append(LOG, b"two", after=0)

    async def test_of_many_who_append_at_once_one_wins(self, bus: Bus, broker: Broker) -> None:
        others = [await broker.connect(f"c{number}") for number in range(4)]
        outcomes = await asyncio.gather(
            *(other.journal.append(LOG, other.__repr__().encode(), after=0) for other in others),
            return_exceptions=True,
        )
        assert sum(isinstance(outcome, int) for outcome in outcomes) == 1
        assert sum(isinstance(outcome, JournalConflictError) for outcome in outcomes) == 3

    async def test_too_large(self, bus: Bus) -> None:
        with pytest.raises(PayloadTooLargeError):
            await bus.journal.append(LOG, bytes(bus.max_payload_bytes + 1), after=0)


class TestObjects:
    async def test_bytes_come_out_as_they_went_in(self, bus: Bus, broker: Broker) -> None:
        sizes = (1, CHUNK_BYTES * 2, 0, 17, CHUNK_BYTES - 3)
        whole = b"".join([piece async for piece in pieces(*sizes)])
        stored = await bus.objects.put("acme corp", "file-1", pieces(*sizes), {"a": "ü"})
        assert stored.size_bytes == len(whole)
        assert stored.num_chunks == -(-len(whole) // CHUNK_BYTES)
        assert stored.sha256 == hashlib.sha256(whole).hexdigest()
        assert stored.metadata == {"a": "ü"}
        other = await broker.connect("other")
        assert await other.objects.info("acme corp", "file-1") == stored
        assert await read_all(other, "acme corp", "file-1") == whole
        assert await other.objects.info("other", "file-1") is None

    async def test_an_empty_object_is_read_as_empty(self, bus: Bus) -> None:
        await bus.objects.put("t", "empty", pieces(), {})
        assert await read_all(bus, "t", "empty") == b""

    async def test_the_first_object_of_a_name_stays(self, bus: Bus) -> None:
        first = await bus.objects.put("t", "file-1", pieces(5), {})
        assert await bus.objects.put("t", "file-1", pieces(9, 9), {}) == first
        assert await read_all(bus, "t", "file-1") == bytes(5)
        assert len(await bus.journal.names("files.chunks.*")) == 1

    async def test_a_broken_upload_leaves_nothing(self, bus: Bus) -> None:
        async def broken() -> AsyncIterator[bytes]:
            yield bytes(CHUNK_BYTES + 1)
            raise ConnectionError

        with pytest.raises(ConnectionError):
            await bus.objects.put("t", "file-1", broken(), {})
        assert await bus.objects.info("t", "file-1") is None
        assert await bus.journal.names("files.chunks.*") == []

    @pytest.mark.parametrize(
        "error",
        [asyncio.CancelledError(), BusUnavailableError("away"), JournalConflictError()],
        ids=["cancelled", "cut off", "sent again"],
    )
    async def test_an_entry_stored_without_confirmation_keeps_its_chunks(
        self, bus: Bus, monkeypatch: pytest.MonkeyPatch, error: BaseException
    ) -> None:
        """Cancelled, cut off or sent again while it was under way."""
        append = bus.journal.append

        async def unheard(name: str, payload: bytes, *, after: int) -> int:
            sequence = await append(name, payload, after=after)
            if name == subjects.object_entry("t", "file-1"):
                raise error
            return sequence

        monkeypatch.setattr(bus.journal, "append", unheard)
        with contextlib.suppress(asyncio.CancelledError, BusUnavailableError):
            await bus.objects.put("t", "file-1", pieces(5, CHUNK_BYTES), {})
        assert len(await read_all(bus, "t", "file-1")) == 5 + CHUNK_BYTES
        assert (await bus.objects.put("t", "file-1", pieces(9), {})).size_bytes == 5 + CHUNK_BYTES
        assert len(await read_all(bus, "t", "file-1")) == 5 + CHUNK_BYTES

    async def test_listed_and_deleted(self, bus: Bus) -> None:
        for name in ("b", "a", "c"):
            await bus.objects.put("t", name, pieces(3), {})
        assert await bus.objects.names("t") == ["a", "b", "c"]
        assert [one.name for one in await bus.objects.infos("t", ["c", "nothing", "a"])] == [
            "c",
            "a",
        ]
        stored = await bus.objects.info("t", "b")
        assert stored is not None
        assert await bus.objects.delete("t", "b")
        assert not await bus.objects.delete("t", "b")
        assert await bus.objects.names("t") == ["a", "c"]
        with pytest.raises(ObjectLostError):
            [chunk async for chunk in bus.objects.read(stored)]


class TestWatchedResults:
    async def test_a_watcher_hears_of_its_tenants_stored_results(
        self, bus: Bus, broker: Broker
    ) -> None:
        request_ids: list[str] = []
        watch = await bus.results.watch("acme corp", request_ids.append)
        other = await broker.connect("worker")
        for tenant, request_id in (("acme corp", "batch_1.2"), ("other", "r"), ("acme corp", "r9")):
            await other.results.store(
                JobResult(request_id=request_id, tenant=tenant, model="m", status="done")
            )
        await eventually(lambda: request_ids == ["batch_1.2", "r9"])
        await watch.close()
        await other.results.store(
            JobResult(request_id="late", tenant="acme corp", model="m", status="done")
        )
        await asyncio.sleep(0)
        assert request_ids == ["batch_1.2", "r9"]
