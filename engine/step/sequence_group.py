"""Sequences of one request, and fork groups, which a client of the engine leads."""

from __future__ import annotations

import secrets

from millrace.engine.kernels.random_stream import stream_key
from millrace.engine.step.sequence import Sequence
from millrace.engine.types import EngineRequest
from millrace.schemas.sampling import MAX_SEED


def draw_seed() -> int:
    """Draw a seed for a request without one."""
    return secrets.randbelow(MAX_SEED + 1)


def choice_key(seed: int, choice: int) -> int:
    """Return the key of a choice's random stream. The key of choice 0 is that of the seed alone."""
    key = stream_key(seed)
    return key if choice == 0 else stream_key(key + choice)


def make_sequence_group(
    request: EngineRequest,
    *,
    arrival: int,
    seed: int,
    max_total_tokens: int,
    added_s: float,
    num_sequences: int | None = None,
) -> list[Sequence]:
    """Make the sequences of a new request, by default one for each completion.

    The first computes the prompt for all of them. They have the ``sampling.n`` arrival numbers
    from ``arrival`` on.
    """
    choices = [
        Sequence(
            request,
            arrival=arrival + choice,
            key=choice_key(seed, choice),
            max_total_tokens=max_total_tokens,
            added_s=added_s,
            choice=choice,
        )
        for choice in range(num_sequences or request.sampling.n)
    ]
    choices[0].forks = choices[1:]
    return choices
