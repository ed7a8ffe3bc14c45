"""``affinity``: routing by prefix cache beside routing by load.

Real servers run one scheduler process and eight simulated workers. Conversations share one of a few
system prompts and grow by each turn, with reading pauses between turns. The same conversations run
on a fresh system with each policy, at a load within capacity and at a load above it. The ceiling of
the hit rate is the share of prompts that conversations repeat, printed beside the rate. The ceiling
of the token rate is that of engines whose prompts cost nothing.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import uvloop

from benchmarks.support.bus_client import Answer, Service, random_prompt
from benchmarks.support.command import PartResult
from benchmarks.support.figures import percentile
from benchmarks.support.simulated_system import simulated_system
from millrace.schemas.config import EngineConfig, SchedulerConfig, SimulationConfig, WorkerConfig
from millrace.schemas.engines import EngineKind
from millrace.workers.simulated.latency_model import LatencyModel

_Policy = Literal["affine", "least_loaded"]

_NUM_WORKERS, _NUM_SLOTS, _NUM_BLOCKS = 8, 8, 1_024
_BLOCK_TOKENS = 16
_SIMULATION = SimulationConfig(prefill_tokens_per_s=6_000.0, step_ms=16.0, step_ms_per_sequence=0.2)
_WORKER = WorkerConfig(
    name="simulated",
    max_num_waiting=2,
    engine=EngineConfig(
        kind=EngineKind.SIMULATED,
        max_num_sequences=_NUM_SLOTS,
        max_batch_tokens=1_024,
        num_blocks=_NUM_BLOCKS,
        block_size_tokens=_BLOCK_TOKENS,
        simulation=_SIMULATION,
    ),
)
_NUM_SYSTEM_PROMPTS, _SYSTEM_TOKENS = 24, 512
_QUESTION_TOKENS, _ANSWER_TOKENS = 48, 32
_MAX_TURNS = 8
_WARM_UP_SHARE = 0.2
_WORST_THROUGHPUT = 0.95
_TIMEOUT_S = 900.0


class _Load(NamedTuple):
    """Load of conversations, with pauses of random length between turns."""

    name: str
    num_conversations: int
    mean_pause_s: float


_LOADS = (_Load("moderate", 64, 2.0), _Load("high", 128, 0.1))


class _Result(NamedTuple):
    """Result of the answers that began after the warm-up.

    ``repeated`` is the share of the prompts' tokens that some worker has computed before, ``hit``
    the share that was found in a cache.
    """

    repeated: float
    hit: float
    ttft_mean_ms: float
    ttft_p99_ms: float
    tokens_per_s: float


class _Conversations:
    """Clients that keep a number of conversations running, and replace ended conversations."""

    def __init__(self, service: Service, load: _Load) -> None:
        self.answers: list[Answer] = []
        self.num_repeated_tokens: dict[Answer, int] = {}
        self._service = service
        self._load = load
        chance = random.Random(3)
        self._systems = [random_prompt(chance, _SYSTEM_TOKENS) for _ in range(_NUM_SYSTEM_PROMPTS)]

    async def run(self, duration_s: float) -> None:
        talking = [
            asyncio.create_task(self._talk(random.Random(number)))
            for number in range(self._load.num_conversations)
        ]
        await asyncio.sleep(duration_s)
        for task in talking:
            task.cancel()
        await asyncio.gather(*talking, return_exceptions=True)
        for task in talking:
            if not task.cancelled():
                task.result()

    async def _talk(self, chance: random.Random) -> None:
        pause_s = self._load.mean_pause_s
        await asyncio.sleep(chance.random() * (pause_s + 1.0))
        while True:
            known = chance.choice(self._systems)
            for _ in range(chance.randint(2, _MAX_TURNS)):
                prompt = known + random_prompt(chance, _QUESTION_TOKENS)
                answer = await self._service.send("talkers", prompt, _ANSWER_TOKENS)
                self.answers.append(answer)
                self.num_repeated_tokens[answer] = len(known) // _BLOCK_TOKENS * _BLOCK_TOKENS
                await answer.ended
                known = prompt + tuple(answer.token_ids)
                await asyncio.sleep(chance.expovariate(1 / pause_s))


async def _run(policy: _Policy, load: _Load, duration_s: float) -> _Result:
    scheduler = SchedulerConfig(placement=policy)
    async with simulated_system(_NUM_WORKERS, scheduler=scheduler, worker=_WORKER) as system:
        service = Service(system.bus)
        await service.open()
        conversations = _Conversations(service, load)
        running = asyncio.create_task(conversations.run(duration_s))
        await asyncio.sleep(duration_s * _WARM_UP_SHARE)
        begun_s, before = time.perf_counter(), service.num_output_tokens
        await asyncio.sleep(duration_s * (1 - _WARM_UP_SHARE) - 0.05)
        took_s, made = time.perf_counter() - begun_s, service.num_output_tokens - before
        await running
    answers = [one for one in conversations.answers if one.sent_s >= begun_s and one.first_token_s]
    prompt_tokens = sum(answer.num_prompt_tokens for answer in answers)
    ttfts_ms = [answer.ttft_s * 1e3 for answer in answers]
    repeated = sum(conversations.num_repeated_tokens[answer] for answer in answers)
    return _Result(
        repeated=repeated / prompt_tokens,
        hit=sum(answer.num_cached_tokens for answer in answers) / prompt_tokens,
        ttft_mean_ms=statistics.fmean(ttfts_ms),
        ttft_p99_ms=percentile(ttfts_ms, 0.99),
        tokens_per_s=made / took_s,
    )


def _ceiling_tokens_per_s() -> float:
    """Return the rate if all slots of all workers decode all the time."""
    kv_tokens = _NUM_SLOTS * (_SYSTEM_TOKENS + _QUESTION_TOKENS)
    step_s = LatencyModel(_SIMULATION).decode_step_s(_NUM_SLOTS, kv_tokens)
    return _NUM_WORKERS * _NUM_SLOTS / step_s


def _print(load: _Load, policy: _Policy, result: _Result) -> None:
    print(
        f"{load.name:<10}{policy:<14}{result.repeated:>9.1%}{result.hit:>9.1%}"
        f"{result.ttft_mean_ms:>12.1f}{result.ttft_p99_ms:>12.1f}{result.tokens_per_s:>11,.0f}"
    )


async def _measure(loads: Sequence[_Load], duration_s: float, rounds: int) -> bool:
    """Return whether affinity cost no throughput, raised the hit rate and lowered TTFT."""
    all_met = True
    print(
        f"{_NUM_WORKERS} workers, {_NUM_SYSTEM_PROMPTS} system prompts of {_SYSTEM_TOKENS} tokens"
    )
    print("load      policy         repeated    found   TTFT mean ms   p99 ms   tokens/s")
    for load in loads:
        of: dict[_Policy, list[_Result]] = {"affine": [], "least_loaded": []}
        for _ in range(rounds):
            for policy, results in of.items():
                results.append(await _run(policy, load, duration_s))
                _print(load, policy, results[-1])
        affine, plain = (_median(results) for results in of.values())
        ratio = affine.tokens_per_s / plain.tokens_per_s
        print(
            f"{load.name:<10}affine / least_loaded: found {affine.hit:.1%} / {plain.hit:.1%}, TTFT "
            f"{affine.ttft_mean_ms / plain.ttft_mean_ms:.2f}, throughput {ratio:.3f} (goal: at "
            f"least {_WORST_THROUGHPUT})"
        )
        all_met = all_met and ratio >= _WORST_THROUGHPUT and affine.hit >= plain.hit
    print(f"ceiling, if prompts cost nothing: {_ceiling_tokens_per_s():,.0f} tokens/s")
    return all_met


def _median(results: Sequence[_Result]) -> _Result:
    return _Result(*(statistics.median(values) for values in zip(*results, strict=True)))


def run(seconds: float = 30.0, rounds: int = 2, smoke: bool = False) -> PartResult:
    """Run each load for ``seconds``; report the median of ``rounds``."""
    loads: Sequence[_Load] = _LOADS
    if smoke:
        loads, seconds, rounds = [_Load("smoke", 8, 0.1)], 2.0, 1
    measuring = asyncio.wait_for(_measure(loads, seconds, rounds), _TIMEOUT_S)
    return PartResult(None, uvloop.run(measuring))
