"""Report of the device time of each request, once, when its last step has been read."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from millrace.engine.step.executor import Executor
from millrace.engine.step.fork_group import charged_together
from millrace.engine.step.outputs import device_time, device_us
from millrace.engine.step.sequence import Sequence
from millrace.engine.types import DeviceTime, EngineOutput


class StepDeviceTimes:
    """Device times of ended and cancelled sequences.

    If a sequence ends or is cancelled while a step that computes it is in flight, its final device
    time follows after that step.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._owing: list[Sequence] = []
        self._unknown: list[DeviceTime] = []

    def note_cancelled(self, cancelled: list[Sequence]) -> None:
        """Add cancelled sequences of one request, some or all.

        A fork group has one device time for all of its sequences.
        """
        is_group = bool(cancelled) and cancelled[0].fork_group is not None
        self._owing += cancelled[:1] if is_group else cancelled

    def note_unknown(self, request_id: str) -> None:
        """Add the cancellation of a request that this engine does not have."""
        self._unknown.append(DeviceTime(request_id, 0, 0.0, over=True))

    def pop(self, live: Iterable[Sequence]) -> list[DeviceTime]:
        """Return the final device times that are known now, and the times so far of ``live``
        sequences."""
        times, self._unknown = self._unknown, []
        if self._owing:
            owing, self._owing = self._owing, []
            for sequence in owing:
                if self._executor.is_in_flight(sequence):
                    self._owing.append(sequence)
                else:
                    times.append(device_time(sequence, over=True))
        times += [device_time(sequence) for sequence in live if device_us(sequence)]
        return times

    def report(self, ended: list[tuple[int, Sequence]], outputs: list[EngineOutput]) -> None:
        """Put the device time of sequences that ended in a step into their last outputs."""
        sequences = {one for _, sequence in ended for one in charged_together(sequence)}
        may_owe = not self._executor.exempt_ended(sequences)
        for index, sequence in ended:
            owes = may_owe and self._executor.is_in_flight(sequence)
            if owes:
                self._owing.append(sequence)
            outputs[index] = msgspec.structs.replace(
                outputs[index], device_us=device_us(sequence), owes=owes
            )
