"""Journal on JetStream: a name is a subject, and its last sequence guards every append."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from nats.aio.msg import Msg

from millrace.bus import subjects
from millrace.bus.nats import jetstream
from millrace.bus.nats.connection import Connection, status_of
from millrace.bus.store.journal import JournalConflictError, JournalEntry
from millrace.schemas.errors import BusUnavailableError

_SEQUENCE = "Nats-Sequence"
_SUBJECT = "Nats-Subject"


class NatsJournal:
    """See ``bus.store.journal.Journal``."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def append(self, name: str, payload: bytes, *, after: int, replace: bool = False) -> int:
        stream, headers = subjects.journal_stream(name), {"Nats-Rollup": "sub"} if replace else {}
        sequence = await jetstream.store_after(
            self._connection, stream, name, payload, after, headers
        )
        if sequence is None:
            raise JournalConflictError
        return sequence

    async def next(self, name: str, after: int) -> JournalEntry | None:
        body = {"seq": after + 1, "next_by_subj": name}
        request = f"{jetstream.API}.DIRECT.GET.{subjects.journal_stream(name)}"
        answer, _ = await self._connection.request_until(request, msgspec.json.encode(body))
        status = status_of(answer)
        if status == jetstream.NOT_FOUND:
            return None
        if status is not None:
            raise BusUnavailableError(f"The message bus could not look an entry up ({status}).")
        return _entry(answer)

    async def last(self, name: str) -> JournalEntry | None:
        stream = subjects.journal_stream(name)
        found = await jetstream.newest(self._connection, stream, name)
        return None if found is None else JournalEntry(sequence=found.seq, payload=found.payload)

    async def last_of(self, names: Sequence[str]) -> dict[str, JournalEntry]:
        if not names:
            return {}
        stream = subjects.journal_stream(names[0])
        messages = await jetstream.newest_of_each(self._connection, stream, names)
        return {_header(message, _SUBJECT): _entry(message) for message in messages}

    async def names(self, pattern: str) -> list[str]:
        stream = subjects.journal_stream(pattern)
        found = await jetstream.subjects_in(self._connection, stream, pattern)
        return sorted(found)

    async def drop(self, name: str) -> None:
        request = f"STREAM.PURGE.{subjects.journal_stream(name)}"
        await jetstream.call(self._connection, request, {"filter": name})


def _entry(message: Msg) -> JournalEntry:
    return JournalEntry(sequence=int(_header(message, _SEQUENCE)), payload=message.data)


def _header(message: Msg, name: str) -> str:
    assert message.headers is not None
    return str(message.headers[name])
