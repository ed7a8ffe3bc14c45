"""How many workers the schedulers want."""

from __future__ import annotations

from collections import deque

from schemas.control import QueueStatus

# Of what was heard within this, the most counts. Several schedulers publish a figure each, under no
# name; one that has just started has not seen all that is needed yet.
_WINDOW_S = 3.0


class WantedWorkers:
    """Remembers what queue statuses said of late. Pure: the caller passes the time in."""

    def __init__(self) -> None:
        self._heard: dict[str, deque[tuple[float, int]]] = {}

    def note(self, status: QueueStatus, now_s: float) -> None:
        heard = self._heard.setdefault(status.model, deque())
        heard.append((now_s, status.desired_workers))
        _forget(heard, now_s)

    def of(self, model: str, now_s: float) -> int | None:
        """The most that any scheduler wants for a model; None: none was heard of lately."""
        heard = self._heard.get(model)
        if heard is None:
            return None
        _forget(heard, now_s)
        return max((count for _, count in heard), default=None)


def _forget(heard: deque[tuple[float, int]], now_s: float) -> None:
    while heard and heard[0][0] <= now_s - _WINDOW_S:
        heard.popleft()
