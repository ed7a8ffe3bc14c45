"""What rank 0 of a group does when another rank is lost."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from millrace.engine.kernels.rank_view import RanksFailedError
from millrace.engine.parallel.members import Members
from millrace.engine.parallel.ranks import RankLostError


class Lead:
    """Rank 0 of a group. An error on rank 0 after the other ranks were told of a step ends the
    group, because they wait for rank 0 in the middle of the step."""

    def __init__(
        self, members: Members, aborts: Sequence[Callable[[str], None]], heard_s: float = 0.0
    ) -> None:
        """``aborts`` end the ways to the other ranks; ``heard_s``: how long to wait for the news of
        how a rank ended, after an exchange with it has failed."""
        self.members = members
        self._aborts = aborts
        self._heard_s = heard_s
        self._is_lost = threading.Event()
        self._why = ""

    @contextmanager
    def together(self) -> Iterator[None]:
        """End the group for an error that is raised meanwhile. Raises RankLostError for it."""
        self.check()
        try:
            yield
        except Exception as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> RankLostError:
        """End the group for an error."""
        if isinstance(error, RanksFailedError):
            self._is_lost.wait(self._heard_s)
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
        """End the group because a rank has ended; for any thread."""
        self.abort(why)
        self._is_lost.set()

    def abort(self, why: str) -> None:
        """End the group; for any thread. The first reason counts."""
        self._why = self._why or why
        for abort in self._aborts:
            abort(why)


def _note_lost(lead: weakref.ref[Lead], wake: Callable[[], None], why: str) -> None:
    lost = lead()
    if lost is not None:
        lost.note_lost(why)
        wake()
