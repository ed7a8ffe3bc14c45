"""SGLang's server, by token ids in and out of ``/generate``.

It draws by a request's seed only when it was started with ``--enable-deterministic-inference``
(``worker.engine.deterministic``); otherwise a seed decides nothing there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

from millrace.engine.grammar.library import ANY_OBJECT
from millrace.engine.types import EngineRequest
from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError
from millrace.schemas.sampling import Grammar, GrammarKind
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.client import AnswerError, ServerClient
from millrace.workers.servers.dialect import (
    Call,
    Command,
    Dialect,
    Reader,
    ServerAddress,
    ServerFacts,
    ServerLoad,
)
from millrace.workers.servers.dialects.json_grammars import with_few_blanks
from millrace.workers.servers.dialects.logit_bias import add_bias
from millrace.workers.servers.dialects.same_model import PROBE_TEXT, check_probe, chosen_model
from millrace.workers.servers.dialects.settings import check_settings, group_options
from millrace.workers.servers.dialects.sglang_answers import SglangReader
from millrace.workers.servers.prometheus_text import read_samples

_GENERATE = "/generate"
_ABORT = "/abort_request"
_KV_USAGE = "sglang:token_usage"
_NOT_FOUND = 404
# What is added to logits: more than models set two of them apart.
_DECISIVE = 200.0
_NO_TOP_K = -1


class SglangDialect(Dialect):
    """See the module."""

    kind = EngineKind.SGLANG
    package = "sglang"
    program = "sglang"
    oldest_version = (0, 5, 4)
    on_port = True

    def __init__(self, model: ServedModel, config: EngineConfig, *, owned: bool) -> None:
        super().__init__(model, config, owned=owned)
        self._takes_priority = owned
        self._has_metrics = owned
        self._reads_guidance = owned
        self.native_grammars = frozenset(GrammarKind)

    def command(self, program: Path, address: ServerAddress) -> Command:
        config = self.config
        check_settings(config, self.kind, "deterministic")
        if config.kv_cache_bytes:
            raise ConfigError(
                "worker.engine.kv_cache_bytes cannot be told to SGLang; give it "
                "gpu_memory_fraction, or --max-total-tokens in worker.engine.arguments."
            )
        options = {
            "--model-path": str(self.model.path),
            "--served-model-name": self.model.entry.name,
            "--host": "127.0.0.1",
            "--port": str(address.port),
            "--context-length": str(self.model.context_window_tokens),
            "--dtype": config.dtype,
            "--load-format": config.load_format,
            "--kv-cache-dtype": "fp8_e4m3" if config.kv_cache_dtype == "fp8" else "auto",
            # The server's own defaults for sampling must not count.
            "--sampling-defaults": "openai",
            # The library of the own engine, so that all grammars mean the same.
            "--grammar-backend": "llguidance",
            "--log-level-http": "warning",
            **group_options(config, "--tp-size", "--ep-size"),
        }
        if config.device == "cpu":
            options["--device"] = "cpu"
        if config.gpu_memory_fraction != EngineConfig().gpu_memory_fraction:
            options["--mem-fraction-static"] = str(config.gpu_memory_fraction)
        if config.max_num_sequences:
            options["--max-running-requests"] = str(config.max_num_sequences)
        if config.max_batch_tokens:
            options["--chunked-prefill-size"] = str(config.max_batch_tokens)
        flags = ["--enable-metrics", "--enable-priority-scheduling"]
        # All tokens so far with each event would be more of them the longer an answer gets.
        flags += ["--incremental-streaming-output"]
        flags += ["--enable-deterministic-inference"] if config.deterministic else []
        flags += [] if config.prefix_cache else ["--disable-radix-cache"]
        flags += [] if config.cuda_graphs else ["--disable-cuda-graph"]
        flags += [] if config.overlap else ["--disable-overlap-schedule"]
        # Everyone on the machine can read a command line.
        settings = address.folder / "sglang.yaml"
        settings.touch(mode=0o600)
        settings.write_text(f"api-key: {json.dumps(address.api_key)}\n")
        is_python = program.name.startswith("python")
        launch = ("-m", "sglang.launch_server") if is_python else ("serve",)
        return Command(
            (
                *(str(program), *launch, "--config", str(settings)),
                *(word for option in options.items() for word in option),
                *flags,
                *config.arguments,
            ),
            self._environment(),
        )

    def _environment(self) -> dict[str, str]:
        # Log-probabilities are the model's, before temperature, penalties and biases.
        variables = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}
        device = self.config.device
        if device.startswith("cuda:"):
            variables["CUDA_VISIBLE_DEVICES"] = device.removeprefix("cuda:")
        if self.config.num_threads:
            variables["OMP_NUM_THREADS"] = str(self.config.num_threads)
        return variables

    # --- what it says of itself ---

    async def read_facts(self, client: ServerClient) -> ServerFacts:
        info = await _first_of(client, "/server_info", "/get_server_info")
        version = info.get("version") if isinstance(info, dict) else None
        if not isinstance(version, str):
            raise EngineFailedError("The server does not say its version, as SGLang's does.")
        self._takes_priority = bool(info.get("enable_priority_scheduling"))
        self._has_metrics = bool(info.get("enable_metrics"))
        self._reads_guidance = info.get("grammar_backend") == "llguidance"
        if not self._reads_guidance:
            self.native_grammars = frozenset(GrammarKind) - {GrammarKind.EBNF}
        name, window = await self._model_of(client)
        await self._check_tokenizer(client)
        return ServerFacts(
            version=version,
            model=name,
            context_window_tokens=window,
            kv_capacity_tokens=_number(info, "max_total_num_tokens"),
            max_num_sequences=_number(info, "max_running_requests"),
        )

    async def _model_of(self, client: ServerClient) -> tuple[str, int | None]:
        """The model's name, and the longest sequence. Raises EngineFailedError or ConfigError."""
        models = await client.get_json("/v1/models")
        model = chosen_model(models, self.config.served_name, "SGLang")
        window = model.get("max_model_len")
        return str(model["id"]), window if isinstance(window, int) else None

    async def _check_tokenizer(self, client: ServerClient) -> None:
        """Raises ConfigError if it cuts a text into other tokens than the catalogue's model: they
        come with the log-probabilities of a prompt."""
        body = {
            "text": PROBE_TEXT,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await client.post_json(_GENERATE, body)
        try:
            entries = answer["meta_info"]["input_token_logprobs"]
            theirs = [int(entry[1]) for entry in entries]
        except (TypeError, KeyError, IndexError, ValueError):
            raise EngineFailedError(
                f"The server answers {_GENERATE} as SGLang's does not."
            ) from None
        check_probe(self.model, theirs, "SGLang")

    async def read_load(self, client: ServerClient) -> ServerLoad:
        if not self._has_metrics:
            await client.get(self.health_path)
            return ServerLoad()
        usages = read_samples(await client.get("/metrics"), [_KV_USAGE])[_KV_USAGE]
        return ServerLoad(kv_usage=sum(usages) / len(usages) if usages else 0.0)

    # --- requests ---

    def call(self, request: EngineRequest, token_ids: Sequence[int]) -> Call:
        body: dict[str, Any] = {
            "rid": f"{request.request_id}-{uuid4().hex}",
            "input_ids": [*request.prompt_token_ids, *token_ids],
            "sampling_params": self._sampling(request, len(token_ids)),
            "stream": True,
        }
        if request.cache_salt:
            body["extra_key"] = request.cache_salt
        if self._takes_priority and request.priority:
            body["priority"] = request.priority
        sampling = request.sampling
        counts = [sampling.logprobs]
        if _wants_prompt_logprobs(request, token_ids):
            counts.append(sampling.prompt_logprobs)
            body["logprob_start_len"] = 0
        if any(count is not None for count in counts):
            body |= {
                "return_logprob": True,
                "top_logprobs_num": max(count or 0 for count in counts),
            }
        return Call(_GENERATE, body)

    def call_one_of(
        self, request: EngineRequest, token_ids: Sequence[int], allowed: Sequence[int]
    ) -> Call:
        call = self.call(request, token_ids)
        sampling = call.body["sampling_params"]
        # Whichever are fewer.
        size = self.model.vocab_size
        if 2 * len(allowed) <= size:
            changes = dict.fromkeys(allowed, _DECISIVE)
        else:
            changes = dict.fromkeys(set(range(size)) - set(allowed), -_DECISIVE)
        add_bias(sampling, changes)
        sampling |= {"max_new_tokens": 1, "min_new_tokens": min(1, sampling["min_new_tokens"])}
        return call

    @property
    def reset_path(self) -> str:
        return "/flush_cache"

    def abort(self, call: Call) -> Call | None:
        """Without it the request runs on for some seconds behind a closed connection."""
        return Call(_ABORT, {"rid": call.body["rid"]})

    def biased(self, call: Call, bias: dict[int, float]) -> Call:
        add_bias(call.body["sampling_params"], bias)
        return call

    def reader(self, request: EngineRequest, token_ids: Sequence[int]) -> Reader:
        wants_prompt = _wants_prompt_logprobs(request, token_ids)
        return SglangReader(
            num_logprobs=request.sampling.logprobs,
            num_prompt_logprobs=request.sampling.prompt_logprobs if wants_prompt else None,
            num_prompt_tokens=len(request.prompt_token_ids),
        )

    def _sampling(self, request: EngineRequest, num_made: int) -> dict[str, Any]:
        """Every parameter, so that nothing of the server's own defaults counts."""
        sampling = request.sampling
        max_tokens = self.num_new_tokens(request, num_made)
        ends = dict.fromkeys(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= dict.fromkeys(request.eos_token_ids)
        said: dict[str, Any] = {
            "max_new_tokens": max_tokens,
            "min_new_tokens": min(max_tokens, max(0, sampling.min_tokens - num_made)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or _NO_TOP_K,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop_token_ids": list(ends),
            "ignore_eos": sampling.ignore_eos,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if sampling.seed is not None:
            said["sampling_seed"] = sampling.seed
        add_bias(said, sampling.logit_bias)
        if sampling.grammar is not None:
            said |= self._grammar(sampling.grammar)
        return said

    def as_read(self, grammar: Grammar) -> Grammar:
        return with_few_blanks(grammar) if self._reads_guidance else grammar

    def _grammar(self, grammar: Grammar) -> dict[str, str]:
        match grammar.kind:
            case GrammarKind.REGEX:
                return {"regex": grammar.text}
            case GrammarKind.EBNF:
                return {"ebnf": grammar.text}
            case GrammarKind.JSON_OBJECT | GrammarKind.JSON_SCHEMA:
                return {"json_schema": self.as_read(grammar).text or ANY_OBJECT}


def _wants_prompt_logprobs(request: EngineRequest, token_ids: Sequence[int]) -> bool:
    """They come with the first tokens of an engine, and not again."""
    return request.sampling.prompt_logprobs is not None and len(token_ids) == len(
        request.output_token_ids
    )


async def _first_of(client: ServerClient, *paths: str) -> Any:
    """What the first of these paths that exists answers."""
    for path in paths[:-1]:
        try:
            return await client.get_json(path)
        except AnswerError as error:
            if error.status != _NOT_FOUND:
                raise
    return await client.get_json(paths[-1])


def _number(info: dict[str, Any], name: str) -> int:
    """A figure of the server, wherever this version has it; 0 if nowhere."""
    states = info.get("internal_states")
    places = [info, *(states if isinstance(states, list) else ())]
    for place in places:
        found = place.get(name) if isinstance(place, dict) else None
        if isinstance(found, int):
            return found
    return 0
