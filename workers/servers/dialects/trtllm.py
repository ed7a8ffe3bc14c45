"""TensorRT-LLM's server, by token ids in and out of its ``/v1/completions``.

Its penalties of presence and frequency count the prompt, too, and of log-probabilities it tells the
texts of tokens, not their ids; so these are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

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
from millrace.workers.servers.dialects.completions_probe import check_completions
from millrace.workers.servers.dialects.logit_bias import add_bias
from millrace.workers.servers.dialects.openai_answers import TokenIdsReader
from millrace.workers.servers.dialects.same_model import chosen_model
from millrace.workers.servers.dialects.settings import check_settings, group_options

_COMPLETIONS = "/v1/completions"
_NUM_SEQUENCES = 64
# Its documentation bounds no seed; it is kept in 64 bits, one of them for the sign.
_MAX_SEED = 2**63 - 1


class TrtllmDialect(Dialect):
    """See the module."""

    kind = EngineKind.TRTLLM
    package = "tensorrt-llm"
    program = "trtllm-serve"
    oldest_version = (1, 0)
    on_port = True

    def __init__(self, model: ServedModel, config: EngineConfig, *, owned: bool) -> None:
        super().__init__(model, config, owned=owned)
        self._name = model.entry.name
        self._load = ServerLoad()

    def command(self, program: Path, address: ServerAddress) -> Command:
        config = self.config
        check_settings(config, self.kind)
        if config.device == "cpu":
            raise ConfigError("worker.engine.device is cpu; TensorRT-LLM runs on GPUs only.")
        if config.kv_cache_bytes:
            raise ConfigError(
                "worker.engine.kv_cache_bytes cannot be told to TensorRT-LLM; give it "
                "gpu_memory_fraction, which is there the share of what the weights leave."
            )
        settings = address.folder / "trtllm.yaml"
        # JSON is YAML, too.
        settings.write_bytes(msgspec.json.encode(self._settings()))
        options = {
            "--host": "127.0.0.1",
            "--port": str(address.port),
            "--max_seq_len": str(self.model.context_window_tokens),
            "--max_batch_size": str(config.max_num_sequences or _NUM_SEQUENCES),
            "--extra_llm_api_options": str(settings),
            **group_options(config, "--tp_size", "--ep_size"),
        }
        if config.max_batch_tokens:
            options["--max_num_tokens"] = str(config.max_batch_tokens)
        variables = {}
        if config.device.startswith("cuda:"):
            variables["CUDA_VISIBLE_DEVICES"] = config.device.removeprefix("cuda:")
        if config.num_threads:
            variables["OMP_NUM_THREADS"] = str(config.num_threads)
        words = (word for option in options.items() for word in option)
        program_words = (str(program), "serve", str(self.model.path))
        return Command((*program_words, *words, *config.arguments), variables)

    def _settings(self) -> dict[str, Any]:
        config = self.config
        cache: dict[str, Any] = {"enable_block_reuse": config.prefix_cache}
        if config.gpu_memory_fraction != EngineConfig().gpu_memory_fraction:
            cache["free_gpu_memory_fraction"] = config.gpu_memory_fraction
        if config.kv_cache_dtype != "auto":
            cache["dtype"] = config.kv_cache_dtype
        settings: dict[str, Any] = {
            "kv_cache_config": cache,
            # Prompts may be longer than a step.
            "enable_chunked_prefill": True,
            # What /metrics tells.
            "enable_iter_perf_stats": True,
            "disable_overlap_scheduler": not config.overlap,
            "dtype": config.dtype,
            "load_format": config.load_format,
        }
        if not config.cuda_graphs:
            settings["cuda_graph_config"] = None
        return settings

    # --- what it says of itself ---

    async def read_facts(self, client: ServerClient) -> ServerFacts:
        said = await client.get_json("/version")
        version = said.get("version") if isinstance(said, dict) else None
        if not isinstance(version, str):
            raise EngineFailedError("The server does not say its version, as TensorRT-LLM's does.")
        models = await client.get_json("/v1/models")
        model = chosen_model(models, self.config.served_name, "TensorRT-LLM")
        self._name = str(model["id"])
        timeout_s = self.config.start_timeout_s
        await check_completions(client, _COMPLETIONS, self._name, self.model, timeout_s)
        own = self.config.max_num_sequences or _NUM_SEQUENCES
        return ServerFacts(
            version=version, model=self._name, max_num_sequences=own if self.owned else 0
        )

    async def read_load(self, client: ServerClient) -> ServerLoad:
        """As of the last step that it tells: each is told once, and none while it is idle."""
        steps = await client.get_json("/metrics")
        if isinstance(steps, list) and steps and isinstance(steps[-1], dict):
            self._load = _load_of(steps[-1])
        return self._load

    # --- requests ---

    def call(self, request: EngineRequest, token_ids: Sequence[int]) -> Call:
        sampling = request.sampling
        ends = dict.fromkeys(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= dict.fromkeys(request.eos_token_ids)
        body: dict[str, Any] = {
            "model": self._name,
            "prompt": [*request.prompt_token_ids, *token_ids],
            "max_tokens": self.num_new_tokens(request, len(token_ids)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            # What ends a sequence is named by us, and told as a token.
            "stop_token_ids": list(ends),
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "detokenize": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed % _MAX_SEED
        add_bias(body, sampling.logit_bias)
        return Call(_COMPLETIONS, body)

    def biased(self, call: Call, bias: dict[int, float]) -> Call:
        add_bias(call.body, bias)
        return call

    def reader(self, request: EngineRequest, token_ids: Sequence[int]) -> Reader:  # noqa: ARG002
        return TokenIdsReader()


def _load_of(step: dict[str, Any]) -> ServerLoad:
    cache = step.get("kvCacheStats")
    cache = cache if isinstance(cache, dict) else {}
    used, blocks = _number(cache, "usedNumBlocks"), _number(cache, "maxNumBlocks")
    return ServerLoad(kv_usage=used / blocks if blocks else 0.0, num_steps=_number(step, "iter"))


def _number(said: dict[str, Any], name: str) -> int:
    found = said.get(name)
    return found if isinstance(found, int) else 0
