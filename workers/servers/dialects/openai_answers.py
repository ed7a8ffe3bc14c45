"""What a server answers to /v1/completions of OpenAI's API: the events of a stream, with text or
with token ids."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import msgspec

from registry.tokenizers.incremental import IncrementalTokenizer
from schemas.frames import FinishReason
from workers.servers.dialect import Part, Reader, RefusedByServerError, ServerStreamError

_DONE = b"[DONE]"
_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
_CALLERS_FAULT = frozenset(map(str, range(400, 500)))


class _Choice(msgspec.Struct):
    text: str | None = None
    token_ids: list[int] | None = None
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


class CompletionsReader(Reader):
    """How many tokens of the prompt were cached is said with the end or behind it, so the end is
    held back for so long."""

    def __init__(self) -> None:
        self._last: Part | None = None

    @abstractmethod
    def token_ids_of(self, choice: _Choice) -> Sequence[int]:
        """Those that a part of the answer makes certain."""

    def read(self, event: bytes) -> Part | None:
        if event == _DONE:
            last, self._last = self._last, None
            return last
        try:
            said = _decoder.decode(event)
        except msgspec.MsgspecError as error:
            raise ServerStreamError(
                f"The server sent what is no event of a stream of completions: {error}"
            ) from error
        if said.error is not None:
            raise _as_error(said.error)
        if said.choices:
            part = self._part(said.choices[0])
            if part.finish_reason is None:
                return part
            self._last = part
        if said.usage is None:
            return Part()
        last, self._last = self._last or Part(), None
        return last._replace(num_cached_tokens=_cached_of(said.usage))

    def _part(self, choice: _Choice) -> Part:
        token_ids = self.token_ids_of(choice)
        if choice.finish_reason is None:
            return Part(token_ids=token_ids)
        reason = _REASONS.get(choice.finish_reason)
        if reason is None:
            raise ServerStreamError(
                f"The server ended the answer for a reason of its own: {choice.finish_reason}"
            )
        return Part(token_ids=token_ids, finish_reason=reason)


class TextReader(CompletionsReader):
    """Makes token ids of the text by ``tokenizer``."""

    def __init__(self, tokenizer: IncrementalTokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def token_ids_of(self, choice: _Choice) -> Sequence[int]:
        token_ids = self._tokenizer.push(choice.text or "")
        return token_ids if choice.finish_reason is None else token_ids + self._tokenizer.flush()


class TokenIdsReader(CompletionsReader):
    """Of a server that was asked for ids in place of text."""

    def token_ids_of(self, choice: _Choice) -> Sequence[int]:
        if choice.text:
            raise ServerStreamError("The server sent text where it was asked for token ids.")
        return choice.token_ids or ()


def _cached_of(usage: _Usage) -> int | None:
    details = usage.prompt_tokens_details
    return None if details is None else details.cached_tokens


def _as_error(said: _Error) -> Exception:
    message = f"The server says: {said.message:.500}"
    is_callers_fault = str(said.code) in _CALLERS_FAULT
    return RefusedByServerError(message) if is_callers_fault else ServerStreamError(message)
