"""What SGLang's server answers to ``/generate``: the events of a stream."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from millrace.schemas.frames import FinishReason, TokenLogprob
from millrace.workers.servers.dialect import Part, Reader, RefusedByServerError, ServerStreamError

_DONE = b"[DONE]"
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}

# Log-probability, token id, and the token's text if it was asked for.
_Entry = tuple[float | None, int, str | None]


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str = ""
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    completion_tokens: int = 0
    cached_tokens: int | None = None
    output_token_logprobs: list[_Entry] = []
    output_top_logprobs: list[list[_Entry] | None] = []
    input_token_logprobs: list[_Entry] = []
    input_top_logprobs: list[list[_Entry] | None] = []


class _Error(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Event)


class SglangReader(Reader):
    """``num_logprobs`` alternatives were asked for (None: no log-probabilities), and
    ``num_prompt_logprobs`` for each of the first ``num_prompt_tokens`` of what was sent.

    An event holds all tokens so far, or with ``--incremental-streaming-output`` the new ones only.
    Which of the two it is shows in how many the server counts.
    """

    def __init__(
        self, *, num_logprobs: int | None, num_prompt_logprobs: int | None, num_prompt_tokens: int
    ) -> None:
        self._num_logprobs = num_logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._num_prompt_tokens = num_prompt_tokens
        self._num_seen = 0

    def read(self, event: bytes) -> Part | None:
        if event == _DONE:
            return None
        try:
            said = _decoder.decode(event)
        except msgspec.MsgspecError as error:
            raise ServerStreamError(f"SGLang sent what is no event of a stream: {error}") from error
        if said.error is not None:
            raise ServerStreamError(f"SGLang failed: {said.error.message}")
        meta = said.meta_info
        reason = None if meta.finish_reason is None else _reason_of(meta.finish_reason)
        token_ids = self._new_of(said.output_ids, meta.completion_tokens)
        part = Part(token_ids=token_ids, finish_reason=reason, num_cached_tokens=meta.cached_tokens)
        if self._num_logprobs is not None and token_ids:
            entries = _entries(
                meta.output_token_logprobs[-len(token_ids) :],
                meta.output_top_logprobs[-len(token_ids) :],
                self._num_logprobs,
            )
            part = part._replace(logprobs=tuple(entry for entry in entries if entry is not None))
        if self._num_prompt_logprobs is not None and meta.input_token_logprobs:
            num, limit = self._num_prompt_tokens, self._num_prompt_logprobs
            entries = _entries(
                meta.input_token_logprobs[:num], meta.input_top_logprobs[:num], limit
            )
            self._num_prompt_logprobs = None
            part = part._replace(prompt_logprobs=tuple(entries))
        return part

    def _new_of(self, token_ids: list[int], num_made: int) -> list[int]:
        if num_made == len(token_ids):
            new = token_ids[self._num_seen :]
        elif num_made == self._num_seen + len(token_ids):
            new = token_ids
        else:
            raise ServerStreamError(
                f"SGLang counts {num_made} tokens where {self._num_seen} came and then "
                f"{len(token_ids)}."
            )
        self._num_seen = num_made
        return new


def _entries(
    tokens: list[_Entry], tops: list[list[_Entry] | None], num_alternatives: int
) -> list[TokenLogprob | None]:
    padded = [*tops, *([None] * (len(tokens) - len(tops)))]
    return [
        None
        if logprob is None
        else TokenLogprob(
            token_id,
            logprob,
            tuple((one, lp) for lp, one, _ in (top or ())[:num_alternatives] if lp is not None),
        )
        for (logprob, token_id, _), top in zip(tokens, padded, strict=True)
    ]


def _reason_of(finish: _Finish) -> FinishReason:
    reason = _REASONS.get(finish.type)
    if reason is not None:
        return reason
    message = finish.message or f"it ended the answer by itself: {finish.type}"
    code = finish.status_code
    if code is not None and HTTPStatus.BAD_REQUEST <= code < HTTPStatus.INTERNAL_SERVER_ERROR:
        raise RefusedByServerError(message)
    raise ServerStreamError(f"SGLang failed: {message}")
