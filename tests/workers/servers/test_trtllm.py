"""TensorRT-LLM's server as an engine, with one that answers as its documentation says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import yaml

from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.frames import FinishReason
from millrace.workers.engine_like import EngineLike
from millrace.workers.servers.dialect import ServerAddress, ServerLoad, ServerStreamError
from millrace.workers.servers.dialects.openai_answers import TokenIdsReader
from millrace.workers.servers.dialects.trtllm import TrtllmDialect
from tests.workers.conformance import PROMPT, EngineConformance, Heard, request, running
from tests.workers.scripted import EOS
from tests.workers.servers.stand_ins.checks import (
    attached_to,
)
from tests.workers.servers.stand_ins.trtllm_server import TrtllmServer

# As its documentation shows it.
_STEP = {
    "gpuMemUsage": 76665782272,
    "iter": 154,
    "iterLatencyMS": 7.0,
    "kvCacheStats": {"freeNumBlocks": 75, "maxNumBlocks": 100, "usedNumBlocks": 25},
    "numActiveRequests": 1,
}


_attached = partial(attached_to, EngineKind.TRTLLM)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: ServedModel) -> AsyncIterator[EngineLike]:
    server = TrtllmServer(model.tokenizer, token_s=0.002)
    async with _attached(model, server, max_num_sequences=4) as started, running(started):
        yield started


class TestTrtllm(EngineConformance):
    kind = EngineKind.TRTLLM


# --- how it is started ---


def _command(
    model: ServedModel, folder: Path, **config: Any
) -> tuple[list[str], dict[str, str], dict[str, Any]]:
    dialect = TrtllmDialect(model, EngineConfig(kind=EngineKind.TRTLLM, **config), owned=True)
    command = dialect.command(Path("/bin/trtllm-serve"), ServerAddress(folder, 4711, "secret"))
    settings = yaml.safe_load((folder / "trtllm.yaml").read_text())
    return list(command.arguments), command.environment, settings


def test_a_group_of_devices_is_told_of(model: ServedModel, tmp_path: Path) -> None:
    arguments, _, _ = _command(model, tmp_path, tensor_parallel=4, expert_parallel=True)
    options = dict(zip(arguments[3::2], arguments[4::2], strict=True))
    assert (options["--tp_size"], options["--ep_size"]) == ("4", "4")
    assert not {"--tp_size", "--ep_size"} & {*_command(model, tmp_path)[0]}


def test_the_command_has_what_the_settings_say(model: ServedModel, tmp_path: Path) -> None:
    arguments, variables, settings = _command(
        model,
        tmp_path,
        max_num_sequences=12,
        max_batch_tokens=512,
        gpu_memory_fraction=0.7,
        kv_cache_dtype="fp8",
        dtype="bfloat16",
        load_format="dummy",
        prefix_cache=False,
        cuda_graphs=False,
        overlap=False,
        device="cuda:2",
        num_threads=3,
        arguments=("--tp_size", "4"),
    )
    assert arguments[:3] == ["/bin/trtllm-serve", "serve", str(model.path)]
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
    assert settings == {
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
    assert variables == {"CUDA_VISIBLE_DEVICES": "2", "OMP_NUM_THREADS": "3"}


# --- what it says of itself ---


async def test_one_that_runs_is_known_by_what_it_says(model: ServedModel) -> None:
    server = TrtllmServer(model.tokenizer)
    async with _attached(model, server, max_num_sequences=3) as engine:
        assert engine.facts.version == "1.2.0"
        assert engine.facts.model == "demo"
        assert engine.stats.max_num_sequences == 3


async def test_its_load_is_that_of_the_last_step_that_it_told(model: ServedModel) -> None:
    server = TrtllmServer(model.tokenizer)
    async with _attached(model, server) as engine:
        read_load = engine._dialect.read_load
        assert await read_load(engine._client) == ServerLoad()
        server.steps = [{"iter": 153}, _STEP]
        for _ in range(2):
            assert await read_load(engine._client) == ServerLoad(kv_usage=0.25, num_steps=154)
        server.steps = [{"iter": 155, "kvCacheStats": None}]
        assert await read_load(engine._client) == ServerLoad(num_steps=155)


# --- requests ---


async def test_a_request_and_its_answer(model: ServedModel) -> None:
    server = TrtllmServer(model.tokenizer)
    async with _attached(model, server) as engine:
        heard = Heard(engine)
        asked = request("r", max_tokens=4, stop_token_ids=(5,), logit_bias={7: 1.5}, top_k=3)
        engine.add(msgspec.structs.replace(asked, eos_token_ids=(EOS,)))
        await heard.ended("r")
    end = heard.end("r")
    assert end is not None
    assert end.finish_reason is FinishReason.LENGTH
    assert len(heard.tokens("r")) == 4
    assert end.num_cached_tokens == 16
    assert server.calls == [
        {
            "model": "demo",
            "prompt": list(PROMPT),
            "max_tokens": 4,
            "temperature": 0.0,
            "top_p": 1.0,
            "top_k": 3,
            "min_p": 0.0,
            "seed": 7,
            "stop_token_ids": [5, EOS],
            "include_stop_str_in_output": True,
            "ignore_eos": True,
            "detokenize": False,
            "logit_bias": {"7": 1.5},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


@pytest.mark.parametrize(
    ("event", "says"),
    [
        ({"choices": [{"text": "word"}]}, "text where it was asked for token ids"),
        ({"choices": [{"text": "", "finish_reason": "timeout"}]}, "reason of its own: timeout"),
        ({"choices": [{"token_ids": ["a"]}]}, "no event of a stream"),
    ],
)
def test_what_is_wrong_is_told(event: Any, says: str) -> None:
    with pytest.raises(ServerStreamError, match=says):
        TokenIdsReader().read(msgspec.json.encode(event))
