"""How long a rank waits for its device, which may wait for others'."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOOKS = 4


class Patience:
    """Calls ``give_up`` with a reason, once and on a thread of its own, where a wait takes longer
    than ``timeout_s``, up to a quarter longer. For one wait at a time."""

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
        """Something is waited for; what is waited for within it is part of it."""
        if self._since_s is not None:
            yield
            return
        self._since_s = time.monotonic()
        try:
            yield
        finally:
            self._since_s = None

    def is_over(self) -> bool:
        """Whether it has given up."""
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
