"""Events of a stream of completions, in OpenAI's form and in variants of it."""

from __future__ import annotations

from abc import abstractmethod
from functools import cache
from typing import Generic, TypeVar

import msgspec

from millrace.registry.tokenizers.incremental import IncrementalTokenizer
from millrace.schemas.frames import FinishReason
from millrace.workers.servers.dialect import (
    AnswerPart,
    AnswerReader,
    RefusedByServerError,
    ServerStreamError,
)

_DONE = b"[DONE]"
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_CALLERS_FAULT = frozenset(map(str, range(400, 500)))


class ServerChoice(msgspec.Struct):
    """Part of an answer, with the fields that all servers have."""

    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


ChoiceT = TypeVar("ChoiceT", bound=ServerChoice)


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _CachedTokens | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct, Generic[ChoiceT]):
    choices: list[ChoiceT] = []
    usage: _Usage | None = None
    error: _Error | None = None


class CompletionsReader(AnswerReader, Generic[ChoiceT]):
    """Reader of completion events.

    The number of cached prompt tokens comes with the end or after it, so the end is held back until
    then.
    """

    def __init__(self, choice: type[ChoiceT]) -> None:
        self._decoder = _decoder_of(choice)
        self._last: AnswerPart | None = None

    @abstractmethod
    def part_of(self, choice: ChoiceT) -> AnswerPart:
        """Return the final tokens of a part of the answer, without its end."""

    def read(self, event: bytes) -> AnswerPart | None:
        if event == _DONE:
            last, self._last = self._last, None
            return last
        try:
            said = self._decoder.decode(event)
        except msgspec.MsgspecError as error:
            raise ServerStreamError(
                f"The server sent an invalid event in a stream of completions: {error}"
            ) from error
        if said.error is not None:
            raise _as_error(said.error)
        if said.choices:
            choice = said.choices[0]
            part = self.part_of(choice)
            if not choice.finish_reason:
                return part
            self._last = part._replace(finish_reason=_reason_of(choice.finish_reason))
        if said.usage is None:
            return AnswerPart()
        last, self._last = self._last or AnswerPart(), None
        return last._replace(num_cached_tokens=_cached_of(said.usage))


class TextReader(CompletionsReader[ServerChoice]):
    """Reader of text, which it converts to token ids with ``tokenizer``."""

    def __init__(self, tokenizer: IncrementalTokenizer) -> None:
        super().__init__(ServerChoice)
        self._tokenizer = tokenizer

    def part_of(self, choice: ServerChoice) -> AnswerPart:
        token_ids = self._tokenizer.push(choice.text or "")
        if choice.finish_reason is not None:
            token_ids += self._tokenizer.flush()
        return AnswerPart(token_ids=token_ids)


class TokenIdsReader(CompletionsReader[ServerChoice]):
    """Reader of token ids, for a server that sends them with the text or instead of it."""

    def __init__(self) -> None:
        super().__init__(ServerChoice)

    def part_of(self, choice: ServerChoice) -> AnswerPart:
        if choice.text and choice.token_ids is None:
            raise ServerStreamError("The server sent text instead of the requested token ids.")
        return AnswerPart(token_ids=choice.token_ids or ())


@cache
def _decoder_of(choice: type[ChoiceT]) -> msgspec.json.Decoder[_Event[ChoiceT]]:
    return msgspec.json.Decoder(_Event[choice])  # type: ignore[valid-type]


def _reason_of(said: str) -> FinishReason:
    reason = _REASONS.get(said)
    if reason is None:
        raise ServerStreamError(f"The server ended the answer with an unknown reason: {said}")
    return reason


def _cached_of(usage: _Usage) -> int | None:
    details = usage.prompt_tokens_details
    return None if details is None else details.cached_tokens


def _as_error(said: _Error) -> Exception:
    message = f"The server says: {said.message:.500}"
    is_callers_fault = str(said.code) in _CALLERS_FAULT
    return RefusedByServerError(message) if is_callers_fault else ServerStreamError(message)
