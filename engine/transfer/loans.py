"""Blocks that stay as they are while a peer reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from millrace.engine.transfer.memory import Region


class Loan:
    """Blocks that a peer has asked for: asked, granted, over. For two threads: the engine's grants
    and expires it, the one that serves the peer waits for it and ends it.

    ``end`` says whether the blocks were the peer's to read until now. ``on_end`` is called once,
    with a granted loan that the peer has ended.
    """

    def __init__(self, keys: list[bytes], on_end: Callable[[Loan], None]) -> None:
        self.keys = keys
        self.places: Sequence[int] = ()
        self._on_end = on_end
        self._lock = threading.Lock()
        self._is_granted = False
        self._is_over = False
        self._answered = threading.Event()

    def grant(self, places: Sequence[int]) -> bool:
        """Lend the blocks at these places; False if nobody waits for them any more."""
        with self._lock:
            if self._is_over:
                return False
            self.places = places
            self._is_granted = True
        self._answered.set()
        return True

    def expire(self) -> bool:
        """Lend them no longer; False if the peer has ended it before."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
        self._answered.set()
        return not was_over

    def wait(self, timeout_s: float) -> Sequence[int]:
        """Where the blocks are that it was granted; none if that took too long."""
        self._answered.wait(timeout_s)
        return self.places

    def end(self) -> bool:
        """The peer reads no more; whether what it has read is whole."""
        with self._lock:
            was_over, self._is_over = self._is_over, True
        if was_over:
            return False
        if self._is_granted:
            self._on_end(self)
        return True


class Lender(Protocol):
    """Who lends blocks; ``engine.kv.lending`` has one."""

    @property
    def regions(self) -> Sequence[Region]:
        """The memory where lent blocks are."""

    def ask(self, keys: list[bytes]) -> Loan:
        """Ask for the first blocks of a prefix; for any thread."""
