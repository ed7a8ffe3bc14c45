"""Which prefixes a server is likely to have cached, as it does not say."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.engine.types import PrefixChanges
from millrace.schemas.prefix import REPORTED_BYTES, extend_keys, root_key


class PrefixEstimate:
    """Remembers the blocks of what was sent and made, as many as the server's cache has room for;
    the longest unused give way."""

    def __init__(self, block_size_tokens: int, capacity_tokens: int) -> None:
        self._size = block_size_tokens
        self._num_blocks = max(1, capacity_tokens // block_size_tokens)
        self._keys: dict[bytes, None] = {}

    def forget(self) -> PrefixChanges:
        """The server's cache was emptied."""
        self._keys.clear()
        return PrefixChanges(whole=True)

    def note(self, token_ids: Sequence[int], salt: str) -> PrefixChanges | None:
        """The server has computed these tokens; what that changes, if anything."""
        keys: list[bytes] = []
        extend_keys(
            keys,
            root_key(salt),
            token_ids,
            num_blocks=len(token_ids) // self._size,
            block_size_tokens=self._size,
        )
        if not keys:
            return None
        added = [key[:REPORTED_BYTES] for key in keys]
        # The beginning of a prompt is of use without its end, never the other way round.
        for key in reversed(added):
            self._keys.pop(key, None)
            self._keys[key] = None
        removed = list(self._keys)[: max(0, len(self._keys) - self._num_blocks)]
        for key in removed:
            del self._keys[key]
        return PrefixChanges(added=b"".join(reversed(added)), removed=b"".join(removed))
