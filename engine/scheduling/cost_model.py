"""What a step takes, learnt while steps run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from millrace.engine.step.sequence import Sequence

# Weight that an observation loses with each later one: about 300 steps are remembered. What a
# coefficient is stays as it was while nothing is observed that would tell.
_DECAY = 1 - 1 / 300
_MIN_OBSERVATIONS = 16
# The speed is that of about 64 steps of a kind.
_SPEED_DECAY = 1 - 1 / 64
# The first steps allocate and compile, and say nothing about the next.
_NUM_IGNORED = 2
# A step that takes more than this many times what was predicted counts as this many times.
_MAX_SURPRISE = 2.0
_SWEEPS = 3
# Sizes at which a feature is about 1, so that one step size fits all coefficients.
_SCALES = (1.0, 256.0, 16.0, 16_384.0, 65_536.0)


class StepWork(NamedTuple):
    """What a step computes: tokens of chunks, rows of sequences that decode (one each, and one for
    each token that is proposed), tokens that these attend to, and pairs of a chunk's token and one
    that it attends to."""

    prefill_tokens: int = 0
    decodes: int = 0
    context_tokens: int = 0
    prefill_pairs: int = 0

    @classmethod
    def of(cls, plan: Iterable[tuple[Sequence, int]]) -> StepWork:
        """The work of a plan that has not been computed yet."""
        prefill_tokens = decodes = context_tokens = prefill_pairs = 0
        for sequence, num_tokens in plan:
            context = sequence.num_computed_tokens
            num_known = len(sequence.token_ids)
            if context + 1 == num_known > sequence.num_prompt_tokens:
                num_rows = 1 + len(sequence.proposed)
                decodes += num_rows
                context_tokens += num_rows * num_known
            else:
                prefill_tokens += num_tokens
                prefill_pairs += chunk_pairs(num_tokens, context)
        return cls(prefill_tokens, decodes, context_tokens, prefill_pairs)


def chunk_pairs(num_tokens: int, num_context_tokens: int) -> int:
    """Pairs of a chunk of ``num_tokens`` behind ``num_context_tokens``."""
    return num_tokens * num_context_tokens + num_tokens * (num_tokens + 1) // 2


class CostModel:
    """Seconds of a step: a + b * prefill tokens + c * decodes + d * context tokens + e * pairs.

    Least squares of the relative error over the recent steps, kept as normal equations that fade,
    with coefficients that are never negative, found by coordinate descent from where they were:
    about 30 us an observation. Slow steps that something else on the machine made slow are
    clipped.
    """

    def __init__(self) -> None:
        size = len(_SCALES)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moments = [0.0] * size
        self._coefficients = [0.0] * size
        self._num_seen = 0

    @property
    def is_warm(self) -> bool:
        """Whether it has seen enough to be believed."""
        return self._num_seen >= _NUM_IGNORED + _MIN_OBSERVATIONS

    def observe(self, work: StepWork, step_s: float) -> None:
        """A step of ``work`` took ``step_s``."""
        self._num_seen += 1
        if self._num_seen <= _NUM_IGNORED or step_s <= 0:
            return
        features = _features(work)
        if self.is_warm:
            step_s = min(step_s, _MAX_SURPRISE * max(self._predict(features), 1e-6))
        row = [feature / step_s for feature in features]
        gram, moments = self._gram, self._moments
        for i, value in enumerate(row):
            own = gram[i]
            for j, other in enumerate(row):
                own[j] = own[j] * _DECAY + value * other
            moments[i] = moments[i] * _DECAY + value
        self._descend()

    def _descend(self) -> None:
        coefficients = self._coefficients
        for _ in range(_SWEEPS):
            for i, row in enumerate(self._gram):
                if row[i] > 1e-9:
                    others = sum(a * b for a, b in zip(row, coefficients, strict=True))
                    change = (self._moments[i] - others) / row[i]
                    coefficients[i] = max(0.0, coefficients[i] + change)

    def _predict(self, features: tuple[float, ...]) -> float:
        return sum(a * b for a, b in zip(features, self._coefficients, strict=True))

    def step_s(self, work: StepWork) -> float:
        """What a step of ``work`` will take; 0 before anything was observed."""
        return self._predict(_features(work))

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        """What computing a prompt's tokens adds to steps that run anyway."""
        pairs = chunk_pairs(num_tokens, num_context_tokens)
        return self.step_s(StepWork(num_tokens, 0, 0, pairs)) - self.step_s(StepWork())

    def largest_chunk(self, bound_s: float, beside: StepWork, num_context_tokens: int) -> int:
        """The most tokens behind ``num_context_tokens`` that a step may compute beside other work
        without being predicted to take longer than ``bound_s``; 0 if there is no time left."""
        left_s = bound_s - self.step_s(beside)
        if left_s <= 0:
            return 0
        per_pair_s = self._coefficients[4] / _SCALES[4]
        per_token_s = self._coefficients[1] / _SCALES[1] + per_pair_s * (num_context_tokens + 0.5)
        if per_token_s <= 0:
            return 1 << 30
        # per_pair_s / 2 * n^2 + per_token_s * n = left_s, in the form that does not cancel.
        root = math.sqrt(per_token_s * per_token_s + 2 * per_pair_s * left_s)
        return int(2 * left_s / (per_token_s + root))


def _features(work: StepWork) -> tuple[float, ...]:
    return (
        1.0,
        work.prefill_tokens / _SCALES[1],
        work.decodes / _SCALES[2],
        work.context_tokens / _SCALES[3],
        work.prefill_pairs / _SCALES[4],
    )


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
            self._prefill_tokens = self._prefill_tokens * _SPEED_DECAY + work.prefill_tokens
            self._prefill_s = self._prefill_s * _SPEED_DECAY + step_s - decode_s
        if work.decodes:
            self._num_decodes = self._num_decodes * _SPEED_DECAY + num_tokens
            self._decode_s = self._decode_s * _SPEED_DECAY + decode_s

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
