"""Which beams of a search go on and which answers it has found, from log-probabilities alone."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Rows
from typing import NamedTuple

from millrace.schemas.frames import FinishReason
from millrace.schemas.sampling import SamplingParams


class Candidate(NamedTuple):
    """A token that may come next, and its natural-log probability."""

    token: int
    logprob: float


class BeamHypothesis(NamedTuple):
    """The tokens of an unfinished completion, and the sum of their log-probabilities."""

    token_ids: Rows[int]
    logprob: float


class Extension(NamedTuple):
    """``beams[beam]`` goes on with ``token``, which makes ``logprob`` of its own."""

    beam: int
    token: int
    logprob: float


class BeamCompletion(NamedTuple):
    """A completion that is over, its stop token included."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """Extends all beams by a token at a time, and keeps the ``sampling.n`` best answers.

    Of each beam the ``num_candidates`` likeliest tokens are looked at, which ``excluded`` ones are
    not among: the stop tokens, while there are fewer than ``min_tokens``. Those that stop it make
    answers; of the others the ``n`` likeliest beams go on. What is left after ``max_tokens`` are
    answers too. A score is that of ``SamplingOptions``: the sum of log-probabilities / number of
    tokens ** length_penalty.

    The search is over as soon as none of its beams can become one of the ``n`` best answers any
    more, so the answers are those of a search that goes on to ``max_tokens``. Of equals the one
    that was found first counts as better; of equal extensions the one of the better beam, then of
    the smaller token. Source of the method: vLLM's and transformers' beam searches. The length is
    that of the completion, as in transformers; vLLM adds the prompt's to it.
    """

    def __init__(
        self, sampling: SamplingParams, *, max_tokens: int, stop_token_ids: frozenset[int]
    ) -> None:
        self.width = sampling.n
        self.temperature = sampling.temperature
        # If as many of them as are not wanted stop their beam, there are as many answers.
        self.num_candidates = 2 * self.width
        self.answers: list[BeamCompletion] = []
        self._max_tokens = max_tokens
        self._min_tokens = sampling.min_tokens
        self._length_penalty = sampling.length_penalty
        self._stop_token_ids = stop_token_ids
        self._sorted_stops = sorted(stop_token_ids)

    def excluded(self, length: int) -> Rows[int]:
        """The tokens that may not be token ``length`` of a completion, counted from 0."""
        return self._sorted_stops if length < self._min_tokens else ()

    def extend(
        self, beams: Rows[BeamHypothesis], candidates: Rows[Rows[Candidate]]
    ) -> list[Extension]:
        """The beams that go on, the likeliest first; [] if the search is over.

        ``beams`` have one length, and come in the order of the extensions that they are.
        """
        length = len(beams[0].token_ids) + 1
        extensions: list[Extension] = []
        for number, (beam, own) in enumerate(zip(beams, candidates, strict=True)):
            for token, logprob in own:
                total = beam.logprob + logprob
                if token not in self._stop_token_ids:
                    extensions.append(Extension(number, token, total))
                else:
                    self._add_answer(beam, token, total, FinishReason.STOP)
        extensions.sort(key=_best_first)
        del extensions[self.width :]
        if length >= self._max_tokens:
            for beam_number, token, total in extensions:
                self._add_answer(beams[beam_number], token, total, FinishReason.LENGTH)
            return []
        if not extensions or self._is_settled(extensions[0].logprob, length):
            return []
        return extensions

    def _add_answer(
        self, beam: BeamHypothesis, token: int, logprob: float, reason: FinishReason
    ) -> None:
        score = logprob / (len(beam.token_ids) + 1) ** self._length_penalty
        if len(self.answers) == self.width and score <= self.answers[-1].score:
            return
        answer = BeamCompletion((*beam.token_ids, token), logprob, score, reason)
        insort(self.answers, answer, key=_falling_score)
        del self.answers[self.width :]

    def _is_settled(self, best_logprob: float, length: int) -> bool:
        """Whether no beam of ``length`` tokens can be better than the answers that there are: sums
        of log-probabilities only fall, so the best is that of a beam whose other tokens are
        certain, at the length that is best for it."""
        if len(self.answers) < self.width:
            return False
        best_length = self._max_tokens if self._length_penalty > 0 else length + 1
        best_score: float = best_logprob / best_length**self._length_penalty
        return best_score <= self.answers[-1].score


def _best_first(extension: Extension) -> tuple[float, int, int]:
    return (-extension.logprob, extension.beam, extension.token)


def _falling_score(answer: BeamCompletion) -> float:
    return -answer.score
