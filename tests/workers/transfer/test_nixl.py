"""What goes wrong with reads by NIXL costs a pull, and neither a process nor bytes of others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.schemas.errors import ConfigError
from millrace.schemas.transfer import TransferEndpoint
from millrace.workers.transfer import nixl_agent, nixl_client, wire
from millrace.workers.transfer.addresses import this_host
from millrace.workers.transfer.client import Target
from millrace.workers.transfer.errors import PeerError
from millrace.workers.transfer.nixl_agent import NixlAgent
from millrace.workers.transfer.peers import Peers
from millrace.workers.transfer.runs import copy_runs
from millrace.workers.transfer.streams import Stream
from tests.support.waiting import eventually
from tests.workers.transfer.shelf import LAYOUT, SHAPE, SPLIT, TOKEN, Served, key, serve_apart

_SPAWN = multiprocessing.get_context("spawn")
_TIMEOUT_S = 10.0
_START_S = 60.0
_NUM_BLOCKS = 4000
_LARGE = SHAPE._replace(num_blocks=_NUM_BLOCKS)


@pytest.fixture(scope="module")
def agent() -> NixlAgent:
    """That of who pulls."""
    return NixlAgent([])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("served"), by_nixl=True)
    yield made
    made.close()


class _Apart:
    """A lender in a process of its own."""

    def __init__(self, process: BaseProcess, endpoint: TransferEndpoint) -> None:
        self.process = process
        self.endpoint = endpoint

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(_TIMEOUT_S)


@contextlib.contextmanager
def _apart(folder: Path) -> Iterator[_Apart]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=serve_apart, args=(theirs, folder, _NUM_BLOCKS), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(_START_S)
        yield _Apart(process, ours.recv())
    finally:
        process.kill()
        process.join(_TIMEOUT_S)


def _peers(agent: NixlAgent, num_blocks: int = SHAPE.num_blocks) -> Peers:
    return Peers(SPLIT, SHAPE._replace(num_blocks=num_blocks), this_host(), agent)


def _pull(
    peers: Peers, endpoint: TransferEndpoint, count: int, timeout_s: float = _TIMEOUT_S
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The first blocks, which are read from there."""
    target = Target(np.zeros((3, count, 4096), np.uint8), list(range(count)))
    keys = [key(number) for number in range(count)]
    assert peers.pull(endpoint, keys, target, timeout_s).num_blocks == count
    return target.blocks


def _num_reads(agent: NixlAgent) -> int:
    """That have not ended."""
    return sum(remote.num_reads for remote in agent._remotes.values())


def _at_the_first_copy(monkeypatch: pytest.MonkeyPatch, action: Any) -> None:
    """Do something in the middle of a pull, of which a few blocks are read at a time."""
    monkeypatch.setattr(nixl_client, "SCRATCH_BYTES", 8 * SHAPE.block_bytes)
    is_first = iter([True])

    def copies(*args: Any) -> None:
        if next(is_first, False):
            action()
        copy_runs(*args)

    monkeypatch.setattr(nixl_client, "copy_runs", copies)


def test_more_than_fits_into_scratch_comes_in_parts(
    tmp_path: Path, agent: NixlAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of scattered blocks, too."""
    monkeypatch.setattr(nixl_client, "SCRATCH_BYTES", 8 * SHAPE.block_bytes)
    served = Served(tmp_path, by_nixl=True, shape=SHAPE._replace(num_blocks=101))
    peers = _peers(agent, 101)
    assert (_pull(peers, served.nixl, 101) == served.shelf.regions[1].blocks).all()
    numbers = [int(one) for one in np.random.default_rng(5).permutation(101)]
    target = Target(np.zeros((3, 101, 4096), np.uint8), numbers[::-1])
    peers.pull(served.nixl, [key(one) for one in numbers], target, _TIMEOUT_S)
    for number, slot in zip(numbers, target.slots, strict=True):
        assert (target.blocks[:, slot] == served.shelf.block(number)).all()
    assert not _num_reads(agent)
    peers.close()
    served.close()


def test_two_pulls_at_once_from_one_peer(
    served: Served, agent: NixlAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is in the middle while all of the other is done."""
    peers = _peers(agent)
    other: list[Any] = []

    def pulls_another() -> None:
        thread = threading.Thread(target=lambda: other.append(_pull(peers, served.nixl, 40)))
        thread.start()
        thread.join(_TIMEOUT_S)

    _at_the_first_copy(monkeypatch, pulls_another)
    expected = served.shelf.regions[1].blocks
    assert (_pull(peers, served.nixl, 40) == expected).all()
    assert (other[0] == expected).all()
    peers.close()
    assert not agent._remotes


@pytest.mark.parametrize("tls", ["", "tcp"])
def test_a_peer_that_is_killed_in_the_middle_of_a_pull(
    tmp_path: Path,
    served: Served,
    agent: NixlAgent,
    tls: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By shared memory and by TCP, whichever UCX takes."""
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
        agent = NixlAgent([])
    peers = _peers(agent, _NUM_BLOCKS)
    with _apart(tmp_path) as peer:
        _pull(peers, peer.endpoint, 10)
        with monkeypatch.context() as patch:
            _at_the_first_copy(patch, peer.kill)
            begin_s = time.monotonic()
            with pytest.raises(PeerError):
                _pull(peers, peer.endpoint, _NUM_BLOCKS)
            assert time.monotonic() - begin_s < _TIMEOUT_S, "it is not waited for"
        with pytest.raises(PeerError):
            _pull(peers, peer.endpoint, 10)
    _ended(agent)
    assert not _num_reads(agent)
    assert (_pull(peers, served.nixl, 40) == served.shelf.regions[1].blocks).all()
    peers.close()


def test_what_hangs_is_given_up_and_its_scratch_not_used_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that is given up may still write: nothing else is read there until it has ended."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    agent = NixlAgent([])
    served = Served(tmp_path / "other", by_nixl=True)
    peers = _peers(agent, _NUM_BLOCKS)
    with _apart(tmp_path) as peer:
        _pull(peers, peer.endpoint, 10)
        with monkeypatch.context() as patch:
            _at_the_first_copy(patch, lambda: peer.send_signal(signal.SIGSTOP))
            with pytest.raises(PeerError, match="too long"):
                _pull(peers, peer.endpoint, _NUM_BLOCKS, 0.3)
        strays = [read.scratch for read in agent._strays]
        assert strays
        with pytest.raises(PeerError, match="too long"):
            _pull(peers, peer.endpoint, 10, 0.05)
        assert (_pull(peers, served.nixl, 40) == served.shelf.regions[1].blocks).all()
        assert not any(one is other for one in strays for other in agent._free)
        monkeypatch.setattr(nixl_agent, "_MAX_STRAYS", 1)
        with pytest.raises(PeerError, match="have not ended"):
            _pull(peers, served.nixl, 40)
        peer.send_signal(signal.SIGCONT)
        _ended(agent)
        assert all(any(one is other for other in agent._free) for one in strays)
        assert len(_pull(peers, peer.endpoint, 10)[0]) == 10, "it is loaded anew"
    peers.close()
    served.close()


def _ended(agent: NixlAgent) -> None:
    until_s = time.monotonic() + _TIMEOUT_S
    while agent._strays:
        assert time.monotonic() < until_s
        with agent._lock:
            agent._end_strays()


@contextlib.contextmanager
def _says(body: bytes, name: str) -> Iterator[TransferEndpoint]:
    """A server that says this of an agent of such a name, and lends its first block."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                with sock, contextlib.suppress(PeerError):
                    stream = Stream(sock, _TIMEOUT_S)
                    stream.receive(wire.HELLO_BYTES)
                    stream.send(wire.frame(wire.Kind.AGENT, len(body), body))
                    stream.receive_frame(wire.Kind.LEND)
                    stream.send(wire.lent([wire.place(0, 0)]))
                    stream.receive_frame(wire.Kind.DONE)
                    stream.send(wire.over(is_valid=True))

    thread = threading.Thread(target=serve)
    thread.start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield TransferEndpoint(layout=LAYOUT, token=TOKEN, address=address, nixl=name)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(_TIMEOUT_S)


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nonsense_about_an_agent_is_not_believed(
    agent: NixlAgent, served: Served, data: st.DataObject
) -> None:
    """None at all, cut anywhere, or with a byte that is another: of what NIXL reads itself, before
    what it hands to UCX."""
    liar = NixlAgent([one.blocks for one in served.shelf.regions])
    body = _body(served, liar)
    match data.draw(st.sampled_from(["any", "cut", "changed"])):
        case "any":
            body = data.draw(st.binary(max_size=300))
        case "cut":
            body = body[: data.draw(st.integers(0, len(body) - 1))]
        case _:
            begin = len(body) - len(liar.metadata)
            at = data.draw(st.integers(begin, begin + 100))
            body = body[:at] + bytes([body[at] ^ data.draw(st.integers(1, 255))]) + body[at + 1 :]
    peers = _peers(agent)
    with _says(body, liar.name) as endpoint, pytest.raises(PeerError):
        _pull(peers, endpoint, 1)
    assert not agent._remotes
    assert (_pull(peers, served.nixl, 40) == served.shelf.regions[1].blocks).all()
    peers.close()
    liar.close()


def _body(served: Served, agent: NixlAgent, address: int | None = None) -> bytes:
    """What an agent says of itself, or with another address of the first region."""
    regions = served.shelf.regions
    addresses = [one.blocks.ctypes.data for one in regions]
    if address is not None:
        addresses[0] = address
    said = wire.Agent([one.shape for one in regions], addresses, agent.metadata)
    return wire.agent(said)[wire.HEADER_BYTES :]


def test_another_agent_than_the_bus_told_of_is_not_read(agent: NixlAgent, served: Served) -> None:
    assert served.agent is not None
    peers = _peers(agent)
    for said, name, why in (
        (served.agent, "other", "it is another"),
        (agent, agent.name, "this engine"),
    ):
        with _says(_body(served, said), name) as endpoint, pytest.raises(PeerError, match=why):
            _pull(peers, endpoint, 1)
    assert (_pull(peers, served.nixl, 40) == served.shelf.regions[1].blocks).all()
    peers.close()


@pytest.mark.parametrize("address", [0, 4096, None, 2**63 - 1, 2**64 - 1])
def test_memory_that_was_not_registered_is_not_read(
    agent: NixlAgent, served: Served, address: int | None
) -> None:
    """Without an address it is other memory of the process that is read."""
    assert served.agent is not None
    other = np.zeros(SHAPE, np.uint8)
    if address is None:
        address = other.ctypes.data
    peers = _peers(agent)
    body = _body(served, served.agent, address)
    expected = pytest.raises(PeerError, match=r"NIXL cannot read|there can be none")
    with _says(body, served.agent.name) as endpoint, expected:
        _pull(peers, endpoint, 1)
    assert (_pull(peers, served.nixl, 40) == served.shelf.regions[1].blocks).all()
    peers.close()


def test_who_has_no_agent_is_not_read_by_nixl(tmp_path: Path, agent: NixlAgent) -> None:
    """One whose endpoint says so is pulled from plainly, one whose endpoint lies is not."""
    served = Served(tmp_path)
    peers = _peers(agent)
    assert (_pull(peers, served.remote, 40) == served.shelf.regions[1].blocks).all()
    with pytest.raises(PeerError):
        _pull(peers, msgspec.structs.replace(served.remote, nixl="none"), 1)
    peers.close()
    served.close()


def test_peers_here_are_read_by_nixl_only_if_that_is_said(served: Served, agent: NixlAgent) -> None:
    here = msgspec.structs.replace(served.nixl, host=this_host(), socket=str(served.path))
    for nixl_here, kind in ((False, "LocalConnection"), (True, "NixlConnection")):
        peers = Peers(SPLIT, SHAPE, this_host(), agent, nixl_here=nixl_here)
        assert (_pull(peers, here, 40) == served.shelf.regions[1].blocks).all()
        (idle,) = peers._all_idle()
        assert type(idle.connection).__name__ == kind
        peers.close()


async def test_memory_is_registered_once_and_let_go_at_the_end(tmp_path: Path) -> None:
    served = Served(tmp_path, by_nixl=True)
    puller = NixlAgent([])
    peers = _peers(puller)
    for _ in range(3):
        _pull(peers, served.nixl, 40)
    assert served.agent is not None
    assert len(served.agent._registered) == 2
    assert len(puller._registered) == 1, "one scratch, used again"
    peers.close()
    puller.close()
    served.close()
    assert not puller._registered
    assert not served.agent._registered
    await eventually(lambda: not served._server._peers)


def test_without_the_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"millrace\[rdma\]"):
        NixlAgent([])


def test_a_package_that_cannot_be_loaded_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> Any:
        if name == "nixl":
            raise ImportError("detected CUDA 13 but nixl-cu13 is not installed")
        return import_module(name)

    monkeypatch.setattr(nixl_agent, "import_module", fails)
    with pytest.raises(ConfigError, match="nixl-cu13 is not installed"):
        NixlAgent([])


def test_memory_that_cannot_be_registered_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is to be locked and may not be."""

    def fails(*_: Any) -> None:
        raise import_module("nixl._bindings").nixlBackendError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(import_module("nixl").nixl_agent, "register_memory", fails)
    with pytest.raises(ConfigError, match="ulimit"):
        NixlAgent([np.zeros((1, 1, 4096), np.uint8)])
