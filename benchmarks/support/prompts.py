"""Prompts and lengths drawn from a seed, so that every system gets the same."""

from __future__ import annotations

import random
from collections.abc import Sequence

from benchmarks.checkpoints import FIRST_TEXT_TOKEN

Prompt = tuple[int, ...]


def distinct_prompts(count: int, num_tokens: int, vocab_size: int, seed: int) -> list[Prompt]:
    """Return ``count`` prompts without a common prefix, except by chance."""
    return shared_prefix_prompts(count, 0, num_tokens, vocab_size, seed)


def shared_prefix_prompts(
    count: int, num_shared_tokens: int, num_own_tokens: int, vocab_size: int, seed: int
) -> list[Prompt]:
    """Return ``count`` prompts with the same first tokens and different continuations."""
    source = random.Random(seed)

    def draw(num_tokens: int) -> Prompt:
        return tuple(source.randrange(FIRST_TEXT_TOKEN, vocab_size) for _ in range(num_tokens))

    shared = draw(num_shared_tokens)
    return [shared + draw(num_own_tokens) for _ in range(count)]


def skewed_lengths(count: int, longest: int, seed: int, mean_share: float = 0.2) -> list[int]:
    """Return output lengths like users': many short, some long.

    They are exponential with a mean of ``mean_share * longest``, cut off at ``longest``, which one
    of them has.
    """
    source = random.Random(seed)
    lengths = [
        max(1, min(longest, round(source.expovariate(1 / (mean_share * longest)))))
        for _ in range(count)
    ]
    lengths[source.randrange(count)] = longest
    return lengths


def gain_of_continuous(lengths: Sequence[int], batch: int) -> float:
    """Return the ratio of the longest of each batch to the mean length.

    Batches of ``batch`` that run until their longest answer ends are slower by this ratio than
    slots that are always full.
    """
    groups = [lengths[start : start + batch] for start in range(0, len(lengths), batch)]
    return sum(max(group) * len(group) for group in groups) / sum(lengths)
