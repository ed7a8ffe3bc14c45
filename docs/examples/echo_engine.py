"""Example of a custom engine that repeats the prompt's tokens.

    millrace up --engine custom --engine-command docs/examples/echo_engine.py:EchoEngine

``workers.engine_like.EngineLike`` documents the required methods. A real engine calls its model
in ``_next_token``.
"""

from __future__ import annotations

import asyncio
import random

import msgspec

from millrace.engine.scheduling.admission import finished_before, longest_total_tokens
from millrace.engine.step.outputs import finished_output, refusal
from millrace.engine.types import DeviceTime, EngineOutput, EngineRequest, EngineStats
from millrace.registry.served import ServedModel
from millrace.runtime.clock import Clock
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind, EnginePromises, check_supported
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import FinishReason
from millrace.workers.engine_like import EngineLike

_STEP_S = 0.005
_CAPACITY_TOKENS = 1 << 16
_US_PER_S = 1e6


class EchoEngine(EngineLike):
    """Engine that computes one token per request and step, in a task that ``close`` ends."""

    promises = EnginePromises(
        continues_sampling=True,
        unsupported=frozenset(
            {"pooling", "n", "grammar", "logprobs", "prompt_logprobs", "use_beam_search"}
        ),
        grammars=frozenset(),
    )

    @classmethod
    async def start(cls, model: ServedModel, config: EngineConfig, clock: Clock) -> EchoEngine:
        """Return an engine that is ready at once, because it loads no weights."""
        return cls(model, config.max_num_sequences or 64, clock)

    def __init__(self, model: ServedModel, max_num_sequences: int, clock: Clock) -> None:
        super().__init__()
        self._model, self._clock = model, clock
        self._max_num_sequences = max_num_sequences
        self._requests: dict[str, tuple[EngineRequest, list[int], int]] = {}
        self._taken_s: dict[str, float] = {}
        self._answers: list[EngineOutput] = []
        self._num_tokens, self._busy_s = 0, 0.0
        self._work = asyncio.Event()
        self._stepping = asyncio.create_task(self._run())

    @property
    def stats(self) -> EngineStats:
        """Statistics of the last step."""
        left = [most - len(made) for _, made, most in self._requests.values()]
        return EngineStats(
            max_num_sequences=self._max_num_sequences,
            num_running=min(len(left), self._max_num_sequences),
            num_waiting=max(0, len(left) - self._max_num_sequences),
            decode_tokens=self._num_tokens,
            busy_s=self._busy_s,
            charged_s=self._busy_s,
            outstanding_tokens=sum(left),
            max_tokens_per_request=self._model.context_window_tokens,
        )

    def add(self, request: EngineRequest) -> None:
        """Add a request for the next step. It replaces a request of the same id."""
        self._drop(request.request_id)
        self._work.set()
        try:
            check_supported(request.sampling, request.pooling, EngineKind.CUSTOM, self.promises)
            most = longest_total_tokens(
                request,
                vocab_size=self._model.vocab_size,
                context_window_tokens=self._model.context_window_tokens,
                capacity_tokens=_CAPACITY_TOKENS,
            )
        except MillraceError as error:
            self._answers.append(refusal(request, error))
            return
        reason = finished_before(request, most)
        if reason is not None:
            self._answers.append(finished_output(request, reason))
            return
        made = list(request.output_token_ids)
        self._requests[request.request_id] = (request, made, most - len(request.prompt_token_ids))

    def cancel(self, request_id: str) -> None:
        """Drop a request and report its device time."""
        self._answers = [one for one in self._answers if one.request_id != request_id]
        final_time = DeviceTime(request_id, 0, self._drop(request_id), over=True)
        asyncio.get_running_loop().call_soon(lambda: self.on_device_times([final_time]))

    async def wait_closed(self) -> str:
        """Wait for the step task to end, and return the reason."""
        await asyncio.wait((self._stepping,))
        return "the echo engine was closed"

    async def close(self) -> None:
        self._stepping.cancel()
        await asyncio.wait((self._stepping,))

    async def _run(self) -> None:
        while True:
            if not self._requests and not self._answers:
                self._work.clear()
                await self._work.wait()
            await self._clock.sleep(_STEP_S)
            batch = list(self._requests)[: self._max_num_sequences]
            self._busy_s += _STEP_S if batch else 0.0
            answers, self._answers = self._answers, []
            self.on_outputs(
                [*answers, *(self._step(name, len(batch)) for name in batch)], self.stats
            )

    def _step(self, request_id: str, num_running: int) -> EngineOutput:
        request, made, most = self._requests[request_id]
        is_first = request_id not in self._taken_s
        self._taken_s[request_id] = self._taken_s.get(request_id, 0.0) + _STEP_S / num_running
        made.append(self._next_token(request, len(made)))
        self._num_tokens += 1
        so_far = msgspec.structs.replace(request, output_token_ids=tuple(made))
        reason = finished_before(so_far, len(request.prompt_token_ids) + most)
        if reason is FinishReason.STOP and len(made) <= request.sampling.min_tokens:
            reason = None
        return EngineOutput(
            request_id=request_id,
            token_ids=(made[-1],),
            finish_reason=reason,
            started=is_first,
            device_us=0.0 if reason is None else self._drop(request_id),
        )

    def _next_token(self, request: EngineRequest, index: int) -> int:
        prompt, sampling = request.prompt_token_ids, request.sampling
        if sampling.temperature == 0:
            return prompt[index % len(prompt)]
        return random.Random(f"{sampling.seed}:{index}").choice(prompt)

    def _drop(self, request_id: str) -> float:
        """Remove a request and return its device time in us."""
        self._requests.pop(request_id, None)
        return self._taken_s.pop(request_id, 0.0) * _US_PER_S
