"""The lines of ``millrace embed``: texts in, embeddings out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from registry.served import ServedModel
from schemas.errors import ConfigError, ContextLengthError, MillraceError, ParameterError

_MAX_SHOWN = 20


class BadTextsError(MillraceError, code="invalid_input", http_status=400):
    """Lines of the input cannot be embedded; the message names each by its number."""


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
_encoder = msgspec.json.Encoder()


def read_texts(file: Path, served: ServedModel) -> list[EmbedText]:
    """Every text of ``file``, tokenised with the special tokens that the model expects; blank
    lines are skipped.

    Raises ConfigError if the file cannot be read, BadTextsError for lines that are no text for
    this model.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    texts: list[EmbedText] = []
    bad: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            texts.append(_read_line(number, line, served))
        except (MillraceError, msgspec.DecodeError, UnicodeDecodeError) as error:
            bad.append(f"{file}, line {number}: {error}")
    if bad:
        more = [f"and {len(bad) - _MAX_SHOWN} more"] if len(bad) > _MAX_SHOWN else []
        raise BadTextsError("\n".join([*bad[:_MAX_SHOWN], *more]))
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
    return _encoder.encode(answer).decode() + "\n"


def error_line(text: EmbedText, error: tuple[str, str]) -> str:
    """What is answered to a text that could not be embedded."""
    answer = {"id": text.id, "error": {"code": error[0], "message": error[1]}}
    return _encoder.encode(answer).decode() + "\n"
