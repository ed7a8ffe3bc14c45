"""The tokens of engines that compute nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence

from millrace.registry.tokenizers.tokenizer import Tokenizer

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = 0xBF58476D1CE4E5B9


class SimulatedTokens:
    """Draws from ``token_ids`` by (seed, index) alone, so that whoever goes on with a completion
    goes on with the same one. Raises ValueError without any."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise ValueError("a simulated engine needs tokens to say something with")
        self._token_ids = tuple(token_ids)

    def draw(self, seed: int, index: int, banned: Collection[int] = ()) -> int:
        """The token with that index; the next one that is not ``banned``, unless all are."""
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
