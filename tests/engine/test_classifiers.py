"""Labels against transformers: in any chunking and company, found in the prefix cache or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import CheckpointError
from millrace.schemas.frames import FinishReason
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import SamplingParams
from tests.engine.checkpoints import save_classifier
from tests.engine.conftest import MakeEngine
from tests.engine.parallel.shapes import SHAPE
from tests.engine.support import drain, last_by_request, prompt, request
from tests.support.engine.warm_fixture import warm_processes as warm_processes

PROMPTS = [prompt(seed, length) for seed, length in ((1, 100), (2, 1), (3, 33), (4, 16), (5, 47))]


def classify(name: str, token_ids: list[int], **changes: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(token_ids),
        pooling=Pooling.CLASSIFY,
        **changes,
    )


def reference(path: Path, token_ids: list[int]) -> torch.Tensor:
    """Return the logits by transformers from the same checkpoint."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def check(path: Path, token_ids: list[int], output: EngineOutput) -> None:
    expected = reference(path, token_ids)
    error = (torch.tensor(output.embedding) - expected).abs().max() / expected.abs().max()
    assert float(error) <= 1e-4
    assert (output.finish_reason, output.token_ids, output.error) == (FinishReason.STOP, (), None)


@pytest.mark.parametrize("kernels", ["auto", "torch", "reference"])
@pytest.mark.parametrize(
    ("family", "num_labels"),
    [("Llama", 1), ("Llama", 5), ("Qwen2", 1), ("Qwen3", 1), ("Qwen3", 2), ("Mistral", 3)],
)
def test_labels_are_those_of_transformers(
    tmp_path: Path, family: str, num_labels: int, kernels: str
) -> None:
    save_classifier(tmp_path, family, num_labels)
    config = EngineConfig(
        num_blocks=128, device="cpu", kernels=kernels, max_batch_tokens=40, max_num_sequences=8
    )
    engine = Engine.load(tmp_path, config)
    for name in ("cold", "warm"):
        for i, token_ids in enumerate(PROMPTS):
            engine.add(classify(f"{name}{i}", token_ids))
        last = last_by_request(drain(engine))
        for i, token_ids in enumerate(PROMPTS):
            check(tmp_path, token_ids, last[f"{name}{i}"])
    assert last["warm0"].num_cached_tokens == 96, "the last token alone is needed"
    stats = engine.stats()
    assert (stats.num_free_blocks, stats.outstanding_tokens) == (128, 0)


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.parametrize(
    "ranks",
    [{"pipeline_parallel": 2}, {"tensor_parallel": 2, "pipeline_parallel": 2}],
    ids=str,
)
def test_labels_of_a_group_of_ranks(tmp_path: Path, ranks: dict[str, Any]) -> None:
    check_ranks(tmp_path, **ranks)


def test_labels_of_a_group_of_ranks_on_devices(tmp_path: Path) -> None:
    """The ranks' processes start afresh, as a user's do."""
    check_ranks(tmp_path, pipeline_parallel=2, kernels="reference")


def check_ranks(tmp_path: Path, **ranks: Any) -> None:
    """Assert that the labels of a group of ranks are those of transformers."""
    save_classifier(tmp_path, "Llama", 3, **SHAPE)
    config = EngineConfig(
        num_blocks=128, device="cpu", max_batch_tokens=40, max_num_sequences=8, num_threads=1
    )
    engine = Engine.load(tmp_path, msgspec.structs.replace(config, **ranks))
    for i, token_ids in enumerate(PROMPTS):
        engine.add(classify(f"r{i}", token_ids))
    last = last_by_request(drain(engine))
    for i, token_ids in enumerate(PROMPTS):
        check(tmp_path, token_ids, last[f"r{i}"])


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_labels_of_a_mixture_of_experts(tmp_path: Path, family: str) -> None:
    changes = {
        "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    }[family]
    save_classifier(tmp_path, family, 3, **changes)
    engine = Engine.load(tmp_path, EngineConfig(num_blocks=32, device="cpu"))
    engine.add(classify("a", PROMPTS[2]))
    check(tmp_path, PROMPTS[2], last_by_request(drain(engine))["a"])


def test_classifier_makes_embeddings_and_no_tokens(tmp_path: Path) -> None:
    model = save_classifier(tmp_path, "Llama", 2)
    engine = Engine.load(tmp_path, EngineConfig(num_blocks=32, device="cpu"))
    engine.add(request("tokens", PROMPTS[1]))
    engine.add(
        EngineRequest(request_id="last", prompt_token_ids=tuple(PROMPTS[2]), pooling=Pooling.LAST)
    )
    last = last_by_request(drain(engine))
    error = last["tokens"].error
    assert error is not None
    assert "labels only" in error[1]
    with torch.inference_mode():
        states = model.model(torch.tensor([PROMPTS[2]])).last_hidden_state[0]
    assert torch.allclose(torch.tensor(last["last"].embedding), states[-1], rtol=1e-4, atol=1e-4)


def test_a_model_without_labels_makes_none(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(classify("a", PROMPTS[2]))
    engine.add(classify("b", PROMPTS[2], sampling=SamplingParams(n=2)))
    last = last_by_request(drain(engine))
    for name in "ab":
        error = last[name].error
        assert error is not None
        assert "classification head" in error[1]


def test_a_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    save_classifier(tmp_path, "Llama", 3)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"2": "LABEL_2"', '"2": "C", "3": "D"'))
    with pytest.raises(CheckpointError, match=r"score\.weight.*\[3, 48\].*\[4, 48\]"):
        Engine.load(tmp_path, EngineConfig(num_blocks=32, device="cpu"))
