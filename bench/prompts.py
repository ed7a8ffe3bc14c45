"""Prompts of the load: lines of a data set, or synthetic prompts of a given length."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from millrace.bench.settings import LoadSettings, TargetApi
from millrace.schemas.errors import ConfigError

# Short common words, most of which are one token in most vocabularies.
_WORD_LIST = (
    "the of and to in is you that it he was for on are as with his they at be this have from or "
    "one had by word but not what all were we when your can said there use an each which she do "
    "how their if will up other about out many then them these so some her would make like him "
    "into time has look two more write go see number no way could people my than first water been "
    "call who oil its now find long down day did get come made may part over new sound take only "
    "little work know place year live me back give most very after thing our just name good man "
    "think say great where help through much before line right too mean old any same tell boy "
    "follow came want show also around form three small set put end does another well large must "
    "big even such because turn here why ask went men read need land home us move try kind hand"
)
_WORDS = _WORD_LIST.split()


class Prompted(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt of one request, as text or as messages, with the limit of its answer."""

    text: str | None = None
    messages: Sequence[dict[str, Any]] = ()
    max_tokens: int | None = None


class PromptSource(Protocol):
    """Source of prompts by the number of the request; the same number always gives the same
    prompt."""

    def prompt(self, index: int) -> Prompted: ...


class SyntheticPrompts:
    """Random words; no two prompts are alike beyond the shared prefix."""

    def __init__(self, settings: LoadSettings) -> None:
        self._settings = settings
        shared = round(settings.shared_prefix_tokens / settings.tokens_per_word)
        self._prefix = random_words(random.Random(settings.seed), shared)
        self._around = settings.tokens_around + settings.shared_prefix_tokens

    def prompt(self, index: int) -> Prompted:
        settings = self._settings
        source = random.Random((settings.seed << 40) + index + 1)
        wanted = settings.input_tokens.draw(source)
        num_own = max(1, round((wanted - self._around) / settings.tokens_per_word))
        return Prompted(
            text=" ".join([*self._prefix, *random_words(source, num_own)]),
            max_tokens=settings.output_tokens.draw(source),
        )


class _Line(msgspec.Struct, frozen=True):
    messages: list[dict[str, Any]] | None = None
    prompt: str | None = None
    max_tokens: int | None = None


class DatasetPrompts:
    """Lines of a JSONL file in an order drawn from the seed, repeated endlessly."""

    def __init__(self, settings: LoadSettings) -> None:
        """Read the data set. Raises ConfigError, naming the line, for an invalid file."""
        self._settings = settings
        self._lines = _read_lines(Path(settings.dataset), settings.api)
        random.Random(settings.seed).shuffle(self._lines)

    def prompt(self, index: int) -> Prompted:
        line = self._lines[index % len(self._lines)]
        max_tokens = line.max_tokens
        if max_tokens is None:
            max_tokens = self._settings.output_tokens.draw(
                random.Random((self._settings.seed << 40) + index + 1)
            )
        return Prompted(text=line.prompt, messages=line.messages or (), max_tokens=max_tokens)


def prompts_of(settings: LoadSettings) -> PromptSource:
    """Return the prompt source of the settings. Raises ConfigError for a bad data set."""
    return DatasetPrompts(settings) if settings.dataset else SyntheticPrompts(settings)


def random_words(source: random.Random, count: int) -> list[str]:
    """Return ``count`` random words."""
    return source.choices(_WORDS, k=count)


def _read_lines(path: Path, api: TargetApi) -> list[_Line]:
    try:
        raw = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"--dataset: {path} cannot be read: {error.strerror}") from error
    decoder = msgspec.json.Decoder(_Line)
    lines = []
    for number, text in enumerate(raw, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--dataset: line {number} of {path}: {error}") from error
        if (line.prompt is None) == (line.messages is None):
            raise ConfigError(f"--dataset: line {number} of {path} needs a prompt or messages")
        if line.messages is not None and api is TargetApi.COMPLETIONS:
            raise ConfigError(
                f"--dataset: line {number} of {path} has messages, which --api completions does "
                "not take; use --api chat"
            )
        lines.append(line)
    if not lines:
        raise ConfigError(f"--dataset: {path} has no line")
    return lines
