"""What a rank on a device of its own that is not rank 0 computes of each step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

import torch

from millrace.engine.devices.cuda.loading import Plans
from millrace.engine.devices.cuda.steps import ALL_LAYERS, DeviceSteps, Stage, StepParts, ToldStep
from millrace.engine.models.shard import Shard
from millrace.engine.parallel.device_group.messages import WantedRows
from millrace.engine.parallel.device_group.ranks import DeviceRanks
from millrace.engine.parallel.device_group.stage import PipelineStage
from millrace.engine.parallel.group.control_wire import LoadAdapter

# Steps, see ``StageLinks``.
_MOST_UNDER_WAY = 2


class MemberSteps(DeviceSteps):
    """Computes the steps that rank 0 computes, with whom it exchanges numbers in them. Logits go to
    rank 0, and the tokens that it chooses come back."""

    def __init__(
        self,
        parts: StepParts,
        *,
        ranks: DeviceRanks,
        num_logits: int = 0,
        stage: Stage = ALL_LAYERS,
    ) -> None:
        super().__init__(parts, num_logits=num_logits, stage=stage)
        self._ranks = ranks

    def _warm_up_rest(self) -> None:
        """Rank 0 alone samples."""

    def compute(self, step: ToldStep) -> None:
        """A step, on this rank's device."""
        self._tell(step)
        self._run(step)

    def make_logits(self, num_rows: int) -> None:
        """Those of rows that rank 0 shares."""
        embedding = self._decoder.embedding
        rows = embedding.new_empty(num_rows, embedding.shape[1])
        self._ranks.share(rows)
        self._ranks.gather(self._decoder.logits(rows), self.config.vocab_size)

    def make_rows(self, wanted: WantedRows) -> None:
        """Nobody asks for them but of a pipeline."""
        raise AssertionError(f"rank 0 has the states of {len(wanted.rows)} rows itself")

    def load_adapter(self, load: LoadAdapter) -> None:
        """Read the slices of an adapter. Raises AdapterError, ModelSourceError."""
        assert self._adapted is not None, "rank 0 has slots, too"
        self._adapted.adapters.load(load.adapter, load.slot, max_rank=load.max_rank)

    def _choose(
        self,
        wanted: torch.Tensor,
        state_rows: torch.Tensor,  # noqa: ARG002 (rank 0's sampler has rows)
        token_indices: torch.Tensor,  # noqa: ARG002
        chosen: torch.Tensor,
    ) -> None:
        self._ranks.gather(self._decoder.logits(wanted), self.config.vocab_size)
        self._ranks.share(chosen)


class StageMemberSteps(MemberSteps):
    """Computes the layers of one stage. What the last one makes goes to rank 0, which samples."""

    def __init__(self, parts: StepParts, *, ranks: DeviceRanks, shard: Shard) -> None:
        assert ranks.links is not None, "a stage is one of several"
        self._shard = shard
        self._links = ranks.links
        self._sends_results = shard.is_last and shard.rank == 0
        super().__init__(
            parts,
            ranks=ranks,
            num_logits=parts.config.vocab_size if self._sends_results else 0,
            stage=PipelineStage(parts, shard, ranks.links),
        )
        # Of the steps under way that keep them.
        self._kept: deque[torch.Tensor] = deque(maxlen=_MOST_UNDER_WAY)

    def compute(self, step: ToldStep) -> None:
        self._tell(step)
        states = self._run(step)
        if step.keeps_states and self._shard.is_last:
            assert states is not None, "a step that keeps its states is not replayed"
            # They may be where those of the next step come.
            self._kept.append(states.clone())
        if self._sends_results:
            _, num_tokens, _, num_sampled = step.shape
            if num_sampled:
                self._links.send_results(self._buffers.logits[:num_sampled])
            self._links.send_results(self._buffers.finite[:num_tokens])

    def make_rows(self, wanted: WantedRows) -> None:
        """Those of a step's states, if this is the last stage."""
        if not self._shard.is_last:
            return
        states = self._kept[-1 - wanted.steps_back]
        rows = states.index_select(0, self._device.upload(wanted.rows))
        if wanted.makes_logits:
            made = self._ranks.gather(self._decoder.logits(rows), self.config.vocab_size)
        else:
            made = self._decoder.normed(rows)
        if self._sends_results:
            assert made is not None, "rank 0 of the stage gathers"
            self._links.send_rows(made.contiguous())

    def _choose(
        self,
        wanted: torch.Tensor,
        state_rows: torch.Tensor,  # noqa: ARG002 (rank 0's sampler has rows)
        token_indices: torch.Tensor,  # noqa: ARG002
        chosen: torch.Tensor,  # noqa: ARG002
    ) -> None:
        logits = self._ranks.gather(self._decoder.logits(wanted), self.config.vocab_size)
        if logits is not None:
            self._buffers.logits[: len(wanted)].copy_(logits)


def member_steps(ranks: DeviceRanks, plans: Plans) -> Callable[[StepParts], MemberSteps]:
    """What makes those of a rank."""
    if ranks.links is None:
        return partial(MemberSteps, ranks=ranks)
    return partial(StageMemberSteps, ranks=ranks, shard=plans.shard)
