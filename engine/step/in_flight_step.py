"""A step that is under way: what the runner hands to the executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from millrace.engine.sampling.prompt_logprobs import ScoredChunk
from millrace.engine.step.pooling import PooledChunk
from millrace.engine.step.sequence import UNREAD_TOKEN, Sequence
from millrace.schemas.frames import TokenLogprob

__all__ = ["NOT_FINITE", "UNREAD_TOKEN", "ChosenTokens", "InFlightStep"]

# Instead of a token: the logits that it should have been chosen from are not finite.
NOT_FINITE = -1


class ChosenTokens(NamedTuple):
    """What the device chose: a token of each sequence, or NOT_FINITE, and its log-probabilities,
    None unless asked for. ``finite``: of each item of the plan, whether all that was computed is a
    number; None leaves it to the reader to look at the cache, which tells the truth only as long
    as no later step was launched."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    finite: list[bool] | None


def nothing_chosen() -> ChosenTokens:
    """Read a step whose tokens are all the host's to choose."""
    return ChosenTokens([], [], None)


class InFlightStep(NamedTuple):
    """A step whose work has been given to the device and may not be done.

    The next tokens of ``by_device`` are chosen there. They are UNREAD_TOKEN in their sequences
    until ``read``, which waits for them, is called, at most once. Those of ``by_host`` are the
    host's to choose, from ``logits`` [num_rows, vocab_size], valid until the next launch: a row of
    each in the same order, then one for each token that was proposed for them. ``pooled`` is what
    the step adds to embeddings, ``scored`` what it adds to the log-probabilities of prompts.

    At most one unread step goes before a launch, and the unread tokens of the plan are those that
    it chose. When a launch or a read fails, everything in flight is read or dropped before the
    next launch, whose plan then has no unread tokens. A sequence that ends or is preempted gives
    up its blocks at once, though the step that was launched meanwhile may still write to them;
    what is done to blocks later has to come after that on the device.
    """

    by_device: list[Sequence]
    by_host: list[Sequence]
    logits: torch.Tensor
    pooled: list[PooledChunk]
    scored: list[ScoredChunk]
    read: Callable[[], ChosenTokens]

    @property
    def needs_host(self) -> bool:
        """Whether what comes of it is wanted before the next step is planned."""
        return bool(self.by_host or self.pooled or self.scored)
