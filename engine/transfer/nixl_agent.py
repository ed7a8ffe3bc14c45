"""Reads of other processes' memory by NIXL: UCX over RDMA, TCP or shared memory.

NIXL cannot cancel a read in flight: it may write to its target at any later time. So blocks are
read into scratch memory and copied from there. The scratch of an abandoned read is reused only once
that read has ended.

UCX has no thread here, because NIXL's thread would poll without pause while an agent exists. UCX
makes progress during waits: in ``finish`` on the reading side and in ``progress`` on the side that
is read. An unused agent costs no time.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from millrace.engine.transfer.memory import Blocks
from millrace.engine.transfer.wire import PeerError
from millrace.schemas.errors import ConfigError

# Bytes read at a time, unless a single block is larger.
SCRATCH_BYTES = 8 << 20
# Most abandoned reads in flight; above that, no new read begins.
_MAX_STRAYS = 8
# Time after which a failed read cannot write any more: devices give up much sooner.
_REST_S = 60.0
# Time that a new connection to a peer waits for earlier abandoned reads of it: the peer makes
# progress on them meanwhile.
_STRAYS_WAIT_S = 0.2
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 250e-6
_NAME_BYTES = 16
_BACKEND = "UCX"
_DONE, _UNDER_WAY, _FAILED = "DONE", "PROC", "ERR"

Scratch = npt.NDArray[np.uint8]
"""Contiguous memory that NIXL may write to."""

Pieces = npt.NDArray[np.uint64]
"""Pieces of memory, [num_pieces, 3]: address, size in bytes, and 0 for host memory."""


def check_nixl() -> None:
    """Raise ConfigError if the package nixl is not installed."""
    if find_spec("nixl") is None:
        raise ConfigError(
            "engine.transfer_transport is nixl, which needs the package nixl. Install "
            "millrace[rdma]."
        )


def _load_nixl() -> ModuleType:
    check_nixl()
    # Hide NIXL's start messages, send UCX's log to stderr instead of the program's output, and keep
    # UCX from handling this process's faults.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("UCX_ERROR_SIGNALS", "")
    try:
        return import_module("nixl")
    except ImportError as error:
        raise ConfigError(f"engine.transfer_transport: NIXL cannot be loaded: {error}.") from error


class Remote:
    """Peer's agent loaded here for a number of connections.

    ``num_reads`` reads of it have not ended. ``is_broken`` is set once a read has failed or was
    abandoned; no more begin.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_users = 0
        self.num_reads = 0
        self.is_broken = False


class Read(NamedTuple):
    """Read in flight from ``remote`` into ``scratch``."""

    remote: Remote
    scratch: Scratch
    handle: Any


class _Resting(NamedTuple):
    """Scratch that a failed read may still write to until ``until_s``."""

    scratch: Scratch
    until_s: float


class NixlAgent:
    """NIXL agent of an engine, safe for several threads.

    ``regions`` stay registered until ``close``, so that peers with the ``metadata`` can read them.
    Owns its scratch and the peers' agents that are loaded. Each read ends in ``finish`` or in
    ``give_up``.
    """

    def __init__(self, regions: Sequence[Blocks]) -> None:
        """Create the agent. Raises ConfigError if NIXL is missing or cannot register the memory."""
        nixl = _load_nixl()
        known = vars(import_module("nixl._bindings")).values()
        self._errors: tuple[type[Exception], ...] = (
            RuntimeError,
            ValueError,
            *(one for one in known if isinstance(one, type) and issubclass(one, Exception)),
        )
        self.name = secrets.token_hex(_NAME_BYTES)
        self._registered: list[Any] = []
        strict = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        config = nixl.nixl_agent_config(
            enable_prog_thread=False, backends=[_BACKEND], sync_mode=strict
        )
        self._agent: Any = None
        try:
            self._agent = nixl.nixl_agent(self.name, config)
            for blocks in regions:
                self._register(blocks)
            # Taken before any scratch is registered: peers must not read the scratch.
            self.metadata: bytes = self._agent.get_agent_metadata()
        except self._errors as error:
            raise ConfigError(
                f"engine.transfer_transport: NIXL cannot register the memory for blocks: {error}. "
                "For RDMA it is locked, which needs a high enough `ulimit -l`."
            ) from error
        self._remotes: dict[str, Remote] = {}
        self._free: list[Scratch] = []
        self._strays: list[Read] = []
        self._resting: list[_Resting] = []
        self._lock = threading.Lock()

    def _register(self, data: npt.NDArray[np.uint8]) -> None:
        piece = (data.ctypes.data, data.nbytes, 0, "")
        agent = self._open_agent()
        self._registered.append(agent.register_memory([piece], "DRAM", [_BACKEND]))

    def _open_agent(self) -> Any:
        agent = self._agent
        if agent is None:
            raise PeerError("the NIXL agent of this engine is closed")
        return agent

    def progress(self) -> None:
        """Let UCX progress without waiting.

        Peers need it for reads that do not use RDMA, and for their first read.
        """
        agent = self._agent
        if agent is not None:
            with suppress(*self._errors):
                agent.get_new_notifs()  # returns none, but makes UCX progress

    def load(self, name: str, metadata: bytes, deadline_s: float) -> Remote:
        """Load a peer's agent by its metadata, for one more user.

        Raises PeerError if its name is not ``name``, or while earlier failed reads of it have not
        ended.
        """
        self._await_strays(name, min(deadline_s, time.monotonic() + _STRAYS_WAIT_S))
        with self._lock:
            remote = self._remotes.get(name)
            if remote is None or remote.is_broken:
                if remote is not None:
                    self._forget(remote)
                remote = self._remotes[name] = self._load(name, metadata)
            remote.num_users += 1
            return remote

    def _await_strays(self, name: str, until_s: float) -> None:
        while True:
            with self._lock:
                self._end_strays()
                remote = self._remotes.get(name)
                is_read = remote is not None and remote.is_broken and remote.num_reads
            if not is_read or time.monotonic() > until_s:
                return
            time.sleep(_LONGEST_PAUSE_S)

    def _load(self, name: str, metadata: bytes) -> Remote:
        if name == self.name:
            raise PeerError("it sent the metadata of this engine's own agent")
        agent = self._open_agent()
        try:
            loaded = agent.add_remote_agent(metadata)
        except self._errors as error:
            self._remove(name)  # it may be partly loaded
            raise PeerError(f"NIXL cannot load its agent: {error}") from error
        if loaded != name.encode():
            self._remove(loaded)
            raise PeerError("it sent the metadata of another agent")
        return Remote(name)

    def unload(self, remote: Remote) -> None:
        """Release a peer's agent for one user."""
        with self._lock:
            remote.num_users -= 1
            self._forget_unused(remote)

    def _forget_unused(self, remote: Remote) -> None:
        is_used = remote.num_users or remote.num_reads
        if not is_used and self._remotes.get(remote.name) is remote:
            self._forget(remote)

    def _forget(self, remote: Remote) -> None:
        if remote.num_reads:
            raise PeerError("an earlier read of its memory has not ended")
        del self._remotes[remote.name]
        self._remove(remote.name)

    def _remove(self, name: str | bytes) -> None:
        try:
            self._agent.remove_remote_agent(name)
        except self._errors:
            return  # it is not loaded
        self.progress()  # closes the connection

    def take_scratch(self, size_bytes: int) -> Scratch:
        """Return memory to read into; give it back unless a read into it was abandoned.

        Raises PeerError.
        """
        with self._lock:
            self._end_strays()
            if len(self._strays) >= _MAX_STRAYS:
                raise PeerError(f"{len(self._strays)} earlier reads by NIXL have not ended")
            for at, scratch in enumerate(self._free):
                if scratch.nbytes >= size_bytes:
                    return self._free.pop(at)
        scratch = np.empty(max(size_bytes, SCRATCH_BYTES), np.uint8)
        try:
            self._register(scratch)
        except self._errors as error:
            raise PeerError(f"NIXL has no memory to read into: {error}") from error
        return scratch

    def give_back(self, scratch: Scratch) -> None:
        """Return scratch that is not read into any more."""
        with self._lock:
            self._free.append(scratch)

    def begin(self, remote: Remote, scratch: Scratch, theirs: Pieces, own: Pieces) -> Read:
        """Begin to read ``theirs`` into ``own``, pieces of ``scratch`` of the same sizes.

        Raises PeerError, also for memory that the peer has not registered.
        """
        agent = self._count(remote, scratch)
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(own, "DRAM"),
                agent.get_xfer_descs(theirs, "DRAM"),
                remote.name,
                backends=[_BACKEND],
            )
        except self._errors as error:
            with self._lock:
                remote.is_broken = True
                remote.num_reads -= 1
                self._free.append(scratch)
            raise PeerError(f"NIXL cannot read its memory: {error}") from error
        read = Read(remote, scratch, handle)
        try:
            agent.transfer(handle)  # `finish` reports errors
        except self._errors as error:
            self._note_failed(read)
            raise PeerError(f"NIXL cannot read its memory: {error}") from error
        return read

    def _count(self, remote: Remote, scratch: Scratch) -> Any:
        """Count one more read; return the agent, which stays open until the read has ended."""
        with self._lock:
            agent = self._open_agent()
            if remote.is_broken:
                self._free.append(scratch)
                raise PeerError("NIXL has lost the connection to it")
            remote.num_reads += 1
            return agent

    def finish(self, read: Read, deadline_s: float) -> None:
        """Wait until a read is done.

        Raises PeerError if it fails or exceeds the deadline; it is abandoned then.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            state = self._state(read)
            if state == _DONE:
                read.handle.release()
                with self._lock:
                    read.remote.num_reads -= 1
                return
            if state != _UNDER_WAY:
                self._note_failed(read)
                raise PeerError("NIXL has lost the connection to it")
            if time.monotonic() > deadline_s:
                self.give_up(read)
                raise PeerError("it takes too long")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def give_up(self, read: Read) -> None:
        """Abandon a read, which may end at any later time."""
        with self._lock:
            read.remote.is_broken = True
            self._strays.append(read)

    def _state(self, read: Read) -> str:
        try:
            return str(self._agent.check_xfer_state(read.handle))
        except self._errors:
            return _FAILED

    def _note_failed(self, read: Read) -> None:
        with self._lock:
            read.remote.is_broken = True
            read.remote.num_reads -= 1
            self._release_failed(read)

    def _release_failed(self, read: Read) -> None:
        self._resting.append(_Resting(read.scratch, time.monotonic() + _REST_S))
        with suppress(*self._errors):
            read.handle.release()

    def _end_strays(self) -> None:
        """Reclaim the scratch of reads that have ended."""
        now_s = time.monotonic()
        self._free += [scratch for scratch, until_s in self._resting if until_s <= now_s]
        self._resting = [one for one in self._resting if one.until_s > now_s]
        states = [(read, self._state(read)) for read in self._strays]
        self._strays = [read for read, state in states if state == _UNDER_WAY]
        for read, state in states:
            if state == _UNDER_WAY:
                continue
            if state == _DONE:
                read.handle.release()
                self._free.append(read.scratch)
            else:
                self._release_failed(read)
            read.remote.num_reads -= 1
            self._forget_unused(read.remote)

    def close(self) -> None:
        """End reads of this engine's memory.

        While a read may still write to the scratch, everything is kept until the process ends.
        """
        with self._lock:
            self._end_strays()
            is_read = any(remote.num_reads for remote in self._remotes.values())
            if is_read or self._resting:
                _kept.append(self)
                return
            for remote in list(self._remotes.values()):
                self._forget(remote)
            registered, self._registered = self._registered, []
            for memory in registered:
                with suppress(*self._errors):
                    self._agent.deregister_memory(memory, [_BACKEND])
            self._agent = None  # the last reference: ends the agent


_kept: list[NixlAgent] = []
