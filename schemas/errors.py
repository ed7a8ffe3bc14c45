"""Errors with a type, a stable code and a sentence that says what to do."""

from __future__ import annotations

import re
from typing import ClassVar

from millrace.schemas.context_length import PromptParts, too_long

SHOWN_CHARACTERS = 200  # of a value that a client sent, in an error, a header or a log line
_MESSAGE_CHARACTERS = 4_000
_ENDING_CHARACTERS = 1_000
_PROMPT = "prompt"
# A value is in quotation marks, or without blanks.
_LONG_VALUE = re.compile(
    r"(?<!\w)(?:'[^']{201,}'|\"[^\"]{201,}\"|`[^`]{201,}`)(?!\w)|\S{201,}", re.DOTALL
)


def shown(value: str) -> str:
    """Return a value as errors and logs show it: whole, or its beginning and ``…``."""
    if len(value) <= SHOWN_CHARACTERS:
        return value
    return f"{value[: SHOWN_CHARACTERS - 1]}…"


def _bounded(message: str) -> str:
    """Shorten the long values of a message, then the message itself."""
    if len(message) <= SHOWN_CHARACTERS:
        return message
    message = _LONG_VALUE.sub(_shortened, message)
    if len(message) <= _MESSAGE_CHARACTERS:
        return message
    beginning = message[: _MESSAGE_CHARACTERS - _ENDING_CHARACTERS - 3]
    return f"{beginning} … {message[-_ENDING_CHARACTERS:]}"


def _shortened(value: re.Match[str]) -> str:
    mark = value[0][-1] if value[0][0] in "'\"`" else ""
    return shown(value[0].removesuffix(mark)) + mark


class MillraceError(Exception):
    """Base of all errors that reach callers.

    ``code`` is stable and machine readable; ``retryable``: the same call may succeed later;
    ``http_status`` is the gateway's status. Values that a class does not set come from its base. A
    long value in the message is shortened: see ``shown``.
    """

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init_subclass__(
        cls, *, code: str = "", retryable: bool | None = None, http_status: int = 0
    ) -> None:
        super().__init_subclass__()
        cls.code = code or cls.code
        cls.retryable = cls.retryable if retryable is None else retryable
        cls.http_status = http_status or cls.http_status

    def __init__(self, message: str) -> None:
        self.message = _bounded(message)
        super().__init__(self.message)


class InvalidJsonError(MillraceError, code="invalid_json", http_status=400):
    """Error for a body or message that is not JSON."""


class ParameterError(MillraceError, ValueError, code="invalid_parameter", http_status=400):
    """Error for a bad value of a request field; ``param`` names the field."""

    def __init__(self, param: str, message: str) -> None:
        self.param = shown(param)
        super().__init__(message.replace(param, self.param) if param != self.param else message)


class GrammarError(MillraceError, code="grammar_invalid", http_status=400):
    """Error for a grammar that does not compile, is too large, or cannot be followed further."""


class ModelNotFoundError(MillraceError, code="model_not_found", http_status=404):
    """Error for a model name that is not in the catalogue."""


class ContextLengthError(MillraceError, code="context_length_exceeded", http_status=400):
    """Error for a prompt and requested completion that exceed a context window. ``param`` is the
    field at fault."""

    def __init__(
        self,
        num_prompt_tokens: int,
        max_tokens: int | None,
        context_window_tokens: int,
        *,
        field: str = _PROMPT,
        is_exact: bool = True,
        parts: PromptParts | None = None,
        limit: str = "",
    ) -> None:
        """Create the error.

        Args:
            field: The field of the prompt: ``messages``, ``prompt`` or ``input``.
            is_exact: False if counting stopped early, so that the prompt has at least that many
                tokens.
            limit: The owner of the limit, if it is not the model's.
        """
        message = too_long(
            num_prompt_tokens,
            max_tokens,
            context_window_tokens,
            noun=field,
            is_exact=is_exact,
            parts=parts,
        )
        super().__init__(f"{message} {limit}" if limit else message)
        self.param = field
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.context_window_tokens = context_window_tokens


class KVCapacityError(MillraceError, code="kv_capacity_exceeded", http_status=400):
    """Error for a request that needs more KV cache than its worker has in total."""

    def __init__(self, num_prompt_tokens: int, max_tokens: int, capacity_tokens: int) -> None:
        super().__init__(
            f"The request asks for {num_prompt_tokens} tokens in the prompt and {max_tokens} in "
            f"the completion, but this worker's KV cache holds {capacity_tokens} tokens. Shorten "
            f"the prompt, lower max_tokens or give the worker more KV cache."
        )


class PayloadTooLargeError(MillraceError, code="payload_too_large", http_status=413):
    """Error for a body or message that is larger than the receiver accepts."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"The request is {size_bytes} bytes; the limit is {limit_bytes} bytes. Send less."
        )
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class QueueFullError(MillraceError, code="queue_full", retryable=True, http_status=429):
    """Error for a queue over its bound; retry after ``retry_after_s``."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BusUnavailableError(MillraceError, code="bus_unavailable", retryable=True, http_status=503):
    """Error for an unreachable message bus; nothing was accepted."""


class BusForbiddenError(BusUnavailableError, code="bus_forbidden", retryable=False):
    """Error for a subject that the server's permissions forbid this process."""


class StoreFullError(BusUnavailableError, code="storage_full"):
    """Error for a full store that accepted work needs; nothing was accepted. ``store`` names it;
    retry after ``retry_after_s``."""

    def __init__(self, store: str, why: str, retry_after_s: float = 5.0) -> None:
        super().__init__(
            f"No new requests are accepted: the store {store} {why}. Accepted requests continue. "
            "Try again when there is room."
        )
        self.store = store
        self.retry_after_s = retry_after_s


class UntrustedServerError(MillraceError, code="untrusted_server", http_status=503):
    """Error for a server with an untrusted certificate, or without required TLS."""


class CredentialsRefusedError(MillraceError, code="credentials_refused", http_status=503):
    """Error for a user, password, token, key or certificate that a server refuses."""


class MalformedMessageError(MillraceError, code="malformed_message", http_status=400):
    """Error for a bus message that does not match its subject. ``param`` is the field at fault, if
    known."""

    def __init__(self, message: str, param: str = "") -> None:
        super().__init__(message)
        self.param = shown(param)


class ResultNotReadyError(MillraceError, code="result_not_ready", retryable=True, http_status=409):
    """Error for a result of a request that still waits or runs."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"The request {request_id!r} has not ended. Its result is stored when it ends, if its "
            "job set store_result."
        )


class ResultNotStoredError(MillraceError, code="result_not_stored", http_status=404):
    """Error for a result that is not stored although its request has ended."""

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"The request {request_id!r} has ended, and no result of it is stored: its job did not "
            "set store_result, or its retention time is over."
        )


class ResultNotFoundError(MillraceError, code="result_not_found", http_status=404):
    """Error for a result of a request that no scheduler knows."""

    def __init__(self, request_id: str, advice: str = "") -> None:
        super().__init__(
            f"No result of a request {request_id!r} is stored: there was no such job, its job did "
            f"not set store_result, or its retention time is over.{advice}"
        )


class ResultNotFoundYetError(ResultNotFoundError, retryable=True):
    """Error for an unknown result while ``num_waiting`` jobs of the tenant wait in the queue, whose
    request ids cannot be seen."""

    def __init__(self, request_id: str, num_waiting: int) -> None:
        super().__init__(
            request_id,
            f" The tenant has about {num_waiting} waiting jobs: if this is one of them, ask again "
            "when it has ended.",
        )


class ForeignTenantError(MalformedMessageError, code="tenant_mismatch", http_status=403):
    """Error for a job that names another tenant than its subject, which defines the tenant."""


class ForeignReplyError(MalformedMessageError, code="reply_forbidden", http_status=403):
    """Error for a job whose frames would go to another tenant's listener."""

    def __init__(self, tenant: str) -> None:
        super().__init__(
            f"The frames of a job go to its tenant only: reply must be {tenant!r}, or {tenant!r} "
            f"with a slash and a name of your choice behind it, such as '{tenant}/mailer'.",
            "reply",
        )


class PrefixCacheKeptError(MillraceError, code="prefix_cache_kept", http_status=409):
    """Error for a prefix cache that cannot be emptied; the message names the worker and the
    reason."""


class ConfigError(MillraceError, code="invalid_configuration"):
    """Error for an unknown key or a bad value in a configuration file or variable."""


class NameTakenError(ConfigError, code="name_taken"):
    """Error for a worker name that another running worker has."""

    def __init__(self, name: str, holder: str) -> None:
        super().__init__(
            f"Another worker named {name!r} is running ({holder}). Give each worker a name of its "
            "own (worker.name, MILLRACE_WORKER__NAME), or none: then it draws one."
        )
        self.name = name
        self.holder = holder


class CheckpointError(MillraceError, code="invalid_checkpoint"):
    """Error for a model whose files are missing, malformed or do not fit its config."""


class AdapterError(MillraceError, code="adapter_invalid", http_status=400):
    """Error for an adapter whose files are missing, malformed, unsupported or do not fit."""
