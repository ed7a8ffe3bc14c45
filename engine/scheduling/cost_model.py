"""Cost model of a step's duration, fitted while steps run, and the speed of recent steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from millrace.engine.step.sequence import Sequence

# Weight that an observation keeps with each later one: about 300 steps are remembered. A
# coefficient does not change while no observation depends on it.
_DECAY = 1 - 1 / 300
_MIN_OBSERVATIONS = 16
# The speed is that of about 64 steps of a kind.
_SPEED_DECAY = 1 - 1 / 64
# The first steps allocate and compile, so they do not predict later ones.
_NUM_IGNORED = 2
# Maximum ratio of observed to predicted time; longer steps count as this ratio.
_MAX_SURPRISE = 2.0
_SWEEPS = 3
# Scales at which a feature is about 1, so that one step size fits all coefficients.
_SCALES = (1.0, 256.0, 16.0, 16_384.0, 65_536.0)


class StepWork(NamedTuple):
    """Work of a step.

    Attributes:
        prefill_tokens: Tokens of chunks.
        decodes: Rows of decoding sequences: one each, and one for each proposed token.
        context_tokens: Tokens that these rows attend to.
        prefill_pairs: Pairs of a chunk's token and a token that it attends to.
    """

    prefill_tokens: int = 0
    decodes: int = 0
    context_tokens: int = 0
    prefill_pairs: int = 0

    @classmethod
    def of(cls, plan: Iterable[tuple[Sequence, int]]) -> StepWork:
        """Return the work of a plan that has not been computed yet."""
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
    """Count the pairs of a chunk of ``num_tokens`` after ``num_context_tokens``."""
    return num_tokens * num_context_tokens + num_tokens * (num_tokens + 1) // 2


class CostModel:
    """Seconds of a step: a + b * prefill tokens + c * decodes + d * context tokens + e * pairs.

    The fit minimizes the squares of the relative error over the recent steps. It keeps normal
    equations that fade, and finds coefficients that are never negative by coordinate descent from
    the previous ones, in about 30 us per observation. Outliers, which other load on the machine
    causes, are clipped.
    """

    def __init__(self) -> None:
        size = len(_SCALES)
        self._gram = [[0.0] * size for _ in range(size)]
        self._moments = [0.0] * size
        self._coefficients = [0.0] * size
        self._num_seen = 0

    @property
    def is_warm(self) -> bool:
        """True if it has enough observations to predict."""
        return self._num_seen >= _NUM_IGNORED + _MIN_OBSERVATIONS

    def observe(self, work: StepWork, step_s: float) -> None:
        """Add an observation: a step of ``work`` took ``step_s``."""
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
        """Predict the seconds of a step of ``work``; 0 before the first observation."""
        return self._predict(_features(work))

    def prefill_s(self, num_tokens: int, num_context_tokens: int = 0) -> float:
        """Predict the seconds that a prompt's tokens add to steps that run anyway."""
        pairs = chunk_pairs(num_tokens, num_context_tokens)
        return self.step_s(StepWork(num_tokens, 0, 0, pairs)) - self.step_s(StepWork())

    def largest_chunk(self, bound_s: float, beside: StepWork, num_context_tokens: int) -> int:
        """Return the most tokens after ``num_context_tokens`` that fit a step of at most
        ``bound_s``.

        The step also computes the work ``beside``. Returns 0 if there is no time left.
        """
        left_s = bound_s - self.step_s(beside)
        if left_s <= 0:
            return 0
        per_pair_s = self._coefficients[4] / _SCALES[4]
        per_token_s = self._coefficients[1] / _SCALES[1] + per_pair_s * (num_context_tokens + 0.5)
        if per_token_s <= 0:
            return 1 << 30
        # Solve per_pair_s / 2 * n^2 + per_token_s * n = left_s, in the form without cancellation.
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
    """Recent speed: prefilled tokens per second, and milliseconds per token of a decoding sequence.

    A step that makes several tokens of a sequence counts as several. O(1) per step. The time of a
    step that does both is divided. Its prefill time is the time beyond the decoding alone, as
    ``costs`` predicts it; before ``costs`` can predict, the time is divided by tokens.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._num_seen = 0
        self._prefill_tokens = 0.0
        self._prefill_s = 0.0
        self._num_decodes = 0.0
        self._decode_s = 0.0

    def observe(self, work: StepWork, step_s: float, num_tokens: float = 1.0) -> None:
        """Add an observation: a step of ``work`` took ``step_s`` and made ``num_tokens`` tokens of
        each decoding sequence."""
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
        # In proportion, since a slow machine slows all of the step.
        predicted_s = self._costs.step_s(work)
        alone_s = self._costs.step_s(StepWork(0, work.decodes, work.context_tokens))
        return step_s * alone_s / predicted_s if predicted_s > 0 else step_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prefilled tokens per second; 0 before the first measurement."""
        return self._prefill_tokens / self._prefill_s if self._prefill_s > 0 else 0.0

    @property
    def decode_step_ms(self) -> float:
        """Milliseconds per token of a decoding sequence; 0 before the first measurement."""
        return self._decode_s * 1e3 / self._num_decodes if self._num_decodes > 0 else 0.0
