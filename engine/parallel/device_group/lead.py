"""Rank 0's ways to the others, and what it does when one is lost."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from millrace.engine.kernels.ranks import RanksFailedError
from millrace.engine.parallel.device_group.channel import Channel
from millrace.engine.parallel.device_group.messages import Message, encode
from millrace.engine.parallel.device_group.patience import Patience
from millrace.engine.parallel.device_group.ranks import DeviceRanks
from millrace.engine.parallel.group.members import Members
from millrace.engine.parallel.group.ranks import RankLostError

# Within this, how a rank ended is heard after an exchange with it has failed.
_HEARD_S = 2.0


class Lead:
    """Rank 0 of a group. The other ranks compute what is posted to them in that order, and rank 0
    computes the same at the same time: what goes wrong here after a message was posted ends the
    group, as the others wait in the middle of it."""

    def __init__(
        self, members: Members, ranks: DeviceRanks, channel: Channel, timeout_s: float
    ) -> None:
        """``timeout_s``: how long rank 0 waits for its device."""
        self.members = members
        self.ranks = ranks
        self.num_posted = 0
        self._channel = channel
        self._patience = Patience(timeout_s, self.abort)
        self._is_lost = threading.Event()
        self._why = ""

    def post(self, message: Message) -> None:
        """Have all other ranks compute something. Raises RankLostError."""
        with self.together():
            self._channel.post(*encode(message))
        self.num_posted += 1

    @contextmanager
    def together(self) -> Iterator[None]:
        """What goes wrong meanwhile ends the group. Raises RankLostError for it."""
        self.check()
        try:
            yield
        except Exception as error:
            raise self.failure(error) from error

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """For this rank's device, for so long at most. Raises RankLostError."""
        with self._patience.waiting(), self.together():
            yield
        self.check()

    def failure(self, error: Exception) -> RankLostError:
        """End the group for an error."""
        if isinstance(error, RanksFailedError):
            self._is_lost.wait(_HEARD_S)
        self.abort(str(error))
        return RankLostError(f"the group of ranks failed: {self._why}")

    def check(self) -> None:
        """Raise RankLostError if the group has failed."""
        if self._why:
            raise RankLostError(f"the group of ranks failed: {self._why}")

    def watch(self, wake: Callable[[], None]) -> None:
        """End the group when a rank has ended, and call ``wake`` then, on another thread."""
        self.members.watch(partial(_note_lost, weakref.ref(self), wake))

    def note_lost(self, why: str) -> None:
        """A rank has ended; for any thread."""
        self.abort(why)
        self._is_lost.set()

    def abort(self, why: str) -> None:
        """End the group; for any thread."""
        self._why = self._why or why
        self._channel.abort(why)
        self.ranks.abort(why)


def _note_lost(lead: weakref.ref[Lead], wake: Callable[[], None], why: str) -> None:
    lost = lead()
    if lost is not None:
        lost.note_lost(why)
        wake()
