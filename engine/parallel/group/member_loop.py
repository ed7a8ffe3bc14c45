"""What a rank that is not rank 0 does: it loads its share of the model and computes as rank 0
says."""

from __future__ import annotations

import gc
import itertools
import logging
from pathlib import Path
from typing import NoReturn

import torch

from millrace.engine.adapters.rows import AdapterWeights
from millrace.engine.devices.cpu.loading import Arithmetic, load_adapter_weights, load_decoder
from millrace.engine.kernels.build import cpu_library
from millrace.engine.kernels.cpu import CpuKernels
from millrace.engine.kernels.ranks import RanksFailedError
from millrace.engine.kernels.stage_link import StageLink
from millrace.engine.kv.cache_part import CachePart
from millrace.engine.parallel.group.control_socket import ControlSocket
from millrace.engine.parallel.group.control_wire import (
    BlocksChecked,
    DropAdapter,
    Join,
    LoadAdapter,
)
from millrace.engine.parallel.group.lead_decoder import vocabulary_widths
from millrace.engine.parallel.group.making import cache_of_rank, make_link, make_ranks, shard_of
from millrace.engine.parallel.group.step_wire import (
    PartCommand,
    StageStep,
    WantedLogits,
    bytes_of,
    decode,
    encode_command,
    encode_stage,
)
from millrace.engine.step.batch import FlatBatch
from millrace.engine.threads.choice import leave_core
from millrace.registry.checkpoints.checkpoint import read_model_config

_log = logging.getLogger(__name__)

__all__ = ["Member", "RanksFailedError"]


class Member:
    """One rank. Raises MillraceError if it cannot be loaded."""

    def __init__(self, join: Join, control: ControlSocket) -> None:
        self._control = control
        path, engine = Path(join.path), join.config
        self._shard = shard_of(join.rank, engine)
        self._config = read_model_config(path)
        dtype: torch.dtype = getattr(torch, join.dtype)
        kernels = CpuKernels(cpu_library(), dtype) if join.has_kernels else None
        self._ranks = make_ranks(join, self._shard)
        cache = cache_of_rank(join, self._config, dtype)
        # Rank 0 itself does with blocks of its host what is to be done with them.
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
        gc.collect()
        gc.freeze()

    @torch.inference_mode()
    def compute(self) -> NoReturn:
        """What rank 0 posts, or the stage before sends, until the group fails. Raises
        RanksFailedError then."""
        if self._links:
            for number in itertools.count():
                self._follow(number, *self._links)
        ranks = self._ranks
        assert ranks is not None, "a rank of the first stage is one of several"
        while True:
            message = decode(ranks.receive(), self._adapters.__getitem__)
            if isinstance(message, WantedLogits):
                ranks.gather(self._decoder.logits(message.rows), self._widths)
            elif isinstance(message, FlatBatch):
                self._decoder.forward(message, message.adapters)
                ranks.check()

    def _follow(self, number: int, before: StageLink, behind: StageLink) -> None:
        """What the message of this number says, from the link before this stage to the one behind
        it. The last stage's results have numbers of their own."""
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
        """Do what is to be done with the part of the KV cache that this rank has."""
        if self._part is None:
            return
        finite = self._part.obey(told.command)
        if finite is not None:
            self._control.send(BlocksChecked(told.number, finite))

    def _compute_stage(self, number: int, step: StageStep, behind: StageLink) -> None:
        """A step, whose result has this number in the link behind this stage."""
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

    def hear(self) -> NoReturn:
        """What rank 0 says beside the steps, on a thread of its own."""
        leave_core()
        control = self._control
        while True:
            message = control.receive()
            if isinstance(message, LoadAdapter):
                control.answer(message, self._load_adapter)
            elif isinstance(message, DropAdapter):
                self._adapters.pop(message.number, None)

    def abort(self, why: str) -> None:
        """End the group."""
        if self._ranks is not None:
            self._ranks.abort(why)
        for link in self._links:
            link.abort(why)

    def _load_adapter(self, load: LoadAdapter) -> None:
        self._adapters[load.number] = load_adapter_weights(
            self._decoder, self._config, load.adapter, load.max_rank, self._shard
        )
