"""Request at an inference server: its next call, and the part of an answer that fits."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from millrace.engine.types import EngineRequest
from millrace.schemas.engines import PROMISES
from millrace.schemas.frames import FinishReason
from millrace.schemas.sampling import MAX_SEED, SamplingParams
from millrace.workers.servers.dialect import AnswerPart, Call, Dialect
from millrace.workers.servers.guided import Guide


class LiveRequest:
    """Live request at a server.

    ``token_ids`` are all tokens of its completion, those delivered earlier included.
    ``max_total_tokens`` bounds prompt and completion. If the server counts ``max_tokens`` in tokens
    of its own, ``window_tokens`` is the bound instead.
    """

    def __init__(
        self,
        request: EngineRequest,
        max_total_tokens: int,
        added_s: float,
        window_tokens: int | None = None,
    ) -> None:
        self.request = request
        self.token_ids = list(request.output_token_ids)
        self.added_s = added_s
        self.first_token_s: float | None = None
        self.last_token_s = added_s
        self.num_cached_tokens = 0
        self.is_resampled = False
        self.num_calls = 0
        self.task: asyncio.Task[None] | None = None
        self.guide: Guide | None = None
        self.num_hidden = 0
        self._server_counts = window_tokens is not None
        self._wanted_tokens = max_total_tokens - len(request.prompt_token_ids)
        longest_tokens = max_total_tokens if window_tokens is None else window_tokens
        self._max_tokens = longest_tokens - len(request.prompt_token_ids)
        sampling = request.sampling
        self._ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            self._ends |= frozenset(request.eos_token_ids)

    @property
    def is_sampled(self) -> bool:
        """True if its tokens are drawn at random."""
        return self.request.sampling.temperature > 0

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens that the server must know before the next token."""
        return len(self.request.prompt_token_ids) + len(self.request.output_token_ids)

    @property
    def num_uncached_prompt_tokens(self) -> int:
        """Number of these tokens that the server had to compute."""
        return max(0, self.num_prompt_tokens - self.num_cached_tokens)

    @property
    def num_outstanding_tokens(self) -> int:
        """Number of tokens still to be computed, if nothing stops early."""
        prefill = 0 if self.first_token_s is not None else self.num_prompt_tokens
        return prefill + max(0, self._wanted_tokens - len(self.token_ids))

    def accept(
        self, part: AnswerPart, *, is_complete: bool = False
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Accept a part of the answer.

        A server that stops before it has made as many tokens as requested has not ended the
        completion.

        Args:
            part: the part.
            is_complete: the grammar is complete.

        Returns:
            The tokens that belong to the completion, and the finish reason if they end it.
        """
        # A later call finds in the cache the blocks that the first call put there.
        if part.num_cached_tokens is not None and self.num_calls == 1:
            self.num_cached_tokens = part.num_cached_tokens
        accepted: list[int] = []
        for token_id in part.token_ids:
            accepted.append(token_id)
            self.token_ids.append(token_id)
            num_tokens = len(self.token_ids)
            if token_id in self._ends and num_tokens > self.request.sampling.min_tokens:
                return tuple(accepted), FinishReason.STOP
            if num_tokens >= self._max_tokens:
                return tuple(accepted), FinishReason.LENGTH
        if is_complete:
            return tuple(accepted), FinishReason.STOP
        if part.finish_reason is FinishReason.LENGTH and not self._server_counts:
            return tuple(accepted), None
        if part.finish_reason is FinishReason.STOP and not self.request.sampling.ignore_eos:
            # Many servers do not return the token that ends a sequence.
            end = self.request.eos_token_ids[:1]
            self.token_ids.extend(end)
            return (*accepted, *end), FinishReason.STOP
        return tuple(accepted), part.finish_reason


# A prime, so that two positions of a completion do not soon share a seed.
_SEED_STRIDE = 1_000_003


class CarriedPenalties(NamedTuple):
    """Presence and frequency penalties of the existing tokens, as a logit ``bias`` for the next
    call.

    The server itself continues to count the frequency of new tokens. Presence is in the bias only,
    or it would count twice. So after a token that is not in ``known``, the server needs a new call
    (``known`` None: no presence penalty). ``keeps_parts``: token ids are made from a server's text,
    and parts are kept whole since they are whole characters.
    """

    bias: dict[int, float]
    known: frozenset[int] | None
    keeps_parts: bool = False

    def head(self, part: AnswerPart) -> tuple[AnswerPart, bool]:
        """Return the part up to the first token that needs a new call, and whether there is one."""
        if self.known is None:
            return part, False
        if self.keeps_parts:
            return part, not self.known.issuperset(part.token_ids)
        for index, token_id in enumerate(part.token_ids):
            if token_id not in self.known:
                is_last = index + 1 == len(part.token_ids)
                reason = part.finish_reason if is_last else None
                return part._replace(
                    token_ids=part.token_ids[: index + 1], finish_reason=reason
                ), True
        return part, False


def carried_penalties(
    sampling: SamplingParams, token_ids: Sequence[int], *, keeps_parts: bool = False
) -> CarriedPenalties | None:
    """Return the penalties to carry over; None if there are none."""
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if not token_ids or (presence == 0 and frequency == 0):
        return None
    counts = Counter(token_ids)
    bias = {token_id: -presence - frequency * count for token_id, count in counts.items()}
    return CarriedPenalties(bias, frozenset(counts) if presence else None, keeps_parts)


class ServerQuestion(NamedTuple):
    """Next call to the server.

    ``request`` is the request as the server sees it. If ``call`` is None, ``forced`` is the only
    token that fits the grammar. ``is_single``: the call asks for one token. ``penalties`` are
    included in the call.
    """

    request: EngineRequest
    call: Call | None
    forced: tuple[int, ...] = ()
    is_single: bool = False
    penalties: CarriedPenalties | None = None

    def head(self, part: AnswerPart) -> tuple[AnswerPart, bool]:
        """Return the part that can be used, and whether the server needs a new call after it."""
        return (part, False) if self.penalties is None else self.penalties.head(part)


def next_question(dialect: Dialect, live: LiveRequest) -> ServerQuestion:
    """Return the next call for a request.

    Raises:
        ParameterError: the server does not support a parameter.
        GrammarError: no token fits.
    """
    has_exact_ids = PROMISES[dialect.kind].exact_token_ids
    penalties = carried_penalties(
        live.request.sampling, live.token_ids, keeps_parts=not has_exact_ids
    )
    request = live.request
    if penalties is not None:
        sampling = msgspec.structs.replace(request.sampling, presence_penalty=0.0)
        request = msgspec.structs.replace(request, sampling=sampling)
    question = _question(dialect, live, request)
    if penalties is None or question.call is None:
        return question
    call = dialect.biased(question.call, penalties.bias)
    return question._replace(call=call, penalties=penalties)


def _question(dialect: Dialect, live: LiveRequest, request: EngineRequest) -> ServerQuestion:
    guide, token_ids = live.guide, live.token_ids
    sampling = request.sampling
    if token_ids and sampling.seed is not None:
        # The server's random stream restarts with each call, so each call needs another seed.
        seed = (sampling.seed + len(token_ids) * _SEED_STRIDE) % MAX_SEED
        sampling = msgspec.structs.replace(sampling, seed=seed)
    num_hidden, live.num_hidden = live.num_hidden, 0
    if guide is None:
        request = msgspec.structs.replace(request, sampling=sampling)
        if num_hidden:
            return ServerQuestion(request, dialect.call_whole(request, token_ids, num_hidden))
        return ServerQuestion(request, dialect.call(request, token_ids))
    sampling = msgspec.structs.replace(sampling, grammar=None)
    request = msgspec.structs.replace(request, sampling=sampling)
    allowed = guide.allowed()
    if len(allowed) == 1 and sampling.logprobs is None:
        return ServerQuestion(request, None, forced=(int(allowed[0]),))
    if guide.asks_for_one:
        call = dialect.call_one_of(request, token_ids, allowed.tolist())
        return ServerQuestion(request, call, is_single=True)
    if num_hidden:
        return ServerQuestion(request, dialect.call_whole(request, token_ids, num_hidden))
    return ServerQuestion(request, dialect.call(request, token_ids))


def fitting_part(guide: Guide, part: AnswerPart, eos_token_ids: Sequence[int]) -> AnswerPart:
    """Return the part that fits the grammar. The end of a call, or of an answer without the
    grammar, does not end the completion.
    """
    num_fitting = guide.accept(part.token_ids)
    fits = num_fitting == len(part.token_ids)
    reason = None
    if fits and part.finish_reason is FinishReason.STOP and not guide.complete:
        # Many servers do not return the token that ends a sequence.
        reason = FinishReason.STOP if guide.accept(eos_token_ids[:1]) else None
    return part._replace(token_ids=part.token_ids[:num_fitting], finish_reason=reason)
