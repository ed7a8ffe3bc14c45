"""Redis's protocol: packed commands are readable for a server, and replies come whole in any
pieces."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.runtime.redis.wire import ErrorReply, MalformedReplyError, ReplyReader, pack

_SIMPLE = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.binary(max_size=64),
    st.text(st.characters(codec="ascii", exclude_characters="\r\n"), max_size=16).map(ErrorReply),
)
_REPLIES = st.lists(st.recursive(_SIMPLE, lambda of: st.lists(of, max_size=4), max_leaves=12))


def _encoded(reply: Any) -> bytes:
    match reply:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % reply
        case bytes():
            return b"$%d\r\n%b\r\n" % (len(reply), reply)
        case ErrorReply():
            return b"-%b\r\n" % reply.text.encode()
        case _:
            return b"*%d\r\n%b" % (len(reply), b"".join(map(_encoded, reply)))


@given(_REPLIES, st.lists(st.integers(1, 40)))
def test_replies_come_whole_in_any_pieces(replies: list[Any], sizes: list[int]) -> None:
    data = b"".join(map(_encoded, replies))
    reader, read, at = ReplyReader(), [], 0
    for size in [*sizes, len(data)]:
        read += reader.feed(data[at : at + size])
        at += size
    assert read == replies


def test_a_status_is_its_text_and_an_array_may_be_none() -> None:
    assert ReplyReader().feed(b"+OK\r\n*-1\r\n*0\r\n") == [b"OK", None, []]


def test_a_long_string_is_not_looked_at_before_it_is_there() -> None:
    reader = ReplyReader()
    assert reader.feed(b"$1000000\r\n") == []
    for _ in range(1_000):
        assert reader.feed(b"\r\n" * 500) == []
    assert reader.feed(b"\r\n:1\r\n") == [b"\r\n" * 500_000, 1]


@pytest.mark.parametrize("data", [b"HTTP/1.1 400\r\n", b"$x\r\n", b":\r\n", b"\r\n", b"*y\r\n"])
def test_what_is_no_reply_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedReplyError):
        ReplyReader().feed(data)


@given(st.lists(st.one_of(st.binary(), st.text(), st.integers(), st.floats()), min_size=1))
def test_a_command_is_an_array_of_its_arguments(command: list[Any]) -> None:
    expected = [one if isinstance(one, bytes) else str(one).encode() for one in command]
    assert ReplyReader().feed(pack(command)) == [expected]
