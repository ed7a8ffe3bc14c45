"""Starter of inference servers: starts a server or attaches to a running one, and checks its
model.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from pathlib import Path

from millrace.registry.checkpoints.fingerprint import weights_fingerprint
from millrace.registry.served import ServedModel
from millrace.runtime.clock import Clock
from millrace.runtime.connection_settings import check_user_data
from millrace.runtime.tasks import outcome_unless
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import PROMISES, EngineKind
from millrace.schemas.errors import ConfigError, MillraceError
from millrace.schemas.redaction import redact_urls
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.client import AnswerError, ServerClient, ServerUnreachableError
from millrace.workers.servers.dialect import Dialect, ServerAddress, ServerFacts
from millrace.workers.servers.dialects.llamacpp import LlamaCppDialect
from millrace.workers.servers.dialects.openai import OpenAiDialect
from millrace.workers.servers.dialects.server_facts import version_of
from millrace.workers.servers.dialects.vllm import VllmDialect
from millrace.workers.servers.server_engine import ServerEngine
from millrace.workers.servers.server_process import ServerProcess, find_program

DIALECTS: dict[EngineKind, type[Dialect]] = {
    EngineKind.LLAMACPP: LlamaCppDialect,
    EngineKind.VLLM: VllmDialect,
    EngineKind.SGLANG: OpenAiDialect,
    EngineKind.OPENAI: OpenAiDialect,
    EngineKind.TGI: OpenAiDialect,
    EngineKind.TRTLLM: OpenAiDialect,
}
_POLL_S = 0.1
# Statuses that no server of the right kind returns while it loads.
_OF_ANOTHER = frozenset({401, 403, 404, 405})

logger = logging.getLogger(__name__)


async def start_server_engine(
    model: ServedModel, config: EngineConfig, clock: Clock
) -> ServerEngine:
    """Return a ready engine of ``config.kind``.

    Raises:
        ConfigError: the server does not have a setting, serves another model, or its program is
            missing.
        EngineFailedError: the server dies or is not ready in time.
    """
    if config.kv_cache_dtype == "int8" and config.kind is not EngineKind.TRTLLM:
        raise ConfigError(
            f"engine.kv_cache_dtype is 'int8', which {config.kind} does not support; use auto or "
            "fp8."
        )
    dialect = DIALECTS[config.kind](model, config, owned=not config.url)
    promises = PROMISES[config.kind]
    if not promises.takes_token_ids:
        logger.warning(
            "this engine takes prompts as text: a stream continued after a crash may differ",
            extra={
                "kind": config.kind,
                "exact_token_ids": promises.exact_token_ids,
                "refused": sorted(promises.unsupported),
            },
        )
    if config.url:
        engine = await _attach(dialect, clock)
        # The weights of a server that was started elsewhere are unknown.
        engine.weights = ""
    else:
        weights = await asyncio.to_thread(weights_fingerprint, model.path)
        engine = await _launch(dialect, clock)
        engine.weights = weights
    return engine


async def _attach(dialect: Dialect, clock: Clock) -> ServerEngine:
    config = dialect.config
    if not config.url.startswith(("http://", "https://")):
        raise ConfigError(
            f"worker.engine.url is {redact_urls(config.url)!r}; it must start with http:// or "
            f"https://."
        )
    check_user_data("worker.engine.url", config.url)
    for name in ("command", "arguments"):
        if getattr(config, name):
            raise ConfigError(
                f"worker.engine.{name} is for a server that the worker starts; the server at "
                f"worker.engine.url already runs."
            )
    client = ServerClient(config.url, api_key=config.api_key)
    try:
        async with asyncio.timeout(config.start_timeout_s):
            await _until_it_answers(dialect, client, clock)
        return ServerEngine(dialect, client, await _checked_facts(dialect, client), None, clock)
    except TimeoutError:
        await client.close()
        raise EngineFailedError(
            f"No {dialect.kind} server answers at {redact_urls(config.url)}{dialect.health_path} "
            f"within {config.start_timeout_s:g} s."
        ) from None
    except BaseException:
        await client.close()
        raise


async def _launch(dialect: Dialect, clock: Clock) -> ServerEngine:
    config = dialect.config
    program = find_program(dialect.program, config.command, dialect.package)
    process = ServerProcess.prepare()
    address = _free_address(process.folder) if dialect.on_port else ServerAddress(process.folder)
    socket_path = None if dialect.on_port else address.socket
    client = ServerClient(address.url, socket=socket_path, api_key=address.api_key)
    try:
        await process.start(dialect.command(program, address))
        await _until_loaded(dialect, client, process, clock)
        facts = await _checked_facts(dialect, client)
        process.is_ready()
        return ServerEngine(dialect, client, facts, process, clock)
    except BaseException:
        await client.close()
        await process.close()
        raise


def _free_address(folder: Path) -> ServerAddress:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return ServerAddress(folder, listener.getsockname()[1], secrets.token_urlsafe(32))


async def _until_loaded(
    dialect: Dialect, client: ServerClient, process: ServerProcess, clock: Clock
) -> None:
    timeout_s = dialect.config.start_timeout_s
    exited = asyncio.Event()
    waiting = asyncio.ensure_future(process.wait())
    waiting.add_done_callback(lambda _: exited.set())
    try:
        async with asyncio.timeout(timeout_s):
            await outcome_unless(exited, _until_healthy(dialect, client, clock))
    except TimeoutError:
        raise _failed(process, f"is not ready after {timeout_s:g} s") from None
    finally:
        waiting.cancel()
    if exited.is_set():
        raise _failed(process, "ended before the model was loaded")


def _failed(process: ServerProcess, what: str) -> EngineFailedError:
    return EngineFailedError(f"The engine's server {what}. Its last output:\n{process.tail}")


async def _until_it_answers(dialect: Dialect, client: ServerClient, clock: Clock) -> None:
    """Wait until the server answers. Raises EngineFailedError if it is another kind of server."""
    while True:
        try:
            await client.get(dialect.health_path)
        except AnswerError as error:
            if error.status in _OF_ANOTHER:
                raise _is_another(dialect, client, error) from error
        except ServerUnreachableError:
            pass
        else:
            return
        await clock.sleep(_POLL_S)


async def _until_healthy(dialect: Dialect, client: ServerClient, clock: Clock) -> None:
    while not await client.is_healthy(dialect.health_path):
        await clock.sleep(_POLL_S)


def _is_another(dialect: Dialect, client: ServerClient, error: MillraceError) -> EngineFailedError:
    return EngineFailedError(
        f"The server at {redact_urls(client.url)} is not of the kind {dialect.kind}: "
        f"{error.message}"
    )


async def _checked_facts(dialect: Dialect, client: ServerClient) -> ServerFacts:
    """Return the server's facts after checking them.

    Raises:
        ConfigError: the version, vocabulary or context window does not fit.
        EngineFailedError: the server is not of this kind.
    """
    kind, model = dialect.kind, dialect.model
    try:
        facts = await dialect.read_facts(client)
    except (EngineFailedError, ConfigError):
        raise
    except MillraceError as error:
        raise _is_another(dialect, client, error) from error
    if facts.version and version_of(facts.version) < dialect.oldest_version:
        oldest = ".".join(map(str, dialect.oldest_version))
        raise ConfigError(
            f"The {kind} server has version {facts.version}; {oldest} or newer is required."
        )
    if facts.vocab_size is not None and facts.vocab_size != model.vocab_size:
        raise ConfigError(
            f"The {kind} server's model has {facts.vocab_size} token ids, the catalogue's "
            f"{model.entry.name} has {model.vocab_size}: they are not the same model."
        )
    window = facts.context_window_tokens
    if window is None or window >= model.context_window_tokens:
        return facts
    if dialect.owned:
        # Its memory limits the window; longer requests are refused one by one.
        logger.warning(
            "the engine's sequences are shorter than the model's window",
            extra={"tokens": window, "window": model.context_window_tokens},
        )
    else:
        raise ConfigError(
            f"The {kind} server's context window is {window} tokens, the catalogue's "
            f"{model.entry.name} has {model.context_window_tokens}. Start the server with a larger "
            f"one, or set context_window_tokens of the model to {window}."
        )
    return facts
