"""Step loop: add requests, plan, run the model, sample, return the tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from millrace.engine.beam_search import advance_searches, begin_search, check_beams
from millrace.engine.config import ResolvedEngineConfig
from millrace.engine.grammar.grammars import Grammars
from millrace.engine.kv.block_file import BlockFile
from millrace.engine.kv.block_tables import BlockTables
from millrace.engine.kv.host_cache import HostCache
from millrace.engine.kv.host_memory import host_memory_of
from millrace.engine.kv.tiers import Tiers
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.scheduling.admission import (
    check_adapter,
    check_kind,
    finished_before,
    longest_total_tokens,
)
from millrace.engine.scheduling.cost_model import CostModel
from millrace.engine.scheduling.planner import Planner
from millrace.engine.speculation.making import make_speculator
from millrace.engine.step.adapter_pool import AdapterPool
from millrace.engine.step.device_times import StepDeviceTimes
from millrace.engine.step.executor import Executor
from millrace.engine.step.live_requests import LiveRequests
from millrace.engine.step.output_processor import OutputProcessor
from millrace.engine.step.outputs import (
    as_millrace_error,
    finished_output,
    refusal,
    started_output,
)
from millrace.engine.step.runner import DraftRunner, Runner
from millrace.engine.step.runners import (
    device_uuid_of,
    device_work_of,
    load_draft,
    load_runner,
)
from millrace.engine.step.sequence import SequenceState
from millrace.engine.step.sequence_group import draw_seed, make_sequence_group
from millrace.engine.step.settings import resolve
from millrace.engine.step.statistics import engine_stats
from millrace.engine.threads.tasks import Bell
from millrace.engine.types import (
    DeviceTime,
    EngineOutput,
    EngineRequest,
    EngineStats,
    PrefixChanges,
)
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import FinishReason
from millrace.schemas.transfer import TransferEndpoint

_log = logging.getLogger(__name__)

# Maximum delay of commands while a step waits for sequences to become ready.
_UNREADY_WAIT_S = 0.005
# Interval at which idle blocks are checked between requests.
_REST_S = 0.5


class Engine:
    """Engine that continues many requests at once.

    Every added request ends in exactly one output that is ``finished``, unless it is cancelled. An
    error of one request ends that request only. A request's tokens depend on its own prompt,
    parameters and seed, and not on the other requests in the batch.

    Not thread-safe: one caller adds, cancels and steps.
    """

    def __init__(
        self,
        runner: Runner,
        config: ResolvedEngineConfig,
        *,
        seed_source: Callable[[], int] = draw_seed,
        monotonic: Callable[[], float] = time.perf_counter,
        tokenizer: Callable[[], Tokenizer | None] = lambda: None,
        draft: DraftRunner | None = None,
    ) -> None:
        self.config = config
        self._runner = runner
        self._sampler = Sampler(
            runner.config.vocab_size, runner.host_device, tokenizer, runner.likeliest
        )
        costs = CostModel()
        self._host_memory = host_memory_of(
            runner.cache, config.host_cache_bytes, shared=config.transfer
        )
        host = HostCache(self._host_memory, monotonic=monotonic)
        self._tables = BlockTables(
            runner.cache.num_blocks,
            config.block_size_tokens,
            runner.cache,
            shared=config.prefix_cache,
            host=host,
            idle_offload_s=config.idle_offload_s,
        )
        self._pool = self._tables.pool
        self._bell = Bell()
        self._adapters = AdapterPool(
            config.max_adapters,
            partial(runner.load_adapter, max_rank=config.max_adapter_rank),
            self._bell.ring,
            monotonic,
        )
        self._planner = Planner(
            self._tables,
            config,
            costs=costs,
            monotonic=monotonic,
            adapters=self._adapters,
        )
        self._planner.num_stages = runner.num_stages
        self._tiers = Tiers(
            self._tables,
            runner.cache,
            self._host_memory,
            self._planner.recompute_s,
            self._bell.ring,
            monotonic,
        )
        self._speculator = make_speculator(config, self._tables, costs, runner, draft)
        self._seed_source = seed_source
        self._monotonic = monotonic
        self._live = LiveRequests(self._planner)
        self._outputs: list[EngineOutput] = []
        self._grammars = Grammars(
            runner.config.vocab_size,
            tokenizer,
            self._bell.ring,
            num_stages=runner.num_stages,
            num_helpers=config.grammar_helpers,
        )
        output_processor = OutputProcessor(
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
            output_processor=output_processor,
            costs=costs,
            device_work=device_work_of(runner),
            overlap=config.overlap and runner.overlaps,
            monotonic=monotonic,
        )
        self._device_times = StepDeviceTimes(self._executor)
        self._num_arrived = 0
        self._num_steps = 0
        self._prefills = False
        runner.watch(self._bell.ring)

    @classmethod
    def load(cls, path: Path, config: EngineConfig, *, among_others: bool = False) -> Engine:
        """Load an engine for the checkpoint folder ``path``.

        With ``among_others``, engines of other workers may exchange KV blocks with this one. Raises
        CheckpointError or ConfigError.
        """
        resolved = resolve(path, config, among_others=among_others)
        runner = load_runner(path, resolved)
        draft = load_draft(path, runner, resolved)
        engine = cls(runner, resolved, tokenizer=checkpoint_tokenizer(path), draft=draft)
        engine._grammars.prepare()
        engine._tiers.open(path, resolved, is_row_exact=runner.is_row_exact)
        return engine

    def keep_on_disk(self, file: BlockFile) -> None:
        """Use a file as disk cache: store blocks of idle conversations in it, and find the blocks
        that it has."""
        self._tiers.keep_on_disk(file)

    @property
    def transfer_endpoint(self) -> TransferEndpoint | None:
        """Endpoint from which other workers' engines pull blocks; None if blocks are not shared."""
        return self._tiers.endpoint

    @property
    def wake_fd(self) -> int:
        """File descriptor that becomes readable when there may be work for ``rest``."""
        return self._bell.fd

    @property
    def context_window_tokens(self) -> int:
        return self._runner.config.context_window_tokens

    @property
    def max_tokens_per_request(self) -> int:
        """Longest prompt + completion that the context window and the KV cache can hold."""
        return min(self.context_window_tokens, self._pool.capacity_tokens)

    @property
    def weight_bytes(self) -> int:
        """Maximum bytes of weights that a step reads: those of layers and head."""
        return self._runner.weight_size.num_bytes

    @property
    def device_uuid(self) -> str:
        """UUID of the CUDA device, as its driver reports it; empty without one."""
        return device_uuid_of(self._runner)

    @property
    def has_work(self) -> bool:
        """True if a step may have outputs, or would finish the step in flight."""
        return bool(len(self._live) or self._outputs or self._executor.has_pending_step)

    def add(self, request: EngineRequest) -> None:
        """Add a request. If it is invalid, the next step returns its error.

        A request with the id of a live request replaces it.
        """
        self._drop_request(request.request_id)
        try:
            check_kind(
                request,
                has_head=self._runner.config.has_head,
                has_labels=self._runner.config.classifier is not None,
            )
            if request.sampling.use_beam_search:
                check_beams(request, vocab_size=self._runner.config.vocab_size)
            check_adapter(request, max_adapters=self._adapters.num_slots)
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
        group = make_sequence_group(
            request,
            arrival=self._num_arrived,
            seed=self._seed_source() if seed is None else seed,
            max_total_tokens=max_total_tokens,
            added_s=self._monotonic(),
            num_sequences=1 if request.sampling.use_beam_search else request.sampling.n,
        )
        if request.sampling.use_beam_search:
            begin_search(group[0])
        try:
            for sequence in group:
                self._sampler.add(sequence)
        except Exception as error:  # noqa: BLE001 (any error ends one request only)
            if not isinstance(error, MillraceError):
                _log.exception("preparing a request for sampling failed")
            self._outputs.append(refusal(request, as_millrace_error(error)))
            return
        self._num_arrived += request.sampling.n
        is_fetched = self._tiers.arrivals.fetch(group[0])
        if request.warms and not is_fetched:
            self._outputs.append(finished_output(request, FinishReason.STOP))
            return
        if request.sampling.is_guided and not is_fetched:
            self._grammars.submit(group)
        self._live.add(group)

    def cancel(self, request_id: str) -> None:
        """Drop a request in any state. Its blocks are free when this returns.

        ``pop_device_times`` then reports its device time, 0 if this engine does not have the
        request.
        """
        if not self._drop_request(request_id):
            self._device_times.note_unknown(request_id)

    def _drop_request(self, request_id: str) -> bool:
        """Drop a request; return whether any of its sequences was live."""
        cancelled = self._live.cancel(request_id)
        self._device_times.note_cancelled(cancelled)
        if self._outputs:
            self._outputs = [o for o in self._outputs if o.request_id != request_id]
        return bool(cancelled)

    def pop_device_times(self, *, live: bool = False) -> list[DeviceTime]:
        """Return the device times of sequences that were cancelled since the last call, or ended
        while their step was in flight.

        If the step of a sequence is still in flight, a later call returns its time. With ``live``,
        also return the times so far of live sequences.
        """
        return self._device_times.pop(self._live.charged() if live else ())

    def step(self) -> list[EngineOutput]:
        """Compute one batch.

        If runner and settings allow steps to overlap, this launches the batch and returns the
        outputs of the step before; with nothing to compute, it waits for the step in flight. If no
        sequence is ready, it waits up to 5 ms for one, so that a caller may step as long as there
        is work.

        Returns:
            The outputs of a step, and the errors of requests that were refused since the last call.
        """
        outputs, self._outputs = self._outputs, []
        self._bell.clear()
        self._finish_settled(outputs)
        plan = self._planner.plan()
        self._prefills = bool(plan) and plan[-1].num_tokens > 1  # decodes come first in a plan
        fresh = [sequence for sequence, _ in plan if not sequence.started]
        if fresh:
            begin_s = self._monotonic()
            for sequence in fresh:
                sequence.queued_s = begin_s - sequence.added_s
        if plan or self._executor.has_pending_step:
            self._executor.execute(plan, outputs, self._speculator)
            if self._live.complete_groups:
                advance_searches(self._live, outputs)
            for sequence in fresh:
                if not sequence.started and sequence.state is not SequenceState.FINISHED:
                    sequence.started = True
                    outputs.append(started_output(sequence))
            self._num_steps += bool(plan)
        elif not outputs and self._planner.num_unready == self._planner.num_live > 0:
            self._bell.wait(_UNREADY_WAIT_S)
        ended = self._live.pop_ended()
        if ended:
            self._device_times.report(ended, outputs)
        return outputs

    def _finish_settled(self, outputs: list[EngineOutput]) -> None:
        """Settle sequences that waited for blocks, an adapter or a grammar.

        End a sequence if its adapter or grammar failed, or if its grammar was complete from the
        start. Resume a sequence if its blocks have been read.
        """
        for sequence in self._tiers.settle():
            if sequence.request.warms:
                self._tiers.arrivals.keep_for_another(sequence)
                outputs.append(finished_output(sequence.request, FinishReason.STOP))
                self._live.finish(sequence, outputs)
            elif sequence.request.sampling.is_guided:
                self._grammars.submit([sequence, *sequence.forks])
        for sequence, failure in self._adapters.settle():
            if not isinstance(failure, MillraceError):
                _log.error("loading an adapter failed", exc_info=failure)
            self._live.fail(sequence, as_millrace_error(failure), outputs)
        for sequence, error in self._grammars.pop_settled():
            if error is not None:
                self._live.fail(sequence, error, outputs)
            else:
                outputs.append(finished_output(sequence.request, FinishReason.STOP))
                self._live.finish(sequence, outputs)

    def rest(self) -> float | None:
        """Move idle blocks while there is nothing to compute.

        Returns:
            Seconds until there may be more to move. None: not before the next step, or before
                ``wake_fd`` is readable.
        """
        self._bell.clear()
        self._runner.check()
        self._tiers.settle()
        is_idle = True
        if self._tiers.disk is not None:
            self._tables.cached.offload_idle(self._monotonic())
            is_idle = not self._pool.num_idle_blocks
        return None if is_idle and not self._tiers.is_busy else _REST_S

    def close(self) -> None:
        """End the processes of other ranks. The engine computes no more."""
        self._runner.close()

    def wake(self) -> None:
        """End a step's wait for sequences to become ready. Any thread may call it."""
        self._bell.ring()

    def stats(self) -> EngineStats:
        return engine_stats(
            self._planner,
            self._executor,
            self._adapters,
            self._live,
            self._tiers.peer_figures(),
            self._tiers.object_figures(),
            self._runner.figures(),
            num_steps=self._num_steps,
            prefills=self._prefills,
            max_tokens_per_request=self.max_tokens_per_request,
        )

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, except for blocks of live requests and an object store."""
        self._tiers.forget_idle()

    def pop_prefix_changes(self) -> PrefixChanges | None:
        """Return the prefix cache's changes since the last call; None if there are none."""
        return self._tables.cached.pop_changes()

    def check_integrity(self) -> None:
        """Raise AssertionError unless groups, planner, cache, pool and the step in flight agree."""
        self._live.check_integrity()
        self._tiers.arrivals.check_integrity()
        self._executor.check_integrity(self._live)


def checkpoint_tokenizer(path: Path) -> Callable[[], Tokenizer | None]:
    """Return a function that loads the tokenizer of a checkpoint folder when it is first called.

    Any thread may call that function. It returns None if the folder has no tokenizer, and raises
    CheckpointError if it cannot be read.
    """

    @cache
    def load() -> Tokenizer | None:
        return Tokenizer.load(path) if (path / "tokenizer.json").is_file() else None

    return load
