"""Penalties of a completion that goes on: a server counts what it makes itself, and takes what was
made before for a part of the prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from millrace.schemas.sampling import SamplingParams
from millrace.workers.servers.dialect import Part


class CarriedPenalties(NamedTuple):
    """What the tokens that are there take from the logits, as ``bias``. The server counts on for
    the frequency; presence is left to the bias alone, or it would count twice. So where a token
    comes that is not among ``known``, it has to be told (None: there is no such penalty). Of tokens
    that were made of a server's text ``keeps_parts`` whole, as these are whole characters."""

    bias: dict[int, float]
    known: frozenset[int] | None
    keeps_parts: bool = False

    def head(self, part: Part) -> tuple[Part, bool]:
        """The part up to the first token that the server has to be told, and whether there is
        one."""
        if self.known is None:
            return part, False
        if self.keeps_parts:
            return part, not self.known.issuperset(part.token_ids)
        for index, token_id in enumerate(part.token_ids):
            if token_id not in self.known:
                is_last = index + 1 == len(part.token_ids)
                reason = part.finish_reason if is_last else None
                return part._replace(
                    token_ids=part.token_ids[: index + 1], finish_reason=reason
                ), True
        return part, False


def carried_penalties(
    sampling: SamplingParams, token_ids: Sequence[int], *, keeps_parts: bool = False
) -> CarriedPenalties | None:
    """None where there is nothing to carry on."""
    presence, frequency = sampling.presence_penalty, sampling.frequency_penalty
    if not token_ids or (presence == 0 and frequency == 0):
        return None
    counts = Counter(token_ids)
    bias = {token_id: -presence - frequency * count for token_id, count in counts.items()}
    return CarriedPenalties(bias, frozenset(counts) if presence else None, keeps_parts)
