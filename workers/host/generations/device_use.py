"""What one run of a request has taken of the worker's device."""

from __future__ import annotations

from millrace.workers.host.energy.meter import EnergyMeter, EnergyShare


class DeviceUse:
    """As reported by the engines: each counts from 0, and what one that died had not reported is
    lost."""

    __slots__ = ("_former_us", "_meter", "_share", "_us")

    def __init__(self, meter: EnergyMeter) -> None:
        self._us = self._former_us = 0.0
        self._meter = meter
        self._share = EnergyShare()

    def note(self, device_us: float) -> None:
        """The engine reports its total so far."""
        if device_us > self._us:
            self._us = device_us
            self._share.device_us = self._former_us + device_us
            self._meter.note_device_time(self._share)

    def note_engine_lost(self) -> None:
        """The engine has ended."""
        self._former_us += self._us
        self._us = 0.0

    @property
    def total_us(self) -> int:
        return round(self._former_us + self._us)

    def settle_energy(self) -> float | None:
        """The joules of that time, of a run that is over; None if they were not measured."""
        return self._meter.settle(self._share)
