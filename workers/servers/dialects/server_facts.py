"""Facts that servers report, and the check that they serve the catalogue's model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from millrace.registry.served import ServedModel
from millrace.schemas.errors import ConfigError
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.client import ServerClient

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
# A text that other tokenizers split differently.
PROBE_TEXT = "The mill stands by 7 streams, said Zoë: „Größe“, naïve 水車 {'a': [1, 2.5]}\n\tEnd."
# Maximum number of extra tokens that a server may put around a prompt.
_MOST_AROUND = 2


def version_of(text: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version."""
    found = re.match(r"[^\d]*(\d+(?:\.\d+)*)", text)
    return tuple(map(int, found.group(1).split("."))) if found else ()


def read_samples(text: bytes, names: Collection[str]) -> dict[str, list[float]]:
    """Return the values of the samples with these names, in order; skip malformed lines."""
    values: dict[str, list[float]] = {name: [] for name in names}
    for line in text.decode(errors="replace").splitlines():
        found = _SAMPLE.match(line) if line.startswith(tuple(names)) else None
        if found is not None and found.group(1) in values:
            try:
                values[found.group(1)].append(float(found.group(3)))
            except ValueError:
                continue
    return values


def read_labels(text: bytes, name: str) -> list[dict[str, str]]:
    """Return the labels of the samples with this name, in order."""
    lines = text.decode(errors="replace").splitlines()
    found = [_SAMPLE.match(line) for line in lines if line.startswith(name)]
    return [
        dict(_LABEL.findall(one.group(2) or "")) for one in found if one and one.group(1) == name
    ]


class _Choice(msgspec.Struct):
    text: str
    prompt_token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


def chosen_model(models: Any, served_name: str, server: str) -> dict[str, Any]:
    """Return the model to use from /v1/models: ``served_name``, or the first one.

    Raises:
        EngineFailedError: the server lists no models.
        ConfigError: the server does not list ``served_name``.
    """
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
    """Check that the server's tokens of ``PROBE_TEXT`` are those of the catalogue's model. The
    server may put begin-of-sequence tokens before them.

    Raises:
        ConfigError: the tokens differ.
    """
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
    """Have the server complete a text, since some servers load the model only then.

    ``body`` has the model's name, and may ask for the token ids of the prompt.

    Raises:
        EngineFailedError: the server does not complete the text or lacks the requested token ids.
        ConfigError: the server tokenizes the text differently from the catalogue's model, or counts
            another number of tokens.
    """
    asked = {**body, "prompt": PROBE_TEXT, "max_tokens": 1, "temperature": 0.0}
    try:
        async with asyncio.timeout(timeout_s):
            answer = b"".join([part async for part in client.whole(path, asked)])
    except TimeoutError:
        raise EngineFailedError(
            f"The server at {client.url} completed no text within {timeout_s:g} s."
        ) from None
    try:
        completion = msgspec.json.decode(answer, type=_Completion)
    except msgspec.MsgspecError:
        completion = None
    if completion is None or not completion.choices:
        raise EngineFailedError(f"The server at {client.url} answered {path} without a completion.")
    if "return_token_ids" in body:
        told = completion.choices[0].prompt_token_ids
        if told is None:
            raise EngineFailedError(
                f"The {server} server at {client.url} returns no token ids at {path}: its version "
                f"does not support return_token_ids. Run a newer one, or attach to this one as "
                f"openai."
            )
        check_probe(model, told, server)
        return
    num_tokens = None if completion.usage is None else completion.usage.prompt_tokens
    own = len(model.tokenizer.encode(PROBE_TEXT, add_special_tokens=False))
    if num_tokens is not None and not own <= num_tokens <= own + _MOST_AROUND:
        raise ConfigError(
            f"The server counts {num_tokens} tokens in a text that has {own} in the tokenizer of "
            f"the catalogue's {model.entry.name}: it serves another model, or adds more tokens "
            f"around a prompt."
        )
