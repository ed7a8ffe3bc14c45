"""Check that the load client was not the bottleneck: its CPU time and its event loop's delays."""

from __future__ import annotations

import asyncio
import time
from array import array

import msgspec

_INTERVAL_S = 0.01
# An event loop's timers are exact to a millisecond.
_TIMER_MS = 1.0
_MAX_CPU_SHARE = 0.85
_MAX_LAG_P99_MS = 20.0


class ProcessHealth(msgspec.Struct, frozen=True, kw_only=True):
    """Health of a load process: CPU time over wall time, and the delays of a timer of 10 ms."""

    cpu_share: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float

    @property
    def why_limited(self) -> str:
        """Reason why this process may have been slower than the server; empty if there is none."""
        if self.cpu_share > _MAX_CPU_SHARE:
            return f"a load process used {self.cpu_share:.0%} of a core"
        if self.lag_p99_ms > _MAX_LAG_P99_MS:
            return f"a load process ran up to {self.lag_p99_ms:.0f} ms late (p99)"
        return ""


class HealthProbe:
    """Probe that measures from ``start`` to ``stop``."""

    def __init__(self) -> None:
        self._lags_ms = array("d")
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._started_s = self._cpu_s = 0.0

    def start(self) -> None:
        self._started_s, self._cpu_s = time.perf_counter(), time.process_time()
        self._arm()

    def stop(self) -> ProcessHealth:
        if self._timer is not None:
            self._timer.cancel()
        wall_s = max(time.perf_counter() - self._started_s, 1e-9)
        lags = sorted(self._lags_ms) or [0.0]
        return ProcessHealth(
            cpu_share=(time.process_time() - self._cpu_s) / wall_s,
            lag_p50_ms=lags[len(lags) // 2],
            lag_p99_ms=lags[min(len(lags) - 1, int(len(lags) * 0.99))],
            lag_max_ms=lags[-1],
        )

    def _arm(self) -> None:
        self._due_s = time.perf_counter() + _INTERVAL_S
        self._timer = asyncio.get_running_loop().call_later(_INTERVAL_S, self._tick)

    def _tick(self) -> None:
        late_ms = (time.perf_counter() - self._due_s) * 1e3
        self._lags_ms.append(max(0.0, late_ms - _TIMER_MS))
        self._arm()
