"""What one run of a request has taken of the worker's device."""

from __future__ import annotations


class DeviceUse:
    """As reported by the engines: each counts from 0, and what one that died had not reported is
    lost."""

    __slots__ = ("_former_us", "_us")

    def __init__(self) -> None:
        self._us = self._former_us = 0.0

    def note(self, device_us: float) -> None:
        """The engine reports its total so far."""
        self._us = max(self._us, device_us)

    def note_engine_lost(self) -> None:
        """The engine has ended."""
        self._former_us += self._us
        self._us = 0.0

    @property
    def total_us(self) -> int:
        return round(self._former_us + self._us)
