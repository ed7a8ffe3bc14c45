"""Rank 0's handling of lost ranks, its messages to ranks with devices, and its device timeout."""

from __future__ import annotations

import itertools
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from millrace.engine.kernels.rank_view import RanksFailedError
from millrace.engine.kernels.stage_link import LinkShape, StageLink
from millrace.engine.kv.cache import CacheCommand, CheckBlocks, ReserveSlots
from millrace.engine.parallel.device_ranks import DeviceRanks
from millrace.engine.parallel.members import Members
from millrace.engine.parallel.messages import Message, encode_told
from millrace.engine.parallel.ranks import GlooRanks, RankLostError
from millrace.schemas.errors import ConfigError


class Lead:
    """Rank 0 of a group.

    An error on rank 0 after it has announced a step ends the group, because the other ranks wait
    for rank 0 in the middle of that step.
    """

    def __init__(
        self, members: Members, aborts: Sequence[Callable[[str], None]], heard_s: float = 0.0
    ) -> None:
        """Lead ``members``; ``aborts`` end the exchanges with the other ranks.

        ``heard_s`` is the time to wait for news of a rank's end after an exchange with it has
        failed.
        """
        self.members = members
        self._aborts = aborts
        self._heard_s = heard_s
        self._is_lost = threading.Event()
        self._why = ""

    @contextmanager
    def together(self) -> Iterator[None]:
        """End the group if the body raises an error; raise RankLostError in its place."""
        self.check()
        try:
            yield
        except Exception as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> RankLostError:
        """End the group for an error, and return the error to raise."""
        if isinstance(error, RanksFailedError):
            self._is_lost.wait(self._heard_s)
        self.abort(str(error))
        return RankLostError(f"the group of ranks failed: {self._why}")

    def check(self) -> None:
        """Raise RankLostError if the group has failed."""
        if self._why:
            raise RankLostError(f"the group of ranks failed: {self._why}")

    def watch(self, wake: Callable[[], None]) -> None:
        """End the group when a rank has ended, then call ``wake`` on another thread."""
        self.members.watch(partial(_note_lost, weakref.ref(self), wake))

    def abort(self, why: str) -> None:
        """End the group; the first reason is kept. May be called from any thread."""
        self._why = self._why or why
        for abort in self._aborts:
            abort(why)


def _note_lost(lead: weakref.ref[Lead], wake: Callable[[], None], why: str) -> None:
    lost = lead()
    if lost is not None:
        lost.abort(why)
        lost._is_lost.set()
        wake()


_LOOKS = 4


class Patience:
    """Watchdog that calls ``give_up`` with a reason when a wait exceeds ``timeout_s``.

    The call is made once, on a thread of its own, up to a quarter of the limit late. Handles one
    wait at a time.
    """

    def __init__(self, timeout_s: float, give_up: Callable[[str], None]) -> None:
        self._timeout_s = timeout_s
        self._give_up = give_up
        self._since_s: float | None = None
        over = threading.Event()
        weakref.finalize(self, over.set)
        threading.Thread(
            target=_look,
            args=(weakref.ref(self), over, timeout_s / _LOOKS),
            name="patience",
            daemon=True,
        ).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time the body; a nested wait counts as part of the outer one."""
        if self._since_s is not None:
            yield
            return
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self._since_s = None

    def is_over(self) -> bool:
        """Return whether the wait has timed out."""
        since_s = self._since_s
        if since_s is None or time.monotonic() - since_s < self._timeout_s:
            return False
        self._give_up(f"a rank did not come to an exchange within {self._timeout_s:g} s")
        return True


def _look(patience: weakref.ref[Patience], over: threading.Event, period_s: float) -> None:
    while not over.wait(period_s):
        own = patience()
        if own is None or own.is_over():
            return
        del own


# Messages that rank 0 may be ahead of another rank's host, and the bytes of a slot. Most messages
# fit into one slot; longer ones go in several pieces.
_NUM_SLOTS, _PIECE_BYTES = 8, 1 << 20
_LENGTH = struct.Struct("=Q")


def link_shape(num_readers: int) -> LinkShape:
    """Return the shape of the link from rank 0 to the ranks of one host."""
    return LinkShape(1, num_readers, _NUM_SLOTS, _PIECE_BYTES)


class LinkChannel:
    """Message channel in memory that all ranks of a host map."""

    def __init__(self, link: StageLink) -> None:
        self._link = link
        self._numbers = itertools.count()

    def post(self, *parts: bytes | memoryview) -> None:
        """Send a message from rank 0 to all other ranks. Raises RanksFailedError."""
        whole = b"".join(parts)
        room = _PIECE_BYTES - _LENGTH.size
        for begin in range(0, max(1, len(whole)), room):
            # Each piece begins with the number of bytes left, itself included.
            left = _LENGTH.pack(len(whole) - begin)
            self._link.write(next(self._numbers), left, whole[begin : begin + room])

    def receive(self) -> memoryview:
        """Wait for rank 0's next message, without a limit. Raises RanksFailedError."""
        pieces: list[bytes] = []
        while True:
            number = next(self._numbers)
            self._link.wait_written(number, bound=False)
            part = self._link.part(number)
            [left] = _LENGTH.unpack_from(part)
            own = part[_LENGTH.size : _LENGTH.size + left]
            pieces.append(bytes(own))
            self._link.done(number)
            if len(own) == left:
                return memoryview(bytearray().join(pieces))

    def abort(self, why: str) -> None:
        self._link.abort(why)


Channel = GlooRanks | LinkChannel
"""Channel of rank 0's messages to the other ranks, which receive copies."""

# Time to wait for news of a rank's end after an exchange with it has failed.
_HEARD_S = 2.0


class DeviceLead(Lead):
    """Rank 0 of a group of devices.

    The other ranks compute the posted messages in order, and rank 0 computes the same work at the
    same time.
    """

    def __init__(
        self, members: Members, ranks: DeviceRanks, channel: Channel, timeout_s: float
    ) -> None:
        """Lead ``members``; waits for rank 0's own device end after ``timeout_s``."""
        super().__init__(members, [channel.abort, ranks.abort], heard_s=_HEARD_S)
        self.ranks = ranks
        self.num_posted = 0
        self._channel = channel
        self._patience = Patience(timeout_s, self.abort)

    def post(self, message: Message) -> None:
        """Post a message that all other ranks compute. Raises RankLostError."""
        with self.together():
            self._channel.post(*encode_told(message))
        self.num_posted += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for this rank's device up to the limit. Raises RankLostError."""
        with self._patience.waiting(), self.together():
            yield
        self.check()


class DeviceParts:
    """Parts of the KV cache on the other ranks, see ``OtherParts``.

    Commands are posted like steps, and so run in order with them.
    """

    def __init__(self, lead: DeviceLead, block_bytes: int) -> None:
        """Use ``lead`` for commands; ``block_bytes`` is a block's size in all of these parts."""
        self.block_bytes = block_bytes
        self._lead = lead

    def tell(self, command: CacheCommand) -> None:
        """Send a command to each part. Raises ConfigError if a rank lacks memory for the slots."""
        self._lead.post(command)
        if isinstance(command, ReserveSlots):
            with self._lead.together():
                [has_memory] = self._lead.ranks.hosts.least([1])
            if not has_memory:
                raise ConfigError(
                    f"A rank's host lacks memory for its part of {command.num_slots} blocks. "
                    "Lower engine.host_cache_bytes."
                )

    def ask(self, command: CheckBlocks) -> list[bool]:
        """Return for each block whether all ranks have only finite numbers in it."""
        self._lead.post(command)
        with self._lead.together():
            return [flag == 1 for flag in self._lead.ranks.hosts.least([1] * len(command.blocks))]
