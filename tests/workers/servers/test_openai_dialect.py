"""Requests to an OpenAI-compatible server, and the reading of its answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from millrace.registry.served import ServedModel
from millrace.registry.tokenizers.incremental import IncrementalTokenizer
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.runtime.clock import SystemClock
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError
from millrace.schemas.frames import FinishReason
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.dialect import RefusedByServerError, ServerStreamError
from millrace.workers.servers.dialects.completions_answers import TextReader
from millrace.workers.servers.dialects.server_facts import PROBE_TEXT
from millrace.workers.servers.server_engine import ServerEngine
from millrace.workers.servers.starting import start_server_engine
from tests.support.engine.tokenizers_made import metaspace, write_tokenizer
from tests.workers.conformance import PROMPT, Heard, request
from tests.workers.scripted import EOS
from tests.workers.servers.stand_ins.checks import attached
from tests.workers.servers.stand_ins.listening import listening
from tests.workers.servers.stand_ins.transcripts import Played, Transcript

_COMPLETIONS, _MODELS = "/v1/completions", "/v1/models"


def _chunk(text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [choice], **more}


def _usage(**more: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 24, "completion_tokens": 5, "total_tokens": 29, **more}
    return {"id": "cmpl-1", "object": "text_completion", "choices": [], "usage": usage}


def _transcript(*events: Any, **changes: Any) -> Transcript:
    """Return the transcript of a server with one model, which answers each stream by these
    events."""

    def complete(body: dict[str, Any]) -> Played:
        if body.get("stream"):
            return Played(events=events)
        assert body["prompt"] == PROBE_TEXT
        return Played(_chunk("x", "length", usage=changes.get("usage")))

    listed = {"id": "demo", "object": "model", **changes.get("listed", {})}
    return Transcript({_MODELS: Played({"data": [listed]}), _COMPLETIONS: complete})


@asynccontextmanager
async def _attached(
    model: ServedModel, transcript: Transcript, path: str = "", **config: Any
) -> AsyncIterator[ServerEngine]:
    async with (
        listening(transcript.play) as url,
        attached(model, EngineKind.OPENAI, url + path, **config) as engine,
    ):
        yield engine


# --- how it is started ---


async def test_without_a_url_there_is_nothing_to_start(model: ServedModel) -> None:
    config = EngineConfig(kind=EngineKind.OPENAI)
    with pytest.raises(ConfigError, match=r"worker\.engine\.url \(--engine-url\)"):
        await start_server_engine(model, config, SystemClock())


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
async def test_the_url_may_have_the_version(model: ServedModel, path: str) -> None:
    transcript = _transcript(_chunk("a b", "stop"), b"[DONE]")
    async with _attached(model, transcript, path, api_key="secret") as engine:
        heard = Heard(engine)
        engine.add(request("r"))
        await heard.ended("r")
        assert heard.tokens("r")
    assert {headers["Authorization"] for *_, headers in transcript.asked} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({}, r"not of the kind openai: /v1/models answered with status 404: Not Found"),
        ({_MODELS: Played(text="<html>")}, r"not of the kind openai: /v1/models sent invalid JSON"),
        ({_MODELS: Played({"data": []})}, "lists no models"),
        ({_MODELS: Played({"data": [{"id": "a"}]})}, r"/v1/completions answered with status 404"),
        (
            {_MODELS: Played({"data": [{"id": "a"}]}), _COMPLETIONS: Played({"choices": [{}]})},
            "answered /v1/completions without a completion",
        ),
        ({_MODELS: Played({"error": "bad key"}, status=401)}, "status 401"),
    ],
)
async def test_something_else_at_the_url_is_told_at_once(
    model: ServedModel, answers: dict[str, Any], says: str
) -> None:
    with pytest.raises(EngineFailedError, match=says):
        async with _attached(model, Transcript(answers)):
            pass


async def test_another_model_is_seen_by_how_it_cuts_a_text(model: ServedModel) -> None:
    for num_tokens, fits in ((12, False), (_num_own(model) + 1, True)):
        transcript = _transcript(usage={"prompt_tokens": num_tokens})
        if fits:
            async with _attached(model, transcript):
                continue
        with pytest.raises(ConfigError, match=r"counts 12 tokens .* another model"):
            async with _attached(model, transcript):
                pass


def _num_own(model: ServedModel) -> int:
    return len(model.tokenizer.encode(PROBE_TEXT, add_special_tokens=False))


async def test_a_server_that_completes_nothing_is_told(model: ServedModel) -> None:
    async def hang(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("never reached")

    async def models(_request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "a"}]})

    app = web.Application()
    app.add_routes([web.get(_MODELS, models), web.post(_COMPLETIONS, hang)])
    async with TestServer(app) as server:
        config = EngineConfig(
            kind=EngineKind.OPENAI, url=str(server.make_url("/")), start_timeout_s=0.2
        )
        with pytest.raises(EngineFailedError, match=r"completed no text within 0\.2 s"):
            await start_server_engine(model, config, SystemClock())


async def test_a_shorter_window_is_refused(model: ServedModel) -> None:
    with pytest.raises(ConfigError, match="context window is 64 tokens"):
        async with _attached(model, _transcript(listed={"max_model_len": 64})):
            pass


async def test_what_cannot_be_promised_is_said_at_start(
    model: ServedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with _attached(model, _transcript()):
            pass
    [record] = [one for one in caplog.records if "prompts as text" in one.message]
    assert record.__dict__["exact_token_ids"] is False
    assert "stop_token_ids" in record.__dict__["refused"]


@pytest.mark.parametrize(
    ("pieces", "said", "code"),
    [
        (("the", " mill"), "the mill", None),
        (("the mill ", "\N{PILE OF POO}"), "the mill", "text_not_spelled"),
    ],
)
async def test_a_tokenizer_without_tokens_of_some_bytes_bars_only_what_it_cannot_spell(
    model: ServedModel, tmp_path: Path, pieces: tuple[str, str], said: str, code: str | None
) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, metaspace(), eos="</s>"))
    other = ServedModel(model.entry, model.path, model.config, tokenizer)
    transcript = _transcript(*map(_chunk, pieces), _chunk("", "stop"), b"[DONE]")
    async with _attached(other, transcript) as engine:
        heard = Heard(engine)
        engine.add(request("r"))
        await heard.ended("r")
    end = heard.end("r")
    assert end is not None
    assert (end.error and end.error[0]) == code
    assert tokenizer.decode((*PROMPT, *heard.tokens("r"))).endswith(said)


# --- what it is asked ---


async def test_a_request_has_what_the_api_has(model: ServedModel) -> None:
    transcript = _transcript(_chunk(" a", "stop"), _usage(), b"[DONE]")
    begin = tuple(model.tokenizer.encode("<|user|>What?", add_special_tokens=True))
    async with _attached(model, transcript) as engine:
        heard = Heard(engine)
        engine.add(
            request(
                "r",
                prompt=begin,
                output_token_ids=tuple(model.tokenizer.encode("Yes", add_special_tokens=False)),
                max_tokens=12,
                temperature=0.5,
                top_p=0.9,
                seed=2**40,
                frequency_penalty=0.25,
                logit_bias={30: 2.0},
            )
        )
        await heard.ended("r")
    body = transcript.bodies(_COMPLETIONS)[-1]
    num_made = len(model.tokenizer.encode("Yes", add_special_tokens=False))
    bias = body.pop("logit_bias")
    assert 0 <= body.pop("seed") < 2**31
    assert body == {
        "model": "demo",
        # Without the token that the server's tokenizer puts before it.
        "prompt": "<|user|>What?Yes",
        "max_tokens": 12 - num_made,
        "temperature": 0.5,
        "top_p": 0.9,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.25,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert bias["30"] == 2.0
    assert sorted(set(bias.values())) == [-0.25, 2.0]


async def test_a_prompt_that_is_no_text_is_refused_by_name(model: ServedModel) -> None:
    [half] = [i for i in range(256) if model.tokenizer.token_bytes(i) == b"\xc3"]
    async with _attached(model, _transcript()) as engine:
        heard = Heard(engine)
        engine.add(request("r", prompt=(*PROMPT, half)))
        await heard.ended("r")
        end = heard.end("r")
    assert end is not None
    assert end.error is not None
    assert end.error[0] == "invalid_parameter"
    assert "prompt_token_ids begins or ends within a character" in end.error[1]


# --- what it answers ---


async def _answered(model: ServedModel, *events: Any, **sampling: Any) -> tuple[str, Heard]:
    async with _attached(model, _transcript(*events)) as engine:
        heard = Heard(engine)
        asked = request("r", **sampling)
        engine.add(msgspec.structs.replace(asked, eos_token_ids=(EOS,)))
        await heard.ended("r")
    text = model.tokenizer.decode(heard.tokens("r"), skip_special_tokens=False)
    return text, heard


async def test_a_text_becomes_tokens_that_spell_it(model: ServedModel) -> None:
    pieces = ["The mi", "ll whe", "el <|us", "er|> 你", "好👍🏽", " says '", "re'\n"]
    events = [*map(_chunk, pieces), _chunk("", "length"), _usage(), b"[DONE]"]
    text, heard = await _answered(model, *events, max_tokens=100)
    assert text == "".join(pieces)
    end = heard.end("r")
    assert end is not None
    assert end.finish_reason is FinishReason.LENGTH
    assert len(heard.of("r")) > 2


async def test_the_server_counts_its_tokens(model: ServedModel) -> None:
    """The server counts fewer or more tokens than these ids."""
    long = "several words of which each has many tokens"
    for said, max_tokens in ((long, 2), ("a", 50)):
        text, heard = await _answered(
            model, _chunk(said), _chunk("", "length"), b"[DONE]", max_tokens=max_tokens
        )
        assert text == said
        end = heard.end("r")
        assert end is not None
        assert end.finish_reason is FinishReason.LENGTH


async def test_an_end_by_itself_is_a_token_of_the_stream(model: ServedModel) -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 16}}
    text, heard = await _answered(model, _chunk("Yes."), _chunk("", "stop"), _usage(**details))
    end = heard.end("r")
    assert end is not None
    assert end.finish_reason is FinishReason.STOP
    assert end.num_cached_tokens == 16
    assert heard.tokens("r")[-1] == EOS
    assert text == "Yes.<|end|>"


async def test_a_stream_that_broke_goes_on_behind_the_text_that_was_given(
    model: ServedModel,
) -> None:
    def complete(body: dict[str, Any]) -> Played:
        if not body.get("stream"):
            return Played(_chunk("x", "length"))
        prompts.append(body["prompt"])
        if len(prompts) == 1:
            return Played(events=[_chunk("The mill "), _chunk("whe")], breaks=True)
        return Played(events=[_chunk(" wheel turns"), _chunk("", "stop"), b"[DONE]"])

    prompts: list[str] = []
    transcript = Transcript({_MODELS: Played({"data": [{"id": "a"}]}), _COMPLETIONS: complete})
    async with _attached(model, transcript) as engine:
        heard = Heard(engine)
        engine.add(request("r", max_tokens=60, temperature=1.0))
        await heard.ended("r")
    prompt = model.tokenizer.decode(PROMPT)
    assert prompts == [prompt, f"{prompt}The mill"]
    assert model.tokenizer.decode(heard.tokens("r")) == "The mill wheel turns"
    assert heard.of("r")[-1].resampled


@pytest.mark.parametrize(
    ("event", "error", "says"),
    [
        (b"{", ServerStreamError, "invalid event in a stream"),
        (b'{"choices": [{"text": 7}]}', ServerStreamError, "invalid event in a stream"),
        ({"error": {"message": "out of memory"}}, ServerStreamError, "out of memory"),
        ({"error": {"message": "n is 3", "code": 400}}, RefusedByServerError, "n is 3"),
        ({"error": {"message": "bad", "code": "server"}}, ServerStreamError, "bad"),
        (_chunk("", "content_filter"), ServerStreamError, "content_filter"),
    ],
)
def test_what_is_wrong_is_told(model: ServedModel, event: Any, error: type, says: str) -> None:
    reader = TextReader(IncrementalTokenizer(model.tokenizer))
    with pytest.raises(error, match=says):
        reader.read(event if isinstance(event, bytes) else msgspec.json.encode(event))


async def test_a_server_that_is_busy_is_asked_again(model: ServedModel) -> None:
    def complete(body: dict[str, Any]) -> Played:
        if not body.get("stream"):
            return Played(_chunk("x", "length"))
        if len(transcript.bodies(_COMPLETIONS)) < 3:
            return Played({"error": {"message": "too many requests"}}, status=429)
        return Played(events=[_chunk("Yes"), _chunk("", "stop"), b"[DONE]"])

    transcript = Transcript({_MODELS: Played({"data": [{"id": "a"}]}), _COMPLETIONS: complete})
    async with _attached(model, transcript) as engine:
        heard = Heard(engine)
        engine.add(request("r"))
        await heard.ended("r")
    assert len(transcript.bodies(_COMPLETIONS)) == 3
    assert model.tokenizer.decode(heard.tokens("r")) == "Yes"


async def test_penalties_that_are_carried_on_leave_characters_whole(model: ServedModel) -> None:
    whole = "The mill 👍🏽 by Ünïcödé 你好 streams 👍🏽 ends."

    def complete(body: dict[str, Any]) -> Played:
        if not body.get("stream"):
            return Played(_chunk("x", "length"))
        asked.append(body["presence_penalty"])
        told = body["prompt"].removeprefix(model.tokenizer.decode(PROMPT))
        assert whole.startswith(told)
        rest = map(_chunk, whole.removeprefix(told))
        return Played(events=[*rest, _chunk("", "stop"), b"[DONE]"])

    asked: list[float] = []
    transcript = Transcript({_MODELS: Played({"data": [{"id": "a"}]}), _COMPLETIONS: complete})
    async with _attached(model, transcript) as engine:
        heard = Heard(engine)
        begun = tuple(model.tokenizer.encode("The mill", add_special_tokens=False))
        engine.add(request("r", max_tokens=90, presence_penalty=1.0, output_token_ids=begun))
        await heard.ended("r")
    assert model.tokenizer.decode([*begun, *heard.tokens("r")]) == whole
    assert len(asked) > 2
    assert set(asked) == {0.0}
