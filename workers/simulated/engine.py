"""Simulated engine: computes nothing and takes the time of a real engine.

It runs on the worker's own event loop, without a process of its own. Workers with it are light
enough to run many of them on one machine.
"""

from __future__ import annotations

import asyncio
import logging
import random

from millrace.engine.config import check_config
from millrace.engine.scheduling.admission import (
    finished_before,
    longest_total_tokens,
)
from millrace.engine.step.device_work import FLOP_PER_BYTE, Chunk, DeviceWork
from millrace.engine.step.outputs import finished_output, refusal
from millrace.engine.types import (
    DeviceTime,
    EngineOutput,
    EngineRequest,
    EngineStats,
    PrefixChanges,
)
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.served import ServedModel
from millrace.runtime.clock import Clock
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind, check_supported
from millrace.schemas.errors import ConfigError, MillraceError
from millrace.schemas.frames import FinishReason
from millrace.schemas.prefix import REPORTED_BYTES
from millrace.schemas.sampling import MAX_SEED
from millrace.workers.engine_like import EngineLike
from millrace.workers.simulated.batch import SimulatedBatch, StepOutputs
from millrace.workers.simulated.blocks import GenerationLimits, SimulatedSequence
from millrace.workers.simulated.latency_model import LatencyModel
from millrace.workers.simulated.tokens import SimulatedTokens, readable_token_ids

# Defaults for settings of 0: those of a GPU, with a KV cache for 262,144 tokens.
_NUM_SEQUENCES, _BATCH_TOKENS, _CACHE_TOKENS = 256, 4_096, 1 << 18
_INTEGRITY_INTERVAL_S = 10.0
# Maximum lateness of the event loop that is made up for.
_MAX_LATE_S = 0.05
# Bytes of a number in the KV cache that the cost model assumes.
_KV_NUMBER_BYTES = 2
_US_PER_S = 1e6

logger = logging.getLogger(__name__)


class SimulatedEngine(EngineLike):
    """Simulated engine with the rules of the real one.

    Bounds, blocks, prefix cache, priorities and preemptions come from ``workers.simulated.batch``.
    Steps last as ``config.simulation`` says. Their time is shared among the requests as on a GPU. A
    completion ends by ``max_tokens`` or a stop token; other sampling parameters have no effect.
    Owns the task that steps, until ``close``.
    """

    def __init__(self, served_model: ServedModel, config: EngineConfig, clock: Clock) -> None:
        """Create the engine. Raises ConfigError for a setting out of range."""
        check_config(config)
        latency = LatencyModel(config.simulation, config.tensor_parallel)
        size = config.block_size_tokens
        super().__init__()
        self.weights = EngineKind.SIMULATED.value
        self.num_devices = config.tensor_parallel
        self._vocab_size = served_model.vocab_size
        self._context_window_tokens = served_model.context_window_tokens
        self._clock = clock
        self._batch = SimulatedBatch(
            latency,
            SimulatedTokens(readable_token_ids(served_model.tokenizer)),
            max_num_sequences=config.max_num_sequences or _NUM_SEQUENCES,
            max_batch_tokens=config.max_batch_tokens or _BATCH_TOKENS,
            num_blocks=config.num_blocks or _CACHE_TOKENS // size,
            block_size_tokens=size,
            prefix_cache=config.prefix_cache,
        )
        shape = served_model.config
        if not isinstance(shape, ModelConfig):
            raise ConfigError(
                f"Model {served_model.entry.name}: GGUF files cannot be simulated, as their layers "
                "are not read here. Name a checkpoint in Hugging Face layout."
            )
        self._work_of = DeviceWork(
            shape,
            kv_token_bytes=2 * shape.num_key_value_heads * shape.head_dim * _KV_NUMBER_BYTES,
            flop_per_byte=FLOP_PER_BYTE["cuda"],
        )
        self._charged_s = 0.0
        self._gone: list[DeviceTime] = []
        self._prefill_tokens_per_s = latency.prefill_tokens_per_s
        self._stats: EngineStats | None = None
        self._answers: list[EngineOutput] = []
        self._added_s: dict[str, float] = {}
        self._work = asyncio.Event()
        self._checked_s = clock.monotonic()
        self._stepping = asyncio.create_task(self._run(), name="simulated engine")

    @classmethod
    async def start(
        cls, served_model: ServedModel, config: EngineConfig, clock: Clock
    ) -> SimulatedEngine:
        """Return an engine after ``config.simulation.start_s``. Raises ConfigError."""
        latency = LatencyModel(config.simulation, config.tensor_parallel)
        await clock.sleep(latency.start_s)
        return cls(served_model, config, clock)

    @property
    def stats(self) -> EngineStats:
        """Current statistics."""
        if self._stats is None:
            self._stats = self._make_stats()
        return self._stats

    def add(self, request: EngineRequest) -> None:
        """Generate for a request from the next step on. A request that cannot be served is answered
        with an error by then.
        """
        if self._batch.get(request.request_id) is not None:
            self.cancel(request.request_id)
        self._work.set()
        try:
            check_supported(request.sampling, request.pooling, EngineKind.SIMULATED)
            max_total_tokens = longest_total_tokens(
                request,
                vocab_size=self._vocab_size,
                context_window_tokens=self._context_window_tokens,
                capacity_tokens=self._batch.capacity_tokens,
            )
        except MillraceError as error:
            self._answers.append(refusal(request, error))
            return
        reason = finished_before(request, max_total_tokens)
        if reason is not None:
            self._answers.append(finished_output(request, reason))
            return
        self._added_s[request.request_id] = self._clock.monotonic()
        self._batch.add(_sequence(request, max_total_tokens))

    def cancel(self, request_id: str) -> None:
        """Forget a request; its blocks are free at once."""
        self._stats = None
        self._added_s.pop(request_id, None)
        sequence = self._batch.cancel(request_id)
        if self._answers:
            self._answers = [one for one in self._answers if one.request_id != request_id]
        if not self._gone:
            asyncio.get_running_loop().call_soon(self._tell_gone)
        device_us = 0.0 if sequence is None else sequence.device_s * _US_PER_S
        self._gone.append(DeviceTime(request_id, 0, device_us, over=True))

    def _tell_gone(self) -> None:
        gone, self._gone = self._gone, []
        self.on_device_times(gone)

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, except for blocks that running requests use."""
        self._batch.blocks.forget_idle()

    async def wait_closed(self) -> str:
        """Wait until the stepping has ended, and return the reason."""
        await asyncio.wait((self._stepping,))
        if self._stepping.cancelled():
            return "the simulated engine was closed"
        error = self._stepping.exception()
        logger.error("the simulated engine failed", exc_info=error)
        return f"the simulated engine failed: {type(error).__name__}: {error}"

    async def close(self) -> None:
        self._stepping.cancel()
        await asyncio.wait((self._stepping,))

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, states and blocks agree."""
        self._batch.check_integrity()

    async def _run(self) -> None:
        due_s = self._clock.monotonic()
        while True:
            if not self._batch.has_work and not self._answers:
                await self._wait_for_work()
                due_s = self._clock.monotonic()
            begun_s = self._clock.monotonic()
            step_s = self._batch.begin()
            if step_s is None:
                # There are only answers to requests that cannot be served.
                await asyncio.sleep(0)
                self._hand_over([])
                continue
            self._charge(step_s)
            due_s = max(due_s, begun_s - _MAX_LATE_S) + step_s
            await self._clock.sleep(max(0.0, due_s - begun_s))
            self._hand_over(self._outputs(self._batch.finish(), begun_s))

    def _charge(self, step_s: float) -> None:
        """Share the time of the new step among its sequences."""
        planned = self._batch.planned
        weights = self._work_of.of_chunks(
            [
                Chunk(num_tokens, known, int(known + num_tokens == len(sequence.token_ids)))
                for sequence, num_tokens in planned
                for known in (sequence.num_computed_tokens,)
            ]
        )
        each_s = step_s / sum(weights)
        for (sequence, _), weight in zip(planned, weights, strict=True):
            sequence.device_s += each_s * weight
        self._charged_s += step_s

    async def _wait_for_work(self) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._checked_s >= _INTEGRITY_INTERVAL_S:
            self._checked_s = now_s
            self.check_integrity()
        self._work.clear()
        await self._work.wait()

    def _hand_over(self, outputs: list[EngineOutput]) -> None:
        answers, self._answers = self._answers, []
        self._stats = None
        changes = self._batch.blocks.take_changes()
        if changes is not None:
            added, removed = _reported(changes.kept), _reported(changes.gone)
            self.on_prefixes(PrefixChanges(added=added, removed=removed, whole=changes.whole))
        self.on_outputs([*answers, *outputs], self.stats)

    def _outputs(self, step: StepOutputs, begun_s: float) -> list[EngineOutput]:
        fresh: dict[SimulatedSequence, float] = {}
        for sequence in step.started:
            fresh[sequence] = begun_s - self._added_s.pop(sequence.request_id)
        finished = set(step.finished)
        outputs: list[EngineOutput] = []
        for sequence in step.made:
            if sequence in fresh or sequence in finished:
                queued_s = fresh.pop(sequence, None)
                outputs.append(_told(sequence, queued_s, ended=sequence in finished))
            else:
                outputs.append(
                    EngineOutput(
                        request_id=sequence.request_id, token_ids=(sequence.token_ids[-1],)
                    )
                )
        outputs += [
            EngineOutput(
                request_id=sequence.request_id,
                started=True,
                queued_s=queued_s,
                num_cached_tokens=sequence.num_cached_tokens,
            )
            for sequence, queued_s in fresh.items()
        ]
        return outputs

    def _make_stats(self) -> EngineStats:
        batch, blocks = self._batch, self._batch.blocks
        return EngineStats(
            max_num_sequences=batch.max_num_sequences,
            num_running=len(batch.running),
            num_waiting=len(batch.waiting),
            num_blocks=blocks.num_blocks,
            num_free_blocks=blocks.num_free,
            num_idle_blocks=blocks.num_idle,
            num_steps=batch.num_steps,
            prefill_tokens=batch.prefill_tokens,
            decode_tokens=batch.decode_tokens,
            num_preemptions=batch.num_preemptions,
            busy_s=batch.busy_s,
            charged_s=self._charged_s,
            outstanding_tokens=batch.outstanding_tokens,
            outstanding_prompt_tokens=batch.outstanding_prompt_tokens,
            prefill_tokens_per_s=self._prefill_tokens_per_s,
            decode_step_ms=batch.decode_step_s * 1e3,
            max_tokens_per_request=min(self._context_window_tokens, batch.capacity_tokens),
            prefix_query_tokens=batch.prefix_query_tokens,
            prefix_hit_tokens=batch.prefix_hit_tokens,
            num_evicted_blocks=blocks.num_evicted,
        )


def _sequence(request: EngineRequest, max_total_tokens: int) -> SimulatedSequence:
    sampling, resumed = request.sampling, request.output_token_ids
    known = request.prompt_token_ids + resumed
    seed = sampling.seed
    return SimulatedSequence(
        request.request_id,
        known,
        limits=GenerationLimits(
            num_to_make=max_total_tokens - len(known),
            stop_token_ids=frozenset(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
        ),
        seed=random.randint(0, MAX_SEED) if seed is None else seed,
        num_resumed=len(resumed),
        priority=request.priority,
        salt=request.cache_salt,
    )


def _told(sequence: SimulatedSequence, queued_s: float | None, *, ended: bool) -> EngineOutput:
    """Return the output for the first or last token of a run."""
    reason = FinishReason.STOP if sequence.stopped else FinishReason.LENGTH
    return EngineOutput(
        request_id=sequence.request_id,
        token_ids=(sequence.token_ids[-1],),
        finish_reason=reason if ended else None,
        started=queued_s is not None,
        queued_s=queued_s or 0.0,
        num_cached_tokens=0 if queued_s is None else sequence.num_cached_tokens,
        num_preemptions=sequence.num_preemptions if ended else 0,
        device_us=sequence.device_s * _US_PER_S if ended else 0.0,
    )


def _reported(keys: list[bytes]) -> bytes:
    return b"".join([key[:REPORTED_BYTES] for key in keys])
