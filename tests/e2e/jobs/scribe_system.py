"""A scheduler, workers and a gateway on one in-memory bus, whose model writes what a test says.

The same request can be asked over HTTP and published as a job: both are run by the same parts.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from millrace.bus import codec
from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.engine.types import EngineOutput, EngineRequest, EngineStats
from millrace.gateway.models import LoadedModels
from millrace.registry.catalogue import ModelEntry
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.routing.router import Route, Router
from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.runtime.clock import SystemClock
from millrace.scheduler.intake.served_models import ModelCatalogue
from millrace.scheduler.scheduler import Scheduler
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.config import EngineConfig, SchedulerConfig, WorkerConfig
from millrace.schemas.frames import TERMINAL_FRAMES, Delta, FinishReason, Frame, TokenLogprob
from millrace.schemas.jobs import JobResult
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.tools import ToolFormat
from millrace.workers.engine_like import EngineLike
from millrace.workers.host.worker import Worker
from millrace.workers.process.keeper import EngineKeeper
from tests.scheduler.world import FakeRunningRequests
from tests.support.engine.tokenizers_made import byte_level, write_tokenizer
from tests.support.running_gateway import RunningGateway, running_gateway
from tests.support.waiting import eventually

MODEL = "demo"
# A name that leaves the model open.
AUTO = "auto"
# The longer of its two models, which no worker has.
LARGE = "large"
TENANT = "local"
CONTEXT_WINDOW_TOKENS = 4_096
_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def scribe_model(
    path: Path,
    tool_format: ToolFormat = ToolFormat.HERMES,
    reasoning: ReasoningFormat | None = None,
) -> ServedModel:
    """A model without weights that calls tools in a format, and thinks if it has a form of that."""
    write_tokenizer(path, byte_level(), chat_template=_TEMPLATE)
    tokenizer = Tokenizer.load(path, tool_format, reasoning)
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        intermediate_size=8,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=CONTEXT_WINDOW_TOKENS,
    )
    return ServedModel(ModelEntry(name=MODEL, source=str(path)), path, config, tokenizer)


class Script:
    """Script of the model's answer.

    If ``hold_at`` is given, the model waits before that token until ``goes_on`` is set.
    ``requests`` are the requests that engines received.
    """

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.text = ""
        self.hold_at: int | None = None
        self.goes_on = asyncio.Event()
        self.requests: list[EngineRequest] = []

    @property
    def token_ids(self) -> list[int]:
        """Return the token ids of the text and its end."""
        ids = self.model.tokenizer.encode(self.text, add_special_tokens=False)
        return [*ids, self.model.eos_token_ids[0]]


class ScribeEngine(EngineLike):
    """Writes the script, one token a step."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self._running: dict[str, asyncio.Task[None]] = {}
        self._closed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def stats(self) -> EngineStats:
        return EngineStats(num_blocks=1_000, num_free_blocks=1_000, max_tokens_per_request=4_096)

    def add(self, request: EngineRequest) -> None:
        self._script.requests.append(request)
        self._running[request.request_id] = asyncio.create_task(self._write(request))

    def cancel(self, request_id: str) -> None:
        task = self._running.pop(request_id, None)
        if task is not None:
            task.cancel()

    async def wait_closed(self) -> str:
        return await self._closed

    async def close(self) -> None:
        for request_id in list(self._running):
            self.cancel(request_id)
        if not self._closed.done():
            self._closed.set_result("closed")

    async def _write(self, request: EngineRequest) -> None:
        script, sampling = self._script, request.sampling
        token_ids = script.token_ids[: sampling.max_tokens]
        begin = len(request.output_token_ids)
        for number, token_id in enumerate(token_ids[begin:], begin):
            if script.hold_at == number:
                await script.goes_on.wait()
            await asyncio.sleep(0)
            finish = None
            if token_id in request.eos_token_ids:
                finish = FinishReason.STOP
            elif number + 1 == sampling.max_tokens:
                finish = FinishReason.LENGTH
            asks = sampling.logprobs is not None
            top = ((token_id, -0.5),) if sampling.logprobs else ()
            output = EngineOutput(
                request_id=request.request_id,
                token_ids=(token_id,),
                finish_reason=finish,
                started=number == begin,
                logprobs=(TokenLogprob(token_id, -0.5, top),) if asks else (),
            )
            self.on_outputs([output], self.stats)


class Life:
    """A worker; ``kill`` ends it as a signal would: it says nothing any more."""

    def __init__(self, system: ScribeSystem, name: str) -> None:
        config = WorkerConfig(
            name=name, model=MODEL, engine=EngineConfig(max_num_sequences=8), heartbeat_s=0.1
        )
        self.bus = MemoryBus(system.broker)
        self.engine = ScribeEngine(system.script)
        keeper = EngineKeeper(self.engine, self._no_other, system.clock)
        self.worker = Worker(
            self.bus, config, system.script.model, keeper, system.clock, system.index
        )
        self.stopping = asyncio.Event()
        self.run = asyncio.create_task(self.worker.run(self.stopping))

    async def _no_other(self) -> ScribeEngine:
        raise AssertionError("the engine does not die")

    async def kill(self) -> None:
        await self.engine.close()
        self.run.cancel()
        await asyncio.gather(self.run, return_exceptions=True)


class ScribeSystem:
    """``http`` asks the gateway, ``publish`` the bus. ``frames`` are all that jobs were sent."""

    def __init__(self, model: ServedModel) -> None:
        self.clock = SystemClock()
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.script = Script(model)
        self.index = WorkersIndex()
        self.lives: list[Life] = []
        self.frames: dict[str, list[Frame]] = {}
        self.front: RunningGateway
        self.http: httpx.AsyncClient
        self._numbers = itertools.count(1)

    def start_worker(self) -> Life:
        life = Life(self, f"scribe-{len(self.lives)}")
        self.lives.append(life)
        return life

    async def publish(
        self, body: dict[str, Any], *, packed: bool = False, subject: str = "", **fields: Any
    ) -> str:
        """Publish a job with a chat or completion body; the request id."""
        request_id = fields.setdefault("request_id", f"job-{next(self._numbers)}")
        job = {"model": MODEL, "reply": TENANT, "store_result": True} | body | fields
        payload = codec.encode(job) if packed else codec.encode_json(job)
        headers = None if packed else codec.JSON
        self.bus.jobs.publish_raw(  # type: ignore[attr-defined]
            subject or f"jobs.{MODEL}.free.{TENANT}", payload, headers, str(request_id)
        )
        return str(request_id)

    async def ended(self, request_id: str) -> list[Frame]:
        """Wait for the terminal frame of a job; all of its frames."""
        frames = self.frames.setdefault(request_id, [])
        await eventually(lambda: any(isinstance(one, TERMINAL_FRAMES) for one in frames))
        return frames

    async def result(self, request_id: str) -> JobResult:
        """The stored result of a job that has ended."""
        await self.ended(request_id)
        found: list[JobResult] = []

        async def is_there() -> bool:
            result = await self.bus.results.fetch(TENANT, request_id)
            found.extend([] if result is None else [result])
            return bool(found)

        await eventually(is_there)
        return found[0]

    async def run_job(self, body: dict[str, Any], **fields: Any) -> JobResult:
        """Publish a job and wait for its result."""
        return await self.result(await self.publish(body, **fields))

    def on_frame(self, request_id: str, frame: Frame) -> None:
        self.frames.setdefault(request_id, []).append(frame)


class WorkersIndex(FakeRunningRequests):
    """Index that also records the entries of workers."""

    async def start(self, request_id: str, worker_id: str, epoch: int, lease: str = "") -> None:
        del lease
        await super().finish(request_id, worker_id, epoch)
        self.known[request_id] = msgspec.structs.replace(self.known[request_id], finished=False)

    async def drop(self, request_id: str, worker_id: str) -> None:
        """Leases are not asked for here."""


@asynccontextmanager
async def scribe_system(
    model: ServedModel, *, trusts_templates: bool = False
) -> AsyncIterator[ScribeSystem]:
    """All of it, with one worker, until the block ends."""
    system = ScribeSystem(model)
    config = SchedulerConfig(models=(MODEL,))
    router = Router({AUTO: Route(small=MODEL, large=LARGE)})
    catalogue = ModelCatalogue([MODEL, LARGE], lambda _name: model, router, trusts_templates)
    scheduler = Scheduler(MemoryBus(system.broker), config, system.clock, catalogue, system.index)
    stopping = asyncio.Event()
    scheduling = asyncio.create_task(scheduler.run(stopping))
    system.start_worker()
    cards = {MODEL: ModelCard(id=MODEL, created=1_700_000_000, max_model_len=None)}
    models = LoadedModels(cards, lambda _name: model)
    await system.bus.frames.subscribe(TENANT, system.on_frame)
    async with (
        running_gateway(models=models, broker=system.broker) as front,
        httpx.AsyncClient(base_url=front.url, timeout=20.0) as http,
    ):
        system.front, system.http = front, http
        try:
            yield system
        finally:
            for life in system.lives:
                await life.kill()
            stopping.set()
            await scheduling


def texts_of(frames: Sequence[Frame]) -> dict[str, Any]:
    """Return the texts that a reader assembles from deltas by the rules of ``docs/protocol.md``."""
    num_tokens, epoch = 0, 0
    content, reasoning = "", ""
    calls: dict[int, dict[str, str]] = {}
    for frame in frames:
        if frame.epoch < epoch:
            continue
        epoch = frame.epoch
        if not isinstance(frame, Delta):
            continue
        had = num_tokens - frame.index
        assert had >= 0, "tokens are missing"
        if had >= len(frame.token_ids):
            continue
        content += frame.text[_cut(frame.text_ends, had) :]
        reasoning += frame.reasoning[_cut(frame.reasoning_ends, had) :]
        for i, call in enumerate(frame.tool_calls):
            ends = frame.tool_call_ends[i] if frame.tool_call_ends else ()
            known = calls.setdefault(
                call.index, {"id": call.id, "type": str(call.type), "text": ""}
            )
            part: Any = call.function or call.custom
            known.setdefault("name", part.name)
            text = getattr(part, "arguments", None)
            text = part.input if text is None else text
            known["text"] += text[_cut(ends, had) :]
        num_tokens = frame.index + len(frame.token_ids)
    return {
        "content": content,
        "reasoning": reasoning,
        "calls": [calls[number] for number in sorted(calls)],
        "num_tokens": num_tokens,
    }


def _cut(ends: tuple[int, ...], had: int) -> int:
    return ends[had - 1] if had and ends else 0
