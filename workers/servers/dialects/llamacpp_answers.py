"""Reader of the answers of llama.cpp's server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from millrace.registry.tokenizers.token_bytes import TokenBytes
from millrace.schemas.frames import FinishReason, TokenLogprob
from millrace.workers.servers.dialect import (
    AnswerPart,
    AnswerReader,
    RefusedByServerError,
    ServerStreamError,
)

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CALLERS_FAULT = range(400, 500)
# The value in OpenAI's API for a token whose log-probability is not reported.
_UNKNOWN_LOGPROB = -9999.0


class LlamaReader(AnswerReader):
    """Reader of llama.cpp's events.

    An event has the id of its last token only, and there is no event for a token that ends within a
    character. Such tokens are found by the text that they add later. If that is ambiguous, the part
    says how many tokens were ``num_hidden``.
    """

    def __init__(self, table: TokenBytes, logprobs: int | None) -> None:
        self._table = table
        self._logprobs = logprobs
        self._num_tokens = 0
        self._by_bytes: dict[bytes, list[int]] | None = None

    def read(self, event: bytes) -> AnswerPart | None:
        try:
            said = msgspec.json.decode(event)
            return self._part(said)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            kind = type(error).__name__
            raise ServerStreamError(f"llama.cpp sent an invalid event ({kind}).") from error

    def _part(self, said: dict[str, Any]) -> AnswerPart:
        if "error" in said:
            raise _error(said["error"])
        if said.get("stop"):
            return self._last_part(said)
        progress = said.get("prompt_progress")
        if progress is not None:
            return AnswerPart(num_cached_tokens=int(progress["cache"]))
        num_tokens, last = int(said["tokens_predicted"]), int(said["tokens"][-1])
        num_hidden = num_tokens - self._num_tokens - 1
        if num_hidden <= 0:
            self._num_tokens = num_tokens
            return AnswerPart(token_ids=(last,), logprobs=self._logprobs_of(said, (last,)))
        hidden = self._hidden(said["content"], last, num_hidden)
        if hidden is None or self._logprobs is not None:
            return AnswerPart(num_hidden=num_hidden + 1)
        self._num_tokens = num_tokens
        return AnswerPart(token_ids=(*hidden, last))

    def _last_part(self, said: dict[str, Any]) -> AnswerPart:
        ids = tuple(map(int, said.get("tokens") or ()))
        if ids:  # not streamed
            return AnswerPart(token_ids=ids, logprobs=self._logprobs_of(said, ids))
        num_hidden = int(said["tokens_predicted"]) - self._num_tokens
        if num_hidden > 0:
            return AnswerPart(num_hidden=num_hidden)
        is_end = said.get("stop_type") == "eos"
        return AnswerPart(finish_reason=FinishReason.STOP if is_end else FinishReason.LENGTH)

    def _hidden(self, text: str, last: int, num_hidden: int) -> tuple[int, ...] | None:
        """Return the only sequence of ``num_hidden`` tokens whose bytes precede those of ``last``
        in ``text``; None if there is none or more than one.
        """
        if _REPLACEMENT in text:
            return None
        whole, end = text.encode(), self._table.bytes_of(last)
        if not whole.endswith(end):
            return None
        found = self._split(whole[: len(whole) - len(end)], num_hidden)
        return found[0] if len(found) == 1 else None

    def _split(self, data: bytes, num_tokens: int) -> list[tuple[int, ...]]:
        """Return the ways to split ``data`` into ``num_tokens`` tokens; if there are many, the
        first few.
        """
        if num_tokens == 1:
            return [(token_id,) for token_id in self._ids_of(data)]
        ways: list[tuple[int, ...]] = []
        for size in range(1, len(data) - num_tokens + 2):
            for token_id in self._ids_of(data[:size]):
                ways += [(token_id, *rest) for rest in self._split(data[size:], num_tokens - 1)]
                if len(ways) > 1:
                    return ways
        return ways

    def _ids_of(self, data: bytes) -> Sequence[int]:
        if self._by_bytes is None:
            self._by_bytes = {}
            for token_id in range(len(self._table.pieces)):
                piece = self._table.bytes_of(token_id)
                self._by_bytes.setdefault(piece, []).append(token_id)
        return self._by_bytes.get(data, ())

    def _logprobs_of(self, said: dict[str, Any], ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        """Return one entry for each token. The server reports none for tokens that end within a
        character.
        """
        if self._logprobs is None:
            return ()
        told = iter(said["completion_probabilities"])
        entry, logprobs = next(told, None), []
        for token_id in ids:
            if entry is None or int(entry["id"]) != token_id:
                logprobs.append(TokenLogprob(token_id=token_id, logprob=_UNKNOWN_LOGPROB))
                continue
            top = entry["top_logprobs"][: self._logprobs]
            logprobs.append(
                TokenLogprob(
                    token_id=token_id,
                    logprob=float(entry["logprob"]),
                    top=tuple((int(one["id"]), float(one["logprob"])) for one in top),
                )
            )
            entry = next(told, None)
        return tuple(logprobs)


def _error(said: dict[str, Any]) -> Exception:
    message = f"llama.cpp's server says: {said.get('message', 'nothing'):.500}"
    if said.get("code") in _CALLERS_FAULT:
        return RefusedByServerError(message)
    return ServerStreamError(message)
