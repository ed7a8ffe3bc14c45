"""Traces: requests of a load as one JSON object a line, and the token ids of their prompts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import TextIO

import msgspec

from millrace.schemas.errors import ConfigError
from millrace.schemas.jobs import MAX_LABEL_CHARACTERS, MAX_NAME_CHARACTERS, Tier, check_length

_MAX_TOKENS = 10_000_000
_MAX_AT_S = 10 * 365 * 86_400.0


class TraceRequest(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """Request of a trace, sent ``at_s`` after the start.

    Its prompt begins with the first tokens of each of ``prefix``, (name, tokens) pairs: requests
    with the same names share them. The rest is its own, or the ``session``'s: a conversation is one
    text, of which each turn shows more, answers included. A turn is sent at ``at_s`` or when the
    previous turn was answered, whichever is later.

    ``output_tokens`` is the length of the answer, which no scheduler knows. ``max_tokens`` is the
    length that the request states, by default the same. ``deadline_s`` counts from its arrival.
    ``published``: a service published it on the bus, so it waits for its tenant's limits. A gateway
    admitted all others.

    Raises ValueError, which names the field, for a value out of range.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = "local"
    tier: Tier = Tier.FREE
    model: str = "demo"
    session: str = ""
    prefix: tuple[tuple[str, int], ...] = ()
    max_tokens: int | None = None
    deadline_s: float | None = None
    published: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.at_s <= _MAX_AT_S:
            raise ValueError(f"at_s must be between 0 and {_MAX_AT_S:.0f}, got {self.at_s}")
        for name in ("prompt_tokens", "output_tokens"):
            if not 1 <= getattr(self, name) <= _MAX_TOKENS:
                raise ValueError(f"{name} must be between 1 and {_MAX_TOKENS}")
        if self.max_tokens is not None and not self.output_tokens <= self.max_tokens <= _MAX_TOKENS:
            raise ValueError("max_tokens must be at least output_tokens")
        if any(count < 1 for _, count in self.prefix):
            raise ValueError("prefix: each part has at least one token")
        if sum(count for _, count in self.prefix) >= self.prompt_tokens:
            raise ValueError("prefix: its parts must leave a token of the prompt")
        if self.deadline_s is not None and not 0 < self.deadline_s < math.inf:
            raise ValueError("deadline_s must be above 0")
        if not self.tenant or not self.model:
            raise ValueError("tenant and model must not be empty")
        check_length("tenant", self.tenant, MAX_NAME_CHARACTERS)
        check_length("model", self.model, MAX_LABEL_CHARACTERS)
        check_length("session", self.session, MAX_LABEL_CHARACTERS)

    @property
    def total_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt_tokens + self.output_tokens

    @property
    def own_tokens(self) -> int:
        """Tokens of the prompt behind the shared prefix."""
        return self.prompt_tokens - sum(count for _, count in self.prefix)


_decode = msgspec.json.Decoder(TraceRequest).decode


def read_trace(path: Path) -> list[TraceRequest]:
    """Return a file's requests in order of arrival.

    Raises ConfigError, with the line's number, for an invalid one.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    requests = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            requests.append(_decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    if not requests:
        raise ConfigError(f"{path} has no requests")
    return sorted(requests, key=lambda request: request.at_s)


def write_trace(requests: Iterable[TraceRequest], file: TextIO) -> None:
    """Write requests, one a line."""
    file.writelines(msgspec.json.encode(request).decode() + "\n" for request in requests)


_NUM_STARTS = 1 << 30


class Texts:
    """Endless texts by name: token ``i`` of a text is its first token plus ``i``.

    A prompt shows the beginnings of its shared prefixes, then that of the session's text or,
    without a session, of the request's own text. The answer continues the latter. So prefixes of
    prompts agree, token by token, exactly as the trace states.
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
        """Return the answer's first token; token ``i`` is this plus ``i``."""
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
