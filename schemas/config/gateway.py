"""Gateway settings: access, request limits, and stored conversations, files and batches."""

from __future__ import annotations

from typing import Literal

from millrace.schemas.config.section import Section
from millrace.schemas.tenants import TierLimits

OldTurns = Literal["window", "summary"]


class SessionContexts(Section, frozen=True, kw_only=True):
    """Treatment of a session's oldest turns that no longer fit the context window, by the caller's
    tier. ``window`` leaves them out; ``summary`` has the model summarise them."""

    free: OldTurns = "window"
    """Tier ``free``."""

    pro: OldTurns = "summary"
    """Tier ``pro``."""

    enterprise: OldTurns = "summary"
    """Tier ``enterprise``."""

    batch: OldTurns = "window"
    """Tier ``batch``."""


class GatewayConfig(Section, frozen=True, kw_only=True):
    """Settings of the gateway. Sizes limit a client's requests and the memory that they use."""

    # Access.

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 8000
    """Port to listen on."""

    certificate_file: str = ""
    """Certificate (PEM) for TLS, read again when it changes; empty: no TLS."""

    key_file: str = ""
    """Private key (PEM) of the certificate."""

    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose ``X-Forwarded-For`` and ``X-Forwarded-Proto`` are believed. Even
    if callers of this machine need no key, a forwarded request needs one."""

    gateway_id: str = ""
    """Name of this gateway; empty: a random name at each start."""

    auth: Literal["auto", "required", "none"] = "auto"
    """API keys: ``required``, ``none``, or ``auto``, which requires them unless ``host`` is
    loopback."""

    tiers: TierLimits = TierLimits()
    """Limits of a tenant of each tier, unless its own record says otherwise."""

    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may use the gateway from a browser, besides its own
    (``https://app.example``; ``*``: any)."""

    max_sockets_per_address: int = 4_096
    """WebSockets open at a time from one address; 0: no limit."""

    # Requests and answers.

    max_body_bytes: int = 4 * 1024 * 1024
    """Largest body of a request, in bytes."""

    body_timeout_s: float = 30.0
    """Seconds in which a body must arrive completely. The time grows by the bytes received divided
    by ``body_bytes_per_s``."""

    body_bytes_per_s: int = 32 * 1024
    """Lowest accepted rate of a large body, in bytes per second."""

    max_ws_message_bytes: int = 1024 * 1024
    """Size of a WebSocket message with all its fragments; a larger one closes the socket (1009)."""

    max_generations_per_socket: int = 64
    """Generations open at a time on one WebSocket."""

    client_buffer_bytes: int = 256 * 1024
    """Largest backlog of a client in bytes; a client with a larger one is disconnected as too slow.
    """

    client_stall_timeout_s: float = 30.0
    """Seconds that a client may read nothing while data waits for it."""

    request_timeout_s: float = 600.0
    """Deadline of a request, in seconds after its receipt."""

    trust_request_chat_template: bool = False
    """Allow requests to bring their own ``chat_template``. Templates are programs. They run in a
    sandbox, which does not limit their time or memory, so allow this only if every caller is
    trusted."""

    replay_probe_s: float = 2.0
    """Seconds without a frame after which the gateway asks the worker for the missing part of an
    answer."""

    resume_grace_s: float = 20.0
    """Seconds that an answer continues after its WebSocket was lost, so that the client can resume
    it."""

    orphan_grace_s: float = 60.0
    """Seconds that an answer continues after its gateway is gone, so that the client can resume it
    at any gateway. Workers and schedulers read this setting and cancel the answer after that time.
    0: it continues to its end."""

    idempotency_ttl_s: float = 86_400.0
    """Seconds that the answer to an Idempotency-Key is kept. Such an answer is completed even if
    its client disconnects."""

    drain_timeout_s: float = 8.0
    """Seconds that a stopping gateway continues open answers before their clients have to reconnect
    elsewhere."""

    telemetry_timeout_s: float = 5.0
    """Timeout of a query of analytics, in seconds."""

    # Stored responses, files and batches.

    response_ttl_s: float = 86_400.0
    """Seconds that answers of the Responses API are kept."""

    response_max_bytes: int = 8 * 1024 * 1024
    """Largest such answer that is kept, in bytes, with the conversation before it."""

    conversation_ttl_s: float = 30 * 86_400.0
    """Seconds that a conversation of the Conversations API is kept after its last change."""

    max_file_bytes: int = 100 * 1024 * 1024
    """Largest uploaded file, in bytes."""

    max_stored_file_bytes: int = 10 * 1024 * 1024 * 1024
    """Total size of a tenant's files, in bytes."""

    max_stored_files: int = 10_000
    """Number of files of a tenant."""

    max_open_batches: int = 100
    """Number of unfinished batches of a tenant."""

    max_batches_at_once: int = 8
    """Batches of all tenants that a gateway processes at a time."""

    batch_lines_at_once: int = 128
    """Requests of each batch that are open at a time."""

    batch_lease_s: float = 10.0
    """Lease of a batch in seconds: another gateway continues the batches of a dead gateway after
    this time."""

    batch_scan_s: float = 1.0
    """Seconds between two scans for batches that no gateway runs; five times as long while there
    are none. A gateway starts a batch that it created itself at once."""

    # Sessions.

    session_ttl_s: float = 3_600.0
    """Seconds that a session is kept after its last request."""

    session_max_bytes: int = 4 * 1024 * 1024
    """Largest session, in bytes."""

    session_max_messages: int = 2_000
    """Most messages of a session."""

    chat_ttl_s: float = 90 * 86_400.0
    """Seconds that a conversation of the chat page is kept after its last change."""

    chat_max_bytes: int = 2 * 1024 * 1024
    """Largest such conversation, in bytes, with all versions of its turns."""

    max_chats: int = 1_000
    """Saved chats of a tenant."""

    session_reserve_tokens: int = 1_024
    """Tokens of the context window that a session's prompt leaves, if possible, for a completion
    without a given length."""

    session_context: SessionContexts = SessionContexts()
    """Treatment of the oldest turns, by tier."""

    session_summary_share: float = 0.6
    """Share of the context window, 0 to 1, that messages must fill before the oldest are
    summarised."""

    session_summary_tokens: int = 256
    """Most tokens of a summary."""

    # Server-side tools.

    tools: str = ""
    """File of HTTP tools that the gateway runs itself; empty: none."""

    tool_allowed_hosts: tuple[str, ...] = ()
    """Hosts that tools may call, where ``*.name`` matches every host below a name; empty: any."""

    max_tool_runs: int = 32
    """Tools that run at a time."""

    max_tool_rounds: int = 8
    """Turns of the model in one answer with server tools."""
