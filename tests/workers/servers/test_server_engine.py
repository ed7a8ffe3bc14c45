"""Behaviour of all engines behind a server, with a real HTTP server that draws tokens at random."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import jsonschema
import pytest
import pytest_asyncio

from millrace.registry.served import ServedModel
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError
from millrace.schemas.frames import FinishReason
from millrace.schemas.sampling import Grammar, GrammarKind
from millrace.workers.engine_like import EngineFailedError, EngineLike
from millrace.workers.servers.server_engine import ServerEngine
from millrace.workers.servers.starting import DIALECTS, start_server_engine
from tests.support.waiting import eventually
from tests.workers.conformance import EngineConformance, Heard, request, running
from tests.workers.servers.stand_ins.checks import attached, check_cancel
from tests.workers.servers.stand_ins.random_server import RandomDialect, RandomServer, serving

_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "size": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["mill", "race"]},
    },
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}

_REGEX = Grammar(
    kind=GrammarKind.REGEX,
    text=r'\{"name": "[a-z]{1,6}", "size": [1-9][0-9]?, "kind": "(mill|race)"\}',
)


@pytest.fixture(scope="module", autouse=True)
def _random_kind() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DIALECTS, EngineKind.VLLM, RandomDialect)
        yield


@asynccontextmanager
async def _engine(model: ServedModel, server: RandomServer) -> AsyncIterator[ServerEngine]:
    async with serving(server) as url, attached(model, EngineKind.VLLM, url) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: ServedModel) -> AsyncIterator[EngineLike]:
    server = RandomServer(model.vocab_size, token_s=0.002)
    async with serving(server) as url:
        config = EngineConfig(kind=EngineKind.VLLM, url=url, max_num_sequences=4)
        started = await start_server_engine(model, config, SystemClock())
        async with running(started) as engine:
            yield engine


class TestServerEngine(EngineConformance):
    kind = EngineKind.VLLM


@pytest.mark.parametrize("kind", [EngineKind.VLLM, EngineKind.SGLANG, EngineKind.TGI])
async def test_a_cache_in_int8_is_not_asked_of_a_server_without(
    model: ServedModel, kind: EngineKind
) -> None:
    config = EngineConfig(kind=kind, kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match=f"'int8', which {kind} does not support"):
        await start_server_engine(model, config, SystemClock())


async def test_a_stream_that_broke_goes_on_where_it_stopped(model: ServedModel) -> None:
    tokens = []
    for breaks in (set[int](), {1, 2}):
        server = RandomServer(model.vocab_size, breaks=breaks)
        async with _engine(model, server) as engine:
            heard = Heard(engine)
            engine.add(request("r"))
            await heard.ended("r")
            assert len(server.calls) == 1 + len(breaks)
            tokens.append(heard.tokens("r"))
    assert tokens[0] == tokens[1]


async def test_a_server_that_always_breaks_off_fails_the_request(model: ServedModel) -> None:
    server = RandomServer(model.vocab_size, breaks=set(range(1, 20)))
    async with _engine(model, server) as engine:
        heard = Heard(engine)
        engine.add(request("broken", max_tokens=50))
        await heard.ended("broken")
        end = heard.end("broken")
        assert end is not None
        assert end.error is not None
        assert end.error[0] == "engine_failed"
        assert len(heard.tokens("broken")) == 4


async def test_what_the_server_refuses_is_the_callers_mistake(model: ServedModel) -> None:
    async with _engine(model, RandomServer(model.vocab_size, status=422)) as engine:
        heard = Heard(engine)
        engine.add(request("bad"))
        await heard.ended("bad")
        end = heard.end("bad")
        assert end is not None
        assert end.error == ("invalid_parameter", "/generate answered with status 422: no")


async def test_a_server_that_does_not_answer_ends_the_engine(model: ServedModel) -> None:
    server = RandomServer(model.vocab_size, token_s=0.05)
    async with _engine(model, server) as engine:
        heard = Heard(engine)
        engine.add(request("lost", max_tokens=80))
        await eventually(lambda: len(heard.tokens("lost")) > 2)
        server.healthy = False
        why = await asyncio.wait_for(engine.wait_closed(), 10.0)
        assert "no longer answers" in why
        assert heard.end("lost") is None


async def test_a_server_without_figures_lives_as_long_as_it_is_healthy(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.workers.servers.server_engine._LOAD_INTERVAL_S", 0.02)
    server = RandomServer(model.vocab_size, token_s=0.01, tells_load=False)
    async with _engine(model, server) as engine:
        heard = Heard(engine)
        engine.add(request("r", max_tokens=60))
        await heard.ended("r")
        assert len(heard.tokens("r")) == 60
        server.token_s = 1.0
        engine.add(request("lost", max_tokens=60))
        await eventually(lambda: bool(heard.tokens("lost")))
        server.healthy = False
        assert "no longer answers" in await asyncio.wait_for(engine.wait_closed(), 5.0)


async def test_a_cancel_closes_the_connection(model: ServedModel) -> None:
    server = RandomServer(model.vocab_size, token_s=0.02)
    async with _engine(model, server) as engine:
        await check_cancel(engine, server)
        assert len(server.calls) == 1


@pytest.mark.parametrize(
    ("grammar", "temperature"),
    [
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(_SCHEMA)), 0.0),
        # What a server that draws at random would fill its answer with, blanks, is not in these.
        (_REGEX, 0.0),
        (_REGEX, 1.0),
    ],
)
@pytest.mark.parametrize("seed", range(3))
async def test_a_grammar_is_kept_though_the_server_knows_none(
    model: ServedModel, grammar: Grammar, temperature: float, seed: int
) -> None:
    server = RandomServer(model.vocab_size)
    async with _engine(model, server) as engine:
        heard = Heard(engine)
        engine.add(
            request(
                "json",
                prompt=(40, 41, 42 + seed),
                max_tokens=100,
                temperature=temperature,
                seed=seed,
                grammar=grammar,
            )
        )
        await heard.ended("json")
        end = heard.end("json")
        assert end is not None
        assert end.error is None
        assert end.finish_reason is FinishReason.STOP
        text = model.tokenizer.decode(heard.tokens("json"))
        jsonschema.validate(json.loads(text), _SCHEMA)


async def test_a_grammar_goes_on_behind_what_was_delivered(model: ServedModel) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="[a-f]{4}-[0-9]{12}")
    async with _engine(model, RandomServer(model.vocab_size)) as engine:
        heard = Heard(engine)
        engine.add(request("whole", max_tokens=40, grammar=grammar))
        await heard.ended("whole")
        tokens = heard.tokens("whole")
        engine.add(
            request("rest", max_tokens=40, grammar=grammar, output_token_ids=tuple(tokens[:7]))
        )
        await heard.ended("rest")
        text = model.tokenizer.decode([*tokens[:7], *heard.tokens("rest")])
        assert len(text) == 17
        assert text[4] == "-"
        engine.add(request("over", max_tokens=40, grammar=grammar, output_token_ids=tuple(tokens)))
        await heard.ended("over")
        assert heard.tokens("over") == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"vocab_size": 7}, "has 7 token ids"),
        ({"healthy": False}, "No vllm server answers"),
    ],
)
async def test_another_server_is_refused(
    model: ServedModel, change: dict[str, int], says: str
) -> None:
    server = RandomServer(**{"vocab_size": model.vocab_size} | change)  # type: ignore[arg-type]
    async with serving(server) as url:
        config = EngineConfig(kind=EngineKind.VLLM, url=url, start_timeout_s=0.3)
        with pytest.raises((ConfigError, EngineFailedError), match=says):
            await start_server_engine(model, config, SystemClock())


async def test_a_program_that_is_not_there_is_named_with_its_package(model: ServedModel) -> None:
    with pytest.raises(ConfigError, match=r"no program 'random-server'\. Install random-server"):
        await start_server_engine(model, EngineConfig(kind=EngineKind.VLLM), SystemClock())


async def test_a_server_that_dies_at_load_leaves_its_last_lines(
    model: ServedModel, tmp_path: Path
) -> None:
    program = tmp_path / "dies"
    program.write_text("#!/bin/sh\nfor i in $(seq 30); do echo line $i; done; exit 3\n")
    program.chmod(0o755)
    config = EngineConfig(kind=EngineKind.VLLM, command=str(program))
    with pytest.raises(EngineFailedError) as caught:
        await start_server_engine(model, config, SystemClock())
    assert "line 30" in caught.value.message
    assert "line 11\n" in caught.value.message
    assert "line 10\n" not in caught.value.message
