"""How fast the engine prefills and decodes, of late."""

from __future__ import annotations

from millrace.engine.scheduling.cost_model import CostModel, StepWork

# Weight that an observation loses with each later one of its kind: about 64 are remembered.
_DECAY = 1 - 1 / 64
# The first steps allocate and compile, and say nothing about the next.
_NUM_IGNORED = 2


class StepSpeed:
    """Prefilled tokens per second, and the time that a token of a sequence takes that decodes: a
    step's, or a part of one that makes several. O(1) a step.

    A step that does both is divided: its prefill is what it took beyond the decoding alone, as
    ``costs`` predicts that, or by tokens as long as nothing can be predicted.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._num_seen = 0
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._num_decodes = 0.0
        self._decode_s = 0.0

    def observe(self, work: StepWork, step_s: float, num_tokens: float = 1.0) -> None:
        """A step of ``work`` took ``step_s`` and made ``num_tokens`` of each that decodes."""
        self._num_seen += 1
        if self._num_seen <= _NUM_IGNORED or step_s <= 0:
            return
        decode_s = self._decode_part_s(work, step_s)
        if work.prefill_tokens:
            self._prefill_tokens = self._prefill_tokens * _DECAY + work.prefill_tokens
            self._prefill_s = self._prefill_s * _DECAY + step_s - decode_s
        if work.decodes:
            self._num_decodes = self._num_decodes * _DECAY + num_tokens
            self._decode_s = self._decode_s * _DECAY + decode_s

    def _decode_part_s(self, work: StepWork, step_s: float) -> float:
        if not work.prefill_tokens:
            return step_s
        if not work.decodes:
            return 0.0
        if not self._costs.is_warm:
            return step_s * work.decodes / (work.decodes + work.prefill_tokens)
        # In proportion, since what slows a step down slows all of it.
        predicted_s = self._costs.step_s(work)
        alone_s = self._costs.step_s(StepWork(0, work.decodes, work.context_tokens))
        return step_s * alone_s / predicted_s if predicted_s > 0 else step_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """0 before anything was measured."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s > 0 else 0.0

    @property
    def decode_step_ms(self) -> float:
        """0 before anything was measured."""
        return self._decode_s * 1e3 / self._num_decodes if self._num_decodes > 0 else 0.0
