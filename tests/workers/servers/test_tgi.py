"""Text Generation Inference as an engine, with a server that answers as its documentation says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.workers.engine_like import EngineLike
from millrace.workers.servers.dialect import RefusedByServerError, ServerAddress, ServerStreamError
from millrace.workers.servers.dialects.tgi import TgiDialect
from millrace.workers.servers.dialects.tgi_answers import TgiReader
from tests.workers.conformance import PROMPT, EngineConformance, Heard, request, running
from tests.workers.servers.stand_ins.checks import (
    attached_to,
)
from tests.workers.servers.stand_ins.tgi_server import TgiServer

_attached = partial(attached_to, EngineKind.TGI)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: ServedModel) -> AsyncIterator[EngineLike]:
    server = TgiServer(model.tokenizer, token_s=0.002)
    async with _attached(model, server) as started, running(started):
        yield started


class TestTgi(EngineConformance):
    kind = EngineKind.TGI


# --- how it is started ---


def _options(model: ServedModel, folder: Path, **config: Any) -> tuple[list[str], dict[str, str]]:
    dialect = TgiDialect(model, EngineConfig(kind=EngineKind.TGI, **config), owned=True)
    program = Path("/bin/text-generation-launcher")
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
        prefix_cache=False,
        cuda_graphs=False,
        device="cuda:2",
        num_threads=3,
        arguments=("--num-shard", "4"),
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
    assert variables == {
        "API_KEY": "secret",
        "CUDA_VISIBLE_DEVICES": "2",
        "OMP_NUM_THREADS": "3",
        "PREFIX_CACHING": "0",
    }


def test_a_group_of_devices_is_told_of(model: ServedModel, tmp_path: Path) -> None:
    arguments, _ = _options(model, tmp_path, tensor_parallel=4)
    assert dict(pairwise(arguments))["--num-shard"] == "4"
    assert "--num-shard" not in _options(model, tmp_path)[0]


# --- what it says of itself ---


async def test_one_that_runs_is_known_by_what_it_says(model: ServedModel) -> None:
    server = TgiServer(model.tokenizer, api_key="k")
    async with _attached(model, server, api_key="k") as engine:
        assert engine.facts.version == "3.3.7"
        assert engine.facts.model == "demo"
        assert engine.facts.context_window_tokens == 128
        assert engine.facts.max_num_sequences == 3
        assert (await engine._dialect.read_load(engine._client)).num_steps == 43


# --- requests ---


async def test_a_request_and_its_answer(model: ServedModel) -> None:
    server = TgiServer(model.tokenizer)
    prompt = tuple(model.tokenizer.encode("<|user|>What?"))
    async with _attached(model, server) as engine:
        heard = Heard(engine)
        engine.add(request("greedy", prompt))
        engine.add(
            request(
                "sampled",
                prompt,
                temperature=0.5,
                seed=2**62,
                top_k=3,
                top_p=0.9,
                typical_p=0.8,
                repetition_penalty=1.2,
            )
        )
        await heard.ended("greedy", "sampled")
    assert len(heard.tokens("greedy")) == 12
    usual = {"max_new_tokens": 12, "details": True}
    # Without the token that the server's tokenizer puts before each prompt.
    assert server.calls == [
        {
            "inputs": "<|user|>What?",
            "parameters": usual | {"do_sample": False, "repetition_penalty": 1.0},
        },
        {
            "inputs": "<|user|>What?",
            "parameters": usual
            | {"do_sample": True, "repetition_penalty": 1.2, "temperature": 0.5}
            | {"top_k": 3, "top_p": 0.9, "typical_p": 0.8, "seed": 2**62},
        },
    ]


async def test_it_is_given_no_more_than_it_takes(model: ServedModel) -> None:
    server = TgiServer(model.tokenizer, max_concurrent_requests=3, token_s=0.002)
    async with _attached(model, server) as engine:
        heard = Heard(engine)
        names = [f"r{number}" for number in range(7)]
        for name in names:
            engine.add(request(name))
        engine.cancel("r3")
        await heard.ended(*(name for name in names if name != "r3"))
    assert all(output.error is None for output in heard.outputs)
    assert len(server.calls) == 6


def test_a_character_that_was_begun_is_made_anew(model: ServedModel) -> None:
    [first] = [i for i in range(5, 261) if model.tokenizer.token_bytes(i) == b"\xc3"]
    [second] = [i for i in range(5, 261) if model.tokenizer.token_bytes(i) == b"\xa9"]
    dialect = TgiDialect(model, EngineConfig(kind=EngineKind.TGI), owned=True)
    asked = request("r", output_token_ids=(40, first))
    body = dialect.call(asked, asked.output_token_ids).body
    assert body["inputs"] == model.tokenizer.decode((*PROMPT, 40))
    assert body["parameters"]["max_new_tokens"] == 11
    for told, kept in (((first, second, 50), [second, 50]), ((41, first), [41, first])):
        reader = dialect.reader(asked, asked.output_token_ids)
        parts = [reader.read(msgspec.json.encode({"token": {"id": one}})) for one in told]
        assert [one for part in parts if part is not None for one in part.token_ids] == kept


@pytest.mark.parametrize(
    ("event", "error", "says"),
    [
        (b"{", ServerStreamError, "no event of a stream"),
        ({"index": 1}, ServerStreamError, "without a token"),
        ({"error": "no", "error_type": "validation"}, RefusedByServerError, "TGI says: no"),
        ({"error": "out of memory", "error_type": "generation"}, ServerStreamError, "out of"),
        (
            {"token": {"id": 1}, "details": {"finish_reason": "tired"}},
            ServerStreamError,
            "reason of its own: tired",
        ),
    ],
)
def test_what_is_wrong_is_told(event: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        TgiReader().read(event if isinstance(event, bytes) else msgspec.json.encode(event))


async def test_a_server_that_is_busy_is_asked_again(model: ServedModel) -> None:
    busy = {"error": "Model is overloaded", "error_type": "overloaded"}
    async with _attached(model, TgiServer(model.tokenizer, errors={1: busy})) as engine:
        heard = Heard(engine)
        engine.add(request("r"))
        await heard.ended("r")
    assert len(heard.tokens("r")) == 12
