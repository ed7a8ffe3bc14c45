"""Interface of a dialect: how to start one kind of inference server, call it and read its
answers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from millrace.engine.types import EngineRequest
from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.frames import FinishReason, TokenLogprob
from millrace.schemas.sampling import Grammar, GrammarKind
from millrace.workers.servers.client import ServerClient


class Command(NamedTuple):
    """Command that starts a server: the program, its arguments, and variables beside our own."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


class ServerAddress(NamedTuple):
    """Address at which a server that the worker starts must listen.

    It is the Unix socket ``socket``. If the server cannot use one, it is ``port`` of this machine,
    where the server requires ``api_key`` to keep other users away. ``folder`` is for files that
    only this user may read.
    """

    folder: Path
    port: int = 0
    api_key: str = ""

    @property
    def socket(self) -> Path:
        return self.folder / "server.sock"

    @property
    def url(self) -> str:
        """URL of the port; on a Unix socket the host of a URL has no meaning."""
        return f"http://127.0.0.1:{self.port}" if self.port else "http://localhost"


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a ready server reports; None and 0 mean that it does not report them.

    ``context_window_tokens`` is the length of the longest sequence. ``kv_capacity_tokens`` is the
    capacity of its KV cache for all sequences together. ``max_num_sequences`` is how many run at a
    time.
    """

    version: str = ""
    model: str = ""
    context_window_tokens: int | None = None
    vocab_size: int | None = None
    kv_capacity_tokens: int = 0
    max_num_sequences: int = 0


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Load figures of a server; 0 if not reported.

    ``kv_usage`` is the share of its KV cache in use (0 to 1). The others count from its start.
    """

    kv_usage: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0


class Call(NamedTuple):
    """Single POST, answered by server-sent events or, unless it ``streams``, as a whole."""

    path: str
    body: dict[str, Any]
    streams: bool = True


class AnswerPart(NamedTuple):
    """Content of one event of a stream: tokens in order, and their finish reason if they ended.

    ``num_cached_tokens`` of the prompt is set once it is known. ``num_hidden`` tokens come next
    whose ids the server does not report in a stream.
    """

    token_ids: Sequence[int] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    num_hidden: int = 0


class ServerStreamError(MillraceError, code="engine_failed", retryable=True):
    """Answer to one request that broke off, or that reports a failed server."""


class RefusedByServerError(MillraceError, code="invalid_parameter", http_status=400):
    """Request that the server rejects as a mistake of the caller."""


class AnswerReader(ABC):
    """Reader of the events of one answer, in order."""

    @abstractmethod
    def read(self, event: bytes) -> AnswerPart | None:
        """Return the content of one server-sent event; None after the last one.

        Raises:
            ServerStreamError: the event is malformed or reports that the server failed.
            RefusedByServerError: the event blames the request.
        """


class Dialect(ABC):
    """Adapter for one kind of server.

    ``package`` is the package that provides the server's program, ``program`` its usual name.
    ``oldest_version`` is the oldest supported version. ``owned``: the worker starts the server
    itself and so knows its flags.
    """

    kind: EngineKind
    package: str
    program: str
    oldest_version: tuple[int, ...] = ()
    on_port: bool = False
    """True if the server cannot listen on a Unix socket."""
    native_grammars: frozenset[GrammarKind] = frozenset()
    """Kinds of grammars that the server enforces itself, from the first token on. ``guided``
    enforces the others, and all grammars after tokens that exist already.
    """

    def __init__(self, model: ServedModel, config: EngineConfig, *, owned: bool) -> None:
        self.model = model
        self.config = config
        self.owned = owned

    @property
    def reset_path(self) -> str:
        """Path that empties the server's prefix cache when posted to; empty if there is none."""
        return ""

    @property
    def health_path(self) -> str:
        """Path that a healthy server answers with success."""
        return "/health"

    @abstractmethod
    def command(self, program: Path, address: ServerAddress) -> Command:
        """Return the command that starts the server so that it listens at ``address``.

        Raises:
            ConfigError: the server does not have a configured setting.
        """

    @abstractmethod
    async def read_facts(self, client: ServerClient) -> ServerFacts:
        """Return the facts of a healthy server.

        Raises:
            EngineFailedError: the server answers in an unknown form.
        """

    @abstractmethod
    async def read_load(self, client: ServerClient) -> ServerLoad:
        """Return the server's current figures. Raises ServerUnreachableError."""

    def as_read(self, grammar: Grammar) -> Grammar:
        """Return a grammar with which Millrace's own library behaves as the server does with
        ``grammar``.

        It is used to guide a completion instead of the server.
        """
        return grammar

    @abstractmethod
    def call(self, request: EngineRequest, token_ids: Sequence[int]) -> Call:
        """Return the call that continues ``request``.

        In the server's prefix cache, prompts of one ``cache_salt`` share nothing with prompts of
        other salts, if the server supports it.

        Args:
            request: the request; its grammar is that of a completion that begins, or None.
            token_ids: the tokens so far, those delivered before and since.

        Raises:
            ParameterError: the server does not support a parameter.
        """

    def call_one_of(
        self,
        request: EngineRequest,  # noqa: ARG002
        token_ids: Sequence[int],  # noqa: ARG002
        allowed: Sequence[int],  # noqa: ARG002
    ) -> Call:
        """Return a call for one more token, drawn from ``allowed`` as if there were no other
        tokens.

        Raises:
            ParameterError: the server has no grammars, so it cannot be restricted to tokens.
        """
        raise ParameterError("grammar", f"The {self.kind} engine does not support grammars.")

    def biased(self, call: Call, bias: dict[int, float]) -> Call:  # noqa: ARG002
        """Return the same call with ``bias`` added to the logits.

        Raises:
            ParameterError: the server does not support logit biases.
        """
        raise ParameterError("logit_bias", f"The {self.kind} engine does not support logit_bias.")

    def num_new_tokens(self, request: EngineRequest, num_made: int) -> int:
        """Return how many more tokens to ask for after ``num_made``: at least 1, at most as the
        request or the model's window allows.
        """
        max_tokens = request.sampling.max_tokens
        if max_tokens is None:
            max_tokens = self.model.context_window_tokens - len(request.prompt_token_ids)
        return max(1, max_tokens - num_made)

    def call_whole(
        self,
        request: EngineRequest,
        token_ids: Sequence[int],
        num_tokens: int,  # noqa: ARG002  (used only if the server hides tokens)
    ) -> Call:
        """Return a call for ``num_tokens`` more tokens that no stream reports."""
        return self.call(request, token_ids)

    def abort(self, call: Call) -> Call | None:  # noqa: ARG002  (most dialects need no abort)
        """Return a call that frees the server's resources of ``call`` at once; None if closing the
        connection does.
        """
        return None

    async def begin(self, request: EngineRequest) -> None:  # noqa: B027  (optional)
        """Wait until the server may be given this request."""

    def end(self, request_id: str) -> None:  # noqa: B027  (optional)
        """Note that the request is no longer at the server, or will not be sent to it."""

    @abstractmethod
    def reader(self, request: EngineRequest, token_ids: Sequence[int]) -> AnswerReader:
        """Return the reader of the answer to that call."""


def add_bias(sampling: dict[str, Any], bias: Mapping[int, float]) -> None:
    """Add ``bias`` to the ``logit_bias`` of sampling parameters, where JSON needs strings as
    keys.
    """
    if not bias:
        return
    told: dict[str, float] = sampling.setdefault("logit_bias", {})
    for token_id, change in bias.items():
        told[str(token_id)] = told.get(str(token_id), 0.0) + change
