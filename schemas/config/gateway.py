"""The gateway: how clients reach it, what they may send, and what it keeps for them."""

from __future__ import annotations

from typing import Literal

from millrace.schemas.config.section import Section
from millrace.schemas.tenants import TierLimits

OldTurns = Literal["window", "summary"]


class SessionContexts(Section, frozen=True, kw_only=True):
    """What becomes of the oldest turns of a session, by the caller's tier, when they do not fit the
    context window any more: ``window`` leaves them out, ``summary`` has the model summarise them.
    """

    free: OldTurns = "window"
    """Tier ``free``."""

    pro: OldTurns = "summary"
    """Tier ``pro``."""

    enterprise: OldTurns = "summary"
    """Tier ``enterprise``."""

    batch: OldTurns = "window"
    """Tier ``batch``."""


class GatewayConfig(Section, frozen=True, kw_only=True):
    """Sizes bound what one client may send or make us hold."""

    # Who may connect.

    host: str = "127.0.0.1"
    """Address to listen on."""

    port: int = 8000
    """Port to listen on."""

    certificate_file: str = ""
    """Certificate (PEM) for TLS, read again when it changes; empty: no TLS."""

    key_file: str = ""
    """Private key (PEM) of the certificate."""

    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks whose ``X-Forwarded-For`` and ``X-Forwarded-Proto`` are believed. Where
    only callers of this machine need no key, a forwarded request needs one."""

    gateway_id: str = ""
    """Name of this gateway; empty: one is drawn at start."""

    auth: Literal["auto", "required", "none"] = "auto"
    """Whether API keys are demanded: ``auto`` unless ``host`` is loopback."""

    tiers: TierLimits = TierLimits()
    """Limits of a tenant of each tier, unless its own record says otherwise."""

    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may use the gateway from a browser, beside its own
    (``https://app.example``; ``*``: any)."""

    max_sockets_per_address: int = 4_096
    """WebSockets open at a time from one address; 0: no limit."""

    # Requests and their answers.

    max_body_bytes: int = 4 * 1024 * 1024
    """Size of a request's body."""

    body_timeout_s: float = 30.0
    """Time in which a body must be whole, and as much more as what has come of it takes at
    ``body_bytes_per_s``."""

    body_bytes_per_s: int = 32 * 1024
    """Slowest rate at which a large body may come."""

    max_ws_message_bytes: int = 1024 * 1024
    """Size of a WebSocket message with all its fragments; a larger one closes the socket (1009)."""

    max_generations_per_socket: int = 64
    """Generations open at a time on one WebSocket."""

    client_buffer_bytes: int = 256 * 1024
    """What may wait for a client to read it; a client with more is cut off as too slow."""

    client_stall_timeout_s: float = 30.0
    """How long a client may read nothing while something waits for it."""

    request_timeout_s: float = 600.0
    """Deadline of a request."""

    trust_request_chat_template: bool = False
    """Whether requests may bring a ``chat_template`` of their own. Templates are programs: they run
    in a sandbox that keeps them from everything else, but not from taking long or much memory, so
    this is for gateways whose callers are all trusted."""

    replay_probe_s: float = 2.0
    """Silence after which the worker is asked for what is missing of an answer."""

    resume_grace_s: float = 20.0
    """How long an answer whose WebSocket was lost goes on for a client that comes back."""

    orphan_grace_s: float = 60.0
    """How long an answer goes on after its gateway is gone, for a client that comes back at any
    gateway. Workers and schedulers read this and cancel it then. 0: it goes on to its end."""

    idempotency_ttl_s: float = 86_400.0
    """How long the answer to an Idempotency-Key is kept; it is made to its end, client or not."""

    drain_timeout_s: float = 8.0
    """How long a gateway that stops goes on with open answers before clients have to go elsewhere.
    """

    telemetry_timeout_s: float = 5.0
    """How long a query of analytics may take."""

    # Kept responses, files and batches.

    response_ttl_s: float = 86_400.0
    """How long answers of the Responses API are kept."""

    response_max_bytes: int = 8 * 1024 * 1024
    """Size of such an answer, with the conversation before it, above which it is not kept."""

    conversation_ttl_s: float = 30 * 86_400.0
    """How long a conversation of the Conversations API is kept after its last change."""

    max_file_bytes: int = 100 * 1024 * 1024
    """Size of an uploaded file."""

    max_stored_file_bytes: int = 10 * 1024 * 1024 * 1024
    """Size of all files of a tenant."""

    max_stored_files: int = 10_000
    """Files of a tenant."""

    max_open_batches: int = 100
    """Unfinished batches of a tenant."""

    max_batches_at_once: int = 8
    """Batches, of all tenants, that a gateway works on at a time."""

    batch_lines_at_once: int = 128
    """Requests of each batch that are open at a time."""

    batch_lease_s: float = 10.0
    """How soon another gateway goes on with the batches of one that died."""

    batch_scan_s: float = 1.0
    """How often a gateway looks for batches that no gateway runs; where there are none, five times
    less often. One that it created itself it begins at once."""

    # Sessions.

    session_ttl_s: float = 3_600.0
    """How long a session is kept after its last request."""

    session_max_bytes: int = 4 * 1024 * 1024
    """Size of a session."""

    session_max_messages: int = 2_000
    """Messages of a session."""

    chat_ttl_s: float = 90 * 86_400.0
    """How long what the chat page keeps of a conversation is there after its last change."""

    chat_max_bytes: int = 2 * 1024 * 1024
    """Size of such a chat, with all versions of its turns."""

    max_chats: int = 1_000
    """Chats of a tenant."""

    session_reserve_tokens: int = 1_024
    """What the prompt leaves, where it can, for a completion of no stated length."""

    session_context: SessionContexts = SessionContexts()
    """What becomes of the oldest turns, by tier."""

    session_summary_share: float = 0.6
    """Share of the context window, 0 to 1, that messages must fill before the oldest are
    summarised."""

    session_summary_tokens: int = 256
    """Tokens of a summary at most."""

    # Tools that the gateway runs.

    tools: str = ""
    """File of HTTP tools that the gateway runs itself; empty: none."""

    tool_allowed_hosts: tuple[str, ...] = ()
    """Hosts that tools may call, where ``*.name`` stands for all below a name; empty: any."""

    max_tool_runs: int = 32
    """Tools that run at a time."""

    max_tool_rounds: int = 8
    """Turns of the model in one answer with server tools."""
