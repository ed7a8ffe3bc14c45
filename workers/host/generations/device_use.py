"""What one run of a request has taken of the worker's device."""

from __future__ import annotations

from millrace.workers.host.energy.meter import EnergyMeter, EnergyShare


class DeviceUse:
    """As reported by the engines: each counts from 0, and what one that died had not reported is
    lost. Engines report the time of one device; all of a group are busy meanwhile, so that what was
    taken is ``num_devices`` times as long."""

    __slots__ = ("_former_us", "_meter", "_share", "_us", "num_devices")

    def __init__(self, meter: EnergyMeter, num_devices: int = 1) -> None:
        self.num_devices = num_devices
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
        """Of all devices together."""
        return round((self._former_us + self._us) * self.num_devices)

    def settle_energy(self) -> float | None:
        """The joules of that time, of a run that is over; None if they were not measured."""
        return self._meter.settle(self._share)
