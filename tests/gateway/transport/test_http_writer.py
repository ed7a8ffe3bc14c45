"""Parts of a response that are written in one piece."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from uvicorn.protocols.http.flow_control import FlowControl

from millrace.gateway.transport.connection_writer import HttpWriter


class _Transport:
    """Notes each write, and ``None`` when it is closed."""

    def __init__(self) -> None:
        self.written: list[bytes | None] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.written.append(None)

    def is_closing(self) -> bool:
        return None in self.written


@pytest.fixture
def transport() -> _Transport:
    return _Transport()


@pytest.fixture
def writer(transport: _Transport) -> HttpWriter:
    lent = cast("asyncio.Transport", transport)
    return HttpWriter(lent, FlowControl(cast("Any", lent)), "1.1")


def test_what_is_held_leaves_in_one_piece_by_whatever_way(
    writer: HttpWriter, transport: _Transport
) -> None:
    writer.write([b"early"])
    writer.hold()
    writer.transport.write(b"HTTP/1.1 200 OK\r\n\r\n")
    writer.write([b"first", b"second"])
    writer.hold()  # it is held already
    writer.transport.write(b"0\r\n\r\n")
    assert transport.written == [b"5\r\nearly\r\n"]
    writer.release()
    writer.write([b"late"])
    whole = b"HTTP/1.1 200 OK\r\n\r\nb\r\nfirstsecond\r\n0\r\n\r\n"
    assert transport.written[1:] == [whole, b"4\r\nlate\r\n"]


def test_nothing_is_written_where_nothing_was_held(
    writer: HttpWriter, transport: _Transport
) -> None:
    writer.release()
    writer.hold()
    writer.release()
    assert transport.written == []


def test_a_connection_is_closed_behind_what_is_held(
    writer: HttpWriter, transport: _Transport
) -> None:
    writer.hold()
    writer.transport.write(b"the end")
    assert writer.is_writable
    writer.transport.close()
    assert transport.written == [b"the end", None]
    assert not writer.is_writable
