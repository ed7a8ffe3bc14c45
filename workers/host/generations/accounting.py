"""Resources of a generation: tokens cached, computed and pulled, and device time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millrace.engine.types import EngineOutput
from millrace.schemas.records import Attempt
from millrace.schemas.transfer import KvSource
from millrace.workers.host.energy import EnergyMeter, EnergyShare


class DeviceUse:
    """Device time of a generation, as the engines report it.

    Each engine counts from 0. Time that an engine had not reported when it died is lost. Engines
    report the time of one device. All devices of a group are busy meanwhile, so the total is
    ``num_devices`` times as long.
    """

    __slots__ = ("_former_us", "_meter", "_share", "_us", "num_devices")

    def __init__(self, meter: EnergyMeter, num_devices: int = 1) -> None:
        self.num_devices = num_devices
        self._us = self._former_us = 0.0
        self._meter = meter
        self._share = EnergyShare()

    def note(self, device_us: float) -> None:
        """Record the engine's total so far, in microseconds."""
        if device_us > self._us:
            self._us = device_us
            self._share.device_us = self._former_us + device_us
            self._meter.note_device_time(self._share)

    def note_engine_lost(self) -> None:
        """Start counting for the next engine: this one has ended."""
        self._former_us += self._us
        self._us = 0.0

    @property
    def total_us(self) -> int:
        """Device time of all devices together, in microseconds."""
        return round((self._former_us + self._us) * self.num_devices)

    def settle_energy(self) -> float | None:
        """Return the joules of that time, once the run is over; None if they were not measured."""
        return self._meter.settle(self._share)


@dataclass(slots=True, eq=False)
class Accounting:
    """Amounts of one attempt.

    ``num_found_tokens`` of the prompt and the resumed tokens were in the engine's KV cache when it
    began. The client pays ``num_cached_tokens`` of the prompt as cached. ``num_pulled_tokens`` came
    from another worker's KV cache. ``resampled``: an engine continued the attempt and draws other
    tokens than its seed would have given. ``is_charged``: the scheduler was told the attempt's
    usage.
    """

    device_use: DeviceUse
    num_found_tokens: int = 0
    num_cached_tokens: int = 0
    num_pulled_tokens: int = 0
    num_preemptions: int = 0
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    resampled: bool = False
    is_charged: bool = False

    def begin(
        self, output: EngineOutput, attempts: Mapping[int, Attempt], num_prompt_tokens: int
    ) -> None:
        """Record that the engine has admitted the request; ``attempts`` are the earlier ones, by
        epoch.
        """
        self.num_found_tokens = output.num_cached_tokens
        self.num_pulled_tokens = output.num_pulled_tokens
        num_free = num_free_tokens(output, attempts)
        self.num_cached_tokens = min(num_free, num_prompt_tokens)

    def find_more(self, output: EngineOutput, num_prompt_tokens: int) -> None:
        """Record cached tokens reported at the end: some servers report them only then."""
        self.num_found_tokens = output.num_cached_tokens
        self.num_cached_tokens = min(output.num_cached_tokens, num_prompt_tokens)

    def add(self, output: EngineOutput) -> None:
        """Add the amounts of a step."""
        self.resampled |= output.resampled
        self.num_preemptions += output.num_preemptions
        if output.num_proposed_tokens or output.num_accepted_tokens:
            self.num_proposed_tokens += output.num_proposed_tokens
            self.num_accepted_tokens += output.num_accepted_tokens
        if output.device_us:
            self.device_use.note(output.device_us)

    def pulled_from(self, source: KvSource | None) -> str:
        """Return the id of the worker that tokens were pulled from; empty if none were."""
        return source.worker_id if source is not None and self.num_pulled_tokens else ""


def num_free_tokens(output: EngineOutput, attempts: Mapping[int, Attempt]) -> int:
    """Return how many tokens found in the KV cache the client does not pay as computed.

    Tokens that an earlier attempt computed and this one pulled were not found for free.

    Args:
        output: the engine's first output, with the tokens found in its KV cache.
        attempts: the earlier attempts, by epoch.
    """
    num_cached = output.num_cached_tokens
    if not attempts:
        return num_cached
    earlier = attempts[max(attempts)].cached_tokens
    return max(num_cached - output.num_pulled_tokens, min(earlier, num_cached))
