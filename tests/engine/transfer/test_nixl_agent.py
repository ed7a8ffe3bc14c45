"""Agent of NIXL: it takes no time without reads, and is gone once it is closed."""

from __future__ import annotations

import threading
import weakref
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.engine.transfer import nixl_agent
from millrace.engine.transfer.nixl_agent import NixlAgent
from millrace.engine.transfer.wire import PeerError
from millrace.schemas.errors import ConfigError
from tests.engine.transfer.nixl_world import num_reads, peers_of, pull
from tests.engine.transfer.shelf import SHAPE, Served
from tests.support.waiting import eventually


def _foreign_threads() -> set[int]:
    """Return the threads of this process that are not Python's."""
    own = {thread.native_id for thread in threading.enumerate()}
    return {int(task.name) for task in Path("/proc/self/task").iterdir()} - own


def _num_links() -> int:
    """Count the sockets of this process, and the waits for sockets."""
    links = [str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(link.startswith(("socket:", "anon_inode:[event")) for link in links)


def _read_once(folder: Path) -> tuple[Served, NixlAgent]:
    """Read once, and return the lender and the reader."""
    served, puller = Served(folder, by_nixl=True), NixlAgent([])
    peers = peers_of(puller)
    assert (pull(peers, served.nixl, 40) == served.shelf.regions[1].blocks).all()
    peers.close()
    return served, puller


async def test_an_agent_has_no_thread(tmp_path: Path) -> None:
    """NIXL's thread polls without a pause, one for each agent. UCX has one thread for all, which
    waits."""
    used = [_read_once(tmp_path / "first")]
    before = _foreign_threads()
    used.append(_read_once(tmp_path / "second"))
    await eventually(lambda: _foreign_threads() <= before)
    for served, puller in used:
        puller.close()
        served.close()


async def test_a_closed_agent_is_gone_with_its_connections(tmp_path: Path) -> None:
    before = 0
    for name in ("first", "second"):
        served, puller = _read_once(tmp_path / name)
        assert served.agent is not None
        agents = [weakref.ref(one._agent) for one in (puller, served.agent)]
        puller.close()
        served.close()
        await eventually(lambda server=served._server: not server._peers)
        assert [one() for one in agents] == [None, None]
        if not before:
            before = _num_links()
    assert _num_links() <= before, "what UCX opens once for all is there since the first"


def test_a_closed_agent_reads_no_more(tmp_path: Path) -> None:
    served, puller = _read_once(tmp_path)
    assert served.agent is not None
    remote = puller.load(served.agent.name, served.agent.metadata, 0.0)
    scratch = puller.take_scratch(SHAPE.block_bytes)
    puller.close()
    puller.progress()
    pieces = np.zeros((1, 3), np.uint64)
    for call in (
        lambda: puller.load(served.nixl.nixl, b"", 0.0),
        lambda: puller.take_scratch(2 * scratch.nbytes),
        lambda: puller.begin(remote, scratch, pieces, pieces),
    ):
        with pytest.raises(PeerError, match="is closed"):
            call()
    puller.unload(remote)
    assert not num_reads(puller)
    served.close()


async def test_memory_is_registered_once_and_let_go_at_the_end(tmp_path: Path) -> None:
    served = Served(tmp_path, by_nixl=True)
    puller = NixlAgent([])
    peers = peers_of(puller)
    for _ in range(3):
        pull(peers, served.nixl, 40)
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
    """Registration fails, for example, where memory must be locked and may not be."""

    def fails(*_: Any) -> None:
        raise import_module("nixl._bindings").nixlBackendError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(import_module("nixl").nixl_agent, "register_memory", fails)
    with pytest.raises(ConfigError, match="ulimit"):
        NixlAgent([np.zeros((1, 1, 4096), np.uint8)])
