"""Protocol of runners, which compute plans, and the in-flight step that they return."""

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

# Takes the place of a token whose logits are not finite.
NOT_FINITE = -1


class ChosenTokens(NamedTuple):
    """Tokens that the device chose.

    Attributes:
        tokens: A token of each sequence, or NOT_FINITE.
        logprobs: Log-probabilities of each token; None unless asked for.
        finite: For each item of the plan, whether all computed numbers are finite. None: the reader
            has to check the cache, which is valid only until a later step is launched.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob | None]
    finite: list[bool] | None


def nothing_chosen() -> ChosenTokens:
    """Return the result of a step whose tokens are all chosen by the host."""
    return ChosenTokens([], [], None)


class InFlightStep(NamedTuple):
    """Step that was given to the device and may not be complete.

    The device chooses the next tokens of ``by_device``. They are UNREAD_TOKEN in their sequences
    until ``read``, which waits for them and may be called once. The host chooses the next tokens of
    ``by_host`` from ``logits`` [num_rows, vocab_size], which are valid until the next launch: one
    row of each sequence in the same order, then one row for each proposed token. ``pooled`` is
    added to embeddings, ``scored`` to the log-probabilities of prompts.

    At most one unread step precedes a launch, and it chose the unread tokens of the plan. When a
    launch or a read fails, everything in flight is read or dropped before the next launch, whose
    plan then has no unread tokens. A sequence that ends or is preempted gives up its
    blocks at once, though the step that was launched meanwhile may still write to them. Later
    operations on these blocks must follow that step on the device.
    """

    by_device: list[Sequence]
    by_host: list[Sequence]
    logits: torch.Tensor
    pooled: list[PooledChunk]
    scored: list[ScoredChunk]
    read: Callable[[], ChosenTokens]

    @property
    def needs_host(self) -> bool:
        """True if the step's results are needed before the next step is planned."""
        return bool(self.by_host or self.pooled or self.scored)


class DraftRunner(Protocol):
    """Runner that computes plans, of a draft model or of the model that it drafts for.

    ``host_device`` has the logits that the host chooses from. ``likeliest`` finds the largest of
    them faster than torch; None if nothing does.
    """

    config: ModelConfig
    cache: KVCache
    likeliest: Likeliest | None

    @property
    def host_device(self) -> torch.device: ...

    def launch(self, plan: Rows[ScheduledSequence]) -> InFlightStep:
        """Compute a plan's tokens, and choose the next ones as far as the device can.

        Launching a plan again gives the same result: it only rewrites the same cache entries.
        """
        ...


class Runner(DraftRunner, Protocol):
    """Runner that owns the weights and the KV cache's memory. The planner assigns blocks to
    sequences.

    Attributes:
        overlaps: True if the device chooses tokens that are read later, so that the next step may
            be launched before they are read.
        max_drawn_rows: Rows of an overlapping step to draw tokens from. None: as many as its
            tokens.
        num_stages: Stages of a pipeline, each of which computes another step at a time.
        is_row_exact: True if a row of logits has the same bits beside any other rows
            (batch-invariant).
    """

    overlaps: bool
    max_drawn_rows: int | None = None
    num_stages: int = 1
    is_row_exact: bool

    @property
    def weight_size(self) -> WeightSize:
        """Return the number and bytes of the weights that a step multiplies with."""
        ...

    def figures(self) -> RunnerFigures:
        """Return counters of its steps; empty by default."""
        return RunnerFigures()

    def watch(self, wake: Callable[[], None]) -> None:  # noqa: ARG002 (a default)
        """Call ``wake``, on any thread, when the device has failed between steps; the engine then
        calls ``check``.

        By default only a step notices that the device has failed.
        """
        return

    def check(self) -> None:
        """Raise DeviceLostError if the device has failed between steps."""
        return

    def close(self) -> None:
        """End the processes that compute with this one; by default there are none."""
        return

    def load_adapter(self, adapter: AdapterRef, slot: int, *, max_rank: int) -> AdapterWeights:
        """Read an adapter of at most ``max_rank`` into the slot of this number.

        Any thread may call it. Steps that are launched meanwhile do not read the slot. Raises
        AdapterError or ModelSourceError.
        """
        ...
