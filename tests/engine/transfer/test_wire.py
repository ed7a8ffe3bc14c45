"""Frames of transfers: malformed bytes of a peer are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.transfer import wire
from millrace.engine.transfer.memory import BlockShape
from millrace.engine.transfer.wire import PeerError

_KINDS = st.sampled_from(wire.TransferFrameKind)


@given(st.binary(min_size=wire.HEADER_BYTES, max_size=wire.HEADER_BYTES), _KINDS)
def test_a_header_is_refused_or_bounded(data: bytes, expected: wire.TransferFrameKind) -> None:
    try:
        kind, count, size = wire.parse_header(data, expected)
    except PeerError:
        return
    assert kind is expected
    assert count <= wire.MAX_KEYS
    assert size <= 16 * wire.MAX_KEYS


@given(_KINDS, st.integers(0, 2**32 - 1), _KINDS)
def test_a_frame_of_another_kind_or_too_many_items_is_refused(
    kind: wire.TransferFrameKind, count: int, expected: wire.TransferFrameKind
) -> None:
    header = wire.frame(kind, count)
    most = {
        wire.TransferFrameKind.WELCOME: 2,
        wire.TransferFrameKind.DONE: 0,
        wire.TransferFrameKind.OVER: 1,
    }.get(kind, wire.MAX_KEYS)
    if kind is expected and count <= most:
        assert wire.parse_header(header, expected)[:2] == (kind, count)
    else:
        with pytest.raises(PeerError):
            wire.parse_header(header, expected)


@given(st.binary(min_size=wire.HELLO_BYTES, max_size=wire.HELLO_BYTES))
def test_a_hello_is_not_guessed(data: bytes) -> None:
    with pytest.raises(PeerError, match="no right"):
        wire.check_hello(data, "token", "layout")


@given(st.text(), st.text())
def test_hello_is_checked_for_token_and_layout(token: str, layout: str) -> None:
    wire.check_hello(wire.hello(token, layout), token, layout)
    with pytest.raises(PeerError, match="no right"):
        wire.check_hello(wire.hello(token + "x", layout), token, layout)
    with pytest.raises(PeerError, match="another layout"):
        wire.check_hello(wire.hello(token, layout + "x"), token, layout)


def test_another_version_is_refused() -> None:
    hello = bytearray(wire.hello("token", "layout"))
    hello[8] += 1
    with pytest.raises(PeerError, match="another version"):
        wire.check_hello(bytes(hello), "token", "layout")


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=20))
def test_keys_come_as_they_were_sent(keys: list[bytes]) -> None:
    data = wire.lend(keys)
    _, _, size = wire.parse_header(data[: wire.HEADER_BYTES], wire.TransferFrameKind.LEND)
    assert wire.parse_keys(data[wire.HEADER_BYTES :]) == keys
    assert size == len(data) - wire.HEADER_BYTES


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2**31 - 1)), max_size=20))
def test_places_come_as_they_were_sent(where: list[tuple[int, int]]) -> None:
    data = wire.lent([wire.place(*one) for one in where])
    places = wire.parse_places(data[wire.HEADER_BYTES :])
    assert [wire.region_and_number(place) for place in places] == where


def test_shapes_come_as_they_were_sent() -> None:
    shapes = [BlockShape(3, 2**31, 2**40), BlockShape(1, 2, 3)]
    assert wire.parse_shapes(wire.welcome(shapes)[wire.HEADER_BYTES :]) == shapes


@given(
    st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=2
    ),
    st.binary(max_size=200),
)
def test_an_agent_comes_as_it_was_sent(regions: list[tuple[int, int]], metadata: bytes) -> None:
    shapes = [BlockShape(3, num_blocks, 2**40) for _, num_blocks in regions]
    said = wire.Agent(shapes, [address for address, _ in regions], metadata)
    data = wire.agent(said)
    _, _, size = wire.parse_header(data[: wire.HEADER_BYTES], wire.TransferFrameKind.AGENT)
    assert size == len(data) - wire.HEADER_BYTES
    assert wire.parse_agent(data[wire.HEADER_BYTES :]) == said


@given(st.binary(max_size=200))
def test_an_agent_without_regions_or_that_is_cut_is_refused(body: bytes) -> None:
    count = int.from_bytes(body[:4], "little")
    if len(body) >= 4 and 0 < count <= wire.MAX_REGIONS and len(body) >= 4 + 32 * count:
        assert len(wire.parse_agent(body).shapes) == count
    else:
        with pytest.raises(PeerError, match="did not announce its memory"):
            wire.parse_agent(body)


@pytest.mark.parametrize("by_nixl", [False, True])
def test_a_hello_says_how_it_reads(by_nixl: bool) -> None:
    assert wire.check_hello(wire.hello("t", "l", by_nixl=by_nixl), "t", "l") is by_nixl
