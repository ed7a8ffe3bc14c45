"""Counters of joules: NVML's of a GPU, RAPL's of a machine's processors and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

_MJ_PER_J = 1e3
_UJ_PER_J = 1e6
_PACKAGE, _MEMORY = "package", "dram"


class UnreadableCounterError(Exception):
    """Why there is nothing to read."""


class EnergyCounter(Protocol):
    """Counts from somewhere, and never falls."""

    def read_j(self) -> float:
        """Joules so far. It may wait for a driver. Raises UnreadableCounterError."""


class NvmlCounter:
    """What a CUDA device has taken since its driver was loaded: all of it, whoever used it."""

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
    """The packages of a machine and its memory, under the kernel's powercap folder ``root``. A
    zone's count begins again at its ``max_energy_range_uj``; it has to be read more often than it
    does, which takes minutes at least."""

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
    """One counter, without the falls of its beginning again."""

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
    """Packages and the memory beside their cores; what is within a package would count twice, and
    so would the whole platform. Raises ValueError if there is none."""
    found = []
    for folder in sorted(root.glob("intel-rapl:*")):
        name = (folder / "name").read_text().strip()
        if name.startswith(_PACKAGE) or name == _MEMORY:
            found.append(folder)
    if not found:
        raise ValueError("it has no zone of a package")
    return found
