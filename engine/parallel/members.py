"""Ranks other than 0, which rank 0 watches and ends: local processes and ranks of other hosts."""

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
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

from millrace.engine.parallel.control import (
    MAX_PACKET_BYTES,
    AdapterLoaded,
    BlocksChecked,
    DropAdapter,
    FromMember,
    Join,
    JoinDevices,
    Joined,
    LoadAdapter,
    RankStarted,
    Refused,
    ToMember,
    from_member_decoder,
    pack,
)
from millrace.engine.parallel.ranks import RankLostError
from millrace.engine.threads.choice import cores_of_process, environment_of_rank
from millrace.runtime.process import python_command, python_environment
from millrace.schemas.errors import AdapterError, ConfigError
from millrace.schemas.models.adapters import AdapterRef

_MODULE = "millrace.engine.parallel.member"
_END_TIMEOUT_S = 2.0
_LOG_LEVEL = "MILLRACE_LOG_LEVEL"

_log = logging.getLogger(__name__)


class Member(ABC):
    """Rank as rank 0 sees it: the socket to it."""

    name = ""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.socket = sock

    def send(self, message: ToMember) -> None:
        with contextlib.suppress(OSError):  # the watcher reports a rank that has ended
            self.socket.send(pack(message))

    def receive(self, timeout_s: float) -> FromMember | None:
        """Return the next message, or None if the rank has ended. Raises TimeoutError."""
        self.socket.settimeout(max(0.0, timeout_s))
        try:
            packet = self.socket.recv(MAX_PACKET_BYTES)
        except BlockingIOError as error:
            raise TimeoutError from error
        except ConnectionError:
            packet = b""
        return from_member_decoder.decode(packet) if packet else None

    @abstractmethod
    def how_it_ended(self) -> str:
        """Describe the end of a rank whose socket is closed."""

    @abstractmethod
    def wait_ended(self) -> None:
        """Wait for the end of a rank after its socket was shut."""


class MemberProcess(Member):
    """Rank that is a child process."""

    def __init__(
        self,
        rank: int,
        fds: tuple[int, ...],
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        """Start the process in ``environment``, which includes its thread settings."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        super().__init__(rank, ours)
        # A member ends with the thread that starts it if the kernel is asked to (die_with_parent).
        # Only the main thread lives as long as the process.
        lives_as_long = threading.current_thread() is threading.main_thread()
        with theirs:
            command = python_command(
                _MODULE,
                str(theirs.fileno()),
                str(os.getpid() if lives_as_long else 0),
                ",".join(map(str, sorted(cores_of_process()))),
            )
            self.process = subprocess.Popen(  # noqa: S603 (our own module)
                command,
                pass_fds=(theirs.fileno(), *fds),
                stdin=subprocess.DEVNULL,
                env={**python_environment(environment), _LOG_LEVEL: _log_level()},
            )
        self.name = f"rank {rank} (process {self.process.pid})"

    def how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_TIMEOUT_S)
        code = self.process.returncode
        how = "closed its socket" if code is None else f"ended with exit code {code}"
        return f"{self.name} {how}"

    def wait_ended(self) -> None:
        """Wait for the process, and kill it after a timeout."""
        try:
            self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Members:
    """Ranks 1 and up of a group.

    They end with ``close``, with this object, or with any end of this process. Use from one thread;
    ``load_adapter`` may be called from any.
    """

    def __init__(
        self,
        size: int,
        fds: tuple[int, ...],
        remote: Sequence[Member] = (),
    ) -> None:
        """Start the processes of a group of ``size`` ranks and give them the files ``fds``.

        The ``remote`` ranks have already started and are loading.
        """
        self._processes: list[MemberProcess] = []
        self._members: list[Member] = list(remote)
        self._num_remote = len(remote)
        self._finalizer = weakref.finalize(self, end_members, self._members)
        self._numbers = itertools.count(1)
        self._waits: dict[int, _Wait] = {}
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._timeout_s = 0.0
        for rank in range(1, size - len(remote)):
            environment = {**os.environ, **environment_of_rank(rank)}
            self._processes.append(MemberProcess(rank, fds, environment))
            self._members.insert(rank - 1, self._processes[-1])

    @property
    def pids(self) -> list[int]:
        """Process ids of the local ranks other than 0."""
        return [member.process.pid for member in self._processes]

    def __str__(self) -> str:
        others = [member.name for member in self._members if member not in self._processes]
        return (
            f"{1 + len(self._members)} ranks compute as one, with processes {self.pids}"
            f"{' and '.join(('', *others))}"
        )

    def join(self, message: Callable[[int], Join | JoinDevices]) -> None:
        """Send every local rank its request to load."""
        for member in self._processes:
            member.send(message(member.rank))

    def wait_joined(
        self, timeout_s: float, until: type[Joined] | type[RankStarted] = Joined
    ) -> None:
        """Wait until all ranks are loaded, or have sent ``until``.

        Loading of an adapter later has the same limit. Raises ConfigError with the rank that failed
        or exceeded ``timeout_s``.
        """
        self._timeout_s = timeout_s
        deadline_s = time.monotonic() + timeout_s
        for member in self._members:
            try:
                answer = member.receive(deadline_s - time.monotonic())
            except TimeoutError as error:
                raise ConfigError(
                    f"engine.tensor_parallel: {member.name} was not loaded within the "
                    f"{timeout_s:g} s of engine.start_timeout_s."
                ) from error
            if isinstance(answer, Refused):
                raise ConfigError(f"rank {member.rank} of the group: {answer.message}")
            if not isinstance(answer, until):
                raise ConfigError(
                    f"engine.tensor_parallel: {member.how_it_ended()} before it was loaded."
                )

    def why_refused(self) -> str | None:
        """Return the reason why a rank could not be loaded, or None.

        Prefers the first rank that reported a reason, else the first that failed: other ranks end
        because of it.
        """
        for member in self._members:
            with contextlib.suppress(TimeoutError):
                answer = member.receive(_END_TIMEOUT_S)
                if isinstance(answer, Refused):
                    return f"rank {member.rank} of the group: {answer.message}"
        for member in self._processes:
            how = member.how_it_ended()
            if member.process.returncode:
                return f"engine.tensor_parallel: {how} before it was loaded."
        return None

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call ``on_lost`` with a reason, once, on a thread of its own, when a rank has ended."""
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
        """Start to read an adapter on all ranks, see ``LoadAdapter``; return its number.

        May be called from any thread.
        """
        number = self._expect(len(self._members))
        self._send_all(LoadAdapter(number, adapter, max_rank, slot, num_posted))
        return number

    def wait_loaded(self, number: int) -> None:
        """Wait until all ranks have read the adapter. Raises AdapterError."""
        wait = self._waits[number]
        if not wait.done.wait(self._timeout_s):
            raise AdapterError(
                f"a rank did not load the adapter within the {self._timeout_s:g} s of "
                "engine.start_timeout_s."
            )
        if wait.error:
            raise AdapterError(wait.error)

    def drop_adapter(self, number: int) -> None:
        """Drop an adapter that no later step uses. May be called from any thread."""
        self._waits.pop(number, None)
        self._send_all(DropAdapter(number))

    def expect_checked(self) -> int:
        """Return the number for a check of blocks by the remote ranks."""
        return self._expect(self._num_remote)

    def wait_checked(self, number: int, timeout_s: float) -> list[bool]:
        """Return the combined result of a check. Raises RankLostError on a timeout."""
        wait = self._waits[number]
        is_done = wait.done.wait(timeout_s)
        del self._waits[number]
        if not is_done:
            raise RankLostError(
                "the group of ranks failed: a rank did not check its blocks in time"
            )
        if wait.error:
            raise RankLostError(f"the group of ranks failed: {wait.error}")
        return wait.finite

    def hear(self, rank: int, message: FromMember) -> None:
        """Handle a message of a watched rank."""
        if isinstance(message, AdapterLoaded) and message.number in self._waits:
            self._waits[message.number].note(message.error and f"rank {rank}: {message.error}")
        elif isinstance(message, BlocksChecked) and message.number in self._waits:
            self._waits[message.number].note("", message.finite)

    def fail(self, why: str) -> None:
        """Fail all waits because a rank has ended."""
        with self._lock:
            self._lost = why
            for wait in self._waits.values():
                wait.fail(why)

    def _expect(self, num_answers: int) -> int:
        with self._lock:
            number = next(self._numbers)
            wait = self._waits[number] = _Wait(num_answers)
            if self._lost is not None:
                wait.fail(self._lost)
        return number

    def close(self) -> None:
        """End the processes, and wait until they have ended."""
        self._finalizer()

    @property
    def is_closed(self) -> bool:
        """True if the processes were told to end."""
        return not self._finalizer.alive

    def _send_all(self, message: ToMember) -> None:
        for member in self._members:
            member.send(message)


class _Wait:
    """Wait for answers of a number of ranks."""

    def __init__(self, num_left: int) -> None:
        self.error = ""
        self.finite: list[bool] = []
        self.done = threading.Event()
        self._num_left = num_left

    def note(self, error: str, finite: list[bool] | None = None) -> None:
        """Note an answer: an error, if any, and the finite flags of blocks, if checked."""
        self.error = self.error or error
        if finite is not None and not self.finite:
            self.finite = finite
        elif finite is not None:
            self.finite = [one and other for one, other in zip(self.finite, finite, strict=True)]
        self._num_left -= 1
        if not self._num_left:
            self.done.set()

    def fail(self, why: str) -> None:
        self.error = why
        self.done.set()


def _watch(
    members: list[Member], owner: weakref.ref[Members], on_lost: Callable[[str], None]
) -> None:
    """Handle the ranks' messages until one of them has ended or the owner has ended them."""
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
            if group is None or group.is_closed or member.socket.fileno() < 0:
                return
            if packet:
                group.hear(member.rank, from_member_decoder.decode(packet))
                # Release the group, so that it can be collected while this thread waits for a
                # packet.
                del group
                continue
            why = member.how_it_ended()
            group.fail(why)
            on_lost(why)
            return


def _log_level() -> str:
    return logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()


def end_members(members: Sequence[Member]) -> None:
    """End members by closing their sockets; kill a process that does not end."""
    for member in members:
        with contextlib.suppress(OSError):
            member.socket.shutdown(socket.SHUT_RDWR)
    for member in members:
        member.wait_ended()
        member.socket.close()
