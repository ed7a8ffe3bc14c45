"""How much of a worker a request will take."""

from __future__ import annotations

from typing import NamedTuple

# Blocks are asked for the tokens there are and this many to come, not for all that may come: most
# completions end long before max_tokens, and a worker that runs out preempts.
HEADROOM_TOKENS = 64


class Need(NamedTuple):
    """``num_context_tokens`` are to be prefilled (prompt and delivered tokens), at most
    ``num_new_tokens`` follow; none if it is an embedding that is asked for."""

    num_context_tokens: int
    num_new_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.num_context_tokens + self.num_new_tokens

    def num_blocks(self, block_size_tokens: int) -> int:
        """KV blocks that it will soon hold."""
        tokens = self.num_context_tokens + min(self.num_new_tokens, HEADROOM_TOKENS)
        return -(-tokens // block_size_tokens)
