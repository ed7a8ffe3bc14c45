"""vLLM's server, with token ids in and out.

At 32 streams ``/inference/v1/generate`` takes about a tenth less of the server's processor time per
token than ``/v1/completions``, since it makes no text. ``/v1/completions`` is used for servers
without it, for servers older than the tested version, and for log-probabilities of the prompt,
which only that path streams.
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
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.sampling import Grammar, GrammarKind
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.client import AnswerError, ServerClient
from millrace.workers.servers.dialect import (
    AnswerPart,
    AnswerReader,
    Call,
    Command,
    Dialect,
    ServerAddress,
    ServerFacts,
    ServerLoad,
    ServerStreamError,
    add_bias,
)
from millrace.workers.servers.dialects.commands import (
    SCHEDULING_POLICY,
    num_sequences,
    vllm_command,
)
from millrace.workers.servers.dialects.completions_answers import CompletionsReader, ServerChoice
from millrace.workers.servers.dialects.json_grammars import with_few_blanks
from millrace.workers.servers.dialects.server_facts import (
    PROBE_TEXT,
    check_probe,
    chosen_model,
    read_labels,
    read_samples,
    version_of,
)

_TOKEN_ID = "token_id:"  # noqa: S105  (vLLM's form of a token as its id)


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float
    top_logprobs: list[_Logprob] = []


class _Logprobs(msgspec.Struct):
    """Log-probabilities; ``content`` comes from /inference/v1/generate, the others from
    /v1/completions.
    """

    content: list[_Logprob] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(ServerChoice):
    logprobs: _Logprobs | None = None


class VllmReader(CompletionsReader[_Choice]):
    """Reader of vLLM's events.

    ``num_logprobs`` alternatives were requested (None: no log-probabilities). The first event
    repeats ``num_echoed`` tokens of the request before its own. The first ``num_prompt_tokens`` of
    them have ``num_prompt_logprobs`` alternatives each.
    """

    def __init__(
        self,
        *,
        num_logprobs: int | None,
        num_echoed: int = 0,
        num_prompt_tokens: int = 0,
        num_prompt_logprobs: int = 0,
    ) -> None:
        super().__init__(_Choice)
        self._num_logprobs = num_logprobs
        self._num_echoed = num_echoed
        self._num_prompt_tokens = num_prompt_tokens
        self._num_prompt_logprobs = num_prompt_logprobs

    def part_of(self, choice: _Choice) -> AnswerPart:
        prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
        logprobs: tuple[TokenLogprob, ...] = ()
        if choice.logprobs is not None:
            entries = _entries(choice.logprobs)
            if self._num_echoed:
                echoed = entries[: self._num_prompt_tokens]
                prompt_logprobs = tuple(_limited(one, self._num_prompt_logprobs) for one in echoed)
                entries, self._num_echoed = entries[self._num_echoed :], 0
            if self._num_logprobs is not None:
                limit = self._num_logprobs
                logprobs = tuple(entry for one in entries if (entry := _limited(one, limit)))
        return AnswerPart(
            token_ids=choice.token_ids or (),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )


def _entries(logprobs: _Logprobs) -> list[TokenLogprob | None]:
    if logprobs.content is not None:
        return [
            TokenLogprob(
                one.token_id,
                one.logprob,
                tuple((top.token_id, top.logprob) for top in one.top_logprobs),
            )
            for one in logprobs.content
        ]
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return [
        None
        if logprob is None
        else TokenLogprob(
            _id_of(token), logprob, tuple((_id_of(name), lp) for name, lp in (top or {}).items())
        )
        for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, tops, strict=True)
    ]


def _limited(entry: TokenLogprob | None, num_alternatives: int) -> TokenLogprob | None:
    """Return the entry with only the most likely alternatives: the server adds the token itself to
    them.
    """
    if entry is None:
        return None
    top = sorted(entry.top, key=lambda one: -one[1])[:num_alternatives]
    return TokenLogprob(entry.token_id, entry.logprob, tuple(top))


def _id_of(token: str) -> int:
    if not token.startswith(_TOKEN_ID):
        raise ServerStreamError("vLLM sent log-probabilities without token ids.")
    return int(token.removeprefix(_TOKEN_ID))


_GENERATE = "/inference/v1/generate"
_COMPLETIONS = "/v1/completions"
_GENERATE_SINCE = (0, 32)
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_PREEMPTIONS = "vllm:num_preemptions_total"
_STEPS = "vllm:iteration_tokens_total_count"
_CACHE_CONFIG = "vllm:cache_config_info"


class VllmDialect(Dialect):
    """Dialect of vLLM. ``priority`` is not sent to a server that already runs, as it may not accept
    it.
    """

    kind = EngineKind.VLLM
    package = "vllm (for processors: make engines-vllm)"
    program = "vllm"
    oldest_version = (0, 11)

    def __init__(self, model: ServedModel, config: EngineConfig, *, owned: bool) -> None:
        super().__init__(model, config, owned=owned)
        self._name = model.entry.name
        self._generates = owned
        # A running server does not report its grammar library, so its EBNF dialect is unknown.
        self.native_grammars = frozenset(GrammarKind) - (
            frozenset() if owned else {GrammarKind.EBNF}
        )
        self._takes_priority = owned and _last_option(config.arguments, SCHEDULING_POLICY) in (
            None,
            "priority",
        )

    @property
    def reset_path(self) -> str:
        """Path that exists if VLLM_SERVER_DEV_MODE is 1, as on servers that Millrace starts."""
        return "/reset_prefix_cache"

    def command(self, program: Path, address: ServerAddress) -> Command:
        return vllm_command(program, address.socket, self.model, self.config)

    # --- facts and load ---

    async def read_facts(self, client: ServerClient) -> ServerFacts:
        version = _text(await client.get_json("/version"), "version")
        models = await client.get_json("/v1/models")
        model = chosen_model(models, self.config.served_name, "vLLM")
        self._name = str(model["id"])
        window = model.get("max_model_len")
        facts = ServerFacts(
            version=version,
            model=self._name,
            context_window_tokens=window if isinstance(window, int) else None,
            kv_capacity_tokens=_kv_capacity_tokens(await client.get("/metrics")),
            max_num_sequences=num_sequences(self.config) if self.owned else 0,
        )
        if version_of(version) < self.oldest_version:
            return facts
        await self._check_tokenizer(client)
        self._generates = version_of(version) >= _GENERATE_SINCE
        await self._check_vocabulary(client)
        return facts

    async def _check_tokenizer(self, client: ServerClient) -> None:
        """Check that the server tokenizes a text as the catalogue's model does. Raises
        ConfigError.
        """
        body = {"model": self._name, "prompt": PROBE_TEXT, "add_special_tokens": False}
        answer = await client.post_json("/tokenize", body)
        check_probe(self.model, answer.get("tokens"), "vLLM")

    async def _check_vocabulary(self, client: ServerClient) -> None:
        """Check that the server accepts the model's last token id and none above it. Raises
        ConfigError.
        """
        size = self.model.vocab_size
        if await self._takes(client, size - 1) and not await self._takes(client, size):
            return
        raise ConfigError(
            f"The vLLM server's model does not have the {size} token ids of the catalogue's "
            f"{self.model.entry.name}: they are not the same model."
        )

    async def _takes(self, client: ServerClient, token_id: int) -> bool:
        request = EngineRequest(request_id="probe", prompt_token_ids=(token_id,))
        call = self._asking_one(self.call(request, ()))
        body = {name: value for name, value in call.body.items() if name != "stream_options"}
        try:
            await client.post_json(call.path, body | {"stream": False})
        except AnswerError as error:
            if self._generates and error.status in _ABSENT:
                self._generates = False
                return await self._takes(client, token_id)
            if error.status != _BAD_REQUEST:
                raise
            return False
        return True

    async def read_load(self, client: ServerClient) -> ServerLoad:
        names = (*_KV_USAGE, _PREEMPTIONS, _STEPS)
        samples = read_samples(await client.get("/metrics"), names)
        usages = samples[_KV_USAGE[0]] or samples[_KV_USAGE[1]]
        return ServerLoad(
            kv_usage=sum(usages) / len(usages) if usages else 0.0,
            num_steps=int(sum(samples[_STEPS])),
            num_preemptions=int(sum(samples[_PREEMPTIONS])),
        )

    # --- requests ---

    def call(self, request: EngineRequest, token_ids: Sequence[int]) -> Call:
        prompt = [*request.prompt_token_ids, *token_ids]
        body: dict[str, Any] = {
            "model": self._name,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.cache_salt:
            body["cache_salt"] = request.cache_salt
        if self._takes_priority and request.priority:
            # vLLM serves lower numbers first.
            body["priority"] = -request.priority
        sampling = self._sampling(request, len(token_ids))
        if self._generates and not _wants_prompt_logprobs(request, token_ids):
            if sampling["logprobs"] is not None:
                # vLLM counts the token itself as one of them.
                sampling["logprobs"] += 1
            sampling |= {"detokenize": False}
            return Call(_GENERATE, body | {"token_ids": prompt, "sampling_params": sampling})
        body |= {"prompt": prompt, "return_token_ids": True, "return_tokens_as_token_ids": True}
        if _wants_prompt_logprobs(request, token_ids):
            counts = (request.sampling.prompt_logprobs, request.sampling.logprobs)
            sampling |= {"echo": True, "logprobs": max(count or 0 for count in counts)}
        return Call(_COMPLETIONS, body | sampling)

    def call_one_of(
        self, request: EngineRequest, token_ids: Sequence[int], allowed: Sequence[int]
    ) -> Call:
        call = self._asking_one(self.call(request, token_ids))
        _sampling_of(call)["allowed_token_ids"] = list(allowed)
        return call

    def biased(self, call: Call, bias: dict[int, float]) -> Call:
        add_bias(_sampling_of(call), bias)
        return call

    def reader(self, request: EngineRequest, token_ids: Sequence[int]) -> AnswerReader:
        sampling = request.sampling
        if not _wants_prompt_logprobs(request, token_ids):
            return VllmReader(num_logprobs=sampling.logprobs)
        return VllmReader(
            num_logprobs=sampling.logprobs,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_echoed=len(request.prompt_token_ids) + len(token_ids),
            num_prompt_logprobs=sampling.prompt_logprobs or 0,
        )

    def _asking_one(self, call: Call) -> Call:
        sampling = _sampling_of(call)
        sampling |= {"max_tokens": 1, "min_tokens": min(1, sampling["min_tokens"])}
        return call

    def _sampling(self, request: EngineRequest, num_made: int) -> dict[str, Any]:
        """Return every parameter, so that the server's own defaults do not apply.

        Millrace names the tokens that end a sequence, since the server may know others.
        """
        sampling = request.sampling
        max_tokens = self.num_new_tokens(request, num_made)
        ends = dict.fromkeys(sampling.stop_token_ids)
        if not sampling.ignore_eos or sampling.grammar is not None:
            ends |= dict.fromkeys(request.eos_token_ids)
        said: dict[str, Any] = {
            "max_tokens": max_tokens,
            "min_tokens": min(max_tokens, max(0, sampling.min_tokens - num_made)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "seed": sampling.seed,
            "stop_token_ids": list(ends),
            "ignore_eos": True,
            "logprobs": sampling.logprobs,
            "bad_words": list(sampling.bad_words),
        }
        if sampling.allowed_token_ids:
            said["allowed_token_ids"] = list(sampling.allowed_token_ids)
        add_bias(said, sampling.logit_bias)
        if sampling.grammar is not None:
            said["structured_outputs"] = self._structured_outputs(sampling.grammar)
        return said

    def as_read(self, grammar: Grammar) -> Grammar:
        # The worker starts its server with the own engine's grammar library.
        return with_few_blanks(grammar) if self.owned else grammar

    def _structured_outputs(self, grammar: Grammar) -> dict[str, Any]:
        read = self.as_read(grammar)
        match read.kind:
            case GrammarKind.REGEX:
                return {"regex": read.text}
            case GrammarKind.EBNF:
                return {"grammar": read.text}
            case GrammarKind.JSON_OBJECT:
                return {"json_object": True}
            case GrammarKind.JSON_SCHEMA:
                return {"json": read.text}


_ABSENT = frozenset({403, 404, 405})
_BAD_REQUEST = 400


def _sampling_of(call: Call) -> dict[str, Any]:
    """Return the part of a call that has its sampling parameters."""
    sampling: dict[str, Any] = call.body.get("sampling_params", call.body)
    return sampling


def _wants_prompt_logprobs(request: EngineRequest, token_ids: Sequence[int]) -> bool:
    """Return whether prompt log-probabilities are due: they come only with an engine's first
    tokens.
    """
    return request.sampling.prompt_logprobs is not None and len(token_ids) == len(
        request.output_token_ids
    )


def _text(answer: Any, name: str) -> str:
    said = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(said, str):
        raise EngineFailedError("The server does not report its version, as vLLM does.")
    return said


def _kv_capacity_tokens(metrics: bytes) -> int:
    """Return the KV cache capacity in tokens of all of the server's engines together."""
    capacity = 0
    for labels in read_labels(metrics, _CACHE_CONFIG):
        blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
        if blocks.isdecimal() and size.isdecimal():
            capacity += int(blocks) * int(size)
    return capacity


def _last_option(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of a command-line option; the last one counts."""
    found = None
    for at, argument in enumerate(arguments):
        if argument == name and at + 1 < len(arguments):
            found = arguments[at + 1]
        elif argument.startswith(f"{name}="):
            found = argument.removeprefix(f"{name}=")
    return found
