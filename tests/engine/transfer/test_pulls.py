"""Pulls of blocks from one memory into another, over either way."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.engine.transfer import addresses, wire
from millrace.engine.transfer.addresses import host_and_port, listen_on_path, this_host
from millrace.engine.transfer.client import LocalConnection, PulledBlocks, PullTarget, map_blocks
from millrace.engine.transfer.memory import (
    BlockLayout,
    BlockShape,
    SharedPages,
    checksum_of,
    private_pages,
)
from millrace.engine.transfer.nixl_agent import NixlAgent
from millrace.engine.transfer.peers import BlockSplit, Peers
from millrace.engine.transfer.streams import Stream
from millrace.engine.transfer.wire import PeerError
from millrace.schemas.errors import ConfigError
from millrace.schemas.transfer import BlockPart, TransferEndpoint
from tests.engine.transfer.shelf import LAYOUT, SHAPE, SPLIT, TOKEN, Served, key
from tests.support.waiting import eventually

_WAYS = ["local", "remote", "nixl"]
_TIMEOUT_S = 10.0


@pytest.fixture
def served(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Yield a lender, with NIXL for tests with that parameter."""
    callspec = getattr(request.node, "callspec", None)
    made = Served(tmp_path, by_nixl=callspec is not None and "nixl" in callspec.params.values())
    yield made
    made.close()


@cache
def _agent() -> NixlAgent:
    """Return the agent of all pullers of this module, since it takes a while to start."""
    return NixlAgent([])


@pytest.fixture(scope="module", autouse=True)
def _ends_agent() -> Iterator[None]:
    yield
    _agent().close()
    _agent.cache_clear()


def _peers(split: BlockSplit = SPLIT, shape: BlockShape = SHAPE, way: str = "") -> Peers:
    return Peers(split, shape, this_host(), _agent() if way == "nixl" else None)


def _target(slots: list[int]) -> PullTarget:
    return PullTarget(np.zeros(SHAPE, dtype=np.uint8), slots)


def _pull(
    peers: Peers, endpoint: TransferEndpoint, numbers: list[int], target: PullTarget
) -> PulledBlocks:
    return peers.pull(endpoint, [key(number) for number in numbers], target, _TIMEOUT_S)


@pytest.mark.parametrize("way", _WAYS)
def test_blocks_come_to_their_slots(served: Served, way: str) -> None:
    numbers, slots = [3, 4, 5, 9, 8, 30], [7, 8, 9, 1, 2, 39]
    target = _target(slots)
    assert _pull(_peers(way=way), served.endpoint(way), numbers, target).num_blocks == 6
    for number, slot in zip(numbers, slots, strict=True):
        assert (target.blocks[:, slot] == served.shelf.block(number)).all()
    assert not target.blocks[:, 0].any()
    assert served.shelf.ended.acquire(timeout=_TIMEOUT_S), "nothing stays lent"


@pytest.mark.parametrize("way", _WAYS)
def test_only_the_first_that_are_there_come(served: Served, way: str) -> None:
    served.shelf.num_blocks = 5
    peers = _peers(way=way)
    for numbers, count in (([3, 4, 5], 2), ([6, 3], 0), ([1], 1)):
        target = _target(list(range(len(numbers))))
        assert _pull(peers, served.endpoint(way), numbers, target).num_blocks == count


@pytest.mark.parametrize("way", _WAYS)
def test_a_connection_is_kept_and_one_that_was_closed_is_made_anew(
    served: Served, way: str
) -> None:
    peers = _peers(way=way)
    endpoint = served.endpoint(way)
    for _ in range(3):
        _pull(peers, endpoint, [1], _target([0]))
    assert len(served._server._peers) == 1
    (first,) = served._server._peers
    first.shutdown(socket.SHUT_RDWR)
    assert _pull(peers, endpoint, [1], _target([0])).num_blocks == 1


@pytest.mark.parametrize("way", _WAYS)
def test_several_at_once(served: Served, way: str) -> None:
    peers = _peers(way=way)
    targets = [_target([slot]) for slot in range(12)]
    threads = [
        threading.Thread(target=_pull, args=(peers, served.endpoint(way), [20 + at], target))
        for at, target in enumerate(targets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, target in enumerate(targets):
        assert (target.blocks[:, at] == served.shelf.block(20 + at)).all()


@pytest.mark.parametrize("way", _WAYS)
def test_a_loan_that_is_over_too_soon_is_told(
    served: Served, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy is made, but its contents are of unknown origin."""
    # Where blocks are sent, they are sent before anybody looks at them.
    spoiled = {"local": "client.copy_runs", "nixl": "client.copy_runs"}.get(
        way, "server.checksum_of"
    )
    before = checksum_of

    def expires(*args: Any) -> Any:
        served.shelf.lent[-1].expire()
        return before(*args) if way == "remote" else None

    monkeypatch.setattr(f"millrace.engine.transfer.{spoiled}", expires)
    with pytest.raises(PeerError, match="reused the blocks"):
        _pull(_peers(way=way), served.endpoint(way), [1, 2], _target([0, 1]))


def test_a_block_that_changed_on_the_way_is_not_taken(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "millrace.engine.transfer.server.checksum_of", lambda pieces: id(pieces) % 2**32
    )
    with pytest.raises(PeerError, match="checksum does not match"):
        _pull(_peers(), served.remote, [1], _target([0]))


@pytest.mark.parametrize("way", _WAYS)
def test_a_lender_that_does_not_answer_is_waited_for_to_the_deadline(
    served: Served, way: str
) -> None:
    served.shelf.grants = False
    with pytest.raises(PeerError, match="takes too long"):
        _peers(way=way).pull(served.endpoint(way), [key(1)], _target([0]), 0.05)


@pytest.mark.parametrize("way", _WAYS)
def test_a_wrong_token_is_told_nothing(served: Served, way: str) -> None:
    wrong = msgspec.structs.replace(served.endpoint(way), token="wrong")
    with pytest.raises(PeerError):
        _pull(_peers(way=way), wrong, [1], _target([0]))
    with served.connect(way) as sock:
        sock.sendall(wire.hello("wrong", LAYOUT, by_nixl=way == "nixl"))
        assert sock.recv(100) == b""
    assert not served.shelf.lent


@pytest.mark.parametrize("way", _WAYS)
@pytest.mark.parametrize("cut", [0, 1, 30, 59, 60, 61, 71, 72, 80, 91])
def test_truncated_frame_ends_one_connection(served: Served, way: str, cut: int) -> None:
    frames = wire.hello(TOKEN, LAYOUT, by_nixl=way == "nixl") + wire.lend([key(1), key(2)])
    with served.connect(way) as sock:
        sock.sendall(frames[:cut])
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            """What it says until it sees that there is no more to come."""
    assert _pull(_peers(way=way), served.endpoint(way), [1], _target([0])).num_blocks == 1


@pytest.mark.parametrize("way", _WAYS)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(junk=st.binary(max_size=200), is_known=st.booleans())
def test_nonsense_ends_one_connection(
    served: Served, junk: bytes, is_known: bool, way: str
) -> None:
    with served.connect(way) as sock, contextlib.suppress(ConnectionError):
        hello = wire.hello(TOKEN, LAYOUT, by_nixl=way == "nixl")
        sock.sendall((hello if is_known else b"") + junk)
        with contextlib.suppress(OSError):  # it has ended the connection before
            sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            """What it says until it sees that there is no more to come."""
    assert not any(loan.places for loan in served.shelf.lent), "no keys were in it"
    peers = _peers(way=way)
    assert _pull(peers, served.endpoint(way), [1], _target([0])).num_blocks == 1
    served.shelf.lent.clear()
    peers.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(junk=st.binary(max_size=200), is_framed=st.booleans(), is_local=st.booleans())
def test_a_server_that_says_nonsense_is_not_believed(
    junk: bytes, is_framed: bool, is_local: bool, tmp_path: Path
) -> None:
    listener, path = listen_on_path(tmp_path)
    port = socket.create_server(("127.0.0.1", 0))

    def serve(listens: socket.socket) -> None:
        sock, _ = listens.accept()
        with sock, contextlib.suppress(PeerError):
            stream = Stream(sock, _TIMEOUT_S)
            stream.receive(wire.HELLO_BYTES)
            if is_framed:
                stream.send(wire.welcome([]))
                stream.receive_frame(wire.TransferFrameKind.LEND)
            stream.send(junk)

    thread = threading.Thread(target=serve, args=(listener if is_local else port,))
    thread.start()
    endpoint = TransferEndpoint(
        layout=LAYOUT,
        token=TOKEN,
        host=this_host() if is_local else "x",
        socket=str(path),
        address=f"127.0.0.1:{port.getsockname()[1]}",
    )
    with pytest.raises(PeerError):
        _pull(_peers(), endpoint, [1, 2], _target([0, 1]))
    thread.join()
    for one in (listener, port):
        one.close()
    path.unlink()


@pytest.mark.parametrize("way", ["local", "nixl"])
@pytest.mark.parametrize(
    "places", [[wire.place(1, 40)], [wire.place(0, 0)] * 3, [wire.place(1, 1), 2**32 - 1]]
)
def test_a_peer_that_lends_what_is_not_there_is_not_believed(
    served: Served, places: list[int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "millrace.engine.transfer.server.wire.lent",
        lambda _: wire.frame(
            wire.TransferFrameKind.LENT, len(places), np.array(places, "<u4").tobytes()
        ),
    )
    with pytest.raises(PeerError):
        _pull(_peers(way=way), served.endpoint(way), [1, 2], _target([0, 1]))


def test_memory_that_can_shrink_or_is_too_small_is_not_mapped() -> None:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SHAPE.size_bytes)
    with pytest.raises(PeerError, match="may shrink"):
        map_blocks(fd, SHAPE)
    os.close(fd)
    pages = SharedPages(SHAPE.size_bytes - 1)
    with pytest.raises(PeerError, match="smaller"):
        map_blocks(pages.fd, SHAPE)


def test_mapped_memory_is_read_only() -> None:
    pages = SharedPages(1 << 16)
    pages.pages[0] = 7
    with pytest.raises(PermissionError):
        mmap.mmap(pages.fd, 1 << 16)
    assert map_blocks(pages.fd, BlockShape(1, 1, 1 << 16))[0, 0, 0] == 7


@pytest.mark.parametrize("way", ["local", "nixl"])
def test_blocks_of_another_shape_are_not_taken(served: Served, way: str) -> None:
    peers = _peers(shape=SHAPE._replace(num_layers=2), way=way)
    with pytest.raises(PeerError, match="another shape"):
        peers.pull(served.endpoint(way), [key(1)], _target([0]), _TIMEOUT_S)


@pytest.mark.parametrize("way", _WAYS)
def test_blocks_that_are_split_otherwise_come_as_they_are_split_here(
    tmp_path: Path, way: str
) -> None:
    """The lender has two ranks with a head each of all layers, the puller two stages with both
    heads."""
    theirs = tuple(BlockPart(0, 3, head, 1) for head in (0, 1))
    split = BlockSplit(
        LAYOUT,
        BlockLayout(16, 2, 256, scale_bytes=0),
        (BlockPart(0, 2, 0, 2), BlockPart(2, 1, 0, 2)),
    )
    served = Served(tmp_path, by_nixl=way == "nixl", shape=BlockShape(6, 40, 8192))
    there = served.shelf
    peers = _peers(split, BlockShape(3, 50, 16384), way)
    endpoint = msgspec.structs.replace(served.endpoint(way), parts=theirs)
    target = PullTarget(np.zeros((3, 50, 16384), np.uint8), [7, 8, 1])
    assert _pull(peers, endpoint, [3, 4, 39], target).num_blocks == 3
    for number, slot in zip([3, 4, 39], target.slots, strict=True):
        by_head = there.block(number).reshape(2, 3, 16, 2, 256)
        assert np.array_equal(target.blocks[:, slot], np.stack(list(by_head), 3).reshape(3, -1))
    lacking = msgspec.structs.replace(endpoint, parts=theirs[:1])
    with pytest.raises(PeerError, match="lack layers or heads"):
        _pull(peers, lacking, [3], target)
    served.close()


def test_sockets_that_were_left_are_removed_and_others_stay(tmp_path: Path) -> None:
    listener, path = listen_on_path(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    left, old = listen_on_path(tmp_path / "run")
    left.close()  # as when its process is killed
    assert old.exists()
    third, _ = listen_on_path(tmp_path / "run")
    assert path.exists()
    assert not old.exists()
    listener.close()
    third.close()


def test_a_folder_that_others_may_use_is_not(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(PermissionError):
        listen_on_path(tmp_path / "open")
    with pytest.raises(OSError, match="too long"):
        listen_on_path(tmp_path / ("x" * 100))


@pytest.mark.parametrize("address", ["", "host", ":80", "host:", "host:x", "host:65536"])
def test_an_address_has_a_host_and_a_port(address: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        host_and_port(address)
    peers = _peers()
    endpoint = TransferEndpoint(layout=LAYOUT, token=TOKEN, address=address)
    with pytest.raises(PeerError):
        _pull(peers, endpoint, [1], _target([0]))


def test_an_address_of_either_kind() -> None:
    assert host_and_port("[::1]:80") == ("::1", 80)
    assert host_and_port("host:0") == ("host", 0)
    listener, told = addresses.listen_on_address("127.0.0.1:0")
    assert host_and_port(told)[1] == listener.getsockname()[1] != 0
    with pytest.raises(ConfigError, match="nothing can be served"):
        addresses.listen_on_address(told)
    listener.close()


async def test_a_peer_that_is_gone_takes_its_memory_along(served: Served) -> None:
    peers = _peers()
    _pull(peers, served.local, [1], _target([0]))
    (idle,) = peers._all_idle()
    assert isinstance(idle.connection, LocalConnection)
    regions = idle.connection
    served.close()
    await eventually(lambda: not regions._regions)
    assert not peers._all_idle()


def test_a_process_forks_beside_pages_that_exceed_the_machines_memory() -> None:
    pages = private_pages(2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        pages[0] = 1
        # A function to call in the child makes it a fork: subprocess would use vfork without one.
        forked = subprocess.run(["true"], preexec_fn=lambda: None)
    finally:
        pages.close()
    assert forked.returncode == 0
