"""Engine with quantized weights: a request's tokens depend on no other request, no cache and no
shortage of blocks, and a request resumes behind any of its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from millrace.engine.step.engine import Engine
from millrace.schemas.config import EngineConfig
from tests.engine.checkpoints import save_llama, save_model
from tests.engine.devices.cpu.test_fused_decoder import LLAMA
from tests.engine.kernels.compiled import compiled
from tests.engine.support import drain, last_by_request, prompt, request, tokens_by_request

_KINDS = ("int8", "int4", "fp8")
_MAX_TOKENS = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide")
    save_llama(path)
    return path


def _engine(checkpoint: Path, kind: str, **settings: Any) -> Engine:
    """Load an engine in float32, whose sums differ too little between batches to change a row's
    codes."""
    config = EngineConfig(quantization=kind, device="cpu", dtype="float32", num_blocks=256)
    return Engine.load(checkpoint, msgspec.structs.replace(config, **settings))


def _alone(checkpoint: Path, kind: str, prompts: list[list[int]]) -> list[list[int]]:
    """Return the tokens of each prompt in an engine that runs one prompt at a time."""
    engine = _engine(checkpoint, kind, prefix_cache=False)
    made = []
    for index, token_ids in enumerate(prompts):
        engine.add(request(str(index), token_ids, max_tokens=_MAX_TOKENS, ignore_eos=True))
        made.append(tokens_by_request(drain(engine))[str(index)])
    return made


@pytest.mark.parametrize("kind", _KINDS)
def test_quantized_weights_are_others(checkpoint: Path, kind: str) -> None:
    wide = Engine.load(checkpoint, EngineConfig(num_blocks=64, device="cpu", dtype="float32"))
    quantized = _engine(checkpoint, kind)
    for engine in (wide, quantized):
        engine.add(request("a", prompt(1, 20), max_tokens=1, logprobs=3))
    (own, other) = (drain(engine)[-1].logprobs[0].logprob for engine in (wide, quantized))
    assert own != other


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.6), ("int4", 0.4), ("fp8", 0.6)])
def test_the_kernels_read_fewer_bytes(tmp_path: Path, kind: str, most: float) -> None:
    save_model(tmp_path, "Llama", **LLAMA | {"stored_dtype": torch.bfloat16})
    compiled(torch.bfloat16)
    settings = EngineConfig(num_blocks=8, device="cpu", dtype="bfloat16")
    wide = Engine.load(tmp_path, settings)
    quantized = Engine.load(tmp_path, msgspec.structs.replace(settings, quantization=kind))
    assert quantized.weight_bytes < most * wide.weight_bytes


@pytest.mark.parametrize("kind", _KINDS)
def test_a_batch_a_cache_and_a_small_pool_change_no_token(checkpoint: Path, kind: str) -> None:
    shared = prompt(9, 40)
    prompts = [[*shared, *prompt(i, 3 + i)] for i in range(6)]
    expected = _alone(checkpoint, kind, prompts)
    for settings in (
        {"prefix_cache": False},
        {"prefix_cache": True},
        {"num_blocks": 9, "max_batch_tokens": 24},
    ):
        engine = _engine(checkpoint, kind, **settings)
        for round_number in range(2):
            for index, token_ids in enumerate(prompts):
                name = f"{round_number}/{index}"
                engine.add(request(name, token_ids, max_tokens=_MAX_TOKENS, ignore_eos=True))
            outputs = drain(engine)
            made = tokens_by_request(outputs)
            assert [made[f"{round_number}/{i}"] for i in range(len(prompts))] == expected
        if "num_blocks" in settings:
            assert max(one.num_preemptions for one in last_by_request(outputs).values()) > 0
        elif settings["prefix_cache"]:
            assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("kind", _KINDS)
def test_a_request_goes_on_behind_any_of_its_tokens(checkpoint: Path, kind: str) -> None:
    whole = request(
        "whole", prompt(4, 12), max_tokens=_MAX_TOKENS, ignore_eos=True, temperature=0.9, seed=3
    )
    engine = _engine(checkpoint, kind)
    engine.add(whole)
    tokens = tokens_by_request(drain(engine))["whole"]
    for cut in range(1, len(tokens)):
        output_token_ids = tuple(tokens[:cut])
        engine.add(
            msgspec.structs.replace(whole, request_id=str(cut), output_token_ids=output_token_ids)
        )
    rest = tokens_by_request(drain(engine))
    assert all(rest[str(cut)] == tokens[cut:] for cut in range(1, len(tokens)))
