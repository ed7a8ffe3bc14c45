"""Wakes who steps the engine."""

from __future__ import annotations

import os
import threading
import weakref


class Bell:
    """Rung by any thread, heard by one: while it waits here, or for other things beside ``fd``,
    which can be read once it was rung."""

    def __init__(self) -> None:
        self._rung = threading.Event()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd).atexit = False

    def ring(self) -> None:
        """What it is rung for has to be there already."""
        self._rung.set()
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Wait for the next time; what it was rung for is looked at after this."""
        self._rung.clear()
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return  # it was not

    def wait(self, timeout_s: float) -> None:
        """Until it is rung, for some time at most."""
        self._rung.wait(timeout_s)
