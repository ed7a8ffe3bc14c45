"""The lines of ``millrace embed``: texts in, embeddings out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from cli.offline.engine_options import BadLinesError, numbered_lines
from registry.served import ServedModel
from schemas.errors import ContextLengthError, MillraceError, ParameterError


class EmbedText(msgspec.Struct, frozen=True):
    """One text as token ids, and the id that the caller gave it or its line number."""

    id: str | int
    number: int
    token_ids: tuple[int, ...]


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str | int | None = None
    text: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None


_decoder = msgspec.json.Decoder(_Line)


def read_texts(file: Path, served: ServedModel) -> list[EmbedText]:
    """Every text of ``file``, tokenised with the special tokens that the model expects; blank
    lines are skipped.

    Raises ConfigError if the file cannot be read, BadLinesError for lines that are no text for
    this model.
    """
    texts: list[EmbedText] = []
    bad: list[tuple[int, str]] = []
    for number, line in numbered_lines(file):
        try:
            texts.append(_read_line(number, line, served))
        except (MillraceError, msgspec.DecodeError, UnicodeDecodeError) as error:
            bad.append((number, str(error)))
    if bad:
        raise BadLinesError.of(file, bad)
    return texts


def _read_line(number: int, raw: bytes, served: ServedModel) -> EmbedText:
    line = _decoder.decode(raw)
    if (line.text is None) == (line.prompt_token_ids is None):
        raise ParameterError("text", "send either text or prompt_token_ids")
    token_ids = line.prompt_token_ids
    if token_ids is None:
        token_ids = tuple(served.tokenizer.encode(line.text or ""))
    if not token_ids:
        raise ParameterError("text", "the text has no tokens")
    vocab_size = served.config.vocab_size
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise ParameterError("prompt_token_ids", f"token ids go from 0 to {vocab_size - 1}")
    if len(token_ids) > served.context_window_tokens:
        raise ContextLengthError(len(token_ids), None, served.context_window_tokens)
    return EmbedText(number if line.id is None else line.id, number, token_ids)


def embedding_line(text: EmbedText, embedding: Sequence[float], *, normalize: bool) -> str:
    """An embedding as one line of JSON, scaled to length 1 if ``normalize``."""
    values: Iterable[float] = embedding
    if normalize:
        # A vector of zeros has no direction; it stays one of zeros.
        length = math.sqrt(math.fsum(value * value for value in embedding)) or 1.0
        values = [value / length for value in embedding]
    answer = {"id": text.id, "embedding": values, "prompt_tokens": len(text.token_ids)}
    return msgspec.json.encode(answer).decode() + "\n"
