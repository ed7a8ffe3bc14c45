"""Start, requests and answers of vLLM's server, played back from answers of a real one."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from millrace.engine.grammar.library import start
from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError, MillraceError
from millrace.schemas.frames import FinishReason, TokenLogprob
from millrace.schemas.sampling import MAX_GRAMMAR_CHARACTERS, Grammar, GrammarKind
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.dialect import (
    AnswerPart,
    RefusedByServerError,
    ServerAddress,
    ServerStreamError,
)
from millrace.workers.servers.dialects.vllm import VllmDialect, VllmReader
from millrace.workers.servers.server_engine import ServerEngine
from tests.workers.conformance import PROMPT, Heard, request
from tests.workers.servers.stand_ins.checks import attached, check_refused, steered_request
from tests.workers.servers.stand_ins.listening import listening
from tests.workers.servers.stand_ins.transcripts import Played, Transcript

_GENERATE, _COMPLETIONS = "/inference/v1/generate", "/v1/completions"
# What there is nothing to add to.
_ODD = '{"x-guidance": 5}'
_LONG = json.dumps({"const": "a" * (MAX_GRAMMAR_CHARACTERS - 20)})
_METRICS = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.75
vllm:num_preemptions_total{engine="0",model_name="tiny"} 3.0
vllm:iteration_tokens_total_count{engine="0",model_name="tiny"} 445.0
vllm:iteration_tokens_total_sum{engine="0",model_name="tiny"} 900.0
vllm:cache_config_info{_block_size_resolved="True",block_size="128",engine="0",\
num_cpu_blocks="None",num_gpu_blocks="512",num_gpu_blocks_override="None"} 1.0
"""


def _dialect(model: ServedModel, **config: Any) -> VllmDialect:
    return VllmDialect(model, EngineConfig(kind=EngineKind.VLLM, **config), owned=True)


def _recorded(model: ServedModel, *, version: str = "0.32.0") -> Transcript:
    """Return the transcript of a server of this model."""

    def generate(body: dict[str, Any]) -> Played:
        if "token_ids" in body and max(body["token_ids"]) >= model.vocab_size:
            return Played({"error": {"message": "out of vocabulary", "code": 400}}, status=400)
        if not body["stream"]:
            return Played({"choices": [{"token_ids": [9]}]})
        return Played(events=[*_EVENTS, b"[DONE]"])

    def tokenize(body: dict[str, Any]) -> Played:
        ids = model.tokenizer.encode(body["prompt"], add_special_tokens=False)
        return Played({"count": len(ids), "tokens": list(ids)})

    return Transcript(
        {
            "/health": Played(text=""),
            "/version": Played({"version": version}),
            "/v1/models": Played(
                {"data": [{"id": "tiny", "max_model_len": 128}, {"id": "other", "parent": "tiny"}]}
            ),
            "/metrics": Played(text=_METRICS),
            "/tokenize": tokenize,
            _GENERATE: generate,
        }
    )


def _event(token_ids: list[int], reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "logprobs": None, "finish_reason": reason, "token_ids": token_ids}
    return {"request_id": "x", "output_mode": "tokens", "choices": [choice], "usage": None}


_USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 24, "prompt_tokens_details": {"cached_tokens": 16}},
}
_EVENTS = [_event([30]), _event([31, 32]), _event([33], "length"), _USAGE]


@asynccontextmanager
async def _attached(
    model: ServedModel, transcript: Transcript, **config: Any
) -> AsyncIterator[ServerEngine]:
    async with (
        listening(transcript.play) as url,
        attached(model, EngineKind.VLLM, url, **config) as engine,
    ):
        yield engine


# --- how it is started ---


def _options(model: ServedModel, **config: Any) -> tuple[list[str], dict[str, str]]:
    command = _dialect(model, **config).command(Path("/bin/vllm"), ServerAddress(Path("/run")))
    return list(command.arguments), command.environment


def test_the_command_has_what_the_settings_say(model: ServedModel) -> None:
    arguments, variables = _options(
        model,
        max_num_sequences=12,
        max_batch_tokens=512,
        kv_cache_bytes=1 << 28,
        kv_cache_dtype="fp8",
        dtype="bfloat16",
        load_format="dummy",
        prefix_cache=False,
        cuda_graphs=False,
        overlap=False,
        num_threads=3,
        arguments=("--tensor-parallel-size", "4"),
    )
    assert arguments[:3] == ["/bin/vllm", "serve", str(model.path)]
    options = dict(pairwise(arguments))
    assert options["--uds"] == "/run/server.sock"
    assert options["--served-model-name"] == "demo"
    assert options["--max-model-len"] == "128"
    assert options["--max-num-seqs"] == "12"
    assert options["--max-num-batched-tokens"] == "512"
    assert options["--kv-cache-memory-bytes"] == str(1 << 28)
    assert options["--kv-cache-dtype"] == "fp8"
    assert options["--dtype"] == "bfloat16"
    assert options["--load-format"] == "dummy"
    assert options["--generation-config"] == "vllm"
    assert "--gpu-memory-utilization" not in options
    assert {"--no-enable-prefix-caching", "--enforce-eager", "--no-async-scheduling"} <= {
        *arguments
    }
    assert arguments[-2:] == ["--tensor-parallel-size", "4"]
    assert variables["OMP_NUM_THREADS"] == "3"
    assert variables["VLLM_NO_USAGE_STATS"] == "1"


def test_a_group_of_devices_is_told_of(model: ServedModel) -> None:
    arguments, _ = _options(model, tensor_parallel=4, expert_parallel=True)
    assert dict(pairwise(arguments))["--tensor-parallel-size"] == "4"
    assert "--enable-expert-parallel" in arguments
    alone, _ = _options(model)
    assert not {"--tensor-parallel-size", "--enable-expert-parallel"} & {*alone}


async def test_devices_of_a_server_that_runs_are_counted(model: ServedModel) -> None:
    async with _attached(model, _recorded(model), tensor_parallel=4) as engine:
        assert engine.num_devices == 4


def test_the_usual_command_leaves_compiling_and_caching_on(model: ServedModel) -> None:
    arguments, variables = _options(model, device="cpu")
    assert not {"--no-enable-prefix-caching", "--enforce-eager"} & {*arguments}
    options = dict(pairwise(arguments))
    assert options["--kv-cache-memory-bytes"] == str(1 << 30)
    assert options["--max-num-seqs"] == "64"
    assert variables["CUDA_VISIBLE_DEVICES"] == ""
    assert "OMP_NUM_THREADS" not in variables
    assert _options(model, device="cuda:3")[1]["CUDA_VISIBLE_DEVICES"] == "3"


# --- what it says of itself ---


async def test_one_that_runs_is_known_by_what_it_says(model: ServedModel) -> None:
    transcript = _recorded(model)
    async with _attached(model, transcript, api_key="k") as engine:
        assert engine.facts.version == "0.32.0"
        assert engine.facts.model == "tiny"
        assert engine.facts.context_window_tokens == 128
        assert engine.facts.kv_capacity_tokens == 512 * 128
        load = await engine._dialect.read_load(engine._client)
        assert (load.kv_usage, load.num_steps, load.num_preemptions) == (0.5, 445, 3)
    assert all(headers["Authorization"] == "Bearer k" for _, _, headers in transcript.asked)


async def test_what_starts_a_server_does_not_go_with_one_that_runs(model: ServedModel) -> None:
    for changes, name in (({"arguments": ("--x",)}, "arguments"), ({"command": "v"}, "command")):
        with pytest.raises(ConfigError, match=rf"worker\.engine\.{name} "):
            async with _attached(model, _recorded(model), **changes):
                """Never reached."""


async def test_it_is_asked_for_a_model_by_name(model: ServedModel) -> None:
    transcript = _recorded(model)
    async with _attached(model, transcript, served_name="other") as engine:
        assert engine.facts.model == "other"
        assert transcript.bodies(_GENERATE)[-1]["model"] == "other"
    with pytest.raises(ConfigError, match=r"no model 'none'.*it has tiny, other"):
        async with _attached(model, _recorded(model), served_name="none"):
            """Never reached."""


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"/version": Played({"version": "0.10.2"})}, ConfigError, "0.11 or newer is required"),
        ({"/version": Played({"hello": 1})}, EngineFailedError, "does not report its version"),
        ({"/version": Played(text="<html>")}, EngineFailedError, "is not of the kind vllm"),
        ({"/version": Played(status=404)}, EngineFailedError, "is not of the kind vllm"),
        ({"/v1/models": Played({"data": []})}, EngineFailedError, "lists no models"),
        ({"/v1/models": Played([1])}, EngineFailedError, "lists no models"),
        ({"/tokenize": Played({"tokens": [1, 2]})}, ConfigError, "tokenizer is not that of"),
        (
            {_GENERATE: Played({"choices": []})},
            ConfigError,
            "does not have the 403 token ids",
        ),
        (
            {"/v1/models": Played({"data": [{"id": "tiny", "max_model_len": 64}]})},
            ConfigError,
            "context window is 64 tokens",
        ),
    ],
)
async def test_what_is_not_that_model_on_such_a_server_is_refused(
    model: ServedModel, changes: dict[str, Played], error: type[MillraceError], says: str
) -> None:
    transcript = _recorded(model)
    transcript.answers |= changes
    with pytest.raises(error, match=says):
        async with _attached(model, transcript):
            """Never reached."""


# --- requests ---


async def test_allowed_tokens_are_told(model: ServedModel) -> None:
    transcript = _recorded(model)
    async with _attached(model, transcript) as engine:
        heard = Heard(engine)
        asked = steered_request()
        sampling = msgspec.structs.replace(asked.sampling, allowed_token_ids=(30, 31))
        engine.add(msgspec.structs.replace(asked, sampling=sampling))
        await heard.ended("r")
    told = transcript.bodies(_GENERATE)[-1]["sampling_params"]
    assert told["allowed_token_ids"] == [30, 31]


async def test_a_request_and_its_answer(model: ServedModel) -> None:
    transcript = _recorded(model)
    async with _attached(model, transcript) as engine:
        heard = Heard(engine)
        engine.add(steered_request())
        await heard.ended("r")
        assert heard.tokens("r") == [30, 31, 32, 33]
        end = heard.end("r")
        assert end is not None
        assert end.finish_reason is FinishReason.LENGTH
        assert end.num_cached_tokens == 16
    body = transcript.bodies(_GENERATE)[-1]
    assert body.pop("sampling_params") == {
        "max_tokens": 4,
        "min_tokens": 2,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 7,
        "stop_token_ids": [5, 1],
        "ignore_eos": True,
        "logprobs": None,
        "bad_words": [],
        "logit_bias": {"7": 1.5},
        "detokenize": False,
    }
    assert body == {
        "model": "tiny",
        "token_ids": list(PROMPT),
        "cache_salt": "s",
        "stream": True,
        "stream_options": {"include_usage": True},
    }, "a server that runs already may have no priorities"


@pytest.mark.parametrize("version", ["0.11.0", "0.32.0"])
async def test_without_the_endpoint_for_tokens_the_other_is_asked(
    model: ServedModel, version: str
) -> None:
    transcript = _recorded(model, version=version)
    generate = transcript.answers[_GENERATE]
    assert not isinstance(generate, Played)

    def complete(body: dict[str, Any]) -> Played:
        return generate(body | {"token_ids": body["prompt"]})

    refused = Played({"error": {"message": "Scale-out endpoints are disabled."}}, status=403)
    transcript.answers |= {_GENERATE: refused, _COMPLETIONS: complete}
    async with _attached(model, transcript) as engine:
        heard = Heard(engine)
        engine.add(request("r", max_tokens=4))
        await heard.ended("r")
        assert heard.tokens("r") == [30, 31, 32, 33]
    body = transcript.bodies(_COMPLETIONS)[-1]
    assert body["prompt"] == list(PROMPT)
    assert body["return_token_ids"] is True
    assert body["temperature"] == 0.0


async def test_an_answer_that_ends_too_soon_is_asked_for_again(model: ServedModel) -> None:
    """No token is lost, although the server reports the full number of tokens."""
    transcript = _recorded(model)
    generate = transcript.answers[_GENERATE]
    assert not isinstance(generate, Played)

    def short(body: dict[str, Any]) -> Played:
        begun = len(body["token_ids"]) > len(PROMPT)
        if not body["stream"] or begun:
            return generate(body)
        return Played(events=[_event([40]), _event([41], "length"), _USAGE, b"[DONE]"])

    transcript.answers[_GENERATE] = short
    async with _attached(model, transcript) as engine:
        heard = Heard(engine)
        engine.add(request("r", max_tokens=6, min_tokens=3))
        await heard.ended("r")
        assert heard.tokens("r") == [40, 41, 30, 31, 32, 33]
    body = transcript.bodies(_GENERATE)[-1]
    assert body["token_ids"] == [*PROMPT, 40, 41]
    assert body["sampling_params"]["max_tokens"] == 4
    assert body["sampling_params"]["min_tokens"] == 1
    assert body["sampling_params"]["seed"] != 7, "the same draws would come again"


async def test_penalties_are_carried_on(model: ServedModel) -> None:
    transcript = _recorded(model)
    async with _attached(model, transcript) as engine:
        heard = Heard(engine)
        engine.add(
            request(
                "r",
                output_token_ids=(30, 50, 30),
                max_tokens=9,
                presence_penalty=1.0,
                frequency_penalty=0.5,
                logit_bias={50: 3.0},
            )
        )
        await heard.ended("r")
        # The server plays the same four again and again; each that is new is told.
        assert heard.tokens("r") == [30, 31, 30, 31, 32, 30]
    calls = [body for body in transcript.bodies(_GENERATE) if body["stream"]]
    assert [len(body["token_ids"]) - len(PROMPT) for body in calls] == [3, 5, 8]
    sampling = [body["sampling_params"] for body in calls]
    assert all(one["presence_penalty"] == 0.0 for one in sampling)
    assert all(one["frequency_penalty"] == 0.5 for one in sampling)
    assert sampling[0]["logit_bias"] == {"30": -2.0, "50": 1.5}
    assert sampling[1]["logit_bias"] == {"30": -2.5, "50": 1.5, "31": -1.5}


async def test_a_grammar_that_cannot_be_compiled_never_gets_to_the_server(
    model: ServedModel,
) -> None:
    transcript = _recorded(model)
    async with _attached(model, transcript) as engine:
        bad = Grammar(kind=GrammarKind.REGEX, text="(")
        await check_refused(engine, request("bad", grammar=bad), "grammar_invalid", "grammar")
    assert not any(body["stream"] for body in transcript.bodies(_GENERATE))


@pytest.mark.parametrize(
    ("grammar", "owned", "sent"),
    [
        (Grammar(kind=GrammarKind.REGEX, text="a+"), True, {"regex": "a+"}),
        (Grammar(kind=GrammarKind.EBNF, text='start: "a"'), True, {"grammar": 'start: "a"'}),
        (Grammar(kind=GrammarKind.JSON_OBJECT), False, {"json_object": True}),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"a": 1}'), False, {"json": '{"a": 1}'}),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text="no JSON"), True, {"json": "no JSON"}),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text=_ODD), True, {"json": _ODD}),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text=_LONG), True, {"json": _LONG}),
    ],
)
def test_a_grammar_goes_to_its_field(
    model: ServedModel, grammar: Grammar, owned: bool, sent: dict[str, Any]
) -> None:
    dialect = VllmDialect(model, EngineConfig(kind=EngineKind.VLLM), owned=owned)
    body = dialect.call(request("r", grammar=grammar), ()).body
    sampling = body.get("sampling_params", body)
    assert sampling["structured_outputs"] == sent


def test_json_has_few_blanks_and_so_has_what_goes_on_behind_it(model: ServedModel) -> None:
    """The engine's own matcher follows a resumed completion."""
    grammar = Grammar(kind=GrammarKind.JSON_OBJECT)
    dialect = _dialect(model)
    body = dialect.call(request("r", grammar=grammar), ()).body
    schema = body["sampling_params"]["structured_outputs"]["json"]
    theirs = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": True})
    vocabulary = LLTokenizer("byte")
    for text, fits in (
        ('{"a":1,"b":[1, 2]}', True),
        ('{"a": {"b": ""}, "c": 1}', True),
        ('{"a":\n1}', False),
        ('{"a":  1}', False),
        ('{"a":1 }', False),
    ):
        read = LLMatcher(vocabulary, theirs, log_level=0)
        token_ids = list(text.encode())
        assert (read.validate_tokens(token_ids) == len(token_ids)) is fits
        own = start(vocabulary, dialect.as_read(grammar))
        assert (own.validate_tokens(token_ids) == len(token_ids)) is fits
        if fits:
            given = start(vocabulary, grammar)
            assert given.validate_tokens(token_ids) == len(token_ids)


@pytest.mark.parametrize(
    ("settings", "fits", "fits_not"),
    [
        ({"whitespace_pattern": r"[ \n]{1,3}"}, '{"a":\n  1}', '{"a":    1}'),
        (
            {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"},
            '{"a":1,"b":2}',
            '{"a": 1}',
        ),
    ],
    ids=["by a pattern", "none"],
)
def test_json_has_the_blanks_that_were_asked_for(
    model: ServedModel, settings: dict[str, Any], fits: str, fits_not: str
) -> None:
    text = json.dumps({"type": "object", "x-guidance": settings})
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=text)
    read = start(LLTokenizer("byte"), _dialect(model).as_read(grammar))
    assert read.validate_tokens(list(fits.encode())) == len(fits)
    assert read.validate_tokens(list(fits_not.encode())) < len(fits_not)


def test_one_token_out_of_those_that_are_allowed(model: ServedModel) -> None:
    call = _dialect(model).call_one_of(request("r", min_tokens=4), (30,), [40, 41])
    sampling = call.body["sampling_params"]
    assert sampling["allowed_token_ids"] == [40, 41]
    assert (sampling["max_tokens"], sampling["min_tokens"]) == (1, 1)
    assert call.body["token_ids"] == [*PROMPT, 30]


def test_priorities_are_sent_where_the_server_has_them(model: ServedModel) -> None:
    urgent = msgspec.structs.replace(request("r"), priority=3)
    assert _dialect(model).call(urgent, ()).body["priority"] == -3
    by_arrival = _dialect(model, arguments=("--scheduling-policy", "fcfs"))
    assert "priority" not in by_arrival.call(urgent, ()).body
    assert (
        "priority"
        not in _dialect(model, arguments=("--scheduling-policy=fcfs",)).call(urgent, ()).body
    )


# --- answers ---


def _read(reader: VllmReader, *events: Any) -> list[AnswerPart | None]:
    return [
        reader.read(event if isinstance(event, bytes) else msgspec.json.encode(event))
        for event in events
    ]


def test_log_probabilities_of_the_endpoint_for_tokens() -> None:
    event = _event([30])
    event["choices"][0]["logprobs"] = {
        "content": [
            {
                "token_id": 30,
                "logprob": -2.0,
                "rank": 3,
                "top_logprobs": [
                    {"token_id": 30, "logprob": -2.0, "rank": 3},
                    {"token_id": 31, "logprob": -0.5, "rank": 1},
                    {"token_id": 32, "logprob": -1.0, "rank": 2},
                ],
            }
        ]
    }
    (part,) = _read(VllmReader(num_logprobs=2), event)
    assert part is not None
    assert part.logprobs == (TokenLogprob(30, -2.0, ((31, -0.5), (32, -1.0))),)


def test_log_probabilities_of_a_prompt_that_is_echoed() -> None:
    event = _event([30])
    event["choices"][0]["logprobs"] = {
        "tokens": ["token_id:20", "token_id:21", "token_id:30"],
        "token_logprobs": [None, -3.0, -0.25],
        "top_logprobs": [
            None,
            {"token_id:21": -3.0, "token_id:5": -0.1},
            {"token_id:30": -0.25},
        ],
    }
    reader = VllmReader(num_logprobs=None, num_echoed=2, num_prompt_tokens=2, num_prompt_logprobs=1)
    (part,) = _read(reader, event)
    assert part is not None
    assert part.token_ids == [30]
    assert part.logprobs == ()
    assert part.prompt_logprobs == (None, TokenLogprob(21, -3.0, ((5, -0.1),)))


def test_the_end_is_held_until_the_cached_tokens_are_known() -> None:
    parts = _read(VllmReader(num_logprobs=None), _event([30], "stop"), _USAGE, b"[DONE]")
    assert parts == [
        AnswerPart(),
        AnswerPart(token_ids=[30], finish_reason=FinishReason.STOP, num_cached_tokens=16),
        None,
    ]
    parts = _read(VllmReader(num_logprobs=None), _event([30], "stop"), b"[DONE]", b"[DONE]")
    assert parts[1] == AnswerPart(token_ids=[30], finish_reason=FinishReason.STOP)
    assert parts[2] is None


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b"nonsense", ServerStreamError),
        (_event([], "abort"), ServerStreamError),
        ({"error": {"message": "engine died", "code": 500}}, ServerStreamError),
        ({"error": {"message": "too long", "code": 400}}, RefusedByServerError),
        (
            {"choices": [{"token_ids": [1], "logprobs": {"tokens": ["a"], "token_logprobs": [0]}}]},
            ServerStreamError,
        ),
    ],
)
def test_an_event_that_reports_a_failure(event: Any, error: type[MillraceError]) -> None:
    with pytest.raises(error):
        _read(VllmReader(num_logprobs=0), event)
