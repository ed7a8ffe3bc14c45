"""Frames between hosts: malformed bytes are refused, and no host can keep another one waiting."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.parallel.remote import connection as handshake
from millrace.engine.parallel.remote import connection as wire
from millrace.engine.parallel.remote.connection import (
    GroupFrameKind,
    RankConnection,
    StageAssignment,
    StageError,
    StageRefusedError,
)
from millrace.engine.transfer.streams import Stream

LIMITS = wire.computing(message_bytes=1000)
SILENCE_S = 30.0
FRAMES = st.lists(
    st.tuples(
        st.sampled_from([GroupFrameKind.MESSAGE, GroupFrameKind.CONTROL, GroupFrameKind.END]),
        st.binary(max_size=1000),
        st.integers(0, 2**16 - 1),
        st.integers(0, 2**64 - 1),
    ),
    max_size=5,
)


@contextmanager
def receiving(silence_s: float = SILENCE_S) -> Iterator[tuple[RankConnection, socket.socket]]:
    """Yield a connection that receives frames of a computing group, and its other end."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        other = stack.enter_context(socket.create_connection(listener.getsockname()))
        connection = RankConnection(listener.accept()[0], silence_s)
        stack.callback(connection.close)
        connection.limits = LIMITS
        yield connection, other


@settings(deadline=None, max_examples=50)
@given(frames=FRAMES, cuts=st.lists(st.integers(0, 6000), max_size=8))
def test_frames_come_as_they_were_sent_however_they_are_split(
    frames: list[tuple[GroupFrameKind, bytes, int, int]], cuts: list[int]
) -> None:
    sent = b"".join(
        wire.header(kind, len(body), at=at, number=number) + body
        for kind, body, at, number in frames
    )
    places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    with receiving() as (connection, other):
        other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for begin, end in itertools.pairwise(places):
            other.sendall(sent[begin:end])
        for kind, body, at, number in frames:
            assert connection.receive() == ((kind, at, number, len(body)), body)


@settings(deadline=None, max_examples=50)
@given(frames=FRAMES.filter(bool), cut=st.integers(1, 1000))
def test_a_frame_that_is_cut_off_is_an_error(
    frames: list[tuple[GroupFrameKind, bytes, int, int]], cut: int
) -> None:
    kind, body, at, number = frames[0]
    whole = wire.header(kind, len(body), at=at, number=number) + body
    with receiving() as (connection, other):
        other.sendall(whole[: -min(cut, len(whole))])
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(StageError, match="closed the connection"):
            connection.receive()


@settings(deadline=None, max_examples=100)
@given(data=st.binary(min_size=wire.HEADER_BYTES, max_size=200))
def test_nonsense_is_an_error(data: bytes) -> None:
    with receiving() as (connection, other):
        other.sendall(data)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(StageError):
            connection.receive()


@given(kind=st.sampled_from(GroupFrameKind), size=st.integers(0, 2**64 - 1))
def test_a_header_is_refused_or_bounded(kind: GroupFrameKind, size: int) -> None:
    header = wire.header(kind, size)
    if size <= LIMITS.get(kind, -1):
        assert wire.parse_header(header, LIMITS) == (kind, 0, 0, size)
    else:
        with pytest.raises(StageError, match=r"an invalid frame|are most"):
            wire.parse_header(header, LIMITS)


def test_a_host_that_says_nothing_is_given_up() -> None:
    with (
        receiving(silence_s=0.05) as (connection, _),
        pytest.raises(StageError, match="takes too long"),
    ):
        connection.receive()


@given(st.binary(max_size=200))
def test_an_assignment_is_not_guessed(body: bytes) -> None:
    with pytest.raises(StageError, match="an invalid frame"):
        wire.decode(body, StageAssignment)


@given(st.binary(max_size=300))
def test_reported_reason_is_one_printable_line(body: bytes) -> None:
    assert wire.text(body).isprintable()


def meet(of_stage: str, of_lead: str) -> list[Exception | None]:
    """Return the handshake errors of the stage and of the lead, None for success."""
    stage, lead = socket.socketpair()
    outcomes: list[Exception | None] = [None, None]

    def welcome() -> None:
        try:
            handshake.welcome(Stream(lead, SILENCE_S), of_lead)
        except StageError as error:
            outcomes[1] = error

    with stage, lead:
        thread = threading.Thread(target=welcome)
        thread.start()
        try:
            handshake.greet(Stream(stage, SILENCE_S), of_stage)
        except StageError as error:
            outcomes[0] = error
        thread.join()
    return outcomes


@settings(deadline=None, max_examples=25)
@given(st.text(), st.text())
def test_both_sides_know_whether_the_token_is_the_same(one: str, other: str) -> None:
    assert meet(one, one) == [None, None]
    for outcome in meet(one, other + "x"):
        assert (outcome is None) == (one == other + "x")
        assert outcome is None or "token" in str(outcome)


@given(data=st.binary(max_size=200))
@settings(deadline=None)
def test_a_stranger_is_turned_away(data: bytes) -> None:
    for side in (handshake.greet, handshake.welcome):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(StageError):
                side(Stream(ours, SILENCE_S), "")


def test_another_version_is_refused_by_both(monkeypatch: pytest.MonkeyPatch) -> None:
    hello, version = handshake._hello(bytes(32)), wire.VERSION
    monkeypatch.setattr(handshake, "VERSION", version + 1)
    for side in (handshake.greet, handshake.welcome):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(hello)
            with pytest.raises(StageRefusedError, match=f"version {version} of this protocol"):
                side(Stream(ours, SILENCE_S), "")
