"""Whether a server completes text, and has the catalogue's model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millrace.registry.served import ServedModel
from millrace.schemas.errors import ConfigError
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.client import ServerClient

# Other tokenizers cut it otherwise.
PROBE_TEXT = "The mill stands by 7 streams, said Zoë: „Größe“, naïve 水車 {'a': [1, 2.5]}\n\tEnd."
# Tokens that a server may put around a prompt beyond those of its tokenizer.
_MOST_AROUND = 2


class _Choice(msgspec.Struct):
    text: str
    prompt_token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


def chosen_model(models: Any, served_name: str, server: str) -> dict[str, Any]:
    """The model to ask for, of those that /v1/models lists: ``served_name``, or the first. Raises
    EngineFailedError or ConfigError."""
    listed: list[dict[str, Any]] = []
    if isinstance(models, dict) and isinstance(models.get("data"), list):
        listed = [one for one in models["data"] if isinstance(one, dict) and "id" in one]
    if not listed:
        raise EngineFailedError(f"The {server} server lists no models.")
    found = [one for one in listed if served_name in ("", str(one["id"]))]
    if not found:
        raise ConfigError(
            f"The {server} server has no model {served_name!r} (worker.engine.served_name); it has "
            f"{', '.join(str(one['id']) for one in listed)}."
        )
    return found[0]


def check_probe(model: ServedModel, token_ids: Sequence[int] | None, server: str) -> None:
    """Raise ConfigError unless the server's tokens of ``PROBE_TEXT`` are those of the catalogue's
    model. It may put a beginning of the sequence before them."""
    own = list(model.tokenizer.encode(PROBE_TEXT, add_special_tokens=False))
    if token_ids is None or list(token_ids)[-len(own) :] != own:
        raise ConfigError(
            f"The {server} server's tokenizer is not that of the catalogue's {model.entry.name}: "
            f"they are not the same model."
        )


async def check_completions(
    client: ServerClient,
    path: str,
    body: Mapping[str, Any],
    model: ServedModel,
    server: str,
    timeout_s: float,
) -> None:
    """Have the server complete a text; some load the model only then. ``body`` has its name, and
    may ask for the token ids of the prompt. Raises EngineFailedError if the server does not
    complete it or does not tell those, and ConfigError if it cuts the text into other tokens than
    the catalogue's model, or, where it only counts them, into more or fewer."""
    asked = {**body, "prompt": PROBE_TEXT, "max_tokens": 1, "temperature": 0.0}
    try:
        async with asyncio.timeout(timeout_s):
            answer = b"".join([part async for part in client.whole(path, asked)])
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
    if "return_token_ids" in body:
        told = completion.choices[0].prompt_token_ids
        if told is None:
            raise EngineFailedError(
                f"The {server} server at {client.url} tells no token ids at {path}: its version is "
                f"too old for return_token_ids. Run a newer one, or attach to this one as openai."
            )
        check_probe(model, told, server)
        return
    num_tokens = None if completion.usage is None else completion.usage.prompt_tokens
    own = len(model.tokenizer.encode(PROBE_TEXT, add_special_tokens=False))
    if num_tokens is not None and not own <= num_tokens <= own + _MOST_AROUND:
        raise ConfigError(
            f"The server counts {num_tokens} tokens in a text that has {own} by the tokenizer of "
            f"the catalogue's {model.entry.name}: it has another model, or writes more around a "
            f"prompt."
        )
