"""Engine on vLLM's own server, with the conformance suite; run by ``make test-engines``."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import psutil
import pytest
import pytest_asyncio

from millrace.engine.types import EngineOutput, EngineRequest
from millrace.registry.catalogue import Catalogue
from millrace.registry.served import ServedModel
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError
from millrace.schemas.frames import FinishReason
from millrace.schemas.sampling import Grammar, GrammarKind
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.process.keeper import EngineKeeper
from millrace.workers.servers.dialects.server_facts import read_samples
from millrace.workers.servers.server_engine import ServerEngine
from millrace.workers.servers.starting import start_server_engine
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.waiting import eventually
from tests.workers.conformance import PROMPT, EngineConformance, Heard, request, running
from tests.workers.servers.relay import port_of

pytestmark = [
    pytest.mark.slow(reason="starts another project's server with a real model"),
    pytest.mark.vllm,
    pytest.mark.timeout(600),
]

_CONTEXT_WINDOW_TOKENS = 4096
# Of its prefix cache, on a processor.
_BLOCK_TOKENS = 128
_SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 4},'
    ' "size": {"type": "integer", "minimum": 1, "maximum": 99}},'
    ' "required": ["name", "size"], "additionalProperties": false}'
)
_REGEX = "(ab|cd){3,5}x[0-9]{2,4}"
_EBNF = 'start: greeting (", " name)+ "."\ngreeting: "hello" | "good day"\nname: /[A-C][a-c]{1,3}/'
_GRAMMARS = {
    GrammarKind.JSON_OBJECT: "",
    GrammarKind.JSON_SCHEMA: _SCHEMA,
    GrammarKind.REGEX: _REGEX,
    GrammarKind.EBNF: _EBNF,
}


def _checkpoint(folder: Path, **changes: Any) -> ServedModel:
    """Save a tiny checkpoint with heads of a size that vLLM's kernels have."""
    path = write_checkpoint(
        folder,
        **{
            "hidden_size": 256,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "max_position_embeddings": _CONTEXT_WINDOW_TOKENS,
            **changes,
        },
    )
    return _served(path)


def _served(path: Path) -> ServedModel:
    catalogue = Catalogue({}).with_model(str(path))
    return ServedModel.load(catalogue, catalogue.names()[0])


def _config(**changes: Any) -> EngineConfig:
    """Return settings without compilation, which takes longer than all these tests."""
    return EngineConfig(
        kind=EngineKind.VLLM,
        **{"cuda_graphs": False, "kv_cache_bytes": 1 << 26, "max_num_sequences": 4, **changes},
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return _checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: ServedModel) -> AsyncIterator[ServerEngine]:
    started = await start_server_engine(model, _config(), SystemClock())
    async with running(started):
        yield started


def _asking(model: ServedModel, name: str, *output: int, **sampling: Any) -> EngineRequest:
    """Return a greedy request that ends at the model's end-of-sequence token."""
    asked = request(name, output_token_ids=tuple(output), **sampling)
    return msgspec.structs.replace(asked, eos_token_ids=model.eos_token_ids)


async def _number(engine: ServerEngine, state: str) -> float:
    """Return the number of requests in this state: running, or waiting."""
    name = f"vllm:num_requests_{state}"
    (number,) = read_samples(await engine._client.get("/metrics"), [name])[name]
    return number


@pytest.mark.asyncio(loop_scope="module")
class TestVllm(EngineConformance):
    kind = EngineKind.VLLM

    async def test_tokens_are_those_that_its_own_api_gives(self, engine: ServerEngine) -> None:
        heard = Heard(engine)
        engine.add(request("a", max_tokens=24))
        await heard.ended("a")
        body = {
            "model": engine.facts.model,
            "prompt": list(PROMPT),
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = await engine._client.post_json("/v1/completions", body)
        assert heard.tokens("a") == answer["choices"][0]["token_ids"]

    async def test_engine_reports_the_facts_of_its_server(
        self, engine: ServerEngine, model: ServedModel
    ) -> None:
        facts = engine.facts
        assert facts.model == model.entry.name
        assert facts.context_window_tokens == _CONTEXT_WINDOW_TOKENS
        assert facts.kv_capacity_tokens >= _CONTEXT_WINDOW_TOKENS
        assert facts.max_num_sequences == 4

    async def test_a_cancel_frees_its_slot(self, engine: ServerEngine) -> None:
        heard = Heard(engine)
        engine.add(request("gone", max_tokens=4000, ignore_eos=True))
        await eventually(lambda: bool(heard.tokens("gone")), timeout_s=60.0)

        async def runs(number: int) -> bool:
            return await _number(engine, "running") == number

        await eventually(lambda: runs(1), timeout_s=60.0)
        engine.cancel("gone")
        await eventually(lambda: runs(0), timeout_s=60.0)
        assert len(heard.tokens("gone")) < 4000

    async def test_log_probabilities_of_the_completion_and_the_prompt(
        self, engine: ServerEngine
    ) -> None:
        heard = Heard(engine)
        engine.add(request("l", logprobs=3, prompt_logprobs=2, max_tokens=5))
        engine.add(request("few", logprobs=0, temperature=1.0, max_tokens=5))
        engine.add(request("most", logprobs=20, temperature=1.5, max_tokens=5))
        await heard.ended("l", "few", "most")
        entries = [entry for output in heard.of("l") for entry in output.logprobs]
        assert [entry.token_id for entry in entries] == heard.tokens("l")
        for entry in entries:
            assert len(entry.top) == 3
            assert entry.top[0] == (entry.token_id, entry.logprob)
            assert [logprob for _, logprob in entry.top] == sorted(
                (logprob for _, logprob in entry.top), reverse=True
            )
        (prompt,) = [output.prompt_logprobs for output in heard.of("l") if output.prompt_logprobs]
        assert prompt[0] is None
        rest = [entry for entry in prompt[1:] if entry is not None]
        assert tuple(entry.token_id for entry in rest) == PROMPT[1:]
        assert all(len(entry.top) == 2 for entry in rest)
        few = [entry for output in heard.of("few") for entry in output.logprobs]
        assert [(entry.token_id, entry.top) for entry in few] == [
            (token, ()) for token in heard.tokens("few")
        ]
        most = [entry for output in heard.of("most") for entry in output.logprobs]
        assert all(len(entry.top) == 20 for entry in most)

    async def test_the_other_endpoint_gives_the_same(self, engine: ServerEngine) -> None:
        """The other endpoint is for servers without the endpoint for tokens."""
        heard, dialect = Heard(engine), engine._dialect
        options: dict[str, Any] = {
            "logprobs": 2,
            "max_tokens": 8,
            "logit_bias": {40: 2.0},
            "min_tokens": 2,
        }
        engine.add(request("a", **options))
        await heard.ended("a")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dialect, "_generates", False)
            engine.add(request("b", **options))
            await heard.ended("b")
        assert _without_id(heard.of("b")) == _without_id(heard.of("a"))

    async def test_what_steers_the_tokens(self, engine: ServerEngine, model: ServedModel) -> None:
        heard = Heard(engine)
        engine.add(_asking(model, "biased", logit_bias={50: 100.0}, max_tokens=4))
        engine.add(_asking(model, "free", max_tokens=16))
        await heard.ended("biased", "free")
        assert heard.tokens("biased") == [50] * 4
        free = heard.tokens("free")
        word = model.tokenizer.decode(free[2:3])
        engine.add(_asking(model, "without", bad_words=(word,), max_tokens=16))
        engine.add(_asking(model, "long", logit_bias={1: 100.0}, min_tokens=5, max_tokens=9))
        engine.add(_asking(model, "deaf", logit_bias={1: 100.0}, ignore_eos=True, max_tokens=9))
        engine.add(_asking(model, "other", presence_penalty=2.0, frequency_penalty=2.0))
        await heard.ended("without", "long", "deaf", "other")
        assert word not in model.tokenizer.decode(heard.tokens("without"))
        assert heard.tokens("long")[5:] == [1]
        assert 1 not in heard.tokens("long")[:5]
        assert heard.tokens("deaf") == [1] * 9

    async def test_penalties_go_on_where_the_completion_does(
        self, engine: ServerEngine, model: ServedModel
    ) -> None:
        heard = Heard(engine)
        options: dict[str, Any] = {
            "presence_penalty": 1.5,
            "frequency_penalty": 0.7,
            "max_tokens": 40,
            "ignore_eos": True,
        }
        engine.add(_asking(model, "whole", **options))
        engine.add(_asking(model, "plain", max_tokens=40, ignore_eos=True))
        await heard.ended("whole", "plain")
        whole = heard.tokens("whole")
        assert whole != heard.tokens("plain")
        for cut in (5, 20, 33):
            engine.add(_asking(model, f"from{cut}", *whole[:cut], **options))
            await heard.ended(f"from{cut}")
            assert heard.tokens(f"from{cut}") == whole[cut:]

    async def test_a_prefix_is_found_by_those_of_one_salt(self, engine: ServerEngine) -> None:
        heard = Heard(engine)
        prompt = tuple(30 + number % 97 for number in range(2 * _BLOCK_TOKENS + 10))
        cached = []
        for name, salt in (("a", "x"), ("b", "x"), ("c", "y")):
            asked = request(name, prompt, max_tokens=2)
            engine.add(msgspec.structs.replace(asked, cache_salt=salt))
            await heard.ended(name)
            end = heard.end(name)
            assert end is not None
            cached.append(end.num_cached_tokens)
        assert cached == [0, 2 * _BLOCK_TOKENS, 0]

    async def test_the_urgent_one_is_taken_first(self, engine: ServerEngine) -> None:
        heard = Heard(engine)
        runs = [f"runs{number}" for number in range(4)]
        waits = [f"waits{number}" for number in range(4)]

        async def are_there(state: str, number: int) -> bool:
            return await _number(engine, state) == number

        for name in runs:
            engine.add(request(name, max_tokens=3000, ignore_eos=True))
        await eventually(lambda: are_there("running", 4), timeout_s=60.0)
        for name in waits:
            engine.add(request(name, max_tokens=3000, ignore_eos=True))
        await eventually(lambda: are_there("waiting", 4), timeout_s=60.0)
        urgent = request("urgent", max_tokens=4, ignore_eos=True)
        engine.add(msgspec.structs.replace(urgent, priority=7))
        await eventually(lambda: are_there("waiting", 5), timeout_s=60.0)
        engine.cancel(runs[0])
        await heard.ended("urgent")
        assert not any(output.finished for output in heard.outputs if output.request_id in runs)
        assert not any(heard.tokens(name) for name in waits[1:]), "there was room for one"
        for name in (*runs[1:], *waits):
            engine.cancel(name)

    @pytest.mark.parametrize("kind", GrammarKind)
    async def test_grammars_hold_and_go_on_from_each_token(
        self, engine: ServerEngine, model: ServedModel, kind: GrammarKind
    ) -> None:
        heard = Heard(engine)
        grammar = Grammar(kind=kind, text=_GRAMMARS[kind])
        engine.add(_asking(model, "whole", grammar=grammar, max_tokens=200))
        await heard.ended("whole")
        whole = heard.tokens("whole")
        end = heard.end("whole")
        assert end is not None
        text = model.tokenizer.decode(whole)
        if end.finish_reason is FinishReason.STOP:
            _check_text(kind, text)
        for cut in range(1, len(whole), max(1, len(whole) // 6)):
            name = f"from{cut}"
            engine.add(_asking(model, name, *whole[:cut], grammar=grammar, max_tokens=200))
            await heard.ended(name)
            rest = heard.end(name)
            assert rest is not None
            assert rest.finish_reason is end.finish_reason
            assert model.tokenizer.decode([*whole[:cut], *heard.tokens(name)]) == text

    async def test_what_is_no_grammar_is_the_callers_mistake(
        self, engine: ServerEngine, model: ServedModel
    ) -> None:
        heard = Heard(engine)
        grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type": "nothing"}')
        engine.add(_asking(model, "bad", grammar=grammar))
        await heard.ended("bad")
        end = heard.end("bad")
        assert end is not None
        assert end.error is not None
        assert end.error[0] == "grammar_invalid"

    async def test_one_attaches_to_it_by_its_url(
        self, engine: ServerEngine, model: ServedModel
    ) -> None:
        assert engine._process is not None
        heard = Heard(engine)
        engine.add(request("here"))
        await heard.ended("here")
        async with port_of(engine._process.folder / "server.sock") as url:
            config = EngineConfig(kind=EngineKind.VLLM, url=url, start_timeout_s=20.0)
            other = await start_server_engine(model, config, SystemClock())
            heard_there = Heard(other)
            other.add(request("there"))
            await heard_there.ended("there")
            await other.close()
        assert heard_there.tokens("there") == heard.tokens("here")

    async def test_another_model_behind_the_url(self, engine: ServerEngine, tmp_path: Path) -> None:
        assert engine._process is not None
        larger = _checkpoint(tmp_path / "larger", vocab_size=engine._vocab_size + 8)
        longer = _checkpoint(tmp_path / "longer", max_position_embeddings=8192)
        async with port_of(engine._process.folder / "server.sock") as url:
            config = EngineConfig(kind=EngineKind.VLLM, url=url, start_timeout_s=20.0)
            named = msgspec.structs.replace(config, served_name="llama-70b")
            for other, settings, says in (
                (larger, config, "not the same model"),
                (longer, config, "context window is 4096 tokens"),
                (larger, named, "no model 'llama-70b'"),
            ):
                with pytest.raises(ConfigError, match=says):
                    await start_server_engine(other, settings, SystemClock())


def _without_id(outputs: list[EngineOutput]) -> list[EngineOutput]:
    return [msgspec.structs.replace(one, request_id="", device_us=0.0) for one in outputs]


def _check_text(kind: GrammarKind, text: str) -> None:
    if kind is GrammarKind.REGEX:
        assert re.fullmatch(_REGEX, text)
    elif kind is GrammarKind.EBNF:
        assert re.fullmatch(r"(hello|good day)(, [A-C][a-c]{1,3})+\.", text)
    else:
        schema = {} if kind is GrammarKind.JSON_OBJECT else msgspec.json.decode(_SCHEMA)
        jsonschema.validate(msgspec.json.decode(text), schema)


async def test_streams_of_a_killed_server_all_go_on(model: ServedModel) -> None:
    """Another engine is started, as the worker does it, and gets all requests with their tokens so
    far."""
    clock = SystemClock()

    async def start() -> ServerEngine:
        return await start_server_engine(model, _config(max_num_sequences=32), clock)

    first = await start()
    keeper = EngineKeeper(first, start, clock)
    tokens: dict[str, list[int]] = {}
    ended: set[str] = set()

    def note(outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.error is None
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finished:
                ended.add(output.request_id)

    def asked(name: str) -> EngineRequest:
        prompt = (*PROMPT, 20 + int(name))
        return request(name, prompt, tuple(tokens.get(name, ())), max_tokens=800, ignore_eos=True)

    names = [str(number) for number in range(20)]

    def go_on() -> None:
        for name in names:
            if name not in ended:
                keeper.add(asked(name))

    keeper.listen(note)
    keeping = asyncio.create_task(keeper.run(on_replaced=go_on))
    try:
        undisturbed: dict[str, list[int]] = {}
        for disturbed in (False, True):
            tokens.clear()
            ended.clear()
            for name in names:
                keeper.add(asked(name))
            if disturbed:
                await eventually(lambda: _shortest(tokens, names) >= 20, timeout_s=120.0)
                os.kill(_server_pid(first), signal.SIGKILL)
            await eventually(lambda: ended == set(names), timeout_s=400.0)
            undisturbed = undisturbed or {name: list(tokens[name]) for name in names}
        assert keeper.num_restarts == 1
        assert {name: tokens[name] for name in names} == undisturbed
    finally:
        keeping.cancel()
        await keeper.close()


def _shortest(tokens: dict[str, list[int]], names: list[str]) -> int:
    return min(len(tokens.get(name, ())) for name in names)


def _server_pid(engine: ServerEngine) -> int:
    """Return the process that the guardian watches."""
    assert engine._process is not None
    assert engine._process._process is not None
    (server,) = psutil.Process(engine._process._process.pid).children()
    return server.pid


async def test_one_that_dies_at_load_says_why(model: ServedModel) -> None:
    config = _config(arguments=("--no-such-option", "7"))
    with pytest.raises(EngineFailedError, match="--no-such-option") as failed:
        await start_server_engine(model, config, SystemClock())
    assert "ended before the model was loaded" in failed.value.message
