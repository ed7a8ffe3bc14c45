"""The tokens of engines that compute nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
