"""Tokens of simulated engines."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from millrace.registry.tokenizers.tokenizer import Tokenizer

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9


class SimulatedTokens:
    """Random source of ``token_ids``, a function of (seed, index) only.

    So any worker that continues a completion continues the same one.

    Raises:
        ValueError: ``token_ids`` is empty.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise ValueError("a simulated engine needs at least one token to generate")
        self._token_ids = tuple(token_ids)

    def draw(self, seed: int, index: int, banned: Collection[int] = ()) -> int:
        """Return the token with that index, or the next token that is not ``banned``; ignore
        ``banned`` if it has all tokens.
        """
        token_ids = self._token_ids
        mixed = (seed + (index + 1) * _GOLDEN) & _MASK
        mixed = ((mixed ^ (mixed >> 29)) * _MIX) & _MASK
        place = (mixed >> 32) % len(token_ids)
        if banned:
            for offset in range(len(token_ids)):
                token_id = token_ids[(place + offset) % len(token_ids)]
                if token_id not in banned:
                    return token_id
        return token_ids[place]


MAX_WORDS = 1_024
_WORD = re.compile(r" [a-z]{3,}")
_LEGIBLE = re.compile(r"[ -~]+")


def readable_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return up to ``MAX_WORDS`` readable token ids, the same for every process with that
    tokenizer.

    They are whole lower-case words. If there are none, they are printable ASCII, and otherwise any
    tokens that are not special and do not end a sequence.
    """
    pieces = tokenizer.table.pieces
    ends = tokenizer.special_token_ids.union(tokenizer.eos_token_ids)

    def those(fits: Callable[[str], object]) -> tuple[int, ...]:
        found = (i for i, piece in enumerate(pieces) if i not in ends and fits(_text(piece)))
        return tuple(token_id for token_id, _ in zip(found, range(MAX_WORDS), strict=False))

    return those(_WORD.fullmatch) or those(_LEGIBLE.fullmatch) or those(lambda _: True)


def _text(piece: str | bytes) -> str:
    return piece.decode(errors="replace") if isinstance(piece, bytes) else piece
