"""Settings of a run, for its processes and its report."""

from __future__ import annotations

from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import msgspec

from millrace.bench.spread import Spread, fixed
from millrace.schemas.errors import ConfigError, MillraceError

DEFAULT_INPUT_TOKENS = 128
DEFAULT_OUTPUT_TOKENS = 64


class TargetApi(StrEnum):
    """API by which the server is called."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    WEBSOCKET = "websocket"


class LoadError(MillraceError, code="bench_failed"):
    """Error if the server's answers make a load impossible."""


class Slo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Limits of a good request; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None


class LoadSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run. Either ``rate_per_s`` (open loop) or ``concurrency`` (closed loop) is
    given, and either ``duration_s`` or ``num_requests``; the warm-up comes first and is not
    counted.

    ``burstiness`` 1 is a Poisson process; the gaps between arrivals are gamma distributed with this
    shape, so lower is burstier. ``tokens_per_word`` and ``tokens_around`` (of a chat template)
    convert tokens into words of a synthetic prompt; they are measured at the server before the run.
    """

    url: str
    api: TargetApi = TargetApi.CHAT
    model: str = ""
    rate_per_s: float | None = None
    concurrency: int | None = None
    burstiness: float = 1.0
    duration_s: float | None = None
    num_requests: int | None = None
    warm_up_s: float = 0.0
    drain_s: float = 30.0
    timeout_s: float = 600.0
    num_processes: int = 1
    seed: int = 0
    dataset: str = ""
    input_tokens: Spread = fixed(DEFAULT_INPUT_TOKENS)
    output_tokens: Spread = fixed(DEFAULT_OUTPUT_TOKENS)
    shared_prefix_tokens: int = 0
    tokens_per_word: float = 1.3
    tokens_around: float = 0.0
    ignore_eos: bool = False
    extra_body: dict[str, Any] = {}
    slo: Slo | None = None
    api_key: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    def without_secrets(self) -> LoadSettings:
        """Return a copy for a report: no key, and only the names of headers."""
        names = tuple((name, "…") for name, _ in self.headers)
        return msgspec.structs.replace(self, api_key="", headers=names)


class ServerTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Parsed base URL; ``path`` ends in /v1."""

    host: str
    port: int
    is_tls: bool
    authority: str
    path: str


def target_of(url: str) -> ServerTarget:
    """Parse a base URL, with or without its /v1. Raises ConfigError for another text."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--url: {url!r} is no address: {error}") from error
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.username:
        raise ConfigError(f"--url: {url!r} does not look like http://HOST:PORT or http://HOST/v1")
    is_tls, path = parts.scheme == "https", parts.path.rstrip("/")
    return ServerTarget(
        host=parts.hostname,
        port=port or (443 if is_tls else 80),
        is_tls=is_tls,
        authority=parts.netloc,
        path=path if path.endswith("/v1") else f"{path}/v1",
    )
