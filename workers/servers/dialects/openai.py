"""Dialect of every server with OpenAI's /v1/completions: SGLang, TGI, TensorRT-LLM and others.

A server that can return token ids is asked for them, and gets token ids of the prompt. For any
other server the token ids are made from its text. If the text tokenizes differently from the
model's tokens, a stream that continues after a crash may take another turn. A server is not sent
parameters that it does not have. A server that returns no token ids counts ``max_tokens`` itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from millrace.engine.grammar.library import ANY_OBJECT
from millrace.engine.types import EngineRequest
from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.incremental import IncrementalTokenizer
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import PROMISES
from millrace.schemas.errors import ConfigError, ParameterError
from millrace.schemas.sampling import Grammar, GrammarKind
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.client import AnswerError, ServerClient
from millrace.workers.servers.dialect import (
    AnswerReader,
    Call,
    Command,
    Dialect,
    ServerAddress,
    ServerFacts,
    ServerLoad,
    add_bias,
)
from millrace.workers.servers.dialects.completions_answers import TextReader, TokenIdsReader
from millrace.workers.servers.dialects.json_grammars import with_few_blanks
from millrace.workers.servers.dialects.openai_servers import SERVERS
from millrace.workers.servers.dialects.server_facts import check_completions, chosen_model

_VERSION = "/v1"
_NOT_FOUND = 404
# Bias that decides between tokens: larger than any difference of logits in practice.
_DECISIVE = 200.0
_GUIDANCE = "llguidance"
# Sampling fields sent unchanged if PROMISES lists them as supported.
_PLAIN_FIELDS = (
    *("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty"),
)


class OpenAiDialect(Dialect):
    """Dialect of all ``SERVERS``. The URL may end with /v1, as clients of OpenAI write it."""

    on_port = True

    def __init__(self, model: ServedModel, config: EngineConfig, *, owned: bool) -> None:
        super().__init__(model, config, owned=owned)
        self.kind = config.kind
        self._server = SERVERS[config.kind]
        self.package, self.program = self._server.package, self._server.program
        self.oldest_version = self._server.oldest_version
        promises = PROMISES[config.kind]
        self._unsupported = promises.unsupported
        self._has_token_ids = promises.takes_token_ids
        self.native_grammars = promises.grammars
        if owned and self._server.command is None:
            raise _no_url()
        is_versioned = config.url.rstrip("/").endswith(_VERSION)
        self._root = "" if is_versioned else _VERSION
        self._name = model.entry.name
        self._takes_priority = self._reads_guidance = owned
        self._load = ServerLoad()
        self._places: asyncio.Semaphore | None = None
        self._placed: set[str] = set()

    @property
    def health_path(self) -> str:
        path = self._server.health_path
        return path if self._server.info_paths else f"{self._root}{path}"

    @property
    def reset_path(self) -> str:
        return self._server.reset_path

    def command(self, program: Path, address: ServerAddress) -> Command:
        if self._server.command is None:
            raise _no_url()
        return self._server.command(program, address, self.model, self.config)

    # --- facts and load ---

    async def read_facts(self, client: ServerClient) -> ServerFacts:
        facts = await self._read_info(client) if self._server.info_paths else ServerFacts()
        self._name = facts.model
        if not facts.model:
            models = await client.get_json(f"{self._root}/models")
            model = chosen_model(models, self.config.served_name, self._server.name)
            self._name, window = str(model["id"]), model.get("max_model_len")
            facts = msgspec.structs.replace(
                facts,
                model=self._name,
                context_window_tokens=window if isinstance(window, int) else None,
            )
        body = {"model": self._name, **self._server.probe}
        path, timeout_s = f"{self._root}/completions", self.config.start_timeout_s
        await check_completions(client, path, body, self.model, self._server.name, timeout_s)
        return facts

    async def _read_info(self, client: ServerClient) -> ServerFacts:
        """Read the server's info. Raises EngineFailedError if it is another kind of server."""
        server, paths = self._server, self._server.info_paths
        info = await _first_of(client, *paths)
        version = info.get("version") if isinstance(info, dict) else None
        if not isinstance(version, str):
            raise EngineFailedError(
                f"The server does not report its version, as {server.name} does."
            )
        try:
            facts = server.facts(info)
        except (KeyError, TypeError, ValueError) as error:
            raise EngineFailedError(
                f"The server at {client.url} is not of the kind {self.kind}: {paths[0]} does not "
                f"report {error}."
            ) from error
        self._takes_priority = bool(info.get("enable_priority_scheduling"))
        self._reads_guidance = info.get("grammar_backend") == _GUIDANCE
        if not self._reads_guidance:
            # Another grammar library reads another language.
            self.native_grammars -= {GrammarKind.EBNF}
        if server.refuses_when_full:
            self._places = asyncio.Semaphore(facts.max_num_sequences)
        own = self.config.max_num_sequences or server.num_sequences
        num_sequences = facts.max_num_sequences or (own if self.owned else 0)
        return msgspec.structs.replace(facts, version=version, max_num_sequences=num_sequences)

    async def read_load(self, client: ServerClient) -> ServerLoad:
        if self._server.load_path:
            told = self._server.load(await client.get(self._server.load_path))
            self._load = told or self._load
        return self._load

    # --- requests ---

    async def begin(self, request: EngineRequest) -> None:
        if self._places is not None:
            await self._places.acquire()
            self._placed.add(request.request_id)

    def end(self, request_id: str) -> None:
        if self._places is not None and request_id in self._placed:
            self._placed.remove(request_id)
            self._places.release()

    def call(self, request: EngineRequest, token_ids: Sequence[int]) -> Call:
        server, sampling = self._server, request.sampling
        max_tokens = self.num_new_tokens(request, len(token_ids))
        body: dict[str, Any] = {
            "model": self._name,
            "prompt": [*request.prompt_token_ids, *token_ids]
            if self._has_token_ids
            else prompt_text(self.model.tokenizer, request, token_ids),
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **server.fields,
        }
        for name in _PLAIN_FIELDS:
            value = getattr(sampling, name)
            is_refused = name in server.rejects_neutral and value == 1.0
            if name not in self._unsupported and not is_refused:
                body[name] = value
        if sampling.seed is not None:
            body["seed"] = sampling.seed % server.max_seed
        if "top_k" not in self._unsupported:
            body["top_k"] = sampling.top_k or server.no_top_k
        if "min_tokens" not in self._unsupported:
            body["min_tokens"] = min(max_tokens, max(0, sampling.min_tokens - len(token_ids)))
        if "stop_token_ids" not in self._unsupported:
            # Millrace names the tokens that end a sequence, and gets them as tokens.
            ends = dict.fromkeys(sampling.stop_token_ids)
            if not sampling.ignore_eos:
                ends |= dict.fromkeys(request.eos_token_ids)
            body["stop_token_ids"] = list(ends)
            body["ignore_eos"] = server.ends_only_by_names or sampling.ignore_eos
        if server.abort_path:
            body["rid"] = f"{request.request_id}-{uuid4().hex}"
        if server.has_cache_salts and request.cache_salt:
            body["cache_salt"] = request.cache_salt
        if server.has_priorities and self._takes_priority and request.priority:
            body["priority"] = request.priority
        add_bias(body, sampling.logit_bias)
        if sampling.grammar is not None:
            body |= self._grammar(sampling.grammar)
        return Call(f"{self._root}/completions", body)

    def call_one_of(
        self, request: EngineRequest, token_ids: Sequence[int], allowed: Sequence[int]
    ) -> Call:
        if not self.native_grammars:
            return super().call_one_of(request, token_ids, allowed)
        call = self.call(request, token_ids)
        # Bias the smaller set.
        size = self.model.vocab_size
        if 2 * len(allowed) <= size:
            changes = dict.fromkeys(allowed, _DECISIVE)
        else:
            changes = dict.fromkeys(set(range(size)) - set(allowed), -_DECISIVE)
        add_bias(call.body, changes)
        few = {"max_tokens": 1, "min_tokens": min(1, call.body["min_tokens"])}
        return call._replace(body=call.body | few)

    def abort(self, call: Call) -> Call | None:
        """Return the call that aborts ``call``: SGLang continues for some seconds after a
        connection closes.
        """
        path = self._server.abort_path
        return Call(path, {"rid": call.body["rid"]}) if path else None

    def biased(self, call: Call, bias: dict[int, float]) -> Call:
        add_bias(call.body, bias)
        return call

    def reader(self, request: EngineRequest, token_ids: Sequence[int]) -> AnswerReader:
        if self._has_token_ids:
            return TokenIdsReader()
        before = (*request.prompt_token_ids, *token_ids)
        return TextReader(IncrementalTokenizer(self.model.tokenizer, before))

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


def prompt_text(tokenizer: Tokenizer, request: EngineRequest, token_ids: Sequence[int]) -> str:
    """Return the text of a prompt and of the completion so far, with special tokens spelled out.

    Special tokens that the server itself puts before each prompt are left out.

    Raises:
        ParameterError: the prompt is not valid text.
    """
    prompt = _less_begin(tokenizer, request.prompt_token_ids)
    spelled = b"".join(map(tokenizer.token_bytes, prompt))
    try:
        spelled.decode()
    except UnicodeDecodeError:
        raise ParameterError(
            "prompt_token_ids",
            "prompt_token_ids begins or ends within a character; the engine of this model takes "
            "prompts as text.",
        ) from None
    return tokenizer.decode((*prompt, *token_ids), skip_special_tokens=False)


def _less_begin(tokenizer: Tokenizer, token_ids: Sequence[int]) -> Sequence[int]:
    before = (tokenizer.special_around or ([], []))[0]
    num = len(before)
    return token_ids[num:] if list(token_ids[:num]) == before else token_ids


async def _first_of(client: ServerClient, *paths: str) -> Any:
    """Return the answer of the first path that exists."""
    for path in paths[:-1]:
        try:
            return await client.get_json(path)
        except AnswerError as error:
            if error.status != _NOT_FOUND:
                raise
    return await client.get_json(paths[-1])


def _no_url() -> ConfigError:
    return ConfigError(
        "An engine of the kind openai is a server that already runs: set its URL in "
        "worker.engine.url (--engine-url)."
    )
