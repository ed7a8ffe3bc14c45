"""Keeper of the worker's engine: starts another engine when it ends."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from itertools import zip_longest
from typing import NoReturn

import msgspec

from millrace.engine.types import (
    EngineOutput,
    EngineRequest,
    EngineStats,
    PrefixChanges,
)
from millrace.runtime.clock import Clock
from millrace.runtime.histogram import STEP_S, Histogram
from millrace.schemas.transfer import TransferEndpoint
from millrace.workers.engine_like import (
    EngineFailedError,
    EngineLike,
    OnDeviceTimes,
    OnPrefixes,
    ignore,
)
from millrace.workers.process import engine_figures

# Maximum number of restarts within the window.
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0
_FIRST_BACKOFF_S = 0.1

# Fields of EngineStats that count from an engine's start. The others are gauges, except
# ``expert_choices``, which count for each expert.
COUNTERS = (*engine_figures.COUNTERS, *engine_figures.TIERS)

logger = logging.getLogger(__name__)


class EngineKeeper:
    """Proxy of the running engine that starts another engine when it ends.

    Requests added or cancelled while there is no engine are dropped. An engine's state is lost with
    it, so its requests must be added again to the next engine. Restarts are bounded: the first
    follows at once, the others after an exponential backoff. Counters in ``stats``, ``step_s``
    (durations of steps) and ``num_restarts`` continue over all engines. The keeper owns the engine
    and ends it in ``close``.
    """

    def __init__(
        self, engine: EngineLike, restart: Callable[[], Awaitable[EngineLike]], clock: Clock
    ) -> None:
        self._outputs: Callable[[list[EngineOutput]], None] = ignore
        self._prefixes: OnPrefixes = ignore
        self._device_times: OnDeviceTimes = ignore
        self._engine: EngineLike | None = None
        self._restart = restart
        self._clock = clock
        self._restarts_s: list[float] = []
        self._ended: EngineStats | None = None
        self._seen = EngineStats()
        self.step_s = Histogram(STEP_S)
        self.num_restarts = 0
        self._take_over(engine)

    def listen(
        self,
        on_outputs: Callable[[list[EngineOutput]], None],
        on_prefixes: OnPrefixes = ignore,
        on_device_times: OnDeviceTimes = ignore,
    ) -> None:
        """Set the callbacks of every engine.

        Args:
            on_outputs: gets the outputs of each step.
            on_prefixes: gets changes of the prefix cache.
            on_device_times: gets device times of requests.
        """
        self._outputs = on_outputs
        self._prefixes, self._device_times = on_prefixes, on_device_times
        if self._engine is not None:
            self._connect(self._engine)

    @property
    def stats(self) -> EngineStats:
        """Statistics as of the last step; without an engine, no capacity is free."""
        ended, engine = self._ended, self._engine
        if ended is None:
            assert engine is not None
            return engine.stats
        if engine is None:
            return ended
        stats = engine.stats
        sums = {name: getattr(ended, name) + getattr(stats, name) for name in COUNTERS}
        choices = zip_longest(ended.expert_choices, stats.expert_choices, fillvalue=0)
        return msgspec.structs.replace(stats, **sums, expert_choices=tuple(map(sum, choices)))

    @property
    def device_uuid(self) -> str:
        """UUID of the first CUDA device, as its driver reports it; empty without a CUDA device."""
        return "" if self._engine is None else self._engine.device_uuid

    @property
    def transfer_endpoint(self) -> TransferEndpoint | None:
        """Endpoint at which the engine serves KV blocks; None if it does not, and while there is no
        engine.
        """
        return None if self._engine is None else self._engine.transfer_endpoint

    @property
    def is_down(self) -> bool:
        """True if an engine has ended and the next one has not started yet."""
        return self._engine is None

    def add(self, request: EngineRequest) -> None:
        """Generate for a request."""
        if self._engine is not None:
            self._engine.add(request)

    def cancel(self, request_id: str) -> bool:
        """Stop a request. Outputs of the current step may still arrive.

        Returns:
            True if there is an engine; it will report the request's device time.
        """
        if self._engine is None:
            return False
        self._engine.cancel(request_id)
        return True

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache of the engine, if an engine runs. Raises PrefixCacheKeptError."""
        if self._engine is not None:
            await self._engine.reset_prefix_cache()

    async def run(
        self, on_lost: Callable[[str], None] = ignore, on_replaced: Callable[[], None] = ignore
    ) -> NoReturn:
        """Replace every engine that ends, until cancelled.

        Args:
            on_lost: called when an engine has ended, with the reason.
            on_replaced: called when the next engine has started.

        Raises:
            EngineFailedError: no other engine can be started; the message has the last reason.
        """
        while True:
            ended = self._engine
            assert ended is not None
            why = await ended.wait_closed()
            self._ended = msgspec.structs.replace(
                self.stats,
                num_running=0,
                num_waiting=0,
                num_free_blocks=0,
                outstanding_tokens=0,
                outstanding_prompt_tokens=0,
            )
            self._engine = None
            self._prefixes(PrefixChanges(whole=True))
            logger.warning("the engine has ended and is restarted", extra={"reason": why})
            on_lost(why)
            # Free its remaining resources, such as device memory, for the next engine.
            await ended.close()
            self._take_over(await self._start_another(why))
            logger.info("a new engine runs")
            on_replaced()

    async def close(self) -> None:
        """End the engine; its running requests are lost."""
        if self._engine is not None:
            await self._engine.close()

    def _take_over(self, engine: EngineLike) -> None:
        self._seen = engine.stats
        # These are kept after the engine has ended.
        self.weights = engine.weights
        self.num_devices = engine.num_devices
        self.max_num_sequences = engine.max_num_sequences
        self._connect(engine)
        self._engine = engine

    def _connect(self, engine: EngineLike) -> None:
        engine.on_outputs = self._on_outputs
        engine.on_prefixes, engine.on_device_times = self._prefixes, self._device_times

    def _on_outputs(self, outputs: list[EngineOutput], stats: EngineStats) -> None:
        before, self._seen = self._seen, stats
        num_steps = stats.num_steps - before.num_steps
        if num_steps:
            self.step_s.add((stats.busy_s - before.busy_s) / num_steps, num_steps)
        self._outputs(outputs)

    async def _start_another(self, why: str) -> EngineLike:
        while True:
            now_s = self._clock.monotonic()
            recent = [at_s for at_s in self._restarts_s if now_s - at_s < RESTART_WINDOW_S]
            if len(recent) >= MAX_RESTARTS:
                raise EngineFailedError(
                    f"the engine ended or did not start {len(recent) + 1} times within "
                    f"{RESTART_WINDOW_S:g} s; the last time: {why}"
                )
            if recent:
                await self._clock.sleep(_FIRST_BACKOFF_S * 2 ** (len(recent) - 1))
            self._restarts_s = [*recent, self._clock.monotonic()]
            self.num_restarts += 1
            try:
                return await self._restart()
            except EngineFailedError as error:
                why = error.message
                logger.warning("a new engine did not start", extra={"reason": why})
