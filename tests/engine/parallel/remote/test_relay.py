"""Relay between hosts: a link's contents reach the other host, and either host can end it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from millrace.engine.kernels.build import cpu_library
from millrace.engine.kernels.ranks import RanksFailedError
from millrace.engine.kernels.stage_link import LinkShape, StageLink, link_memory
from millrace.engine.parallel.remote import connection as wire
from millrace.engine.parallel.remote.connection import GroupFrameKind, RankConnection
from millrace.engine.parallel.remote.relay import LinkEnds, RankEnd, Relay

WAIT_S = 30.0
FORTH = LinkShape(num_writers=1, num_readers=1, num_slots=2, part_bytes=200)
BACK = LinkShape(num_writers=2, num_readers=1, num_slots=2, part_bytes=200)


def link(shape: LinkShape) -> tuple[list[StageLink], StageLink]:
    """Return the writers and the reader of a link."""
    fd = link_memory(shape)
    library = cpu_library()
    try:
        writers = [
            StageLink(library, fd, shape, index=index, timeout_s=WAIT_S)
            for index in range(shape.num_writers)
        ]
        return writers, StageLink(library, fd, shape, index=0, timeout_s=WAIT_S)
    finally:
        os.close(fd)


class End(NamedTuple):
    """Relay of a host, and the other ends of its links."""

    relay: Relay
    writers: list[StageLink]
    reader: StageLink
    rank: socket.socket


def end(sock: socket.socket, written: LinkShape, read: LinkShape) -> End:
    """Start a relay that sends contents ``written`` at its host, and writes contents ``read``
    there."""
    connection = RankConnection(sock, WAIT_S)
    writers, source = link(written)
    targets, reader = link(read)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(WAIT_S)
    relay = Relay(
        connection,
        LinkEnds(source, written.num_writers, targets),
        [RankEnd(theirs, lambda: "the rank ended")],
    )
    relay.start()
    return End(relay, writers, reader, ours)


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
    with one, other:
        other.settimeout(WAIT_S)
        yield one, other


@pytest.fixture
def ends(sockets: tuple[socket.socket, socket.socket]) -> Iterator[tuple[End, End]]:
    """Yield the lead's end and the stage's end."""
    pair = end(sockets[0], FORTH, BACK), end(sockets[1], BACK, FORTH)
    yield pair
    for one in pair:
        one.relay.close()
        one.rank.close()


def test_messages_and_packets_go_both_ways(ends: tuple[End, End]) -> None:
    lead, stage = ends
    for number in range(5):
        message = bytes([number]) * number
        lead.writers[0].write(number, message)
        stage.reader.wait_written(number, bound=True)
        assert bytes(stage.reader.part(number)) == message
        stage.reader.done(number)
        for index, writer in enumerate(stage.writers):
            writer.write(number, message, bytes([index]))
        lead.reader.wait_written(number, bound=True)
        parts = [bytes(lead.reader.part(number, index)) for index in range(2)]
        assert parts == [message + b"\x00", message + b"\x01"]
        lead.reader.done(number)
    for sender, receiver in ((lead, stage), (stage, lead)):
        sender.rank.send(b"packet")
        assert receiver.rank.recv(100) == b"packet"


def test_end_of_one_host_is_reported_to_the_other_with_its_reason(ends: tuple[End, End]) -> None:
    lead, stage = ends
    stage.rank.close()
    assert lead.relay.ended.wait(WAIT_S)
    assert stage.relay.why == "the rank ended"
    assert lead.relay.why.endswith(" says: the rank ended")
    assert lead.rank.recv(100) == b"", "the watcher of the rank sees its end"
    lead.relay.close()
    with pytest.raises(RanksFailedError):
        lead.reader.wait_written(0, bound=False)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (wire.header(GroupFrameKind.MESSAGE, number=1), "an unexpected message"),
        (wire.header(GroupFrameKind.MESSAGE, at=2), "an unexpected message"),
        (wire.header(GroupFrameKind.MESSAGE, 201), "201 bytes where 200 are most"),
        (wire.header(GroupFrameKind.CONTROL, at=1), "an unknown rank"),
        (wire.header(GroupFrameKind.ASSIGNMENT), "an invalid frame"),
        (bytes(wire.HEADER_BYTES), "an invalid frame"),
        (b"", "has closed the connection"),
    ],
    ids=range(7),
)
def test_malformed_frame_ends_the_relay(
    sockets: tuple[socket.socket, socket.socket], frame: bytes, why: str
) -> None:
    lead = end(sockets[0], FORTH, BACK)
    sockets[1].sendall(frame)
    sockets[1].shutdown(socket.SHUT_WR)
    assert lead.relay.ended.wait(WAIT_S)
    assert why in lead.relay.why
    assert lead.rank.recv(100) == b""
    lead.relay.close()
    lead.rank.close()
