"""How one kind of inference server is started, asked and read."""

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
    """What starts a server: the program, its arguments, and variables beside our own."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


class ServerAddress(NamedTuple):
    """Where a server that the worker starts is to listen: on the Unix socket ``socket``, or, if it
    cannot, on ``port`` of this machine, where it asks for ``api_key``, which keeps other users
    away. ``folder`` is for files that only this user may read."""

    folder: Path
    port: int = 0
    api_key: str = ""

    @property
    def socket(self) -> Path:
        return self.folder / "server.sock"

    @property
    def url(self) -> str:
        """That of the port. The host of a URL is of no meaning on a Unix socket."""
        return f"http://127.0.0.1:{self.port}" if self.port else "http://localhost"


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself once it is ready; None and 0: it does not say.

    ``context_window_tokens`` is the longest sequence, ``kv_capacity_tokens`` what its KV cache
    holds of all of them together, ``max_num_sequences`` how many it runs at a time.
    """

    version: str = ""
    model: str = ""
    context_window_tokens: int | None = None
    vocab_size: int | None = None
    kv_capacity_tokens: int = 0
    max_num_sequences: int = 0


class ServerLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A server's own figures: ``kv_usage`` is the share of its KV cache in use, the others count
    from its start. What it does not say is 0."""

    kv_usage: float = 0.0
    num_steps: int = 0
    num_preemptions: int = 0


class Call(NamedTuple):
    """One POST, answered by server-sent events or, unless it ``streams``, as a whole."""

    path: str
    body: dict[str, Any]
    streams: bool = True


class AnswerPart(NamedTuple):
    """What one event of a stream says: tokens in order, and how they ended, if they did.
    ``num_cached_tokens`` of the prompt, once it is known. Of ``num_hidden`` tokens that come next
    the server does not tell the ids in a stream."""

    token_ids: Sequence[int] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int | None = None
    num_hidden: int = 0


class ServerStreamError(MillraceError, code="engine_failed", retryable=True):
    """A server's answer to one request broke off, or said that the server failed."""


class RefusedByServerError(MillraceError, code="invalid_parameter", http_status=400):
    """The server takes this request for a mistake of the caller."""


class AnswerReader(ABC):
    """Reads the events of one answer, in order."""

    @abstractmethod
    def read(self, event: bytes) -> AnswerPart | None:
        """What the data of one server-sent event says; None behind the last one. Raises
        ServerStreamError for one that is malformed or reports that the server failed, and
        RefusedByServerError for one that blames the request."""


class Dialect(ABC):
    """One kind of server.

    ``package`` is what to install where the server's program is missing, ``program`` its usual
    name, ``oldest_version`` the first that speaks as is expected here. ``owned``: the worker starts
    the server itself and so knows its flags.
    """

    kind: EngineKind
    package: str
    program: str
    oldest_version: tuple[int, ...] = ()
    on_port: bool = False
    """Whether it cannot listen on a Unix socket."""
    native_grammars: frozenset[GrammarKind] = frozenset()
    """What the server keeps to by itself, from the first token on. To others, and behind tokens
    that are there already, ``guided`` sees."""

    def __init__(self, model: ServedModel, config: EngineConfig, *, owned: bool) -> None:
        self.model = model
        self.config = config
        self.owned = owned

    @property
    def reset_path(self) -> str:
        """What is posted to in order to empty the server's prefix cache; empty if it has no such
        path."""
        return ""

    @property
    def health_path(self) -> str:
        """What is answered with success by a server that is well."""
        return "/health"

    @abstractmethod
    def command(self, program: Path, address: ServerAddress) -> Command:
        """What starts the server so that it listens there. Raises ConfigError for a setting that it
        does not have."""

    @abstractmethod
    async def read_facts(self, client: ServerClient) -> ServerFacts:
        """Ask a server that is healthy. Raises EngineFailedError for one that answers something
        else."""

    @abstractmethod
    async def read_load(self, client: ServerClient) -> ServerLoad:
        """Its figures as of now. Raises ServerUnreachableError."""

    def as_read(self, grammar: Grammar) -> Grammar:
        """One that says to the own library what the server makes of ``grammar``: what follows a
        completion in the server's stead keeps to the same."""
        return grammar

    @abstractmethod
    def call(self, request: EngineRequest, token_ids: Sequence[int]) -> Call:
        """What is sent to continue ``request``, of which ``token_ids`` were made (those delivered
        before and since). The grammar is that of a completion that begins, or None. Prompts of one
        ``cache_salt`` share nothing with those of others in the server's prefix cache, where the
        server can be told so. Raises ParameterError for what the server cannot do."""

    def call_one_of(
        self,
        request: EngineRequest,  # noqa: ARG002
        token_ids: Sequence[int],  # noqa: ARG002
        allowed: Sequence[int],  # noqa: ARG002
    ) -> Call:
        """As ``call``, for one token more, which is one of ``allowed``: drawn as if there were no
        others. Raises ParameterError of a server that takes no grammars, as cannot be held to
        tokens."""
        raise ParameterError("grammar", f"The {self.kind} engine cannot be held to tokens.")

    def biased(self, call: Call, bias: dict[int, float]) -> Call:  # noqa: ARG002
        """The same call with these added to the logits, too. Raises ParameterError of a server that
        has no biases."""
        raise ParameterError("logit_bias", f"The {self.kind} engine has no biases of logits.")

    def num_new_tokens(self, request: EngineRequest, num_made: int) -> int:
        """How many more to ask for, of which ``num_made`` are there: as many as the request or the
        model's window allows, and one at least."""
        max_tokens = request.sampling.max_tokens
        if max_tokens is None:
            max_tokens = self.model.context_window_tokens - len(request.prompt_token_ids)
        return max(1, max_tokens - num_made)

    def call_whole(
        self,
        request: EngineRequest,
        token_ids: Sequence[int],
        num_tokens: int,  # noqa: ARG002  (a server that hides none is asked as ever)
    ) -> Call:
        """As ``call``, for ``num_tokens`` more that no stream tells."""
        return self.call(request, token_ids)

    def abort(self, call: Call) -> Call | None:  # noqa: ARG002  (most need not)
        """What frees at once what the server has of ``call``; None if the end of the connection
        does."""
        return None

    async def begin(self, request: EngineRequest) -> None:  # noqa: B027  (most need not know)
        """Returns when the server may be given this request."""

    def end(self, request_id: str) -> None:  # noqa: B027  (most need not know)
        """The server has it no more, or is not given it any more."""

    @abstractmethod
    def reader(self, request: EngineRequest, token_ids: Sequence[int]) -> AnswerReader:
        """What reads the answer to that call."""


def add_bias(sampling: dict[str, Any], bias: Mapping[int, float]) -> None:
    """Add to what sampling parameters have as ``logit_bias``, where JSON wants text for keys."""
    if not bias:
        return
    told: dict[str, float] = sampling.setdefault("logit_bias", {})
    for token_id, change in bias.items():
        told[str(token_id)] = told.get(str(token_id), 0.0) + change
