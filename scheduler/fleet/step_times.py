"""How a worker's decoding slows down with its batch, learnt from its heartbeats."""

from __future__ import annotations

# Weight that a heartbeat loses with each later one: about 20 are remembered.
_DECAY = 0.95
# Before batches of different sizes were seen, a full one is taken to cost this much more than a
# small one, of what a step takes; never less than a little, never more than a lot.
_ASSUMED_GROWTH, _LEAST_GROWTH, _MOST_GROWTH = 0.5, 0.1, 4.0
# What is assumed counts like a variance of batch sizes of this.
_ASSUMED_WEIGHT = 1.0


class StepTimes:
    """Seconds of a step by the size of its batch: a straight line through the last measurements."""

    __slots__ = ("_xx", "_xy", "batch", "num_told", "per_sequence_s", "step_s")

    def __init__(self) -> None:
        self.num_told = 0.0
        self.batch = 0.0
        self.step_s = 0.0
        self.per_sequence_s = 0.0
        self._xx = 0.0
        self._xy = 0.0

    def observe(self, batch: int, step_s: float, num_slots: int) -> None:
        """Steps took so long while ``batch`` of at most ``num_slots`` sequences ran."""
        self.num_told = self.num_told * _DECAY + 1
        weight = 1 / self.num_told
        off_batch, off_s = batch - self.batch, step_s - self.step_s
        self.batch += weight * off_batch
        self.step_s += weight * off_s
        # Moments about the mean, which fade as it does.
        self._xx += weight * ((1 - weight) * off_batch * off_batch - self._xx)
        self._xy += weight * ((1 - weight) * off_batch * off_s - self._xy)
        unit_s = self.step_s / max(num_slots, 1)
        assumed_s = _ASSUMED_GROWTH * unit_s
        slope_s = (self._xy + _ASSUMED_WEIGHT * assumed_s) / (self._xx + _ASSUMED_WEIGHT)
        self.per_sequence_s = min(max(slope_s, _LEAST_GROWTH * unit_s), _MOST_GROWTH * unit_s)

    @property
    def spread(self) -> float:
        """How different the batches were that it has seen of late: their variance."""
        return self._xx

    def at_half(self, num_slots: int, per_sequence_s: float) -> float:
        """A step with half of the slots taken, if a sequence adds so much."""
        return self.step_s + per_sequence_s * (num_slots / 2 - self.batch)

    def at(self, batch: float) -> float:
        """What a step of so large a batch takes; 0 if nothing was measured so far."""
        return max(
            self.step_s + self.per_sequence_s * (batch - self.batch), self.step_s * _LEAST_GROWTH
        )
