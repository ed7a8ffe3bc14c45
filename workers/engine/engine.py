"""The step loop: take requests, plan, run the model, sample, hand the tokens over."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from registry.tokenizers.tokenizer import Tokenizer
from schemas.config import EngineConfig
from schemas.errors import MillraceError
from schemas.frames import FinishReason
from schemas.sampling import MAX_SEED
from workers.engine.checkpoint_tokenizer import checkpoint_tokenizer
from workers.engine.device.work import FLOP_PER_BYTE, DeviceWork
from workers.engine.executor import Executor
from workers.engine.grammar.grammars import Grammars
from workers.engine.kv.block_tables import BlockTables
from workers.engine.kv.host_cache import HostCache
from workers.engine.kv.host_memory import host_memory_of
from workers.engine.live_requests import LiveRequests
from workers.engine.output_processor import Receiver
from workers.engine.outputs import as_millrace_error, finished_output, refusal, started_output
from workers.engine.runners import Runner, load_runner
from workers.engine.sampling.sampler import Sampler
from workers.engine.scheduling.admission import (
    check_config,
    check_kind,
    finished_before,
    longest_total_tokens,
)
from workers.engine.scheduling.cost_model import CostModel
from workers.engine.scheduling.planner import Planner
from workers.engine.sequence import Sequence, SequenceState
from workers.engine.sequence_group import make_choices
from workers.engine.settings import settled
from workers.engine.types import (
    DeviceTime,
    EngineOutput,
    EngineRequest,
    EngineStats,
    PrefixChanges,
)

_log = logging.getLogger(__name__)

# How long commands wait, at most, while a step waits for sequences to become ready.
_UNREADY_WAIT_S = 0.005
_US_PER_S = 1e6


def draw_seed() -> int:
    """A seed for a request that brings none."""
    return secrets.randbelow(MAX_SEED + 1)


class Engine:
    """Continues many requests at once. Not thread-safe: one caller adds, cancels and steps.

    Every request that is added ends in exactly one output that is ``finished``, unless it is
    cancelled. What goes wrong with one request ends that request only. A request's tokens depend
    on its own prompt, parameters and seed, not on who else is in the batch.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        seed_source: Callable[[], int] = draw_seed,
        monotonic: Callable[[], float] = time.perf_counter,
        tokenizer: Callable[[], Tokenizer | None] = lambda: None,
    ) -> None:
        config = settled(config, runner.cache.data.device)
        self._runner = runner
        self._sampler = Sampler(runner.config.vocab_size, runner.host_device, tokenizer)
        costs = CostModel()
        host_memory = host_memory_of(runner.cache, config.host_cache_bytes)
        self._host = HostCache(host_memory, monotonic=monotonic)
        self._tables = BlockTables.make(
            runner.cache.num_blocks,
            config.block_size_tokens,
            runner.cache,
            shared=config.prefix_cache,
            host=self._host,
            idle_offload_s=config.idle_offload_s,
        )
        self._pool = self._tables.pool
        self._planner = Planner(
            self._tables,
            max_batch_tokens=config.max_batch_tokens,
            max_num_sequences=config.max_num_sequences,
            ageing_s=config.ageing_s,
            itl_bound_s=config.itl_bound_ms / 1e3,
            costs=costs,
            monotonic=monotonic,
        )
        self._seed_source = seed_source
        self._monotonic = monotonic
        self._live = LiveRequests(self._planner, self._sampler)
        self._outputs: list[EngineOutput] = []
        self._owing: list[Sequence] = []
        self._device_times: list[DeviceTime] = []
        self._readied = threading.Event()
        self._grammars = Grammars(runner.config.vocab_size, tokenizer, self._readied.set)
        receiver = Receiver(
            cache=runner.cache,
            planner=self._planner,
            sampler=self._sampler,
            grammars=self._grammars,
            live=self._live,
        )
        self._executor = Executor(
            runner=runner,
            planner=self._planner,
            grammars=self._grammars,
            receiver=receiver,
            costs=costs,
            device_work=_device_work(runner),
            overlap=config.overlap and runner.overlaps,
            monotonic=monotonic,
        )
        self._num_arrived = 0
        self._num_steps = 0
        self._prefills = False

    @classmethod
    def load(cls, path: Path, config: EngineConfig) -> Engine:
        """An engine for the checkpoint folder ``path``. Raises CheckpointError or ConfigError."""
        check_config(config)
        runner = load_runner(path, config)
        engine = cls(runner, config, tokenizer=checkpoint_tokenizer(path))
        engine._grammars.prepare()
        return engine

    @property
    def context_window_tokens(self) -> int:
        return self._runner.config.context_window_tokens

    @property
    def max_tokens_per_request(self) -> int:
        """The longest prompt + completion that context window and KV cache can ever hold."""
        return min(self.context_window_tokens, self._pool.capacity_tokens)

    @property
    def device_uuid(self) -> str:
        """The CUDA device's, by which its driver knows it too; empty without one."""
        device = self._runner.cache.data.device
        if device.type != "cuda":
            return ""
        return str(torch.cuda.get_device_properties(device).uuid)

    @property
    def has_work(self) -> bool:
        """Whether a step may hand something over, or there is one under way that it would end."""
        return bool(len(self._live) or self._outputs or self._executor.has_unread)

    def add(self, request: EngineRequest) -> None:
        """Take a request; one that cannot be served is answered with an error at the next step.

        A request with the id of a live one takes its place.
        """
        self._forget(request.request_id)
        try:
            check_kind(request, has_head=self._runner.config.has_head)
            max_total_tokens = longest_total_tokens(
                request,
                vocab_size=self._runner.config.vocab_size,
                context_window_tokens=self.context_window_tokens,
                capacity_tokens=self._pool.capacity_tokens,
            )
        except MillraceError as error:
            self._outputs.append(refusal(request, error))
            return
        finish_reason = finished_before(request, max_total_tokens)
        if finish_reason is not None:
            self._outputs.append(finished_output(request, finish_reason))
            return
        seed = request.sampling.seed
        choices = make_choices(
            request,
            arrival=self._num_arrived,
            seed=self._seed_source() if seed is None else seed,
            max_total_tokens=max_total_tokens,
            added_s=self._monotonic(),
        )
        try:
            for sequence in choices:
                self._sampler.begin(sequence)
        except Exception as error:  # noqa: BLE001 (whatever it is, it ends one request only)
            if not isinstance(error, MillraceError):
                _log.exception("a request could not be prepared for sampling")
            self._outputs.append(refusal(request, as_millrace_error(error)))
            return
        self._num_arrived += len(choices)
        if request.sampling.grammar is not None:
            self._grammars.submit(choices)
        self._live.add(choices)

    def cancel(self, request_id: str) -> None:
        """Forget a request, in whatever state; its blocks are free when this returns.

        ``take_device_times`` says then what it has taken, that it is nothing if it was not here.
        """
        if not self._forget(request_id):
            self._device_times.append(DeviceTime(request_id, 0, 0.0, over=True))

    def _forget(self, request_id: str) -> bool:
        """Whether there was anything to forget but an answer."""
        cancelled = self._live.cancel(request_id)
        self._owing += cancelled
        if self._outputs:
            self._outputs = [o for o in self._outputs if o.request_id != request_id]
        return bool(cancelled)

    def take_device_times(self, *, live: bool = False) -> list[DeviceTime]:
        """What those took of the device in all that were cancelled since the last call, or owed
        something; one that has a part in a step under way is kept until that is over. With ``live``
        also what the others have taken so far."""
        times, self._device_times = self._device_times, []
        if self._owing:
            owing, self._owing = self._owing, []
            for sequence in owing:
                if self._executor.is_flying(sequence):
                    self._owing.append(sequence)
                else:
                    times.append(_device_time(sequence, over=True))
        if live:
            times += [_device_time(sequence) for sequence in self._live if sequence.device_s]
        return times

    def step(self) -> list[EngineOutput]:
        """Compute one batch; what it made, and the answers to requests refused since the last.

        Where the runner and the settings let steps overlap, the batch is only launched, and what
        the one before made is handed over; when there is nothing to compute, what is under way is
        waited for. When nothing but sequences that are not ready is there, this waits a moment for
        one, so that a caller may step as long as there is work.
        """
        outputs, self._outputs = self._outputs, []
        self._readied.clear()
        self._end_settled(outputs)
        plan = self._planner.plan()
        self._prefills = bool(plan) and plan[-1].num_tokens > 1  # those that decode come first
        if plan:
            fresh = [sequence for sequence, _ in plan if not sequence.started]
            if fresh:
                begin_s = self._monotonic()
                for sequence in fresh:
                    sequence.queued_s = begin_s - sequence.added_s
            self._executor.execute(plan, outputs)
            for sequence in fresh:
                if not sequence.started and sequence.state is not SequenceState.FINISHED:
                    sequence.started = True
                    outputs.append(started_output(sequence))
            self._num_steps += 1
        elif self._executor.has_unread:
            self._executor.execute([], outputs)
        elif not outputs and self._planner.num_unready == self._planner.num_live > 0:
            self._readied.wait(_UNREADY_WAIT_S)
        ended = self._live.take_ended()
        if ended:
            self._tell_device_times(ended, outputs)
        return outputs

    def _tell_device_times(
        self, ended: list[tuple[int, Sequence]], outputs: list[EngineOutput]
    ) -> None:
        """Say in their last outputs what those took of the device that have ended in this step."""
        sequences = {sequence for _, sequence in ended}
        may_owe = not self._executor.discharge(sequences)
        for index, sequence in ended:
            owes = may_owe and self._executor.is_flying(sequence)
            if owes:
                self._owing.append(sequence)
            outputs[index] = msgspec.structs.replace(
                outputs[index], device_us=sequence.device_s * _US_PER_S, owes=owes
            )

    def _end_settled(self, outputs: list[EngineOutput]) -> None:
        """End what has turned out to be over while it waited for its grammar."""
        for sequence, error in self._grammars.take_settled():
            if error is not None:
                self._live.fail(sequence, error, outputs)
            else:
                outputs.append(finished_output(sequence.request, FinishReason.STOP))
                self._live.end(sequence, outputs)

    def wake(self) -> None:
        """Have a step that waits for sequences to become ready look at once; for any thread."""
        self._readied.set()

    def stats(self) -> EngineStats:
        return EngineStats(
            max_num_sequences=self._planner.max_num_sequences,
            num_running=len(self._planner.running),
            num_waiting=self._planner.num_waiting,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free_blocks,
            num_idle_blocks=self._pool.num_idle_blocks,
            num_steps=self._num_steps,
            prefill_tokens=self._executor.prefill_tokens,
            decode_tokens=self._executor.decode_tokens,
            num_preemptions=self._planner.num_preemptions,
            busy_s=self._executor.meter.busy_s,
            charged_s=self._executor.meter.charged_s,
            outstanding_tokens=self._planner.outstanding_tokens,
            outstanding_prompt_tokens=self._outstanding_prompt_tokens(),
            prefill_tokens_per_s=self._executor.speed.prefill_tokens_per_s,
            decode_step_ms=self._executor.speed.decode_step_ms,
            max_tokens_per_request=self.max_tokens_per_request,
            prefix_query_tokens=self._tables.num_query_tokens,
            prefix_hit_tokens=self._tables.num_hit_tokens,
            num_evicted_blocks=self._tables.num_evicted_blocks,
            num_host_blocks=self._host.num_slots,
            num_used_host_blocks=len(self._host),
            num_offloaded_blocks=self._host.num_stored_blocks,
            num_reloaded_blocks=self._host.num_loaded_blocks,
            num_swaps=self._tables.num_swaps,
        )

    def _outstanding_prompt_tokens(self) -> int:
        if not (self._planner.num_waiting or self._prefills):
            return 0
        behind = [len(one.token_ids) - one.num_computed_tokens for one in self._live]
        return sum([num_tokens for num_tokens in behind if num_tokens > 1])

    def take_prefix_changes(self) -> PrefixChanges | None:
        """What came into the prefix cache and what left it since the last call; None: nothing."""
        return self._tables.take_prefix_changes()

    def check_integrity(self) -> None:
        """Raise AssertionError unless choices, planner, cache, pool and unread step agree."""
        self._live.check_integrity()
        self._executor.check_integrity(self._live)


def _device_work(runner: Runner) -> DeviceWork:
    cache = runner.cache
    return DeviceWork(
        runner.config,
        kv_token_bytes=cache.blocks.shape[-1] / cache.block_size_tokens,
        flop_per_byte=FLOP_PER_BYTE["cuda" if cache.data.device.type == "cuda" else "cpu"],
    )


def _device_time(sequence: Sequence, *, over: bool = False) -> DeviceTime:
    device_us = sequence.device_s * _US_PER_S
    return DeviceTime(sequence.request_id, sequence.choice, device_us, over)
