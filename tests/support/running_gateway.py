"""A gateway on a real socket, over the in-memory bus, with a model of one byte a token."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import msgspec

from millrace.bus.memory import MemoryBroker, MemoryBus
from millrace.bus.running_requests import RunningRequestIndex
from millrace.gateway.core import Backends, Gateway
from millrace.gateway.models import LoadedModels
from millrace.gateway.server import Server, listen
from millrace.gateway.tools.catalogue import ToolCatalogue
from millrace.registry.checkpoints.adapters.outline import AdapterOutline, read_adapter_outline
from millrace.registry.checkpoints.checkpoint import ModelConfig
from millrace.registry.checkpoints.classifier import ClassifierHead
from millrace.registry.pricing import UNPRICED
from millrace.registry.served import EmbeddingSettings, num_kept_tokens
from millrace.registry.tokenizers.token_bytes import TokenBytes
from millrace.runtime.clock import SystemClock
from millrace.runtime.redis.link import RedisLink
from millrace.runtime.tracing import Tracing
from millrace.schemas.chat.reasoning import ReasoningFormat
from millrace.schemas.config import Config, GatewayConfig, MetricsConfig, RedisConfig, StorageConfig
from millrace.schemas.context_length import PromptParts
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ContextLengthError, ParameterError
from millrace.schemas.jobs import ChatMessage, Job
from millrace.schemas.models.cards import ModelCard
from millrace.schemas.pooling import ModelTask, Pooling
from millrace.schemas.sampling import SamplingDefaults
from millrace.schemas.tools import ToolDefinition, ToolFormat
from tests.support.echo_worker import EMBEDDING_SIZE, EchoWorker

CONTEXT_WINDOW_TOKENS = 4_096
# What adapters of the model have to fit.
ADAPTABLE = ModelConfig(
    architecture="LlamaForCausalLM",
    hidden_size=32,
    vocab_size=256,
    max_position_embeddings=CONTEXT_WINDOW_TOKENS,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    intermediate_size=48,
)
MODEL = "echo"


class ByteTokenizer:
    """UTF-8 bytes are token ids; a conversation is its last message, behind the template of the
    request if that brings one."""

    def __init__(self, template: str = "") -> None:
        self._template = template
        self.table = TokenBytes(tuple(bytes([one]) for one in range(256)), "replace")
        self.special_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[ToolDefinition] = (),
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] = {},
    ) -> list[int]:
        return list((self._template + messages[-1].content).encode())

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def spelling(self, token_id: int) -> str:
        return chr(token_id)


class ByteModel:
    """Stand-in for a served model whose tokens are bytes."""

    def __init__(self) -> None:
        self.tokenizer = ByteTokenizer()
        self.context_window_tokens = CONTEXT_WINDOW_TOKENS
        self.vocab_size = 256
        self.eos_token_ids: tuple[int, ...] = ()
        self.tool_format: ToolFormat | None = ToolFormat.HERMES
        self.reasoning_format: ReasoningFormat | None = None
        self.engine_kind = EngineKind.REAL
        self.prices = UNPRICED
        self.sampling_defaults = SamplingDefaults()
        self.task: ModelTask = "generate"
        self.classifier: ClassifierHead | None = None
        self.embedding_size = EMBEDDING_SIZE
        self.embedding_defaults = EmbeddingSettings(Pooling.MEAN, normalize=True)

    def adapter_outline(self, folder: Path) -> AdapterOutline:
        return read_adapter_outline(folder, ADAPTABLE)

    def with_chat_template(self, source: str) -> Self:
        model = copy.copy(self)
        model.tokenizer = ByteTokenizer(source)
        return model

    def prepare(self, job: Job, seed_source: random.Random) -> Job:
        token_ids = job.prompt_token_ids
        if job.messages is not None:
            token_ids = tuple(self.tokenizer.encode_chat(job.messages))
        elif job.prompt is not None:
            token_ids = tuple(self.tokenizer.encode(job.prompt + (job.text_pair or "")))
        assert token_ids is not None
        for i, token_id in enumerate(token_ids):
            if not 0 <= token_id <= 255:
                param = f"prompt_token_ids[{i}]"
                raise ParameterError(param, f"{param} is not in the vocabulary")
        num_kept = num_kept_tokens(job, CONTEXT_WINDOW_TOKENS)
        token_ids = token_ids if num_kept is None else token_ids[-num_kept:]
        left = CONTEXT_WINDOW_TOKENS - len(token_ids)
        wanted = job.sampling.max_tokens
        if left < (0 if job.pooling else wanted or 1):
            field = "prompt" if job.messages is None else "messages"
            raise ContextLengthError(len(token_ids), wanted, CONTEXT_WINDOW_TOKENS, field=field)
        sampling = msgspec.structs.replace(
            job.sampling,
            max_tokens=wanted or max(left, 1),
            seed=seed_source.randrange(2**63) if job.sampling.seed is None else job.sampling.seed,
            reasoning=None if job.messages is None else self.reasoning_format,
        )
        return msgspec.structs.replace(
            job,
            prompt=None,
            text_pair=None,
            messages=None,
            chat_template_kwargs={},
            truncate_prompt_tokens=None,
            prompt_token_ids=token_ids,
            sampling=sampling,
        )

    def prompt_parts(self, _job: Job, _num_prompt_tokens: int | None) -> PromptParts | None:
        return None


def byte_models() -> LoadedModels:
    return LoadedModels(
        {MODEL: ModelCard(id=MODEL, created=1_700_000_000, max_model_len=None)},
        lambda _name: ByteModel(),
    )


class RunningGateway:
    """A gateway that serves, its worker, and where to find both."""

    def __init__(
        self, gateway: Gateway, server: Server, broker: MemoryBroker, worker: EchoWorker
    ) -> None:
        self.gateway = gateway
        self.server = server
        self.broker = broker
        self.worker = worker

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.server.port}/v1/ws"

    def close_connections(self) -> None:
        """Close every client's connection (1012) and keep accepting new ones."""
        for connection in self.connections:
            connection.shutdown()

    @property
    def connections(self) -> list[Any]:
        """The server's side of each connection, in no order."""
        return list(self.server._server.server_state.connections)


@asynccontextmanager
async def running_gateway(
    config: GatewayConfig | None = None,
    models: LoadedModels | None = None,
    *,
    gateway_id: str = "gw-test",
    broker: MemoryBroker | None = None,
    redis: RedisConfig | None = None,
    tools: ToolCatalogue | None = None,
    tracing: Tracing | None = None,
    storage: StorageConfig | None = None,
    exposure: MetricsConfig | None = None,
) -> AsyncIterator[RunningGateway]:
    """Serve on a free port until the block ends.

    Gateways on one ``broker`` and ``redis`` are of one system; the first brings the worker.
    """
    config = msgspec.structs.replace(config or GatewayConfig(), port=0, gateway_id=gateway_id)
    is_first = broker is None
    broker = broker or MemoryBroker()
    bus = MemoryBus(broker)
    worker = EchoWorker(MemoryBus(broker))
    link = None if redis is None else RedisLink(redis)
    index = None if redis is None else RunningRequestIndex(redis)
    gateway = Gateway(
        Backends(bus, link, index),
        Config(
            gateway=config,
            storage=storage or StorageConfig(),
            metrics=exposure or MetricsConfig(),
        ),
        models or byte_models(),
        SystemClock(),
        random.Random(7),
        tools=tools,
        tracing=tracing,
    )
    server = Server(gateway, listen(config), tune=False)
    serving = asyncio.create_task(server.serve())
    try:
        await server.wait_started()
        if is_first:
            await worker.start()
        yield RunningGateway(gateway, server, broker, worker)
    finally:
        await server.stop(drain_timeout_s=0.0)
        await serving
        await worker.close()
        await bus.close()
        if link is not None:
            await link.close()
        if index is not None:
            await index.close()
