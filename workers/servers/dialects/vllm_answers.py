"""What vLLM's server answers: the events of a stream, from either of two endpoints."""

from __future__ import annotations

import msgspec

from millrace.schemas.frames import TokenLogprob
from millrace.workers.servers.dialect import AnswerPart, ServerStreamError
from millrace.workers.servers.dialects.completions_answers import CompletionsReader, ServerChoice

_TOKEN_ID = "token_id:"  # noqa: S105  (how it writes a token as its id)


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_Logprob] = []


class _Logprobs(msgspec.Struct):
    """``content`` comes from /inference/v1/generate, the others from /v1/completions."""

    content: list[_Logprob] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(ServerChoice):
    logprobs: _Logprobs | None = None


class VllmReader(CompletionsReader[_Choice]):
    """``num_logprobs`` alternatives were asked for (None: no log-probabilities), and the first
    event has ``num_echoed`` tokens of what was sent before its own, the first
    ``num_prompt_tokens`` of them with ``num_prompt_logprobs`` alternatives each."""

    def __init__(
        self,
        *,
        num_logprobs: int | None,
        num_echoed: int = 0,
        num_prompt_tokens: int = 0,
        num_prompt_logprobs: int = 0,
    ) -> None:
        super().__init__(_Choice)
        self._num_logprobs = num_logprobs
        self._num_echoed = num_echoed
        self._num_prompt_tokens = num_prompt_tokens
        self._num_prompt_logprobs = num_prompt_logprobs

    def part_of(self, choice: _Choice) -> AnswerPart:
        prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        if choice.logprobs is not None:
            entries = _entries(choice.logprobs)
            if self._num_echoed:
                echoed = entries[: self._num_prompt_tokens]
                prompt_logprobs = tuple(_limited(one, self._num_prompt_logprobs) for one in echoed)
                entries, self._num_echoed = entries[self._num_echoed :], 0
            if self._num_logprobs is not None:
                limit = self._num_logprobs
                logprobs = tuple(entry for one in entries if (entry := _limited(one, limit)))
        return AnswerPart(
            token_ids=choice.token_ids or (),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _entries(logprobs: _Logprobs) -> list[TokenLogprob | None]:
    if logprobs.content is not None:
        return [
            TokenLogprob(
                one.token_id,
                one.logprob,
                tuple((top.token_id, top.logprob) for top in one.top_logprobs),
            )
            for one in logprobs.content
        ]
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return [
        None
        if logprob is None
        else TokenLogprob(
            _id_of(token), logprob, tuple((_id_of(name), lp) for name, lp in (top or {}).items())
        )
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, tops, strict=True)
    ]


def _limited(entry: TokenLogprob | None, num_alternatives: int) -> TokenLogprob | None:
    """With the most likely alternatives only: the server adds the token itself to them."""
    if entry is None:
        return None
    top = sorted(entry.top, key=lambda one: -one[1])[:num_alternatives]
    return TokenLogprob(entry.token_id, entry.logprob, tuple(top))


def _id_of(token: str) -> int:
    if not token.startswith(_TOKEN_ID):
        raise ServerStreamError("vLLM sent log-probabilities without token ids.")
    return int(token.removeprefix(_TOKEN_ID))
