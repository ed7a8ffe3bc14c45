"""What the prompts of a trace are made of: token ids that agree as far as the texts do."""

from __future__ import annotations

from hashlib import blake2b

from millrace.simulation.traces.trace import TraceRequest

_NUM_STARTS = 1 << 30


class Texts:
    """Endless texts, each under its name: token ``i`` of a text is its first token plus ``i``.

    A prompt shows the beginnings of its shared prefixes, then that of the session's text or,
    without a session, of a text that is the request's alone; the answer goes on with that one. So
    prefixes of prompts agree, token by token, exactly where the trace says so.
    """

    def __init__(self, seed: int) -> None:
        self._key = seed.to_bytes(8, "little")
        self._starts: dict[str, int] = {}

    def prompt(self, request: TraceRequest, request_id: str) -> tuple[int, ...]:
        token_ids: list[int] = []
        for name, count in request.prefix:
            start = self._shared(f"prefix {name}")
            token_ids.extend(range(start, start + count))
        start = self._own(request, request_id)
        token_ids.extend(range(start, start + request.own_tokens))
        return tuple(token_ids)

    def first_answer_token(self, request: TraceRequest, request_id: str) -> int:
        """Token ``i`` of the answer is this plus ``i``."""
        return self._own(request, request_id) + request.own_tokens

    def _own(self, request: TraceRequest, request_id: str) -> int:
        if request.session:
            return self._shared(f"session {request.tenant} {request.session}")
        return self._start(f"request {request_id}")

    def _shared(self, name: str) -> int:
        start = self._starts.get(name)
        if start is None:
            start = self._starts[name] = self._start(name)
        return start

    def _start(self, name: str) -> int:
        digest = blake2b(name.encode(), digest_size=8, key=self._key).digest()
        return int.from_bytes(digest, "little") % _NUM_STARTS
