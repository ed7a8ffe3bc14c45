"""What vLLM's server answers: the events of a stream, from either of two endpoints."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from schemas.frames import FinishReason, TokenLogprob
from workers.servers.dialect import Part, Reader, RefusedByServerError, ServerStreamError

_DONE = b"[DONE]"
_TOKEN_ID = "token_id:"  # noqa: S105  (how it writes a token as its id)
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


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


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _CachedTokens | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Event)


class VllmReader(Reader):
    """``num_logprobs`` alternatives were asked for (None: no log-probabilities), and the first
    event has ``num_echoed`` tokens of what was sent before its own, the first
    ``num_prompt_tokens`` of them with ``num_prompt_logprobs`` alternatives each.

    How many tokens of the prompt were cached is said behind the last token, which is held back for
    so long.
    """

    def __init__(
        self,
        *,
        num_logprobs: int | None,
        num_echoed: int = 0,
        num_prompt_tokens: int = 0,
        num_prompt_logprobs: int = 0,
    ) -> None:
        self._num_logprobs = num_logprobs
        self._num_echoed = num_echoed
        self._num_prompt_tokens = num_prompt_tokens
        self._num_prompt_logprobs = num_prompt_logprobs
        self._last: Part | None = None

    def read(self, event: bytes) -> Part | None:
        if event == _DONE:
            last, self._last = self._last, None
            return last
        try:
            said = _decoder.decode(event)
        except msgspec.MsgspecError as error:
            raise ServerStreamError(f"vLLM sent what is no event of a stream: {error}") from error
        if said.error is not None:
            raise _as_error(said.error)
        if not said.choices:
            last, self._last = self._last or Part(), None
            return last._replace(num_cached_tokens=_cached_of(said.usage))
        part = self._part(said.choices[0])
        if part.finish_reason is None:
            return part
        self._last = part
        return Part()

    def _part(self, choice: _Choice) -> Part:
        reason = choice.finish_reason
        if reason is not None and reason not in _REASONS:
            raise ServerStreamError(f"vLLM ended the answer by itself: {reason}.")
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
        return Part(
            token_ids=choice.token_ids or (),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=None if reason is None else _REASONS[reason],
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


def _cached_of(usage: _Usage | None) -> int | None:
    details = None if usage is None else usage.prompt_tokens_details
    return None if details is None else details.cached_tokens


def _as_error(error: _Error) -> ServerStreamError | RefusedByServerError:
    code = error.code
    if isinstance(code, int) and code < HTTPStatus.INTERNAL_SERVER_ERROR:
        return RefusedByServerError(error.message or "vLLM refuses the request.")
    return ServerStreamError(f"vLLM failed: {error.message or 'it does not say why'}")
