"""Traces: the requests of a load, one JSON object a line, as they are read, drawn and written, and
what their prompts are made of: token ids that agree as far as the texts do."""

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
    """One request: who asks at ``at_s`` after the start, and how much.

    Its prompt begins with the first tokens of each of ``prefix``, (name, tokens) pairs: requests
    that name the same ones begin alike. The rest is its own, or the ``session``'s: a conversation
    is one text, of which each turn shows more, answers included; a turn is sent at ``at_s`` or
    when the turn before it was answered, whichever is later.

    ``output_tokens`` is how long the answer will be, which no scheduler knows; ``max_tokens`` (the
    same, if it is not given) is what the request states. ``deadline_s`` counts from its arrival.
    ``published``: a service published it on the bus, so that it waits for the limits of its tenant;
    all others were admitted by a gateway.

    Raises ValueError, naming the field, for a value out of range.
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
        """Of prompt and answer."""
        return self.prompt_tokens + self.output_tokens

    @property
    def own_tokens(self) -> int:
        """Tokens of the prompt behind the shared prefix."""
        return self.prompt_tokens - sum(count for _, count in self.prefix)


_decode = msgspec.json.Decoder(TraceRequest).decode


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests by arrival. Raises ConfigError, with the line's number, for a bad one."""
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
    """One line each."""
    file.writelines(msgspec.json.encode(request).decode() + "\n" for request in requests)


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
