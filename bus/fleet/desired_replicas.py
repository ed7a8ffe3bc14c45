"""Desired number of workers, from the schedulers' queue statuses."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from millrace.schemas.control import QueueStatus

# The highest figure within this time counts. Several schedulers publish figures without a name, and
# a scheduler that has just started does not know the whole need yet.
_WINDOW_S = 3.0


@dataclass
class _Heard:
    since_s: float = 0.0
    figures: deque[tuple[float, int]] = field(default_factory=deque)

    def forget(self, now_s: float) -> None:
        while self.figures and self.figures[0][0] <= now_s - _WINDOW_S:
            self.figures.popleft()


class DesiredReplicas:
    """Recent figures of queue statuses. Pure: the caller passes the time."""

    def __init__(self) -> None:
        self._heard: dict[str, _Heard] = {}

    def note(self, status: QueueStatus, now_s: float) -> None:
        heard = self._heard.setdefault(status.model, _Heard())
        heard.forget(now_s)
        if not heard.figures:
            heard.since_s = now_s
        heard.figures.append((now_s, status.desired_workers))

    def of(self, model: str, now_s: float) -> int | None:
        """Return the highest number that a scheduler wants for a model; None without recent
        figures."""
        heard = self._heard.get(model)
        if heard is None:
            return None
        heard.forget(now_s)
        return max((count for _, count in heard.figures), default=None)

    def is_settled(self, model: str, now_s: float) -> bool:
        """Return whether schedulers were heard for long enough that none wants more than ``of``.

        Workers beyond that number may then be stopped.
        """
        heard = self._heard.get(model)
        return heard is not None and now_s - heard.since_s >= _WINDOW_S
