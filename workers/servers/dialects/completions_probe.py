"""Whether a server completes text, and has the catalogue's model, where it tells no token ids."""

from __future__ import annotations

import asyncio

import msgspec

from millrace.registry.served import ServedModel
from millrace.schemas.errors import ConfigError
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.client import ServerClient
from millrace.workers.servers.dialects.same_model import PROBE_TEXT

# Tokens that a server may put around a prompt beyond those of its tokenizer.
_MOST_AROUND = 2


class _Choice(msgspec.Struct):
    text: str


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


async def check_completions(
    client: ServerClient, path: str, name: str, model: ServedModel, timeout_s: float
) -> None:
    """Have the server's model ``name`` complete a text; some load it only then. Raises
    EngineFailedError if it does not, and ConfigError if it cuts the text into more or fewer tokens
    than the catalogue's model."""
    body = {"model": name, "prompt": PROBE_TEXT, "max_tokens": 1, "temperature": 0.0}
    try:
        async with asyncio.timeout(timeout_s):
            answer = b"".join([part async for part in client.whole(path, body)])
    except TimeoutError:
        raise EngineFailedError(
            f"The server at {client.url} completes no text within {timeout_s:g} s."
        ) from None
    try:
        completion = msgspec.json.decode(answer, type=_Completion)
    except msgspec.MsgspecError:
        completion = None
    if completion is None or not completion.choices:
        raise EngineFailedError(f"The server at {client.url} answers {path} with no completion.")
    num_tokens = None if completion.usage is None else completion.usage.prompt_tokens
    own = len(model.tokenizer.encode(PROBE_TEXT, add_special_tokens=False))
    if num_tokens is not None and not own <= num_tokens <= own + _MOST_AROUND:
        raise ConfigError(
            f"The server counts {num_tokens} tokens in a text that has {own} by the tokenizer of "
            f"the catalogue's {model.entry.name}: it has another model, or writes more around a "
            f"prompt."
        )
