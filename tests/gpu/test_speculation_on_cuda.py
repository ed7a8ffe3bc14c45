"""Proposed tokens on a CUDA device: bit for bit the tokens of an engine that proposes none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.schemas.config import EngineConfig
from tests.engine.checkpoints import save_llama
from tests.engine.support import drain, prompt, request

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    shape = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    save_llama(path, num_attention_heads=4, **shape)
    return path


def _answers(path: Path, requests: list[EngineRequest], **config: Any) -> dict[str, list[int]]:
    chosen: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "deterministic": True,
        "num_blocks": 256,
        "max_num_sequences": 16,
    }
    engine = Engine.load(path, EngineConfig(**(chosen | config)))
    for one in requests:
        engine.add(one)
    found: dict[str, list[int]] = {}
    for output in drain(engine):
        assert output.error is None, output.error
        found.setdefault(output.request_id, []).extend(output.token_ids)
    if config.get("speculation") == "ngram":
        assert engine.stats().accepted_tokens > 0
    return found


@pytest.mark.parametrize("options", [{}, {"quantization": "fp8"}, {"cuda_graphs": False}])
@pytest.mark.parametrize("overlap", [True, False])
def test_no_token_changes(llama: Path, options: dict[str, Any], overlap: bool) -> None:
    plain = [
        request(
            f"r{i}",
            prompt(i, 9 + 17 * i),
            max_tokens=48,
            seed=i,
            **({"temperature": 0.8, "top_p": 0.9} if i % 2 else {"temperature": 0.0}),
        )
        for i in range(8)
    ]
    known = _answers(llama, plain, speculation="off", overlap=overlap, **options)
    predicted = [
        _with_prediction(one, [token if at % 5 else 3 for at, token in enumerate(known[f"r{i}"])])
        for i, one in enumerate(plain)
    ]
    assert _answers(llama, predicted, speculation="ngram", overlap=overlap, **options) == known


def _with_prediction(one: EngineRequest, token_ids: list[int]) -> EngineRequest:
    return msgspec.structs.replace(one, prediction_token_ids=tuple(token_ids))
