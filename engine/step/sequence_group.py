"""The sequences of one request."""

from __future__ import annotations

import secrets

from millrace.engine.beams.group import BeamGroup
from millrace.engine.beams.search import BeamSearch
from millrace.engine.kernels.random_stream import stream_key
from millrace.engine.step.sequence import Sequence
from millrace.engine.types import EngineRequest
from millrace.schemas.sampling import MAX_SEED


def draw_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbelow(MAX_SEED + 1)


def choice_key(seed: int, choice: int) -> int:
    """The key of a choice's random stream; that of choice 0 is the seed's own."""
    key = stream_key(seed)
    return key if choice == 0 else stream_key(key + choice)


def make_sequence_group(
    request: EngineRequest, *, arrival: int, seed: int, max_total_tokens: int, added_s: float
) -> list[Sequence]:
    """One sequence for each completion; the first computes the prompt for all of them. A beam
    search begins with the first only.

    They take the ``sampling.n`` numbers of arrival from ``arrival`` on.
    """
    num_sequences = 1 if request.sampling.use_beam_search else request.sampling.n
    choices = [
        Sequence(
            request,
            arrival=arrival + choice,
            key=choice_key(seed, choice),
            max_total_tokens=max_total_tokens,
            added_s=added_s,
            choice=choice,
        )
        for choice in range(num_sequences)
    ]
    if request.sampling.use_beam_search:
        first = choices[0]
        search = BeamSearch(
            request.sampling,
            max_tokens=max_total_tokens - first.num_prompt_tokens,
            stop_token_ids=first.stop_token_ids,
        )
        first.beams = BeamGroup(first, search)
    choices[0].forks = choices[1:]
    return choices
