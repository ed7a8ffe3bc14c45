"""A rank on a device of its own: what each makes for itself, and what the others compute."""

from __future__ import annotations

import gc
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from millrace.engine.devices.cuda.device import device_of
from millrace.engine.devices.cuda.inputs import ToldStep
from millrace.engine.devices.cuda.loading import Plans, StepsT, load_plans, make_ready
from millrace.engine.devices.cuda.steps import ALL_LAYERS, DeviceSteps, Stage, StepParts
from millrace.engine.kv.cache_commands import CacheCommand, ReserveSlots
from millrace.engine.kv.cache_part import CachePart
from millrace.engine.models.shard import Shard
from millrace.engine.parallel.control import (
    ControlSocket,
    JoinDevices,
    LoadAdapter,
    RankStarted,
)
from millrace.engine.parallel.device_lead import Channel, LinkChannel
from millrace.engine.parallel.device_ranks import DeviceRanks, PipelineStage
from millrace.engine.parallel.layout import make_link, shard_of
from millrace.engine.parallel.messages import SharedRows, WantedRows, decode_told
from millrace.engine.parallel.rendezvous import Rendezvous
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.errors import ConfigError


def meet(join: JoinDevices, listener: socket.socket | None = None) -> DeviceRanks:
    """A rank's way to the others, which all of them make at the same time; ``listener`` is where
    rank 0 has a place on the network. Raises RanksFailedError."""
    engine = join.config
    device = torch.device(join.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout_s = engine.start_timeout_s
    return DeviceRanks(
        Rendezvous.at(join.place, timeout_s, listener),
        device,
        shard_of(join.rank, engine),
        fixed=engine.deterministic,
        timeout_s=timeout_s,
    )


def make_channel(join: JoinDevices, ranks: DeviceRanks) -> Channel:
    """A rank's end of the way of messages."""
    if join.link_fd < 0:
        return ranks.hosts
    return LinkChannel(make_link(join, index=join.link_reader))


def load_steps(
    join: JoinDevices, ranks: DeviceRanks, make: Callable[[Plans], Callable[[StepParts], StepsT]]
) -> StepsT:
    """A rank's share of a checkpoint, ready to compute steps by what ``make`` makes. All ranks load
    theirs at the same time. Raises CheckpointError, ConfigError, or RanksFailedError where another
    one could not."""
    path, engine = Path(join.path), join.config
    device = device_of(torch.device(join.device))
    shard = shard_of(join.rank, engine)
    collectives = ranks if shard.is_sliced else None
    plans = load_plans(path, read_model_config(path), engine, device, shard, collectives)

    def agree(num_blocks: int) -> int:
        [least] = ranks.hosts.least([num_blocks])
        return least

    # One that cannot load its weights is noticed here, not in the middle of a step.
    ranks.hosts.least([0])
    steps = make_ready(plans, make(plans), agree)
    ranks.wait_at_most(engine.rank_timeout_s)
    return steps


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


_log = logging.getLogger(__name__)


class DeviceMember:
    """One rank. Raises MillraceError if it cannot be loaded, RanksFailedError if another cannot."""

    def __init__(self, join: JoinDevices, control: ControlSocket) -> None:
        control.send(RankStarted())
        self._ranks = meet(join)
        self._channel = make_channel(join, self._ranks)
        self._steps = load_steps(join, self._ranks, partial(member_steps, self._ranks))
        self._part = CachePart(self._steps.cache)
        self._num_done = 0
        self._is_done = threading.Condition()
        gc.collect()
        gc.freeze()

    @torch.inference_mode()
    def compute(self) -> NoReturn:
        """What rank 0 posts, until the group fails. Raises RanksFailedError then."""
        while True:
            message = decode_told(self._channel.receive())
            self._ranks.check()
            if isinstance(message, ToldStep):
                self._steps.compute(message)
            elif isinstance(message, SharedRows):
                self._steps.make_logits(message.num_rows)
            elif isinstance(message, WantedRows):
                self._steps.make_rows(message)
            else:
                self._obey(message)
            with self._is_done:
                self._num_done += 1
                self._is_done.notify_all()

    def _obey(self, command: CacheCommand) -> None:
        """Do something with blocks; how it went is told by the least of all ranks' numbers."""
        if isinstance(command, ReserveSlots):
            self._ranks.hosts.least([self._reserve(command)])
            return
        finite = self._part.obey(command)
        if finite is not None:
            self._ranks.hosts.least([int(flag) for flag in finite])

    def _reserve(self, command: ReserveSlots) -> int:
        """Whether there is memory for it, 0 or 1."""
        try:
            self._part.obey(command)
        except ConfigError as error:
            _log.warning("%s", error.message)
            return 0
        return 1

    def drop_adapter(self, number: int) -> None:
        """Leave an adapter in its slot until another is loaded there."""

    def load_adapter(self, load: LoadAdapter) -> None:
        """Read an adapter once no step that was posted before can read its slot."""
        with self._is_done:
            self._is_done.wait_for(lambda: self._num_done >= load.num_posted)
        self._steps.load_adapter(load)

    def abort(self, why: str) -> None:
        """End the group."""
        self._channel.abort(why)
        self._ranks.abort(why)
