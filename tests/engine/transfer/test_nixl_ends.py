"""Peers that end, hang or take back a loan during a read by NIXL cost one pull."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.engine.transfer import nixl_agent
from millrace.engine.transfer.nixl_agent import NixlAgent
from millrace.engine.transfer.wire import PeerError
from tests.engine.transfer.nixl_world import (
    NUM_BLOCKS,
    TIMEOUT_S,
    at_the_first_copy,
    end_strays,
    lender_apart,
    num_reads,
    peers_of,
    pull,
    reader_apart,
)
from tests.engine.transfer.shelf import Served


@pytest.fixture(params=["", "tcp"])
def agent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlAgent]:
    """Yield the puller's agent, over shared memory or over TCP, which needs the lender's work; the
    test's lenders have the same transport."""
    if request.param:
        monkeypatch.setenv("UCX_TLS", request.param)
    made = NixlAgent([])
    yield made
    made.close()


@pytest.fixture
def served(agent: NixlAgent, tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "served", by_nixl=True)
    yield made
    made.close()


def test_a_peer_that_is_killed_in_the_middle_of_a_pull(
    tmp_path: Path, served: Served, agent: NixlAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = peers_of(agent, NUM_BLOCKS)
    with lender_apart(tmp_path) as peer:
        pull(peers, peer.said, 10)
        with monkeypatch.context() as patch:
            at_the_first_copy(patch, peer.kill)
            begin_s = time.monotonic()
            with pytest.raises(PeerError):
                pull(peers, peer.said, NUM_BLOCKS)
            assert time.monotonic() - begin_s < TIMEOUT_S, "it is not waited for"
        with pytest.raises(PeerError):
            pull(peers, peer.said, 10)
    end_strays(agent)
    assert not num_reads(agent)
    assert (pull(peers, served.nixl, 40) == served.shelf.regions[1].blocks).all()
    peers.close()


def test_puller_killed_in_the_middle_of_a_pull_gives_back_its_loan(
    served: Served, agent: NixlAgent
) -> None:
    with reader_apart(served.nixl) as reader:
        assert not served.shelf.ended.acquire(blocking=False)
        reader.kill()
        assert served.shelf.ended.acquire(timeout=TIMEOUT_S)
    peers = peers_of(agent)
    assert (pull(peers, served.nixl, 40) == served.shelf.regions[1].blocks).all()
    peers.close()


def test_a_loan_that_ends_in_the_middle_of_a_pull(
    tmp_path: Path, agent: NixlAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lender does nothing more for the loan. The puller has time until its own deadline."""
    served = Served(tmp_path, loan_s=0.05, by_nixl=True)
    peers = peers_of(agent)
    with monkeypatch.context() as patch:
        at_the_first_copy(patch, lambda: served.shelf.ended.acquire(timeout=TIMEOUT_S))
        begin_s = time.monotonic()
        with pytest.raises(PeerError):
            pull(peers, served.nixl, 40, 0.5)
        assert time.monotonic() - begin_s < TIMEOUT_S
    server = served._server
    server._identity = replace(server._identity, loan_s=TIMEOUT_S)
    assert (pull(peers, served.nixl, 40) == served.shelf.regions[1].blocks).all()
    assert not num_reads(agent)
    peers.close()
    served.close()


def test_hanging_read_is_given_up_and_its_scratch_not_used_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that was given up may still write: its scratch is not used until it has ended. Over
    TCP it ends while the peer is asked again."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    agent = NixlAgent([])
    served = Served(tmp_path / "other", by_nixl=True)
    peers = peers_of(agent, NUM_BLOCKS)
    with lender_apart(tmp_path) as peer:
        pull(peers, peer.said, 10)
        with monkeypatch.context() as patch:
            at_the_first_copy(patch, lambda: peer.send_signal(signal.SIGSTOP))
            with pytest.raises(PeerError, match="too long"):
                pull(peers, peer.said, NUM_BLOCKS, 0.3)
        strays = [read.scratch for read in agent._strays]
        assert strays
        with pytest.raises(PeerError, match="too long"):
            pull(peers, peer.said, 10, 0.05)
        assert (pull(peers, served.nixl, 40) == served.shelf.regions[1].blocks).all()
        assert not any(one is other for one in strays for other in agent._free)
        with monkeypatch.context() as patch:
            patch.setattr(nixl_agent, "_MAX_STRAYS", 1)
            with pytest.raises(PeerError, match="have not ended"):
                pull(peers, served.nixl, 40)
        peer.send_signal(signal.SIGCONT)
        assert len(pull(peers, peer.said, 10)[0]) == 10, "it is loaded anew"
        assert not agent._strays
        assert all(any(one is other for other in agent._free) for one in strays)
    peers.close()
    served.close()
    agent.close()
