"""Lines of ``millrace embed``: texts in, embeddings out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from millrace.cli.offline.engine_options import BadLine, BadLinesError, numbered_lines
from millrace.engine.offline.outputs import unit_vector
from millrace.registry.served import ServedModel
from millrace.runtime.json.lines import on_one_line
from millrace.schemas.errors import ContextLengthError, MillraceError, ParameterError


class EmbedText(msgspec.Struct, frozen=True):
    """Text as token ids, with the caller's id or its line number."""

    id: str | int
    number: int
    token_ids: tuple[int, ...]


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str | int | None = None
    text: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None


_decoder = msgspec.json.Decoder(_Line)


def read_texts(
    file: Path, served: ServedModel, *, keep_bad: bool = False
) -> list[EmbedText | BadLine]:
    """Read and tokenise every text of ``file``, with the special tokens that the model expects;
    blank lines are skipped.

    With ``keep_bad``, the list contains a BadLine for each invalid line. Raises ConfigError if the
    file cannot be read, and without ``keep_bad`` BadLinesError with the number of each invalid
    line.
    """
    texts = [_read_line(number, line, served) for number, line in numbered_lines(file)]
    bad = [(line.number, line.message) for line in texts if isinstance(line, BadLine)]
    if bad and not keep_bad:
        raise BadLinesError.of(file, bad)
    return texts


def _read_line(number: int, raw: bytes, served: ServedModel) -> EmbedText | BadLine:
    own_id: str | int = number
    try:
        line = _decoder.decode(raw)
        own_id = number if line.id is None else line.id
        return EmbedText(own_id, number, _token_ids(line, served))
    except (MillraceError, msgspec.DecodeError, UnicodeDecodeError) as error:
        code = error.code if isinstance(error, MillraceError) else BadLinesError.code
        return BadLine(id=own_id, number=number, code=code, message=str(error))


def _token_ids(line: _Line, served: ServedModel) -> tuple[int, ...]:
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
    return token_ids


def embedding_line(text: EmbedText, embedding: Sequence[float], *, normalize: bool) -> str:
    """Render an embedding as one line of JSON, scaled to length 1 if ``normalize``."""
    values = unit_vector(embedding) if normalize else embedding
    answer = {"id": text.id, "embedding": values, "prompt_tokens": len(text.token_ids)}
    return on_one_line(msgspec.json.encode(answer)).decode() + "\n"
