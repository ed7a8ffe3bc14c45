"""Engine that is a third-party server, driven over HTTP."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from enum import Enum, auto
from typing import cast

import msgspec

from millrace.engine.scheduling.admission import finished_before, longest_total_tokens
from millrace.engine.step.outputs import finished_output, refusal
from millrace.engine.types import (
    DeviceTime,
    EngineOutput,
    EngineRequest,
    EngineStats,
    PrefixChanges,
)
from millrace.runtime.clock import Clock
from millrace.runtime.process import how_it_ended
from millrace.runtime.tasks import Tasks, wait_or_sleep
from millrace.schemas.engines import PROMISES, check_supported
from millrace.schemas.errors import MillraceError, PrefixCacheKeptError
from millrace.workers.engine_like import EngineLike
from millrace.workers.servers.client import AnswerError, ServerClient, ServerUnreachableError
from millrace.workers.servers.dialect import (
    AnswerPart,
    Call,
    Dialect,
    RefusedByServerError,
    ServerFacts,
    ServerStreamError,
)
from millrace.workers.servers.guided import Guides
from millrace.workers.servers.questions import LiveRequest, fitting_part, next_question
from millrace.workers.servers.server_process import ServerProcess
from millrace.workers.servers.server_stats import PrefixEstimate, ServerStats, TokenShares

# Defaults for a server that reports neither.
_NUM_SEQUENCES, _CACHE_TOKENS = 64, 1 << 16
_LOAD_INTERVAL_S = 1.0
_IDLE_CHECK_INTERVAL_S = 10.0
_MAX_FAILED_CHECKS = 3
# A connection breaks a moment before the end of its process is noticed.
_DYING_S = 1.0
_MAX_BREAKS = 3
_US_PER_S = 1e6

logger = logging.getLogger(__name__)


class _StreamEnd(Enum):
    """End of the answer to one call: the request is over, the connection broke while the server
    lives, or another call continues the request.
    """

    OVER = auto()
    BROKEN = auto()
    CONTINUES = auto()


class ServerEngine(EngineLike):
    """Engine that sends each request as a streaming call and turns the streams into outputs.

    Outputs of one turn of the event loop are delivered together. A stream that breaks while the
    server lives is requested again from where it stopped. The server is watched while it has
    requests. A server that was not started here is also checked now and then while it is idle. Owns
    the client and the process, if there is one, until ``close``.
    """

    def __init__(
        self,
        dialect: Dialect,
        client: ServerClient,
        facts: ServerFacts,
        process: ServerProcess | None,
        clock: Clock,
    ) -> None:
        super().__init__()
        self.facts = facts
        config, model = dialect.config, dialect.model
        self.num_devices = config.tensor_parallel
        self._dialect = dialect
        self._client = client
        self._process = process
        self._clock = clock
        self._has_exact_ids = PROMISES[dialect.kind].exact_token_ids
        self._vocab_size = model.vocab_size
        self._context_window_tokens = model.context_window_tokens
        longest = facts.context_window_tokens or self._context_window_tokens
        self._capacity_tokens = min(longest, facts.kv_capacity_tokens or longest)
        self._live: dict[str, LiveRequest] = {}
        self._shares = TokenShares()
        cache_tokens = facts.kv_capacity_tokens or _CACHE_TOKENS
        self._prefixes = PrefixEstimate(config.block_size_tokens, cache_tokens)
        self._stats = ServerStats(
            max_num_sequences=config.max_num_sequences or facts.max_num_sequences or _NUM_SEQUENCES,
            num_blocks=cache_tokens // config.block_size_tokens,
            max_tokens_per_request=min(self._context_window_tokens, self._capacity_tokens),
        )
        self._outputs: list[EngineOutput] = []
        self._device_times: list[DeviceTime] = []
        self._handing_over = False
        self._has_work = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self._guides = Guides(model, config.grammar_helpers)
        self._tasks = Tasks()
        self._tasks.spawn(self._watch_load(), "watch the server")
        if process is not None:
            self._tasks.spawn(self._watch_process(process), "watch the server's process")

    @property
    def stats(self) -> EngineStats:
        """Current statistics. The server's own figures are from the last second in which it had
        requests.
        """
        return self._stats.of(self._live.values(), self._shares)

    def add(self, request: EngineRequest) -> None:
        """Send a request. A request that cannot be served is answered with an error."""
        if request.request_id in self._live:
            self.cancel(request.request_id)
        try:
            check_supported(request.sampling, request.pooling, self._dialect.kind)
            max_total_tokens = longest_total_tokens(
                request,
                vocab_size=self._vocab_size,
                context_window_tokens=self._context_window_tokens,
                capacity_tokens=self._capacity_tokens,
            )
            reason = finished_before(request, max_total_tokens)
            if reason is not None:
                self._put(finished_output(request, reason))
                return
            window_tokens = None if self._has_exact_ids else self._context_window_tokens
            live = LiveRequest(request, max_total_tokens, self._clock.monotonic(), window_tokens)
            self._dialect.call(request, live.token_ids)
        except MillraceError as error:
            self._put(refusal(request, error))
            return
        self._live[request.request_id] = live
        self._shares.begin(request.request_id, self._clock.monotonic())
        live.task = self._tasks.spawn(self._serve(live), f"stream {request.request_id}")
        self._has_work.set()

    def cancel(self, request_id: str) -> None:
        """Close the request's connection, which frees its slot at the server."""
        self._outputs = [one for one in self._outputs if one.request_id != request_id]
        live, device_us = self._live.get(request_id), 0.0
        if live is not None:
            device_us = self._drop(live)
            if live.task is not None:
                live.task.cancel()
        self._device_times.append(DeviceTime(request_id, 0, device_us, over=True))
        self._hand_over_soon()

    async def reset_prefix_cache(self) -> None:
        """Have the server empty its prefix cache. Raises PrefixCacheKeptError."""
        path, kind = self._dialect.reset_path, self._dialect.kind
        if not path:
            raise PrefixCacheKeptError(f"A {kind} server has no path that empties its cache.")
        try:
            await self._client.post(path, {})
        except MillraceError as error:
            raise PrefixCacheKeptError(
                f"The {kind} server did not empty its cache at {path}: {error.message}"
            ) from error
        self.on_prefixes(self._prefixes.forget())

    async def wait_closed(self) -> str:
        """Wait until the server has ended or no longer answers, and return the reason."""
        return await asyncio.shield(self._closed)

    async def close(self) -> None:
        """End every stream, and the server if it was started here."""
        self._end("the engine was closed")
        await self._tasks.close()
        self._guides.close()
        await self._client.close()
        if self._process is not None:
            await self._process.close()

    # --- one request ---

    async def _serve(self, live: LiveRequest) -> None:
        request_id = live.request.request_id
        try:
            await self._dialect.begin(live.request)
            num_breaks = 0
            while num_breaks <= _MAX_BREAKS:
                await self._guide(live)
                match await self._read_stream(live):
                    case _StreamEnd.OVER:
                        return
                    case _StreamEnd.BROKEN:
                        num_breaks += 1
                        live.is_resampled = live.first_token_s is not None and live.is_sampled
            self._fail(live, ServerStreamError("The engine's server breaks off the answer."))
        except MillraceError as error:
            self._fail(live, error)
        except Exception as error:
            logger.exception("a stream could not be read", extra={"request_id": request_id})
            kind = type(error).__name__
            self._fail(live, ServerStreamError(f"The engine's server sent invalid data ({kind})."))

    async def _guide(self, live: LiveRequest) -> None:
        """Start a guide for the grammar if the server does not support it. Raises MillraceError."""
        grammar = live.request.sampling.grammar
        if grammar is None or live.guide is not None:
            return
        read = self._dialect.as_read(grammar)
        if not live.token_ids and grammar.kind in self._dialect.native_grammars:
            await self._guides.check(read, live.request.tenant)
            return
        live.guide = await self._guides.start(live.request, read, live.token_ids)
        if live.guide.complete:
            self._accept(live, AnswerPart())

    async def _read_stream(self, live: LiveRequest) -> _StreamEnd:
        """Send the next call and read its answer. Raises MillraceError for an error of this request
        alone.
        """
        guide = live.guide
        if guide is not None and guide.complete:
            return _StreamEnd.OVER
        question = next_question(self._dialect, live)
        call, is_single, num_before = question.call, question.is_single, len(live.token_ids)
        if call is None:
            await asyncio.sleep(0)
            is_over = self._accept(live, AnswerPart(token_ids=question.forced))
            return _StreamEnd.OVER if is_over else _StreamEnd.CONTINUES
        reader = self._dialect.reader(question.request, live.token_ids)
        live.num_calls += 1
        ask = self._client.stream if call.streams else self._client.whole
        events = cast("AsyncGenerator[bytes]", ask(call.path, call.body))
        is_answered = False
        try:
            async with aclosing(events):
                async for event in events:
                    part = reader.read(event)
                    is_answered = part is None or part.finish_reason is not None
                    if part is None:
                        break
                    if part.num_hidden:
                        live.num_hidden = part.num_hidden
                        return _StreamEnd.CONTINUES
                    part, asks_anew = question.head(part)
                    if self._accept(live, part):
                        return _StreamEnd.OVER
                    if guide is not None and guide.asks_for_one and not is_single:
                        asks_anew = True
                    if asks_anew:
                        return _StreamEnd.CONTINUES
        except AnswerError as error:
            is_answered = True
            if error.blames_caller:
                raise RefusedByServerError(error.message) from error
            await self._check_alive()
        except (ServerUnreachableError, ServerStreamError):
            await self._check_alive()
        finally:
            abort = None if is_answered else self._dialect.abort(call)
            if abort is not None and not self._closed.done():
                self._tasks.spawn(self._abort(abort), "abort a call")
        is_short = is_single or not call.streams
        has_advanced = len(live.token_ids) > num_before
        return _StreamEnd.CONTINUES if is_short and has_advanced else _StreamEnd.BROKEN

    async def _abort(self, call: Call) -> None:
        try:
            await self._client.post(call.path, call.body)
        except MillraceError as error:
            logger.warning("a call was not aborted", extra={"reason": error.message})

    async def _check_alive(self) -> None:
        """Wait until the server is known to live. If it does not, end the engine, and with it the
        calling task.
        """
        await self._clock.sleep(_DYING_S)
        if not await self._is_healthy():
            self._end("the server no longer answers")
            await asyncio.Event().wait()

    async def _is_healthy(self) -> bool:
        return await self._client.is_healthy(self._dialect.health_path)

    def _accept(self, live: LiveRequest, part: AnswerPart) -> bool:
        """Accept an event's content, and return whether it ends the request."""
        if live.guide is not None:
            part = fitting_part(live.guide, part, live.request.eos_token_ids)
        is_complete = live.guide is not None and live.guide.complete
        token_ids, reason = live.accept(part, is_complete=is_complete)
        if not token_ids and reason is None and not part.prompt_logprobs:
            return False
        request, now_s = live.request, self._clock.monotonic()
        is_first = live.first_token_s is None
        if is_first:
            self._stats.note_first_token(live, now_s)
            self._shares.note(request.request_id, live.num_uncached_prompt_tokens)
            self._note_prefix(live)
        self._shares.note(request.request_id, len(token_ids))
        self._stats.note_tokens(live, len(token_ids), now_s)
        live.first_token_s = now_s if is_first else live.first_token_s
        self._put(
            EngineOutput(
                request_id=request.request_id,
                token_ids=token_ids,
                logprobs=part.logprobs[: len(token_ids)],
                prompt_logprobs=part.prompt_logprobs,
                # A resumed request's cached tokens were reported by the engine that had it first.
                num_cached_tokens=0 if request.output_token_ids else live.num_cached_tokens,
                started=is_first,
                resampled=live.is_resampled,
                finish_reason=reason,
                device_us=0.0 if reason is None else self._drop(live),
            )
        )
        return reason is not None

    def _fail(self, live: LiveRequest, error: MillraceError) -> None:
        request = live.request
        if self._live.get(request.request_id) is live:
            device_us = self._drop(live)
            self._put(msgspec.structs.replace(refusal(request, error), device_us=device_us))

    def _drop(self, live: LiveRequest) -> float:
        """Forget a request that the server no longer has, and return its server time in µs."""
        request_id = live.request.request_id
        del self._live[request_id]
        self._dialect.end(request_id)
        self._stats.note_prompt(live)
        self._note_prefix(live)
        return self._shares.end(request_id, self._clock.monotonic()) * _US_PER_S

    def _note_prefix(self, live: LiveRequest) -> None:
        request = live.request
        token_ids = (*request.prompt_token_ids, *live.token_ids)
        changes = self._prefixes.note(token_ids, request.cache_salt)
        if changes is not None:
            self._loop.call_soon(self._report_prefixes, changes)

    def _report_prefixes(self, changes: PrefixChanges) -> None:
        if not self._closed.done():
            self.on_prefixes(changes)

    # --- handing over ---

    def _put(self, output: EngineOutput) -> None:
        self._outputs.append(output)
        self._hand_over_soon()

    def _hand_over_soon(self) -> None:
        if not self._handing_over:
            self._handing_over = True
            self._loop.call_soon(self._hand_over)

    def _hand_over(self) -> None:
        self._handing_over = False
        outputs, self._outputs = self._outputs, []
        device_times, self._device_times = self._device_times, []
        if self._closed.done():
            return
        if outputs:
            self.on_outputs(outputs, self.stats)
        if device_times:
            self.on_device_times(device_times)

    # --- the server ---

    def _end(self, why: str) -> None:
        """End the engine; nothing more is reported."""
        if not self._closed.done():
            self._closed.set_result(why)
        for live in self._live.values():
            if live.task is not None:
                live.task.cancel()
        self._live.clear()

    async def _watch_process(self, process: ServerProcess) -> None:
        code = await process.wait()
        self._end(f"the server's process ended with {how_it_ended(code)}")

    async def _watch_load(self) -> None:
        num_failed = 0
        while not self._closed.done():
            if not self._live:
                await self._wait_for_work()
            # Some servers report their figures only between two steps, however long these take.
            with suppress(MillraceError):
                self._stats.load = await self._dialect.read_load(self._client)
            num_failed = 0 if await self._is_healthy() else num_failed + 1
            if num_failed >= _MAX_FAILED_CHECKS:
                self._end("the server no longer answers")
            self._report_shares()
            await self._clock.sleep(_LOAD_INTERVAL_S)

    async def _wait_for_work(self) -> None:
        """Wait for a request. A server that this worker did not start is checked meanwhile."""
        self._has_work.clear()
        if self._process is not None:
            await self._has_work.wait()
        else:
            await wait_or_sleep(self._has_work, self._clock, _IDLE_CHECK_INTERVAL_S)

    def _report_shares(self) -> None:
        totals = self._shares.settle(self._clock.monotonic())
        self._device_times += [
            DeviceTime(name, 0, total_s * _US_PER_S) for name, total_s in totals.items()
        ]
        if totals:
            self._hand_over_soon()
