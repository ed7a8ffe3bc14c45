"""Rank of a group, on a CPU or on its own device: its setup, and the work of ranks above 0."""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from millrace.engine.adapters.rows import AdapterWeights
from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.devices.cpu.loading import Arithmetic, load_adapter_weights, load_decoder
from millrace.engine.devices.cuda.device import device_of
from millrace.engine.devices.cuda.inputs import ToldStep
from millrace.engine.devices.cuda.loading import Plans, StepsT, load_plans, make_ready
from millrace.engine.devices.cuda.steps import ALL_LAYERS, DeviceSteps, StepParts
from millrace.engine.kernels.build import cpu_library
from millrace.engine.kernels.cpu import CpuKernels
from millrace.engine.kernels.ranks import RankShape, SharedRanks
from millrace.engine.kernels.stage_link import StageLink
from millrace.engine.kv.cache import CacheCommand, KVCache, ReserveSlots, cache_dtype
from millrace.engine.kv.host_memory import CachePart
from millrace.engine.models.shard import block_part
from millrace.engine.parallel.control import (
    BlocksChecked,
    ControlSocket,
    FolderPlace,
    Join,
    JoinDevices,
    LoadAdapter,
    RankStarted,
)
from millrace.engine.parallel.device_ranks import DeviceRanks, PipelineStage
from millrace.engine.parallel.layout import make_link, num_local_ranks, shard_of, vocabulary_widths
from millrace.engine.parallel.lead import Channel, LinkChannel
from millrace.engine.parallel.messages import (
    PartCommand,
    SharedRows,
    StageStep,
    WantedLogits,
    WantedRows,
    bytes_of,
    decode,
    decode_told,
    encode_command,
    encode_stage,
)
from millrace.engine.parallel.ranks import GlooRanks, Ranks
from millrace.engine.parallel.rendezvous import Rendezvous
from millrace.engine.step.batch import FlatBatch
from millrace.engine.transfer.memory import SharedPages
from millrace.registry.checkpoints.checkpoint import ModelConfig, read_model_config
from millrace.registry.checkpoints.shard import Shard, shard_config
from millrace.schemas.errors import ConfigError

_log = logging.getLogger(__name__)


def make_ranks(join: Join, shard: Shard) -> Ranks | None:
    """Connect a rank to the others of its stage, or return None if it is alone.

    All ranks of the stage must call this at the same time. Raises RanksFailedError.
    """
    if shard.size == 1:
        return None
    timeout_s = join.config.rank_timeout_s
    if not join.memory_fds:
        place = Rendezvous.at(FolderPlace(join.gloo_folder), timeout_s)
        return GlooRanks(place, rank=shard.rank, size=shard.size, timeout_s=timeout_s)
    shape = RankShape(shard.size, join.message_bytes, join.buffer_bytes)
    fd = join.memory_fds[shard.stage]
    return SharedRanks(cpu_library(), fd, shape, rank=shard.rank, timeout_s=timeout_s)


def part_layers(config: ModelConfig, engine: ResolvedEngineConfig, ranks: range) -> tuple[int, ...]:
    """Return the number of layers of each of the ranks, of a whole model's ``config``."""
    shards = [shard_of(rank, engine) for rank in ranks]
    return tuple(shard_config(config, shard).num_hidden_layers for shard in shards)


def group_cache(
    config: ModelConfig,
    engine: ResolvedEngineConfig,
    dtype: torch.dtype,
    num_blocks: int,
    pages: SharedPages,
) -> KVCache:
    """Create the KV cache of all ranks of this host; ``dtype`` is the weights'.

    Each rank's layers and heads of the whole model's ``config`` are one part.
    """
    ranks = range(num_local_ranks(engine))
    layers = part_layers(config, engine, ranks)
    cache = _cache(config, engine, dtype, num_blocks, shard_of(0, engine), pages, layers)
    cache.parts = tuple(block_part(config, shard_of(rank, engine)) for rank in ranks)
    return cache


def cache_of_rank(join: Join, config: ModelConfig, dtype: torch.dtype) -> KVCache:
    """Return a rank's part of rank 0's KV cache, or on another host a cache of its own.

    Raises ConfigError if memory is short.
    """
    engine = join.config
    if join.cache_fd < 0:
        return _cache(config, engine, dtype, join.num_blocks, shard_of(join.rank, engine))
    pages = SharedPages.mapped(join.cache_fd, join.cache_bytes)
    return group_cache(config, engine, dtype, join.num_blocks, pages).part(join.rank)


def _cache(
    config: ModelConfig,
    engine: ResolvedEngineConfig,
    dtype: torch.dtype,
    num_blocks: int,
    shard: Shard,
    pages: SharedPages | None = None,
    layers: tuple[int, ...] | None = None,
) -> KVCache:
    return KVCache(
        shard_config(config, shard),
        num_blocks=num_blocks,
        block_size_tokens=engine.block_size_tokens,
        dtype=cache_dtype(engine.kv_cache_dtype, dtype),
        device=torch.device("cpu"),
        pages=pages,
        part_layers=layers,
    )


class CpuMember:
    """Rank on a CPU. Raises MillraceError if it cannot be loaded."""

    def __init__(self, join: Join, control: ControlSocket) -> None:
        self._control = control
        path, engine = Path(join.path), join.config
        self._shard = shard_of(join.rank, engine)
        self._config = read_model_config(path)
        dtype: torch.dtype = getattr(torch, join.dtype)
        kernels = CpuKernels(cpu_library(), dtype) if join.has_kernels else None
        self._ranks = make_ranks(join, self._shard)
        cache = cache_of_rank(join, self._config, dtype)
        # Rank 0 itself moves the blocks of its host.
        self._part = CachePart(cache) if join.cache_fd < 0 else None
        arithmetic = Arithmetic(dtype, kernels, join.has_own_products)
        self._decoder, _ = load_decoder(
            path, self._config, engine, arithmetic, cache, self._shard, self._ranks
        )
        self._widths = vocabulary_widths(self._config, self._shard.size)
        self._adapters: dict[int, AdapterWeights] = {}
        self._links: list[StageLink] = []
        self._num_steps = 0
        if not self._shard.is_first:
            own, stage = self._shard.rank, self._shard.stage
            self._links = [
                make_link(join, stage - 1, index=own),
                make_link(join, stage, index=own),
            ]

    @torch.inference_mode()
    def compute(self) -> NoReturn:
        """Compute what rank 0 posts or the previous stage sends, until the group fails.

        Raises RanksFailedError then.
        """
        if self._links:
            for number in itertools.count():
                self._follow(number, *self._links)
        ranks = self._ranks
        assert ranks is not None, "a rank above 0 of the first stage has others beside it"
        while True:
            message = decode(ranks.receive(), self._adapters.__getitem__)
            if isinstance(message, WantedLogits):
                ranks.gather(self._decoder.logits(message.rows), self._widths)
            elif isinstance(message, FlatBatch):
                self._decoder.forward(message, message.adapters)
                ranks.check()

    def _follow(self, number: int, before: StageLink, behind: StageLink) -> None:
        """Handle message ``number`` of the link before this stage, and write to the link after it.

        The last stage's results are numbered separately.
        """
        before.wait_written(number, bound=False)
        message = decode(before.part(number), self._adapters.__getitem__)
        before.done(number)
        if isinstance(message, PartCommand):
            if not self._shard.is_last and self._shard.rank == 0:
                behind.write(number, *encode_command(message))
            self._obey(message)
            return
        assert isinstance(message, StageStep)
        self._compute_stage(self._num_steps if self._shard.is_last else number, message, behind)
        self._num_steps += 1

    def _obey(self, told: PartCommand) -> None:
        """Apply a command to this rank's part of the KV cache."""
        if self._part is None:
            return
        finite = self._part.obey(told.command)
        if finite is not None:
            self._control.send(BlocksChecked(told.number, finite))

    def _compute_stage(self, number: int, step: StageStep, behind: StageLink) -> None:
        """Compute a step and write its result as ``number`` to the link after this stage."""
        decoder = self._decoder
        hidden = decoder.forward_hidden(step.batch, step.hidden, step.batch.adapters)
        if self._ranks is not None:
            self._ranks.check()
        if not self._shard.is_last:
            if self._shard.rank == 0:
                behind.write(number, *encode_stage(step._replace(hidden=hidden)))
            return
        made: list[torch.Tensor] = []
        if len(step.wanted):
            made.append(decoder.logits(hidden.index_select(0, step.wanted)))
        if step.wants_states and self._shard.rank == 0:
            made.append(decoder.normed(hidden))
        behind.write(number, *map(bytes_of, made))

    def abort(self, why: str) -> None:
        """End the group."""
        if self._ranks is not None:
            self._ranks.abort(why)
        for link in self._links:
            link.abort(why)

    def drop_adapter(self, number: int) -> None:
        """Drop an adapter that no later step uses."""
        self._adapters.pop(number, None)

    def load_adapter(self, load: LoadAdapter) -> None:
        """Read the slices of an adapter. Raises AdapterError, ModelSourceError."""
        self._adapters[load.number] = load_adapter_weights(
            self._decoder, self._config, load.adapter, load.max_rank, self._shard
        )


def meet(join: JoinDevices, listener: socket.socket | None = None) -> DeviceRanks:
    """Connect a rank to the others; all ranks must call this at the same time.

    ``listener`` is rank 0's socket at a meeting place on the network. Raises RanksFailedError.
    """
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
    """Return a rank's end of the message channel."""
    if join.link_fd < 0:
        return ranks.hosts
    return LinkChannel(make_link(join, index=join.link_reader))


def load_steps(
    join: JoinDevices, ranks: DeviceRanks, make: Callable[[Plans], Callable[[StepParts], StepsT]]
) -> StepsT:
    """Load a rank's share of a checkpoint with ``make``, ready to compute steps.

    All ranks load their shares at the same time.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ConfigError: The settings do not suit the model.
        RanksFailedError: Another rank could not load.
    """
    path, engine = Path(join.path), join.config
    device = device_of(torch.device(join.device))
    shard = shard_of(join.rank, engine)
    collectives = ranks if shard.is_sliced else None
    plans = load_plans(path, read_model_config(path), engine, device, shard, collectives)

    def agree(num_blocks: int) -> int:
        [least] = ranks.hosts.least([num_blocks])
        return least

    # A rank that cannot load its weights is noticed here, not in the middle of a step.
    ranks.hosts.least([0])
    steps = make_ready(plans, make(plans), agree)
    ranks.wait_at_most(engine.rank_timeout_s)
    return steps


# Most steps in flight, see ``StageLinks``.
_MOST_UNDER_WAY = 2


class MemberSteps(DeviceSteps):
    """Steps of a rank other than 0, computed together with rank 0.

    In a pipeline they cover the layers of one stage. Logits go to rank 0, which chooses tokens.
    With a single stage the tokens come back within the step.
    """

    def __init__(self, parts: StepParts, *, ranks: DeviceRanks, shard: Shard) -> None:
        links = ranks.links
        self._sends_results = links is not None and shard.is_last and shard.rank == 0
        super().__init__(
            parts,
            num_logits=parts.config.vocab_size if self._sends_results else 0,
            stage=ALL_LAYERS if links is None else PipelineStage(parts, shard, links),
        )
        self._ranks = ranks
        self._links = links
        # Kept states of steps in flight.
        self._kept: deque[torch.Tensor] = deque(maxlen=_MOST_UNDER_WAY)

    def _warm_up_rest(self) -> None:
        """Do nothing: only rank 0 samples."""

    def compute(self, step: ToldStep) -> None:
        """Compute a step on this rank's device."""
        self._tell(step)
        states = self._run(step)
        links = self._links
        if links is None:
            return
        if step.keeps_states and self._stage.is_last:
            assert states is not None, "a step that keeps its states is not replayed"
            # Copy, because the next step's states may overwrite this memory.
            self._kept.append(states.clone())
        if self._sends_results:
            _, num_tokens, _, num_sampled = step.shape
            if num_sampled:
                links.send_results(self._buffers.logits[:num_sampled])
            links.send_results(self._buffers.finite[:num_tokens])

    def make_logits(self, num_rows: int) -> None:
        """Compute the logits of rows that rank 0 shares."""
        embedding = self._decoder.embedding
        rows = embedding.new_empty(num_rows, embedding.shape[1])
        self._ranks.share(rows)
        self._ranks.gather(self._decoder.logits(rows), self.config.vocab_size)

    def make_rows(self, wanted: WantedRows) -> None:
        """Send rank 0 rows of a step's states, or their logits, if this is the last stage."""
        links = self._links
        assert links is not None, f"rank 0 has the states of {len(wanted.rows)} rows itself"
        if not self._stage.is_last:
            return
        states = self._kept[-1 - wanted.steps_back]
        rows = states.index_select(0, self._device.upload(wanted.rows))
        if wanted.makes_logits:
            made = self._ranks.gather(self._decoder.logits(rows), self.config.vocab_size)
        else:
            made = self._decoder.normed(rows)
        if self._sends_results:
            assert made is not None, "rank 0 of the stage gathers the logits"
            links.send_rows(made.contiguous())

    def load_adapter(self, load: LoadAdapter) -> None:
        """Read the slices of an adapter. Raises AdapterError, ModelSourceError."""
        assert self._adapted is not None, "rank 0 has no slots for adapters"
        self._adapted.adapters.load(load.adapter, load.slot, max_rank=load.max_rank)

    def _choose(
        self,
        wanted: torch.Tensor,
        state_rows: torch.Tensor,  # noqa: ARG002 (rank 0's sampler has rows)
        token_indices: torch.Tensor,  # noqa: ARG002
        chosen: torch.Tensor,
    ) -> None:
        logits = self._ranks.gather(self._decoder.logits(wanted), self.config.vocab_size)
        if self._links is None:
            self._ranks.share(chosen)
        elif logits is not None:
            self._buffers.logits[: len(wanted)].copy_(logits)


def member_steps(ranks: DeviceRanks, plans: Plans) -> Callable[[StepParts], MemberSteps]:
    """Return the function that makes a rank's steps."""
    return partial(MemberSteps, ranks=ranks, shard=plans.shard)


class DeviceMember:
    """Rank with a device.

    Raises MillraceError if it cannot be loaded, RanksFailedError if another rank cannot.
    """

    def __init__(self, join: JoinDevices, control: ControlSocket) -> None:
        control.send(RankStarted())
        self._ranks = meet(join)
        self._channel = make_channel(join, self._ranks)
        self._steps = load_steps(join, self._ranks, partial(member_steps, self._ranks))
        self._part = CachePart(self._steps.cache)
        self._num_done = 0
        self._is_done = threading.Condition()

    @torch.inference_mode()
    def compute(self) -> NoReturn:
        """Compute rank 0's messages until the group fails. Raises RanksFailedError then."""
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
        """Apply a command to blocks; ranks report its success by the minimum of their numbers."""
        if isinstance(command, ReserveSlots):
            self._ranks.hosts.least([self._reserve(command)])
            return
        finite = self._part.obey(command)
        if finite is not None:
            self._ranks.hosts.least([int(flag) for flag in finite])

    def _reserve(self, command: ReserveSlots) -> int:
        """Reserve slots; return 1 on success, 0 if there is not enough memory."""
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
