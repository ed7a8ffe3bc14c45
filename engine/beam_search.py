"""Beam search, a client of the engine's fork groups. The engine itself knows only forks."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Rows
from typing import NamedTuple

from millrace.engine.step.fork_group import Candidate, ForkGroup
from millrace.engine.step.live_requests import LiveRequests
from millrace.engine.step.sequence import Sequence
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.errors import ParameterError
from millrace.schemas.frames import FinishReason
from millrace.schemas.sampling import SamplingParams


def check_beams(request: EngineRequest, *, vocab_size: int) -> None:
    """Raise ParameterError for a beam search that the engine cannot compute.

    A beam search delivers no tokens before its end, so it cannot continue from delivered tokens.
    Its ``2 * n`` candidates and its stop tokens must fit the vocabulary.
    """
    if request.output_token_ids:
        raise ParameterError(
            "output_token_ids",
            "output_token_ids cannot be used with use_beam_search, which cannot resume an answer; "
            "leave one of them out.",
        )
    num_stops = len(request.sampling.stop_token_ids) + len(request.eos_token_ids)
    if 2 * request.sampling.n + num_stops > vocab_size:
        raise ParameterError(
            "n",
            f"n is too large for a beam search in a vocabulary of {vocab_size} tokens; lower it.",
        )


class BeamHypothesis(NamedTuple):
    """Tokens of an unfinished completion, and the sum of their log-probabilities."""

    token_ids: Rows[int]
    logprob: float


class Extension(NamedTuple):
    """Continuation of ``beams[beam]`` with ``token``. ``logprob`` is the sum with that token."""

    beam: int
    token: int
    logprob: float


class BeamCompletion(NamedTuple):
    """Finished completion, its stop token included."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """Beam search that extends all beams by one token at a time and keeps the ``sampling.n`` best
    answers.

    The ``num_candidates`` likeliest next tokens of each beam are considered. The ``excluded``
    tokens are not among them: the stop tokens, while there are fewer than ``min_tokens``. A stop
    token makes its beam an answer. Of the other extensions the ``n`` likeliest become the next
    beams. After ``max_tokens``, the remaining beams become answers, too. A score is defined as in
    ``SamplingOptions``: the sum of log-probabilities / number of tokens ** length_penalty.

    The search ends as soon as no beam can become one of the ``n`` best answers, so the answers
    equal those of a search that runs to ``max_tokens``. Among equal answers, the one found first is
    better; among equal extensions, that of the better beam, then the smaller token. Source of the
    method: the beam searches of vLLM and transformers. The length is that of the completion, as in
    transformers; vLLM adds the prompt's length.
    """

    def __init__(
        self, sampling: SamplingParams, *, max_tokens: int, stop_token_ids: frozenset[int]
    ) -> None:
        self.width = sampling.n
        # Enough for ``width`` answers even if ``width`` of these tokens do not stop their beam.
        self.num_candidates = 2 * self.width
        self.answers: list[BeamCompletion] = []
        self.beam_logprobs = [0.0]
        self._max_tokens = max_tokens
        self._min_tokens = sampling.min_tokens
        self._length_penalty = sampling.length_penalty
        self._stop_token_ids = stop_token_ids
        self._sorted_stops = sorted(stop_token_ids)

    def excluded(self, length: int) -> Rows[int]:
        """Return the tokens that are excluded as token ``length`` of a completion, counted from
        0."""
        return self._sorted_stops if length < self._min_tokens else ()

    def extend(
        self, beams: Rows[BeamHypothesis], candidates: Rows[Rows[Candidate]]
    ) -> list[Extension]:
        """Return the next beams, the likeliest first; [] if the search is over.

        ``beams`` have one length, and come in the order of the extensions that made them.
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
        """Return whether no beam of ``length`` tokens can become better than the present answers.

        Sums of log-probabilities only fall. So the bound is the best beam, continued with certain
        tokens to the length that gives it the best score.
        """
        if len(self.answers) < self.width:
            return False
        best_length = self._max_tokens if self._length_penalty > 0 else length + 1
        best_score: float = best_logprob / best_length**self._length_penalty
        return best_score <= self.answers[-1].score


def begin_search(first: Sequence) -> None:
    """Start a search that a request's only sequence leads.

    Its beams become forks of the sequence.
    """
    search = BeamSearch(
        first.request.sampling,
        max_tokens=first.max_total_tokens - first.num_prompt_tokens,
        stop_token_ids=first.stop_token_ids,
    )
    first.fork_group = ForkGroup(
        first,
        width=search.width,
        num_candidates=search.num_candidates,
        excluded=search.excluded(0),
        client_state=search,
    )


def advance_searches(live: LiveRequests, outputs: list[EngineOutput]) -> None:
    """Advance or end the searches whose beams are all computed.

    The beams of a search may be computed in several steps, as budget, slots and blocks allow. Their
    next tokens are chosen once the candidates of all are known. A preempted beam is computed again
    from its tokens, with the same result.
    """
    for group in live.pop_complete_groups():
        try:
            _advance(group, live, outputs)
        except Exception as error:  # noqa: BLE001 (any error ends one search only)
            live.fail(group.first, error, outputs)


def _advance(group: ForkGroup, live: LiveRequests, outputs: list[EngineOutput]) -> None:
    search: BeamSearch = group.client_state
    num_prompt_tokens = group.first.num_prompt_tokens
    beams = [
        BeamHypothesis(sequence.token_ids[num_prompt_tokens:-1], logprob)
        for sequence, logprob in zip(group.members, search.beam_logprobs, strict=True)
    ]
    extensions = search.extend(beams, [group.candidates[s] for s in group.members])
    if extensions:
        search.beam_logprobs = [extension.logprob for extension in extensions]
        excluded = search.excluded(len(beams[0].token_ids) + 1)
        live.go_on(group, [(one.beam, one.token) for one in extensions], excluded, outputs)
        return
    assert len(search.answers) == search.width, "a choice has no answer"
    answers = [
        EngineOutput(
            request_id=group.request.request_id,
            choice=choice,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason,
            cumulative_logprob=answer.logprob,
        )
        for choice, answer in enumerate(search.answers)
    ]
    live.finish_group(group, answers, outputs)


def _best_first(extension: Extension) -> tuple[float, int, int]:
    return (-extension.logprob, extension.beam, extension.token)


def _falling_score(answer: BeamCompletion) -> float:
    return -answer.score
