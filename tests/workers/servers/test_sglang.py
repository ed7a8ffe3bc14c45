"""SGLang's server as an engine, with one that answers as its documentation says."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import yaml

from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import MillraceError
from millrace.schemas.frames import FinishReason, TokenLogprob
from millrace.schemas.sampling import Grammar, GrammarKind
from millrace.workers.engine_like import EngineLike
from millrace.workers.servers.dialect import (
    Part,
    RefusedByServerError,
    ServerAddress,
    ServerStreamError,
)
from millrace.workers.servers.dialects.sglang import SglangDialect
from millrace.workers.servers.dialects.sglang_answers import SglangReader
from tests.support.waiting import eventually
from tests.workers.conformance import PROMPT, EngineConformance, Heard, request, running
from tests.workers.servers.stand_ins.checks import (
    attached_to,
    check_cancel,
    check_refused,
    steered_request,
)
from tests.workers.servers.stand_ins.sglang_server import SglangServer

_attached = partial(attached_to, EngineKind.SGLANG)


def _server(model: ServedModel, **changes: Any) -> SglangServer:
    return SglangServer(model.tokenizer, model.vocab_size, **changes)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[True, False])
async def engine(model: ServedModel, request: pytest.FixtureRequest) -> AsyncIterator[EngineLike]:
    """Whose events have the new tokens only, or all so far."""
    server = _server(model, token_s=0.002, disjoint=request.param)
    async with _attached(model, server) as started, running(started):
        yield started


class TestSglang(EngineConformance):
    kind = EngineKind.SGLANG


# --- how it is started ---


def _options(model: ServedModel, folder: Path, **config: Any) -> tuple[list[str], dict[str, str]]:
    dialect = SglangDialect(model, EngineConfig(kind=EngineKind.SGLANG, **config), owned=True)
    program = Path(config.get("command", "/bin/sglang"))
    command = dialect.command(program, ServerAddress(folder, 4711, "secret"))
    return list(command.arguments), command.environment


def test_the_command_has_what_the_settings_say(model: ServedModel, tmp_path: Path) -> None:
    arguments, variables = _options(
        model,
        tmp_path,
        max_num_sequences=12,
        max_batch_tokens=512,
        gpu_memory_fraction=0.7,
        kv_cache_dtype="fp8",
        dtype="bfloat16",
        deterministic=True,
        prefix_cache=False,
        cuda_graphs=False,
        overlap=False,
        device="cuda:2",
        num_threads=3,
        arguments=("--tp-size", "4"),
    )
    assert arguments[:2] == ["/bin/sglang", "serve"]
    options = dict(pairwise(arguments))
    assert options["--model-path"] == str(model.path)
    assert options["--port"] == "4711"
    assert options["--host"] == "127.0.0.1"
    assert options["--context-length"] == "128"
    assert options["--max-running-requests"] == "12"
    assert options["--chunked-prefill-size"] == "512"
    assert options["--mem-fraction-static"] == "0.7"
    assert options["--kv-cache-dtype"] == "fp8_e4m3"
    assert options["--sampling-defaults"] == "openai"
    assert {
        "--enable-deterministic-inference",
        "--disable-radix-cache",
        "--disable-cuda-graph",
        "--disable-overlap-schedule",
    } <= {*arguments}
    assert arguments[-2:] == ["--tp-size", "4"]
    assert variables["CUDA_VISIBLE_DEVICES"] == "2"
    assert variables["OMP_NUM_THREADS"] == "3"


def test_a_group_of_devices_is_told_of(model: ServedModel, tmp_path: Path) -> None:
    arguments, _ = _options(model, tmp_path, tensor_parallel=4, expert_parallel=True)
    options = dict(pairwise(arguments))
    assert (options["--tp-size"], options["--ep-size"]) == ("4", "4")
    assert not {"--tp-size", "--ep-size"} & {*_options(model, tmp_path)[0]}


def test_nobody_else_can_read_the_key(model: ServedModel, tmp_path: Path) -> None:
    arguments, variables = _options(model, tmp_path)
    assert not any("secret" in word for word in (*arguments, *variables.values()))
    settings = Path(dict(pairwise(arguments))["--config"])
    assert yaml.safe_load(settings.read_text()) == {"api-key": "secret"}
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600


def test_a_python_starts_it_as_a_module(model: ServedModel, tmp_path: Path) -> None:
    arguments, _ = _options(model, tmp_path, command="/venv/bin/python3")
    assert arguments[:3] == ["/venv/bin/python3", "-m", "sglang.launch_server"]


# --- what it says of itself ---


async def test_one_that_runs_is_known_by_what_it_says(model: ServedModel) -> None:
    async with _attached(model, _server(model, api_key="k"), api_key="k") as engine:
        assert engine.facts.version == "0.5.9"
        assert engine.facts.model == "demo"
        assert engine.facts.context_window_tokens == 128
        assert engine.facts.kv_capacity_tokens == 4096
        assert engine.facts.max_num_sequences == 4
        assert (await engine._dialect.read_load(engine._client)).kv_usage == 0.25


async def test_without_metrics_it_is_asked_whether_it_lives(model: ServedModel) -> None:
    async with _attached(model, _server(model, info={"enable_metrics": False})) as engine:
        assert (await engine._dialect.read_load(engine._client)).kv_usage == 0.0


# --- requests ---


async def test_a_request_and_its_answer(model: ServedModel) -> None:
    server = _server(model)
    async with _attached(model, server) as engine:
        heard = Heard(engine)
        engine.add(steered_request())
        await heard.ended("r")
        end = heard.end("r")
        assert end is not None
        assert end.finish_reason is FinishReason.LENGTH
        assert heard.of("r")[0].num_cached_tokens == 16
        assert server.aborted == []
    body = server.calls[-1]
    assert body.pop("rid").startswith("r-")
    assert body == {
        "input_ids": list(PROMPT),
        "stream": True,
        "extra_key": "s",
        "priority": 5,
        "sampling_params": {
            "max_new_tokens": 4,
            "min_new_tokens": 2,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 3,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop_token_ids": [5, 1],
            "ignore_eos": False,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "sampling_seed": 7,
            "logit_bias": {"7": 1.5},
        },
    }


async def test_a_cancel_is_told_to_the_server(model: ServedModel) -> None:
    server = _server(model, token_s=0.02)
    async with _attached(model, server) as engine:
        await check_cancel(engine, server)
        await eventually(lambda: server.aborted == [server.calls[-1]["rid"]])


async def test_log_probabilities_of_the_completion_and_the_prompt(model: ServedModel) -> None:
    for disjoint in (True, False):
        async with _attached(model, _server(model, disjoint=disjoint)) as engine:
            heard = Heard(engine)
            engine.add(request("l", logprobs=1, prompt_logprobs=2, max_tokens=3))
            await heard.ended("l")
            tokens = heard.tokens("l")
            assert [entry for output in heard.of("l") for entry in output.logprobs] == [
                TokenLogprob(token, -0.5, ((token, -0.5),)) for token in tokens
            ]
            first = heard.of("l")[0].prompt_logprobs
            assert first[0] is None
            assert first[1] == TokenLogprob(21, -1.5, ((21, -0.5), (22, -1.5)))
            assert len(first) == len(PROMPT)
            assert not any(output.prompt_logprobs for output in heard.of("l")[1:])


async def test_what_the_server_refuses_is_the_callers_mistake(model: ServedModel) -> None:
    async with _attached(model, _server(model)) as engine:
        bad = request("bad", repetition_penalty=3.0)
        await check_refused(engine, bad, "invalid_parameter", "repetition_penalty must be in")


async def test_a_grammar_goes_on_behind_what_was_delivered(model: ServedModel) -> None:
    grammar = Grammar(kind=GrammarKind.REGEX, text="[a-f]{4}-[0-9]{8}")
    server = _server(model)
    async with _attached(model, server) as engine:
        heard = Heard(engine)
        begun = model.tokenizer.encode("abcd-1", add_special_tokens=False)
        asked = request("rest", max_tokens=40, grammar=grammar, output_token_ids=tuple(begun))
        engine.add(asked)
        await heard.ended("rest")
        text = model.tokenizer.decode([*begun, *heard.tokens("rest")])
        assert len(text) == 13
        assert text[6:].isdecimal()
    singles = [call for call in server.calls if call.get("sampling_params", {}).get("logit_bias")]
    assert singles
    assert all(call["sampling_params"]["max_new_tokens"] == 1 for call in singles)
    assert not any("regex" in call["sampling_params"] for call in server.calls)


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
    dialect = SglangDialect(model, EngineConfig(kind=EngineKind.SGLANG), owned=True)
    sampling = dialect.call(request("r", grammar=grammar), ()).body["sampling_params"]
    assert sent.items() <= sampling.items()


async def test_a_server_of_another_grammar_library_gets_no_lark(model: ServedModel) -> None:
    server = _server(model, info={"grammar_backend": "xgrammar"})
    async with _attached(model, server) as engine:
        assert GrammarKind.EBNF not in engine._dialect.native_grammars
        assert GrammarKind.REGEX in engine._dialect.native_grammars


def test_one_token_out_of_those_that_are_allowed(model: ServedModel) -> None:
    dialect = SglangDialect(model, EngineConfig(kind=EngineKind.SGLANG), owned=True)
    asked = request("r", min_tokens=4, logit_bias={40: -1.0})
    few = dialect.call_one_of(asked, (30,), [40, 41]).body["sampling_params"]
    assert few["logit_bias"] == {"40": 199.0, "41": 200.0}
    assert (few["max_new_tokens"], few["min_new_tokens"]) == (1, 1)
    allowed = [token for token in range(model.vocab_size) if token != 50]
    many = dialect.call_one_of(asked, (30,), allowed).body["sampling_params"]
    assert many["logit_bias"] == {"40": -1.0, "50": -200.0}


# --- answers ---


def _read(*events: Any, **options: Any) -> list[Part | None]:
    usual: dict[str, Any] = {
        "num_logprobs": None,
        "num_prompt_logprobs": None,
        "num_prompt_tokens": 2,
    }
    reader = SglangReader(**usual | options)
    return [
        reader.read(event if isinstance(event, bytes) else msgspec.json.encode(event))
        for event in events
    ]


def _event(token_ids: list[int], num_made: int, **meta: Any) -> dict[str, Any]:
    return {"output_ids": token_ids, "meta_info": {"completion_tokens": num_made, **meta}}


def test_new_tokens_are_told_from_all_tokens() -> None:
    parts = _read(_event([30], 1), _event([30, 31, 32], 3), _event([33], 4), b"[DONE]")
    assert [part and list(part.token_ids) for part in parts] == [[30], [31, 32], [33], None]
    with pytest.raises(ServerStreamError, match="counts 9 tokens"):
        _read(_event([30], 1), _event([31], 9))


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b"nonsense", ServerStreamError),
        ({"error": {"message": "the scheduler died"}}, ServerStreamError),
        (_event([], 0, finish_reason={"type": "abort", "message": "x"}), ServerStreamError),
        (
            _event([], 0, finish_reason={"type": "abort", "message": "x", "status_code": 400}),
            RefusedByServerError,
        ),
    ],
)
def test_an_event_that_reports_a_failure(event: Any, error: type[MillraceError]) -> None:
    with pytest.raises(error):
        _read(event)
