"""Client of the bus that publishes jobs and records the times of their frames."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from benchmarks.support.simulated_system import MODEL
from millrace.bus.api import Bus
from millrace.schemas.frames import TERMINAL_FRAMES, Delta, Done, Frame, Started, Usage
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.sampling import SamplingParams

REPLY = "benchmark"
_AT_ONCE = 64


def random_prompt(chance: random.Random, num_tokens: int) -> tuple[int, ...]:
    """Return a prompt that shares no prefix with any other."""
    return tuple(chance.choices(range(5, 4_000), k=num_tokens))


class Answer:
    """Answer of one request. Times are of ``time.perf_counter``; 0 means not yet."""

    __slots__ = (
        "done_s",
        "ended",
        "first_token_s",
        "num_cached_tokens",
        "num_prompt_tokens",
        "sent_s",
        "started_s",
        "tenant",
        "token_ids",
    )

    def __init__(self, tenant: str, num_prompt_tokens: int) -> None:
        self.tenant = tenant
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.token_ids: list[int] = []
        self.sent_s = self.started_s = self.first_token_s = self.done_s = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.sent_s


class Service:
    """Service that publishes jobs, with their answers.

    Answers come to ``reply``, a name that no other service has. ``charged`` sums, by tenant, the
    fair share's charge for tokens: 1 for an uncached token of a prompt, ``output_weight`` for a
    generated token.
    """

    def __init__(self, bus: Bus, output_weight: float = 2.0, reply: str = REPLY) -> None:
        self.answers: dict[str, Answer] = {}
        self.charged: dict[str, float] = {}
        self.num_unstarted: dict[str, int] = {}
        self.num_output_tokens = 0
        self._bus = bus
        self._reply = reply
        self._output_weight = output_weight
        self._num_sent = 0

    async def open(self) -> None:
        await self._bus.frames.subscribe(self._reply, self._on_frame)

    async def send(
        self,
        tenant: str,
        prompt_token_ids: tuple[int, ...],
        max_tokens: int,
        *,
        tier: Tier = Tier.FREE,
        reserved: bool = True,
    ) -> Answer:
        """Publish a job; return when it is stored.

        With ``reserved`` it is published as by a gateway, otherwise as by a tenant's service, to
        which limits apply.
        """
        self._num_sent += 1
        request_id = f"{self._reply}-{self._num_sent}"
        answer = Answer(tenant, len(prompt_token_ids))
        self.answers[request_id] = answer
        self.num_unstarted[tenant] = self.num_unstarted.get(tenant, 0) + 1
        self.charged.setdefault(tenant, 0.0)
        job = Job(
            request_id=request_id,
            model=MODEL,
            prompt_token_ids=prompt_token_ids,
            sampling=SamplingParams(max_tokens=max_tokens, seed=self._num_sent),
            tenant=tenant,
            tier=tier,
            reply=self._reply,
            batch_frames=True,
            received_ns=time.time_ns(),
        )
        answer.sent_s = time.perf_counter()
        await self._bus.jobs.publish(job, reserved=reserved)
        return answer

    async def send_many(
        self,
        tenant: str,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: tuple[int, int],
        *,
        tier: Tier = Tier.FREE,
        reserved: bool = True,
    ) -> list[Answer]:
        """Publish a backlog for completions of random lengths, approximately in order."""
        chance = random.Random(tenant)
        answers: list[Answer] = []
        for start in range(0, len(prompts), _AT_ONCE):
            batch = prompts[start : start + _AT_ONCE]
            answers += await asyncio.gather(
                *(
                    self.send(
                        tenant, prompt, chance.randint(*max_tokens), tier=tier, reserved=reserved
                    )
                    for prompt in batch
                )
            )
        return answers

    def _on_frame(self, request_id: str, frame: Frame) -> None:
        answer = self.answers.get(request_id)
        if answer is None:
            return
        match frame:
            case Delta():
                if not answer.first_token_s:
                    answer.first_token_s = time.perf_counter()
                answer.token_ids += frame.token_ids
                self.num_output_tokens += len(frame.token_ids)
                self.charged[answer.tenant] += self._output_weight * len(frame.token_ids)
            case Started() if not answer.started_s:
                answer.started_s = time.perf_counter()
                answer.num_cached_tokens = frame.num_cached_tokens
                self.num_unstarted[answer.tenant] -= 1
                fresh = frame.num_prompt_tokens - frame.num_cached_tokens
                self.charged[answer.tenant] += fresh
            case Usage():
                answer.num_cached_tokens = frame.cached_tokens
            case _ if isinstance(frame, TERMINAL_FRAMES):
                answer.done_s = time.perf_counter()
                if answer.ended.done():
                    return
                if isinstance(frame, Done):
                    answer.ended.set_result(None)
                else:
                    answer.ended.set_exception(RuntimeError(f"a request ended with {frame}"))
