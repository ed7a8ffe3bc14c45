"""The slots that beam searches need, so that their beams run together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from millrace.engine.beams.group import BeamGroup
from millrace.engine.step.sequence import Sequence


def has_slot(
    newcomer: Sequence, running: Collection[Sequence], num_leaving: int, num_slots: int
) -> bool:
    """Whether there is a slot for ``newcomer`` once ``num_leaving`` of the running ones have left:
    one that no beam of a running search needs; and if it is the first beam of its search, slots for
    the others too, unless it runs alone.

    Otherwise beams of several searches would fill the batch, each waiting for others that do not
    fit.
    """
    num_taken = len(running) - num_leaving
    if num_taken <= 0:
        return num_slots > 0
    num_running: Counter[BeamGroup] = Counter()
    for sequence in running:
        if sequence.beams is not None:
            num_running[sequence.beams] += 1
    own = newcomer.beams
    if own in num_running:
        del num_running[own]  # one of the slots that its search needs is its own
    elif own is not None:
        num_taken += own.num_beams - 1
    num_taken += sum(group.num_beams - num for group, num in num_running.items())
    return num_taken < num_slots
