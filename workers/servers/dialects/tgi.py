"""Text Generation Inference's server: prompts as text, answers as token ids (``/generate_stream``).

Its penalties of presence and frequency are others than those of OpenAI's API, its log-probabilities
are those of the distribution that it draws from, and it can neither be held to tokens nor go on
within a grammar; so these are refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millrace.engine.types import EngineRequest
from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.client import ServerClient
from millrace.workers.servers.dialect import (
    Call,
    Command,
    Dialect,
    Reader,
    ServerAddress,
    ServerFacts,
    ServerLoad,
)
from millrace.workers.servers.dialects.prompt_text import num_whole, prompt_text
from millrace.workers.servers.dialects.same_model import PROBE_TEXT, check_probe
from millrace.workers.servers.dialects.settings import check_settings, check_usual, group_options
from millrace.workers.servers.dialects.tgi_answers import TgiReader
from millrace.workers.servers.prometheus_text import read_samples

_GENERATE = "/generate_stream"
_STEPS = "tgi_batch_inference_count"
_NUM_REQUESTS = 128
# It sees a moment after its reader that an answer is over: so much of its room is for that.
_SPARE = 4


class TgiDialect(Dialect):
    """See the module. What it has no room for it refuses, so it is given no more at a time."""

    kind = EngineKind.TGI
    package = "text-generation-inference"
    program = "text-generation-launcher"
    oldest_version = (2, 0)
    on_port = True

    def __init__(self, model: ServedModel, config: EngineConfig, *, owned: bool) -> None:
        super().__init__(model, config, owned=owned)
        self._places = asyncio.Semaphore(config.max_num_sequences or _NUM_REQUESTS)
        self._placed: set[str] = set()

    def command(self, program: Path, address: ServerAddress) -> Command:
        config = self.config
        check_settings(config, self.kind)
        check_usual(config, self.kind, "load_format", "overlap")
        if config.kv_cache_bytes:
            raise ConfigError(
                "worker.engine.kv_cache_bytes cannot be told to TGI; give it gpu_memory_fraction, "
                "or --max-batch-total-tokens in worker.engine.arguments."
            )
        window = self.model.context_window_tokens
        num_requests = config.max_num_sequences or _NUM_REQUESTS
        options = {
            "--model-id": str(self.model.path),
            "--hostname": "127.0.0.1",
            "--port": str(address.port),
            # Any that is free: its metrics are at the other port, too.
            "--prometheus-port": "0",
            "--shard-uds-path": str(address.folder / "shard"),
            "--max-input-tokens": str(window - 1),
            "--max-total-tokens": str(window),
            "--max-concurrent-requests": str(num_requests + -(-num_requests // (_SPARE - 1))),
            "--usage-stats": "off",
            **group_options(config, "--num-shard"),
        }
        if config.dtype != "auto":
            options["--dtype"] = config.dtype
        if config.kv_cache_dtype == "fp8":
            options["--kv-cache-dtype"] = "fp8_e4m3fn"
        if config.gpu_memory_fraction != EngineConfig().gpu_memory_fraction:
            options["--cuda-memory-fraction"] = str(config.gpu_memory_fraction)
        if config.max_batch_tokens:
            options["--max-batch-prefill-tokens"] = str(config.max_batch_tokens)
        if not config.cuda_graphs:
            options["--cuda-graphs"] = "0"
        words = (word for option in options.items() for word in option)
        # Everyone on the machine can read a command line, but not these.
        variables = {"API_KEY": address.api_key, **self._environment()}
        return Command((str(program), *words, *config.arguments), variables)

    def _environment(self) -> dict[str, str]:
        variables = {}
        device = self.config.device
        if device == "cpu":
            variables["CUDA_VISIBLE_DEVICES"] = ""
        elif device.startswith("cuda:"):
            variables["CUDA_VISIBLE_DEVICES"] = device.removeprefix("cuda:")
        if self.config.num_threads:
            variables["OMP_NUM_THREADS"] = str(self.config.num_threads)
        if not self.config.prefix_cache:
            variables["PREFIX_CACHING"] = "0"
        return variables

    # --- what it says of itself ---

    async def read_facts(self, client: ServerClient) -> ServerFacts:
        info = await client.get_json("/info")
        try:
            name, version = str(info["model_id"]), str(info["version"])
            room = int(info["max_concurrent_requests"])
            window, longest_prompt = int(info["max_total_tokens"]), int(info["max_input_tokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailedError(
                f"What listens at {client.url} is no tgi server: /info does not tell {error}."
            ) from error
        await self._check_tokenizer(client)
        num_requests = max(1, room - -(-room // _SPARE))
        self._places = asyncio.Semaphore(num_requests)
        return ServerFacts(
            version=version,
            model=name,
            # A prompt that may be no longer leaves room for one token more at least.
            context_window_tokens=min(window, longest_prompt + 1),
            max_num_sequences=num_requests,
        )

    async def _check_tokenizer(self, client: ServerClient) -> None:
        """Raises ConfigError if it cuts a text into other tokens than the catalogue's model."""
        answer = await client.post_json("/tokenize", {"inputs": PROBE_TEXT})
        try:
            token_ids = [int(token["id"]) for token in answer]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailedError("The server answers /tokenize as TGI's does not.") from error
        check_probe(self.model, token_ids, "TGI")

    async def read_load(self, client: ServerClient) -> ServerLoad:
        samples = read_samples(await client.get("/metrics"), [_STEPS])
        return ServerLoad(num_steps=int(sum(samples[_STEPS])))

    # --- requests ---

    async def begin(self, request: EngineRequest) -> None:
        await self._places.acquire()
        self._placed.add(request.request_id)

    def end(self, request_id: str) -> None:
        if request_id in self._placed:
            self._placed.remove(request_id)
            self._places.release()

    def call(self, request: EngineRequest, token_ids: Sequence[int]) -> Call:
        """Behind the last whole character: what there is of the next one the server makes anew."""
        sampling, whole = request.sampling, token_ids[: self._num_whole(request, token_ids)]
        parameters: dict[str, Any] = {
            "max_new_tokens": self.num_new_tokens(request, len(whole)),
            "do_sample": sampling.temperature > 0,
            "repetition_penalty": sampling.repetition_penalty,
            "details": True,
        }
        if sampling.temperature > 0:
            # It takes none that changes nothing.
            parameters["temperature"] = sampling.temperature
            usual = {"top_k": 0, "top_p": 1.0, "typical_p": 1.0}
            given = {name: getattr(sampling, name) for name in usual}
            parameters |= {name: value for name, value in given.items() if value != usual[name]}
            if sampling.seed is not None:
                parameters["seed"] = sampling.seed
        text = prompt_text(self.model.tokenizer, request, whole)
        return Call(_GENERATE, {"inputs": text, "parameters": parameters})

    def reader(self, request: EngineRequest, token_ids: Sequence[int]) -> Reader:
        return TgiReader(token_ids[self._num_whole(request, token_ids) :])

    def _num_whole(self, request: EngineRequest, token_ids: Sequence[int]) -> int:
        return num_whole(self.model.tokenizer, request.prompt_token_ids, token_ids)
