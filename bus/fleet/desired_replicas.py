"""How many workers the schedulers want."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from millrace.schemas.control import QueueStatus

# Of what was heard within this, the most counts. Several schedulers publish a figure each, under no
# name; one that has just started has not seen all that is needed yet.
_WINDOW_S = 3.0


@dataclass
class _Heard:
    since_s: float = 0.0
    figures: deque[tuple[float, int]] = field(default_factory=deque)

    def forget(self, now_s: float) -> None:
        while self.figures and self.figures[0][0] <= now_s - _WINDOW_S:
            self.figures.popleft()


class DesiredReplicas:
    """Remembers what queue statuses said of late. Pure: the caller passes the time in."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}

    def note(self, status: QueueStatus, now_s: float) -> None:
        heard = self._heard.setdefault(status.model, _Heard())
        heard.forget(now_s)
        if not heard.figures:
            heard.since_s = now_s
        heard.figures.append((now_s, status.desired_workers))

    def of(self, model: str, now_s: float) -> int | None:
        """The most that any scheduler wants for a model; None: none was heard of lately."""
        heard = self._heard.get(model)
        if heard is None:
            return None
        heard.forget(now_s)
        return max((count for _, count in heard.figures), default=None)

    def is_settled(self, model: str, now_s: float) -> bool:
        """Whether schedulers were heard for so long that none wants more than ``of`` says: enough
        to stop what is beyond that."""
        heard = self._heard.get(model)
        return heard is not None and now_s - heard.since_s >= _WINDOW_S
