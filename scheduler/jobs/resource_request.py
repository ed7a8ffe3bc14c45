"""How much of a worker a request will take."""

from __future__ import annotations

from typing import NamedTuple

from millrace.schemas.jobs import Tier

# Blocks are asked for the tokens there are and this many to come, not for all that may come: most
# completions end long before max_tokens, and a worker that runs out preempts.
HEADROOM_TOKENS = 64

# The most urgent tier has rank 0. Those of a higher rank make way.
TIER_RANKS = {tier: rank for rank, tier in enumerate(Tier)}


class ResourceRequest(NamedTuple):
    """``num_context_tokens`` are to be prefilled (prompt and delivered tokens), at most
    ``num_new_tokens`` follow; none if it is an embedding that is asked for. Work of lower tiers
    than ``tier`` makes way for it. ``adapter`` is the version of the adapter that it has, empty for
    none."""

    num_context_tokens: int
    num_new_tokens: int
    tier: Tier = Tier.FREE
    adapter: str = ""

    @property
    def total_tokens(self) -> int:
        return self.num_context_tokens + self.num_new_tokens

    @property
    def rank(self) -> int:
        return TIER_RANKS[self.tier]

    def num_blocks(self, block_size_tokens: int) -> int:
        """KV blocks that it will soon hold."""
        tokens = self.num_context_tokens + min(self.num_new_tokens, HEADROOM_TOKENS)
        return -(-tokens // block_size_tokens)
