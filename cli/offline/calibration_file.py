"""Lines of ``millrace quantize --calibrate``: texts as token ids."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import msgspec

from millrace.cli.offline.chat_row import ChatRow
from millrace.cli.offline.engine_options import BadLinesError, numbered_lines
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import MillraceError, ParameterError


class _Line(ChatRow, frozen=True):
    text: str | None = None
    prompt: str | None = None


_decoder = msgspec.json.Decoder(_Line)


def read_calibration(file: Path, tokenizer: Tokenizer, num_samples: int) -> list[list[int]]:
    """Return the token ids of the first ``num_samples`` lines.

    Each line is an object with ``text``, ``prompt`` or ``messages`` (including answers); other
    fields are ignored. Raises ConfigError if the file cannot be read, and BadLinesError for lines
    without a text.
    """
    texts: list[list[int]] = []
    bad = []
    for number, line in islice(numbered_lines(file), num_samples):
        try:
            texts.append(_token_ids(_decoder.decode(line), tokenizer))
        except (MillraceError, msgspec.DecodeError, UnicodeDecodeError) as error:
            bad.append((number, str(error)))
    if bad:
        raise BadLinesError.of(file, bad)
    return texts


def _token_ids(line: _Line, tokenizer: Tokenizer) -> list[int]:
    given = [name for name in ("text", "prompt", "messages") if getattr(line, name) is not None]
    if len(given) != 1:
        raise ParameterError("text", "a line has one of text, prompt and messages")
    chat = line.read()
    if chat.messages is None:
        return tokenizer.encode(line.text or line.prompt or "")
    return tokenizer.encode_chat(chat.messages, chat.tools, add_generation_prompt=False)
