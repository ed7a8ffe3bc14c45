"""What computes plans, and what it hands to the executor: a step that is under way."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from typing import NamedTuple, Protocol

import torch

from millrace.engine.adapters.rows import AdapterWeights
from millrace.engine.kernels.operations import WeightSize
from millrace.engine.kv.cache import KVCache
from millrace.engine.sampling.prompt_logprobs import ScoredChunk
from millrace.engine.sampling.sampler import Likeliest
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.pooling import PooledChunk
from millrace.engine.step.sequence import UNREAD_TOKEN, Sequence
from millrace.engine.types import RunnerFigures
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.models.adapters import AdapterRef

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


class DraftRunner(Protocol):
    """Computes the tokens of plans: of a draft, or of a model that is drafted for.

    ``host_device`` has the logits that the host chooses from; ``likeliest`` finds the largest of
    them there faster than torch, if anything does.
    """

    config: ModelConfig
    cache: KVCache
    likeliest: Likeliest | None

    @property
    def host_device(self) -> torch.device: ...

    def launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        """Have a plan's tokens computed, and the next ones chosen as far as the device can do that.

        Launching a plan again gives the same: it only writes the cache where it wrote before.
        """
        ...


class Runner(DraftRunner, Protocol):
    """Owns the weights and the KV cache's memory. The planner decides which block a sequence has.

    ``overlaps``: the device chooses tokens that are read later, so the next step may be launched
    before they are read; its steps have ``max_drawn_rows`` to draw from, None: as many as tokens.
    ``num_stages``: of a pipeline, each of which computes another step at a time.
    ``is_row_exact``: whether a row of logits has the same bits whatever rows are beside it.
    """

    overlaps: bool
    max_drawn_rows: int | None = None
    num_stages: int = 1
    is_row_exact: bool

    @property
    def weight_size(self) -> WeightSize:
        """Count the weights that a step multiplies with."""
        ...

    def figures(self) -> RunnerFigures:
        """Count what happened in its steps; nothing by default."""
        return RunnerFigures()

    def watch(self, wake: Callable[[], None]) -> None:  # noqa: ARG002 (a default)
        """Call ``wake``, on any thread, when the device has failed between steps, so that ``check``
        is asked. By default only a step finds out that the device has failed."""
        return

    def check(self) -> None:
        """Raise DeviceLostError if the device has failed between steps."""
        return

    def close(self) -> None:
        """End the processes that compute with this one; by default there are none."""
        return

    def load_adapter(self, adapter: AdapterRef, slot: int, *, max_rank: int) -> AdapterWeights:
        """Read an adapter of at most such a rank into a slot of this number, which no step that is
        launched meanwhile reads; for any thread. Raises AdapterError, ModelSourceError."""
        ...
