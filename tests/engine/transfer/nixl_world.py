"""Readers by NIXL and their lenders, in this process and in others."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.engine.transfer import client, nixl_client
from millrace.engine.transfer.addresses import this_host
from millrace.engine.transfer.client import PullTarget
from millrace.engine.transfer.memory import copy_runs
from millrace.engine.transfer.nixl_agent import NixlAgent
from millrace.engine.transfer.peers import Peers
from millrace.schemas.transfer import TransferEndpoint
from tests.engine.transfer.shelf import SHAPE, SPLIT, key, serve_apart

TIMEOUT_S = 10.0
# Of who lends in a process apart.
NUM_BLOCKS = 4000
_SPAWN = multiprocessing.get_context("spawn")
_START_S = 60.0


class Apart:
    """Another process, with its first message."""

    def __init__(self, process: BaseProcess, said: Any) -> None:
        self.process = process
        self.said = said

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(TIMEOUT_S)


@contextlib.contextmanager
def _apart(target: Callable[..., None], *args: Any) -> Iterator[Apart]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(_START_S)
        yield Apart(process, ours.recv())
    finally:
        process.kill()
        process.join(TIMEOUT_S)


def lender_apart(folder: Path) -> contextlib.AbstractContextManager[Apart]:
    """Start a process that lends; its first message is its endpoint."""
    return _apart(serve_apart, folder, NUM_BLOCKS)


def reader_apart(endpoint: TransferEndpoint) -> contextlib.AbstractContextManager[Apart]:
    """Start a process that stops for good in the middle of a pull, and reports when it is there."""
    return _apart(_stop_in_the_middle, endpoint)


def _stop_in_the_middle(pipe: Connection, endpoint: TransferEndpoint) -> None:
    def stop() -> None:
        pipe.send("in the middle")
        pipe.recv()

    at_the_first_copy(pytest.MonkeyPatch(), stop)
    pull(peers_of(NixlAgent([])), endpoint, SHAPE.num_blocks)


def peers_of(agent: NixlAgent, num_blocks: int = SHAPE.num_blocks) -> Peers:
    return Peers(SPLIT, SHAPE._replace(num_blocks=num_blocks), this_host(), agent)


def pull(
    peers: Peers, endpoint: TransferEndpoint, count: int, timeout_s: float = TIMEOUT_S
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Pull the first blocks of an endpoint."""
    target = PullTarget(np.zeros((3, count, 4096), np.uint8), list(range(count)))
    keys = [key(number) for number in range(count)]
    assert peers.pull(endpoint, keys, target, timeout_s).num_blocks == count
    return target.blocks


def num_reads(agent: NixlAgent) -> int:
    """Return the number of reads in flight."""
    return sum(remote.num_reads for remote in agent._remotes.values())


def at_the_first_copy(monkeypatch: pytest.MonkeyPatch, action: Callable[[], Any]) -> None:
    """Run an action in the middle of a pull that reads a few blocks at a time."""
    monkeypatch.setattr(nixl_client, "SCRATCH_BYTES", 8 * SHAPE.block_bytes)
    is_first = iter([True])

    def copies(*args: Any) -> None:
        if next(is_first, False):
            action()
        copy_runs(*args)

    monkeypatch.setattr(client, "copy_runs", copies)


def end_strays(agent: NixlAgent) -> None:
    """Wait for the reads that were given up."""
    until_s = time.monotonic() + TIMEOUT_S
    while agent._strays:
        assert time.monotonic() < until_s
        with agent._lock:
            agent._end_strays()
