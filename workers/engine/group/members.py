"""The processes of the other ranks, which rank 0 starts, watches and ends."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping

from millrace.runtime.process import python_command, python_environment
from millrace.schemas.errors import AdapterError, ConfigError
from millrace.schemas.models.adapters import AdapterRef
from millrace.workers.engine.group.control_wire import (
    MAX_PACKET_BYTES,
    AdapterLoaded,
    DropAdapter,
    FromMember,
    Join,
    JoinDevices,
    Joined,
    LoadAdapter,
    Refused,
    Started,
    ToMember,
    from_member_decoder,
    pack,
)
from millrace.workers.engine.threads.choice import cores_of_process, environment_of_rank

_MODULE = "millrace.workers.engine.group.member"
_END_TIMEOUT_S = 2.0
_LOG_LEVEL = "MILLRACE_LOG_LEVEL"

_log = logging.getLogger(__name__)


class _Member:
    """One process, and the socket to it."""

    def __init__(self, rank: int, fds: tuple[int, ...], module: str) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket = ours
        # A member ends with the thread that starts it, if the kernel is told to see to it; the
        # main thread lives as long as the process.
        lives_as_long = threading.current_thread() is threading.main_thread()
        with theirs:
            command = python_command(
                module,
                str(theirs.fileno()),
                str(os.getpid() if lives_as_long else 0),
                ",".join(map(str, sorted(cores_of_process()))),
            )
            self.process = subprocess.Popen(  # noqa: S603 (our own module)
                command,
                pass_fds=(theirs.fileno(), *fds),
                stdin=subprocess.DEVNULL,
                env=_environment(rank),
            )

    def send(self, message: ToMember) -> None:
        with contextlib.suppress(OSError):  # one that has ended is heard of by the watcher
            self.socket.send(pack(message))

    def receive(self, timeout_s: float) -> FromMember | None:
        """Its next message, None once it has ended. Raises TimeoutError."""
        self.socket.settimeout(max(0.0, timeout_s))
        try:
            packet = self.socket.recv(MAX_PACKET_BYTES)
        except BlockingIOError as error:
            raise TimeoutError from error
        except ConnectionError:
            packet = b""
        return from_member_decoder.decode(packet) if packet else None

    def how_it_ended(self) -> str:
        """Of one whose socket is closed."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_TIMEOUT_S)
        code = self.process.returncode
        how = "closed its socket" if code is None else f"ended with exit code {code}"
        return f"rank {self.rank} (process {self.process.pid}) {how}"


class Members:
    """Ranks 1 and up of a group. They end with ``close``, with this object, or with this process,
    however it ends. For one thread, but for ``load_adapter``."""

    def __init__(self, size: int, fds: tuple[int, ...], module: str | None = None) -> None:
        """Start the processes, which are given the files ``fds``; of another ``module`` than that
        of ranks on a CPU."""
        self._members: list[_Member] = []
        self._finalizer = weakref.finalize(self, _end, self._members)
        self._numbers = itertools.count(1)
        self._loads: dict[int, _AdapterLoad] = {}
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._timeout_s = 0.0
        for rank in range(1, size):
            self._members.append(_Member(rank, fds, module or _MODULE))

    @property
    def pids(self) -> list[int]:
        """Of ranks 1 and up."""
        return [member.process.pid for member in self._members]

    def join(self, message: Callable[[int], Join | JoinDevices]) -> None:
        """Tell every rank what to load."""
        for member in self._members:
            member.send(message(member.rank))

    def wait_joined(self, timeout_s: float, until: type[Joined] | type[Started] = Joined) -> None:
        """Until all are loaded, or say what is named. Raises ConfigError naming one that is not, or
        not in time; adapters have as much."""
        self._timeout_s = timeout_s
        deadline_s = time.monotonic() + timeout_s
        for member in self._members:
            try:
                answer = member.receive(deadline_s - time.monotonic())
            except TimeoutError as error:
                raise ConfigError(
                    f"engine.tensor_parallel: rank {member.rank} (process {member.process.pid}) "
                    f"was not loaded within the {timeout_s:g} s of engine.start_timeout_s."
                ) from error
            if isinstance(answer, Refused):
                raise ConfigError(f"rank {member.rank} of the group: {answer.message}")
            if not isinstance(answer, until):
                raise ConfigError(
                    f"engine.tensor_parallel: {member.how_it_ended()} before it was loaded."
                )

    def why_refused(self) -> str | None:
        """Which rank could not be loaded, and why, when others have ended for it: the first that
        has said so, or else the first that failed."""
        for member in self._members:
            with contextlib.suppress(TimeoutError):
                answer = member.receive(_END_TIMEOUT_S)
                if isinstance(answer, Refused):
                    return f"rank {member.rank} of the group: {answer.message}"
        for member in self._members:
            how = member.how_it_ended()
            if member.process.returncode:
                return f"engine.tensor_parallel: {how} before it was loaded."
        return None

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call ``on_lost`` with a reason, once, when a rank has ended; on a thread of its own."""
        for member in self._members:
            member.socket.settimeout(None)
        threading.Thread(
            target=_watch,
            args=(list(self._members), weakref.ref(self), on_lost),
            name="ranks",
            daemon=True,
        ).start()

    def load_adapter(
        self, adapter: AdapterRef, max_rank: int, *, slot: int = 0, num_posted: int = 0
    ) -> int:
        """Have all ranks begin to read an adapter, see ``LoadAdapter``; the number by which they
        know it. For any thread."""
        with self._lock:
            number = next(self._numbers)
            load = self._loads[number] = _AdapterLoad(len(self._members))
            if self._lost is not None:
                load.fail(self._lost)
        self._send_all(LoadAdapter(number, adapter, max_rank, slot, num_posted))
        return number

    def wait_loaded(self, number: int) -> None:
        """Until all ranks have it. Raises AdapterError."""
        load = self._loads[number]
        if not load.done.wait(self._timeout_s):
            raise AdapterError(
                f"a rank did not load the adapter within the {self._timeout_s:g} s of "
                "engine.start_timeout_s."
            )
        if load.error:
            raise AdapterError(load.error)

    def drop_adapter(self, number: int) -> None:
        """No step has it any more, or will have it. For any thread."""
        self._loads.pop(number, None)
        self._send_all(DropAdapter(number))

    def hear(self, rank: int, message: FromMember) -> None:
        """What a rank says while it is watched."""
        if isinstance(message, AdapterLoaded) and message.number in self._loads:
            self._loads[message.number].note(message.error and f"rank {rank}: {message.error}")

    def fail(self, why: str) -> None:
        """A rank has ended: what is waited for does not come."""
        with self._lock:
            self._lost = why
            for load in self._loads.values():
                load.fail(why)

    def close(self) -> None:
        """End the processes."""
        self._finalizer()

    def _send_all(self, message: ToMember) -> None:
        for member in self._members:
            member.send(message)


class _AdapterLoad:
    """What is still to come of an adapter from so many ranks."""

    def __init__(self, num_left: int) -> None:
        self.error = ""
        self.done = threading.Event()
        self._num_left = num_left

    def note(self, error: str) -> None:
        self.error = self.error or error
        self._num_left -= 1
        if not self._num_left:
            self.done.set()

    def fail(self, why: str) -> None:
        self.error = why
        self.done.set()


def _watch(
    members: list[_Member], owner: weakref.ref[Members], on_lost: Callable[[str], None]
) -> None:
    """Hear what the ranks say until one of them has ended, or they are ended by their owner."""
    by_fd = {member.socket.fileno(): member for member in members}
    poll = select.poll()
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            member = by_fd[fd]
            try:
                packet = member.socket.recv(MAX_PACKET_BYTES)
            except OSError:
                packet = b""
            group = owner()
            if group is None or member.socket.fileno() < 0:
                return
            if packet:
                group.hear(member.rank, from_member_decoder.decode(packet))
                continue
            why = member.how_it_ended()
            group.fail(why)
            on_lost(why)
            return


def _environment(rank: int) -> Mapping[str, str]:
    level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
    return {**python_environment(), **environment_of_rank(rank), _LOG_LEVEL: level}


def _end(members: list[_Member]) -> None:
    """A member ends when its socket is closed; one that cannot is killed."""
    for member in members:
        with contextlib.suppress(OSError):
            member.socket.shutdown(socket.SHUT_RDWR)
    for member in members:
        try:
            member.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            member.process.kill()
            member.process.wait()
        member.socket.close()
