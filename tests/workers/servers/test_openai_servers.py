"""The adapter of OpenAI-compatible servers with SGLang, TGI and TensorRT-LLM.

A stand-in answers as the documentation of each says.
"""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
import pytest_asyncio
import yaml

from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError, MillraceError
from millrace.schemas.frames import FinishReason
from millrace.schemas.sampling import Grammar, GrammarKind
from millrace.workers.engine_like import EngineFailedError
from millrace.workers.servers.dialect import Dialect, ServerAddress, ServerLoad, ServerStreamError
from millrace.workers.servers.dialects.completions_answers import TokenIdsReader
from millrace.workers.servers.dialects.openai import OpenAiDialect
from millrace.workers.servers.dialects.vllm import VllmDialect
from millrace.workers.servers.server_engine import ServerEngine
from tests.support.waiting import eventually
from tests.workers.conformance import PROMPT, EngineConformance, Heard, request, running
from tests.workers.servers.stand_ins.checks import (
    END_AT,
    attached_to,
    check_cancel,
    check_end,
    check_refused,
    launched,
    steered_request,
)
from tests.workers.servers.stand_ins.completions_server import VERSIONS, CompletionsServer

SGLANG, TGI, TRTLLM = EngineKind.SGLANG, EngineKind.TGI, EngineKind.TRTLLM
VLLM = EngineKind.VLLM
KINDS = (SGLANG, TGI, TRTLLM)
of_each_kind = pytest.mark.parametrize("kind", KINDS)


def _server(
    kind: EngineKind, model: ServedModel, tokenizer: Any = None, **changes: Any
) -> CompletionsServer:
    return CompletionsServer(kind, tokenizer or model.tokenizer, **changes)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def engine(model: ServedModel, request: pytest.FixtureRequest) -> AsyncIterator[ServerEngine]:
    server = _server(request.param, model, token_s=0.002)
    async with (
        attached_to(request.param, model, server, max_num_sequences=4) as started,
        running(started),
    ):
        yield started


class TestOpenAiServers(EngineConformance):
    @pytest.fixture(autouse=True)
    def kind_of_the_server(self, engine: ServerEngine) -> None:
        type(self).kind = engine._dialect.kind


# --- how it is started ---


def _command(
    kind: EngineKind, model: ServedModel, folder: Path, **config: Any
) -> tuple[list[str], dict[str, str]]:
    dialect = OpenAiDialect(model, EngineConfig(kind=kind, **config), owned=True)
    program = Path(config.get("command", "/bin/server"))
    command = dialect.command(program, ServerAddress(folder, 4711, "secret"))
    return list(command.arguments), command.environment


_SETTINGS: dict[str, Any] = {
    "max_num_sequences": 12,
    "max_batch_tokens": 512,
    "gpu_memory_fraction": 0.7,
    "kv_cache_dtype": "fp8",
    "dtype": "bfloat16",
    "prefix_cache": False,
    "cuda_graphs": False,
    "device": "cuda:2",
    "num_threads": 3,
}
_DEVICE = {"CUDA_VISIBLE_DEVICES": "2", "OMP_NUM_THREADS": "3"}


def test_the_command_of_sglang_has_what_the_settings_say(
    model: ServedModel, tmp_path: Path
) -> None:
    more = {"deterministic": True, "overlap": False, "arguments": ("--tp-size", "4")}
    arguments, variables = _command(SGLANG, model, tmp_path, **_SETTINGS, **more)
    assert arguments[:2] == ["/bin/server", "serve"]
    assert {
        ("--model-path", str(model.path)),
        ("--port", "4711"),
        ("--host", "127.0.0.1"),
        ("--context-length", "128"),
        ("--max-running-requests", "12"),
        ("--chunked-prefill-size", "512"),
        ("--mem-fraction-static", "0.7"),
        ("--kv-cache-dtype", "fp8_e4m3"),
        ("--sampling-defaults", "openai"),
    } <= {*pairwise(arguments)}
    assert {
        "--enable-cache-report",
        "--enable-deterministic-inference",
        "--disable-radix-cache",
        "--disable-cuda-graph",
        "--disable-overlap-schedule",
    } <= {*arguments}
    assert arguments[-2:] == ["--tp-size", "4"]
    assert variables == _DEVICE


def test_the_command_of_tgi_has_what_the_settings_say(model: ServedModel, tmp_path: Path) -> None:
    arguments, variables = _command(
        TGI, model, tmp_path, **_SETTINGS, arguments=("--num-shard", "4")
    )
    options = dict(zip(arguments[1::2], arguments[2::2], strict=True))
    assert options == {
        "--model-id": str(model.path),
        "--hostname": "127.0.0.1",
        "--port": "4711",
        "--prometheus-port": "0",
        "--shard-uds-path": str(tmp_path / "shard"),
        "--max-input-tokens": "127",
        "--max-total-tokens": "128",
        "--max-concurrent-requests": "16",
        "--usage-stats": "off",
        "--dtype": "bfloat16",
        "--kv-cache-dtype": "fp8_e4m3fn",
        "--cuda-memory-fraction": "0.7",
        "--max-batch-prefill-tokens": "512",
        "--cuda-graphs": "0",
        "--num-shard": "4",
    }
    assert variables == {"API_KEY": "secret", "PREFIX_CACHING": "0", **_DEVICE}


def test_the_command_of_trtllm_has_what_the_settings_say(
    model: ServedModel, tmp_path: Path
) -> None:
    more = {"load_format": "dummy", "overlap": False, "arguments": ("--tp_size", "4")}
    arguments, variables = _command(TRTLLM, model, tmp_path, **_SETTINGS, **more)
    assert arguments[:3] == ["/bin/server", "serve", str(model.path)]
    assert dict(zip(arguments[3::2], arguments[4::2], strict=True)) == {
        "--host": "127.0.0.1",
        "--port": "4711",
        "--max_seq_len": "128",
        "--max_batch_size": "12",
        "--max_num_tokens": "512",
        "--extra_llm_api_options": str(tmp_path / "trtllm.yaml"),
        "--tp_size": "4",
    }
    assert arguments[-2:] == ["--tp_size", "4"]
    assert yaml.safe_load((tmp_path / "trtllm.yaml").read_text()) == {
        "kv_cache_config": {
            "enable_block_reuse": False,
            "free_gpu_memory_fraction": 0.7,
            "dtype": "fp8",
        },
        "enable_chunked_prefill": True,
        "enable_iter_perf_stats": True,
        "disable_overlap_scheduler": True,
        "dtype": "bfloat16",
        "load_format": "dummy",
        "cuda_graph_config": None,
    }
    assert variables == _DEVICE


@pytest.mark.parametrize(
    ("kind", "tensor", "experts"),
    [
        (SGLANG, "--tp-size", "--ep-size"),
        (TGI, "--num-shard", None),
        (TRTLLM, "--tp_size", "--ep_size"),
    ],
)
def test_a_group_of_devices_is_told_of(
    model: ServedModel, tmp_path: Path, kind: EngineKind, tensor: str, experts: str | None
) -> None:
    has_experts = experts is not None
    arguments, _ = _command(kind, model, tmp_path, tensor_parallel=4, expert_parallel=has_experts)
    options = dict(pairwise(arguments))
    assert options[tensor] == "4"
    assert experts is None or options[experts] == "4"
    assert not {tensor, experts} & {*_command(kind, model, tmp_path)[0]}


def test_key_is_readable_by_its_owner_alone(model: ServedModel, tmp_path: Path) -> None:
    arguments, variables = _command(SGLANG, model, tmp_path)
    assert not any("secret" in word for word in (*arguments, *variables.values()))
    settings = Path(dict(pairwise(arguments))["--config"])
    assert yaml.safe_load(settings.read_text()) == {"api-key": "secret"}
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600


def test_a_python_starts_it_as_a_module(model: ServedModel, tmp_path: Path) -> None:
    arguments, _ = _command(SGLANG, model, tmp_path, command="/venv/bin/python3")
    assert arguments[:3] == ["/venv/bin/python3", "-m", "sglang.launch_server"]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (SGLANG, "kernels", "torch"),
        (SGLANG, "kv_cache_bytes", 1 << 30),
        (TGI, "kernels", "torch"),
        (TGI, "kv_cache_bytes", 1),
        (TGI, "overlap", False),
        (TGI, "load_format", "dummy"),
        (TRTLLM, "kernels", "torch"),
        (TRTLLM, "kv_cache_bytes", 1),
        (TRTLLM, "device", "cpu"),
        (VLLM, "num_blocks", 9),
        (VLLM, "kernels", "torch"),
        (VLLM, "deterministic", True),
        (VLLM, "ageing_s", 1.0),
        (VLLM, "itl_bound_ms", 5.0),
        (VLLM, "host_cache_bytes", 0),
        (VLLM, "idle_offload_s", 1.0),
        (VLLM, "collectives", "gloo"),
    ],
)
def test_a_setting_that_it_does_not_have_is_refused_by_name(
    model: ServedModel, tmp_path: Path, kind: EngineKind, name: str, value: object
) -> None:
    config = EngineConfig(kind=kind, **{name: value})  # type: ignore[arg-type]
    address = ServerAddress(tmp_path, 4711, "secret")
    dialect: type[Dialect] = VllmDialect if kind is VLLM else OpenAiDialect
    with pytest.raises(ConfigError, match=rf"worker\.engine\.{name}\b"):
        dialect(model, config, owned=True).command(Path("/bin/server"), address)


class _OtherTokenizer:
    """Tokenizer that splits texts differently from the model's."""

    def encode(self, text: str, **_: bool) -> list[int]:
        return [ord(character) % 300 for character in text]


class _Refused(NamedTuple):
    """Case of a server at the URL that the engine refuses at start, and the words of the error."""

    kind: EngineKind
    changes: dict[str, Any]
    config: dict[str, Any]
    error: type[MillraceError]
    says: str


_REFUSED = (
    _Refused(SGLANG, {"version": "0.4.6"}, {}, ConfigError, "0.5.4 or newer is required"),
    _Refused(SGLANG, {"version": None}, {}, EngineFailedError, "does not report its version"),
    _Refused(SGLANG, {"window": 64}, {}, ConfigError, "context window is 64 tokens"),
    _Refused(SGLANG, {"api_key": "o"}, {"api_key": "k"}, EngineFailedError, "status 401"),
    _Refused(SGLANG, {}, {"served_name": "llama"}, ConfigError, "no model 'llama'"),
    _Refused(SGLANG, {"tokenizer": _OtherTokenizer()}, {}, ConfigError, "tokenizer is not that of"),
    _Refused(
        SGLANG, {"tells_ids": False}, {}, EngineFailedError, "does not support return_token_ids"
    ),
    _Refused(TGI, {"version": "1.4.5"}, {}, ConfigError, r"2\.0 or newer is required"),
    _Refused(
        TGI, {"info": {"max_total_tokens": None}}, {}, EngineFailedError, "not of the kind tgi"
    ),
    _Refused(TGI, {"window": 64}, {}, ConfigError, "context window is 64 tokens"),
    _Refused(TGI, {"info": {"max_input_tokens": 99}}, {}, ConfigError, "window is 100 tokens"),
    _Refused(TGI, {"api_key": "o"}, {"api_key": "k"}, EngineFailedError, "status 401"),
    _Refused(TGI, {"tokenizer": _OtherTokenizer()}, {}, ConfigError, "it serves another model"),
    _Refused(TRTLLM, {"version": "0.20.0"}, {}, ConfigError, r"1\.0 or newer is required"),
    _Refused(TRTLLM, {"version": None}, {}, EngineFailedError, "does not report its version"),
    _Refused(TRTLLM, {}, {"served_name": "llama"}, ConfigError, "no model 'llama'"),
    _Refused(TRTLLM, {"tokenizer": _OtherTokenizer()}, {}, ConfigError, "it serves another model"),
)


@pytest.mark.parametrize("refused", _REFUSED, ids=lambda one: f"{one.kind.value}-{one.says}")
async def test_a_server_without_the_model_is_refused(model: ServedModel, refused: _Refused) -> None:
    server = _server(refused.kind, model, **refused.changes)
    with pytest.raises(refused.error, match=refused.says):
        async with attached_to(refused.kind, model, server, **refused.config):
            """Never reached."""


@pytest.mark.parametrize(
    ("kind", "program"),
    [(SGLANG, "sglang"), (TGI, "text-generation-launcher"), (TRTLLM, "trtllm-serve")],
)
async def test_server_is_started_on_a_free_port(
    model: ServedModel, tmp_path: Path, kind: EngineKind, program: str
) -> None:
    """The server has a key, which the stand-ins of SGLang and TGI require, as the real servers
    do."""
    async with launched(model, kind, tmp_path / program, "completions_server") as engine:
        heard = Heard(engine)
        engine.add(request("r"))
        await heard.ended("r")
        assert heard.tokens("r")
        if kind is TRTLLM:
            assert engine.stats.max_num_sequences == 64
            return
        url = f"{engine._client.url}/v1/completions"
        async with aiohttp.ClientSession() as others, others.post(url) as answer:
            assert answer.status == 401


# --- what it says of itself ---


@pytest.mark.parametrize(
    ("kind", "window", "kv_capacity_tokens", "max_num_sequences", "load"),
    [
        (SGLANG, 128, 4096, 4, ServerLoad(kv_usage=0.25)),
        (TGI, 128, 0, 3, ServerLoad(num_steps=43)),
        (TRTLLM, None, 0, 0, ServerLoad()),
    ],
)
async def test_one_that_runs_is_known_by_what_it_says(
    model: ServedModel,
    kind: EngineKind,
    window: int | None,
    kv_capacity_tokens: int,
    max_num_sequences: int,
    load: ServerLoad,
) -> None:
    server = _server(kind, model, api_key="k")
    async with attached_to(kind, model, server, api_key="k") as engine:
        assert engine.facts.version == VERSIONS[kind]
        assert engine.facts.model == "demo"
        assert engine.facts.context_window_tokens == window
        assert engine.facts.kv_capacity_tokens == kv_capacity_tokens
        assert engine.facts.max_num_sequences == max_num_sequences
        assert await engine._dialect.read_load(engine._client) == load


async def test_the_load_of_trtllm_is_that_of_the_last_step_that_it_told(
    model: ServedModel,
) -> None:
    server = _server(TRTLLM, model)
    cache = {"freeNumBlocks": 75, "maxNumBlocks": 100, "usedNumBlocks": 25}
    async with attached_to(TRTLLM, model, server) as engine:
        read_load = engine._dialect.read_load
        assert await read_load(engine._client) == ServerLoad()
        # As its documentation shows it.
        server.steps = [{"iter": 153}, {"gpuMemUsage": 7, "iter": 154, "kvCacheStats": cache}]
        for _ in range(2):
            assert await read_load(engine._client) == ServerLoad(kv_usage=0.25, num_steps=154)
        server.steps = [{"iter": 155, "kvCacheStats": None}]
        assert await read_load(engine._client) == ServerLoad(num_steps=155)


# --- requests ---


_USUAL = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}}


async def _asked(kind: EngineKind, model: ServedModel, asked: Any) -> tuple[Heard, dict[str, Any]]:
    server = _server(kind, model)
    async with attached_to(kind, model, server) as engine:
        heard = Heard(engine)
        engine.add(asked)
        await heard.ended("r")
    assert server.aborted == []
    [body] = server.calls
    return heard, body


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        (
            SGLANG,
            {
                "cache_salt": "s",
                "priority": 5,
                "min_tokens": 2,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "ignore_eos": False,
                "return_token_ids": True,
                "skip_special_tokens": False,
                "no_stop_trim": True,
            },
        ),
        (
            TRTLLM,
            {"ignore_eos": True, "include_stop_str_in_output": True, "detokenize": False},
        ),
    ],
)
async def test_a_request_by_token_ids_and_its_answer(
    model: ServedModel, kind: EngineKind, more: dict[str, Any]
) -> None:
    asked = steered_request()
    if kind is TRTLLM:
        sampling = msgspec.structs.replace(asked.sampling, min_tokens=0)
        asked = msgspec.structs.replace(asked, sampling=sampling)
    heard, body = await _asked(kind, model, asked)
    end = heard.end("r")
    assert end is not None
    assert end.finish_reason is FinishReason.LENGTH
    assert len(heard.tokens("r")) == 4
    assert heard.of("r")[-1].num_cached_tokens == 16
    assert kind is TRTLLM or body.pop("rid").startswith("r-")
    assert body == {
        **_USUAL,
        **more,
        "prompt": list(PROMPT),
        "max_tokens": 4,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 3,
        "min_p": 0.0,
        "seed": 7,
        "stop_token_ids": [5, 1],
        "logit_bias": {"7": 1.5},
    }


@pytest.mark.parametrize(
    ("sampling", "sent"),
    [
        ({}, {"temperature": 0.0, "repetition_penalty": 1.0, "seed": 7}),
        (
            {"temperature": 0.5, "seed": 2**62, "top_p": 0.9, "repetition_penalty": 1.2},
            {"temperature": 0.5, "seed": 2**62, "top_p": 0.9, "repetition_penalty": 1.2},
        ),
    ],
)
async def test_a_request_by_text_and_its_answer(
    model: ServedModel, sampling: dict[str, Any], sent: dict[str, Any]
) -> None:
    """TGI takes no ``top_p`` that changes nothing."""
    prompt = tuple(model.tokenizer.encode("<|user|>What?"))
    heard, body = await _asked(TGI, model, request("r", prompt, max_tokens=12, **sampling))
    assert heard.tokens("r")
    # Without the token that the server's tokenizer puts before each prompt.
    assert body == {**_USUAL, **sent, "prompt": "<|user|>What?", "max_tokens": 12}


@pytest.mark.parametrize("kind", [SGLANG, TRTLLM])
async def test_an_end_of_the_sequence_is_its_last_token(
    model: ServedModel, kind: EngineKind
) -> None:
    async with attached_to(kind, model, _server(kind, model, end_at=END_AT)) as engine:
        await check_end(engine)


@of_each_kind
async def test_a_cancel_ends_the_connection(model: ServedModel, kind: EngineKind) -> None:
    server = _server(kind, model, token_s=0.02)
    async with attached_to(kind, model, server) as engine:
        await check_cancel(engine, server)
        if kind is SGLANG:
            await eventually(lambda: server.aborted == [server.calls[-1]["rid"]])


@pytest.mark.parametrize("kind", [SGLANG, TRTLLM])
async def test_a_stream_that_broke_goes_on_where_it_stopped(
    model: ServedModel, kind: EngineKind
) -> None:
    tokens = []
    for breaks in ({}, {1: 1, 2: 5}):
        server = _server(kind, model, breaks_at=breaks)
        async with attached_to(kind, model, server) as engine:
            heard = Heard(engine)
            engine.add(request("r", max_tokens=30))
            await heard.ended("r")
            assert len(server.calls) == 1 + len(breaks)
            tokens.append(heard.tokens("r"))
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 30


async def test_tgi_is_given_no_more_than_it_takes(model: ServedModel) -> None:
    server = _server(TGI, model, room=3, token_s=0.002)
    async with attached_to(TGI, model, server) as engine:
        heard = Heard(engine)
        names = [f"r{number}" for number in range(7)]
        for name in names:
            engine.add(request(name))
        engine.cancel("r3")
        await heard.ended(*(name for name in names if name != "r3"))
    assert all(output.error is None for output in heard.outputs)
    assert len(server.calls) == 6


@of_each_kind
async def test_a_server_that_is_busy_is_asked_again(model: ServedModel, kind: EngineKind) -> None:
    server = _server(kind, model, busy=frozenset({1}))
    async with attached_to(kind, model, server) as engine:
        heard = Heard(engine)
        engine.add(request("r"))
        await heard.ended("r")
    assert heard.tokens("r")
    assert len(server.calls) == 2


async def test_what_the_server_refuses_is_the_callers_mistake(model: ServedModel) -> None:
    async with attached_to(SGLANG, model, _server(SGLANG, model)) as engine:
        bad = request("bad", repetition_penalty=3.0)
        await check_refused(engine, bad, "invalid_parameter", "repetition_penalty is over 2")


# --- grammars ---


async def test_a_grammar_goes_on_behind_what_was_delivered(model: ServedModel) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="[a-f]{4}-[0-9]{8}")
    server = _server(SGLANG, model)
    async with attached_to(SGLANG, model, server) as engine:
        heard = Heard(engine)
        begun = model.tokenizer.encode("abcd-1", add_special_tokens=False)
        asked = request("rest", max_tokens=40, grammar=grammar, output_token_ids=tuple(begun))
        engine.add(asked)
        await heard.ended("rest")
        text = model.tokenizer.decode([*begun, *heard.tokens("rest")])
        assert len(text) == 13
        assert text[6:].isdecimal()
    singles = [call for call in server.calls if call.get("logit_bias")]
    assert singles
    assert all(call["max_tokens"] == 1 for call in singles)
    assert not any("regex" in call for call in server.calls)


@pytest.mark.parametrize(
    ("grammar", "sent"),
    [
        (Grammar(kind=GrammarKind.REGEX, text="a+"), {"regex": "a+"}),
        (Grammar(kind=GrammarKind.EBNF, text='start: "a"'), {"ebnf": 'start: "a"'}),
        (Grammar(kind=GrammarKind.JSON_SCHEMA, text="no JSON"), {"json_schema": "no JSON"}),
    ],
)
def test_a_grammar_goes_to_its_field(
    model: ServedModel, grammar: Grammar, sent: dict[str, str]
) -> None:
    dialect = OpenAiDialect(model, EngineConfig(kind=SGLANG), owned=True)
    body = dialect.call(request("r", grammar=grammar), ()).body
    assert sent.items() <= body.items()


async def test_a_server_of_another_grammar_library_gets_no_lark(model: ServedModel) -> None:
    server = _server(SGLANG, model, info={"grammar_backend": "xgrammar"})
    async with attached_to(SGLANG, model, server) as engine:
        assert GrammarKind.EBNF not in engine._dialect.native_grammars
        assert GrammarKind.REGEX in engine._dialect.native_grammars


def test_one_token_out_of_those_that_are_allowed(model: ServedModel) -> None:
    dialect = OpenAiDialect(model, EngineConfig(kind=SGLANG), owned=True)
    asked = request("r", min_tokens=4, logit_bias={40: -1.0})
    few = dialect.call_one_of(asked, (30,), [40, 41]).body
    assert few["logit_bias"] == {"40": 199.0, "41": 200.0}
    assert (few["max_tokens"], few["min_tokens"]) == (1, 1)
    allowed = [token for token in range(model.vocab_size) if token != 50]
    many = dialect.call_one_of(asked, (30,), allowed).body
    assert many["logit_bias"] == {"40": -1.0, "50": -200.0}


# --- answers ---


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({"choices": [{"text": "word"}]}, "text instead of the requested token ids"),
        ({"choices": [{"text": "", "finish_reason": "timeout"}]}, "unknown reason: timeout"),
        ({"choices": [{"token_ids": ["a"]}]}, "invalid event in a stream"),
    ],
)
def test_what_is_wrong_is_told(event: Any, says: str) -> None:
    with pytest.raises(ServerStreamError, match=says):
        TokenIdsReader().read(msgspec.json.encode(event))
