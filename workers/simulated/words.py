"""What a simulated engine says: tokens of the model's vocabulary that read like text."""

from __future__ import annotations

import re
from collections.abc import Callable

from millrace.registry.tokenizers.tokenizer import Tokenizer

MAX_WORDS = 1_024
_WORD = re.compile(r" [a-z]{3,}")
_LEGIBLE = re.compile(r"[ -~]+")


def readable_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Up to ``MAX_WORDS`` ids: whole lower-case words; where there are none, printable ASCII; else
    whatever is not special and ends nothing. The same for everybody with that tokenizer."""
    pieces = tokenizer.table.pieces
    ends = tokenizer.special_token_ids.union(tokenizer.eos_token_ids)

    def those(fits: Callable[[str], object]) -> tuple[int, ...]:
        found = (i for i, piece in enumerate(pieces) if i not in ends and fits(_text(piece)))
        return tuple(token_id for token_id, _ in zip(found, range(MAX_WORDS), strict=False))

    return those(_WORD.fullmatch) or those(_LEGIBLE.fullmatch) or those(lambda _: True)


def _text(piece: str | bytes) -> str:
    return piece.decode(errors="replace") if isinstance(piece, bytes) else piece
