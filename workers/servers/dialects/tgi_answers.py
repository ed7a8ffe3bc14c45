"""What Text Generation Inference's server answers: an event for each token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from millrace.schemas.frames import FinishReason
from millrace.workers.servers.dialect import Part, Reader, RefusedByServerError, ServerStreamError

_REASONS = {
    "length": FinishReason.LENGTH,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
}
_VALIDATION = "validation"


class _Token(msgspec.Struct):
    id: int


class _Details(msgspec.Struct):
    finish_reason: str


class _Event(msgspec.Struct):
    token: _Token | None = None
    details: _Details | None = None
    error: str | None = None
    error_type: str = ""


_decoder = msgspec.json.Decoder(_Event)


class TgiReader(Reader):
    """``known`` are tokens that were delivered and are made anew: they are passed over as long as
    they come as they came before."""

    def __init__(self, known: Sequence[int] = ()) -> None:
        self._known = deque(known)

    def read(self, event: bytes) -> Part | None:
        try:
            said = _decoder.decode(event)
        except msgspec.MsgspecError as error:
            raise ServerStreamError(f"TGI sent what is no event of a stream: {error}") from error
        if said.error is not None:
            message = f"TGI says: {said.error:.500}"
            if said.error_type == _VALIDATION:
                raise RefusedByServerError(message)
            raise ServerStreamError(message)
        if said.token is None:
            raise ServerStreamError("TGI sent an event without a token.")
        token_ids = self._new_of(said.token.id)
        reason = None if said.details is None else _reason_of(said.details.finish_reason)
        return Part(token_ids=token_ids, finish_reason=reason)

    def _new_of(self, token_id: int) -> tuple[int, ...]:
        if self._known and self._known[0] == token_id:
            self._known.popleft()
            return ()
        self._known.clear()
        return (token_id,)


def _reason_of(said: str) -> FinishReason:
    reason = _REASONS.get(said)
    if reason is None:
        raise ServerStreamError(f"TGI ended the answer for a reason of its own: {said}")
    return reason
