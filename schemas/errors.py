"""Errors with a type, a stable code and a sentence that says what to do."""

from __future__ import annotations

from typing import ClassVar


class MillraceError(Exception):
    """Base of every error that a caller may meet.

    ``code`` is stable and machine readable; ``retryable`` says whether the same call may succeed
    later; ``http_status`` is what the gateway answers.
    """

    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = False
    http_status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ParameterError(MillraceError, ValueError):
    """A request field has a bad value; ``param`` names the field."""

    code = "invalid_parameter"
    http_status = 400

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class GrammarError(MillraceError):
    """A grammar that does not compile, is too large, or cannot be followed any further."""

    code = "grammar_invalid"
    http_status = 400


class ModelNotFoundError(MillraceError):
    """No model of that name is in the catalogue."""

    code = "model_not_found"
    http_status = 404


class ContextLengthError(MillraceError):
    """Prompt and requested completion exceed the model's context window."""

    code = "context_length_exceeded"
    http_status = 400

    def __init__(
        self,
        num_prompt_tokens: int,
        max_tokens: int | None,
        context_window_tokens: int,
        *,
        is_exact: bool = True,
    ) -> None:
        """``is_exact`` False: the prompt has at least so many tokens; they were not all counted."""
        asked = f"{num_prompt_tokens} tokens in the prompt"
        if not is_exact:
            asked = f"at least {asked}"
        if max_tokens is not None:
            asked += f" and {max_tokens} in the completion"
        super().__init__(
            f"This model's context window is {context_window_tokens} tokens, but the request asks "
            f"for {asked}. Shorten the prompt or lower max_tokens."
        )
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.context_window_tokens = context_window_tokens


class PayloadTooLargeError(MillraceError):
    """A body or message is larger than what the receiver accepts."""

    code = "payload_too_large"
    http_status = 413

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"The request is {size_bytes} bytes; the limit is {limit_bytes} bytes. Send less."
        )
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes


class QueueFullError(MillraceError):
    """The queue is over its bound; ``retry_after_s`` says when to come back."""

    code = "queue_full"
    retryable = True
    http_status = 429

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BusUnavailableError(MillraceError):
    """The message bus cannot be reached; nothing was accepted."""

    code = "bus_unavailable"
    retryable = True
    http_status = 503


class BusForbiddenError(BusUnavailableError):
    """The server's permissions do not let this process use a subject."""

    code = "bus_forbidden"
    retryable = False


class StoreFullError(BusUnavailableError):
    """A store that accepted work needs has no room; nothing was accepted. ``store`` names it, and
    ``retry_after_s`` says when to come back."""

    code = "storage_full"

    def __init__(self, store: str, why: str, retry_after_s: float = 5.0) -> None:
        super().__init__(
            f"Nothing new is accepted: the store {store} {why}. What was accepted goes on. Try "
            "again when there is room."
        )
        self.store = store
        self.retry_after_s = retry_after_s


class UntrustedServerError(MillraceError):
    """A server's certificate is not trusted, or it has no TLS where TLS is demanded."""

    code = "untrusted_server"
    http_status = 503


class CredentialsRefusedError(MillraceError):
    """A server does not accept our user, password, token, key or certificate."""

    code = "credentials_refused"
    http_status = 503


class MalformedMessageError(MillraceError):
    """A message on the bus is not what its subject carries."""

    code = "malformed_message"
    http_status = 400


class ForeignTenantError(MalformedMessageError):
    """A job names another tenant than the subject that it was published under, which says whose it
    is."""

    code = "tenant_mismatch"
    http_status = 403


class ConfigError(MillraceError):
    """A configuration file or variable has an unknown key or a bad value."""

    code = "invalid_configuration"


class NameTakenError(ConfigError):
    """Another worker of that name is running."""

    code = "name_taken"

    def __init__(self, name: str, holder: str) -> None:
        super().__init__(
            f"Another worker named {name!r} is running ({holder}). Give each worker a name of its "
            "own (worker.name, MILLRACE_WORKER__NAME), or none: then it draws one."
        )
        self.name = name
        self.holder = holder


class CheckpointError(MillraceError):
    """A model's files are missing, malformed or do not fit its config."""

    code = "invalid_checkpoint"
