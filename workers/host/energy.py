"""Energy in joules: counters of devices and machines, and the shares of running requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_MJ_PER_J = 1e3
_UJ_PER_J = 1e6
_PACKAGE, _MEMORY = "package", "dram"


class UnreadableCounterError(Exception):
    """Error of an energy counter that cannot be read; the message has the reason."""


class EnergyCounter(Protocol):
    """Energy counter that never falls."""

    def read_j(self) -> float:
        """Return the joules so far; may wait for a driver. Raises UnreadableCounterError."""


class NvmlCounter:
    """Energy of a CUDA device since its driver was loaded, of all its users."""

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._handle: Any = None

    def read_j(self) -> float:
        try:
            import pynvml  # only where the engine has a CUDA device
        except ImportError as error:
            raise UnreadableCounterError("nvidia-ml-py is not installed") from error
        try:
            if self._handle is None:
                pynvml.nvmlInit()  # counts its calls: what is loaded stays so
                self._handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) / _MJ_PER_J
        except pynvml.NVMLError as error:
            raise UnreadableCounterError(str(error)) from error


class RaplCounter:
    """Energy of a machine's CPU packages and memory, from the kernel's powercap folder ``root``.

    A zone's counter wraps at its ``max_energy_range_uj``. It must be read more often than it wraps,
    which takes minutes at least.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._zones: list[_Zone] | None = None

    def read_j(self) -> float:
        try:
            if self._zones is None:
                self._zones = [_Zone(folder) for folder in _counted(self._root)]
            return sum(zone.read_uj() for zone in self._zones) / _UJ_PER_J
        except PermissionError as error:
            raise UnreadableCounterError(
                f"{error.filename} may be read by root only: let the worker's user read energy_uj"
            ) from error
        except (OSError, ValueError) as error:
            raise UnreadableCounterError(f"no RAPL counter under {self._root}: {error}") from error


class _Zone:
    """Counter of one zone, with its wraps removed."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text()) + 1
        self._last_uj = self._read()
        self._total_uj = self._last_uj

    def read_uj(self) -> int:
        now_uj = self._read()
        self._total_uj += (now_uj - self._last_uj) % self._range_uj
        self._last_uj = now_uj
        return self._total_uj

    def _read(self) -> int:
        return int(self._file.read_text())


def _counted(root: Path) -> list[Path]:
    """Return the zones of packages and of memory. Zones inside a package and the whole platform are
    left out, since they would count twice.

    Raises:
        ValueError: there is no such zone.
    """
    found = []
    for folder in sorted(root.glob("intel-rapl:*")):
        name = (folder / "name").read_text().strip()
        if name.startswith(_PACKAGE) or name == _MEMORY:
            found.append(folder)
    if not found:
        raise ValueError("it has no zone of a package")
    return found


# GPU counters are updated every 20 to 100 ms, so a reading may lag by that much.
READ_INTERVAL_S = 0.4
_S_PER_US = 1e-6

logger = logging.getLogger(__name__)


class EnergyTotals(NamedTuple):
    """Joules since the first reading: counted by the counter, and charged to requests."""

    counted_j: float = 0.0
    charged_j: float = 0.0


class EnergyShare:
    """Energy of one run: ``energy_j`` for the first ``settled_us`` of its ``device_us``."""

    __slots__ = ("device_us", "energy_j", "settled_us")

    def __init__(self) -> None:
        self.device_us = self.settled_us = self.energy_j = 0.0

    @property
    def open_s(self) -> float:
        """Device time in seconds that no reading covers so far."""
        return (self.device_us - self.settled_us) * _S_PER_US

    def give(self, joules: float) -> None:
        self.energy_j += joules
        self.settled_us = self.device_us


class EnergyMeter:
    """Meter that shares the energy between two readings among the runs, in proportion to their
    device time.

    Energy of the idle device is charged to no run. Its power is that of the last interval that was
    idle throughout, or the interval's mean before the first such interval.

    A run that ends between two readings is charged for its device time at the power of the last
    interval. The next interval carries the difference to the real value. So ``charged_j``,
    ``idle_j`` and ``carried_j`` always add up to ``counted_j``.

    Without a counter nothing is measured, and no value is reported as 0. A counter that fails once
    is not read again. ``rest_totals`` are the totals when the device was last seen idle.
    """

    def __init__(
        self,
        counter: EnergyCounter | None,
        busy_s: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        """Create a meter; ``busy_s`` returns how long the device has been busy so far."""
        self._counter = counter
        self._busy_s = busy_s
        self._monotonic = monotonic
        self._wanted = asyncio.Event()
        self._lock = asyncio.Lock()
        self._open: dict[EnergyShare, None] = {}
        self._first_j = self._last_j = self._read_s = self._read_busy_s = 0.0
        self._has_read = False
        self._idle_w: float | None = None
        self._busy_w: float | None = None
        self.charged_j = self.idle_j = self.carried_j = 0.0
        self.rest_totals = EnergyTotals()

    @property
    def measures(self) -> bool:
        """True if there is a counter and it has been read."""
        return self._counter is not None and self._has_read

    @property
    def counted_j(self) -> float:
        return self._last_j - self._first_j

    @property
    def totals(self) -> EnergyTotals | None:
        return EnergyTotals(self.counted_j, self.charged_j) if self.measures else None

    def read_soon(self, *, at_once: bool = False) -> None:
        """Read the counter, unless it was read less than ``READ_INTERVAL_S`` ago.

        ``at_once`` reads in any case: the device becomes busy or idle.
        """
        if self._counter is None:
            return
        if at_once or self._monotonic() - self._read_s >= READ_INTERVAL_S:
            self._wanted.set()

    async def run(self) -> None:
        """Read the counter whenever a reading is requested, until cancelled."""
        while True:
            await self.read()
            await self._wanted.wait()
            self._wanted.clear()

    async def read(self) -> None:
        """Read the counter in a thread, since it may wait for its driver."""
        async with self._lock:
            if self._counter is None:
                return
            try:
                joules = await asyncio.to_thread(self._counter.read_j)
            except UnreadableCounterError as error:
                logger.info("energy is not measured", extra={"reason": str(error)})
                self._counter = None
                self._open.clear()
                return
            self._note(joules, self._monotonic(), self._busy_s())

    async def read_before_first_end(self) -> None:
        """Read the counter if there is no power yet, so that the first run to end is measured."""
        if self._counter is not None and self._busy_w is None:
            await self.read()

    def note_device_time(self, share: EnergyShare) -> None:
        """Record that a share's run got more device time."""
        if self._counter is not None:
            self._open[share] = None

    def settle(self, share: EnergyShare) -> float | None:
        """Return the joules of an ended run; None if they were not measured."""
        if not self.measures:
            return None
        if share.open_s > 0:
            if self._busy_w is None:
                return None
            joules = share.open_s * self._busy_w
            share.give(joules)
            self.charged_j += joules
            self.carried_j -= joules
        self._open.pop(share, None)
        return share.energy_j

    def _note(self, joules: float, now_s: float, busy_s: float) -> None:
        if not self._has_read or joules < self._last_j:
            # This is the first reading, or the driver was loaded again and counts from 0.
            self._first_j += joules - self._last_j
            self._has_read = True
        elif joules == self._last_j:
            return  # the counter has not been updated yet
        else:
            passed_s = now_s - self._read_s
            self._share(joules - self._last_j, passed_s, busy_s - self._read_busy_s)
        self._last_j, self._read_s, self._read_busy_s = joules, now_s, busy_s

    def _share(self, joules: float, passed_s: float, busy_s: float) -> None:
        idle_s = max(passed_s - busy_s, 0.0)
        if busy_s <= 0:
            self._idle_w = joules / passed_s if passed_s > 0 else self._idle_w
            self.idle_j += joules + self.carried_j
            self.carried_j = 0.0
            self.rest_totals = EnergyTotals(self.counted_j + joules, self.charged_j)
            return
        idle_w = joules / (idle_s + busy_s) if self._idle_w is None else self._idle_w
        idle_j = min(joules, idle_w * idle_s)
        self.idle_j += idle_j
        busy_j = joules - idle_j
        self._busy_w = busy_j / busy_s or self._busy_w
        self.carried_j += busy_j
        open_s = sum(share.open_s for share in self._open)
        if open_s > 0 and self.carried_j > 0:
            for share in self._open:
                share.give(self.carried_j * share.open_s / open_s)
            self.charged_j += self.carried_j
            self.carried_j = 0.0
            self._open.clear()
