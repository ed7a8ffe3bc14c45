"""Models on the runner of a device: the answers of transformers, in every batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from millrace.engine.devices.cuda.runner import DeviceRunner
from millrace.engine.step.engine import Engine
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from millrace.schemas.frames import TokenLogprob
from tests.engine.checkpoints import (
    reference_greedy,
    reference_logits,
    save_llama,
    save_model,
)
from tests.engine.models.test_decoder import CASES, PROMPTS, mean_error
from tests.engine.support import drain, prompt, request, tokens_by_request
from tests.support.engine.triton_products import rows_by_themselves


def make_engine(path: Path, **config: Any) -> Engine:
    defaults: dict[str, Any] = {"device": "cpu", "num_blocks": 48, "max_num_sequences": 4}
    return Engine.load(path, EngineConfig(**(defaults | config)))


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_logprobs_and_greedy_tokens_are_those_of_transformers(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = save_model(tmp_path, family, **changes)
    engine = make_engine(tmp_path, kernels="reference", dtype="float32", max_batch_tokens=56)
    for i, token_ids in enumerate(PROMPTS):
        engine.add(request(str(i), token_ids, max_tokens=12, logprobs=20))
    outputs = drain(engine)
    tokens = tokens_by_request(outputs)
    for i, token_ids in enumerate(PROMPTS):
        assert tokens[str(i)] == reference_greedy(model, token_ids, 12)
        first = next(o.logprobs[0] for o in outputs if o.request_id == str(i) and o.logprobs)
        exact = reference_logits(model, token_ids)[-1].double().log_softmax(-1)
        for token, logprob in first.top:
            assert logprob == pytest.approx(float(exact[token]), abs=1e-4)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        pytest.param("Llama", {"head_dim": 16}, id="llama"),
        pytest.param("Qwen3", {}, id="qwen3"),
        pytest.param("Mistral", {"sliding_window": 7}, id="mistral-window"),
        pytest.param("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}, id="mixtral"),
    ],
)
def test_the_gpus_kernels_compute_them_too(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    model = save_model(tmp_path, family, num_hidden_layers=1, **changes)
    engine = make_engine(
        tmp_path, kernels="triton", dtype="float32", max_batch_tokens=12, cuda_graphs=False
    )
    prompts = [prompt(1, 14), prompt(2, 1)]
    for i, token_ids in enumerate(prompts):
        engine.add(request(str(i), token_ids, max_tokens=3))
    tokens = tokens_by_request(drain(engine))
    for i, token_ids in enumerate(prompts):
        assert tokens[str(i)] == reference_greedy(model, token_ids, 3)


def first_logits(engine: Engine, token_ids: list[int]) -> torch.Tensor:
    """Return the logits from which the first token of a completion is chosen."""
    runner = engine._runner
    assert isinstance(runner, DeviceRunner)
    engine.add(request("r", token_ids, max_tokens=1))
    drain(engine)
    return runner._buffers.logits[0]


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mixtral"])
def test_half_precision_is_no_coarser_than_that_of_transformers(
    tmp_path: Path, family: str
) -> None:
    model = save_model(tmp_path, family, stored_dtype=torch.bfloat16)
    halved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    engine = make_engine(tmp_path, kernels="reference", dtype="bfloat16", prefix_cache=False)
    for token_ids in PROMPTS:
        exact = reference_logits(model, token_ids)[-1]
        theirs = mean_error(reference_logits(halved, token_ids)[-1], exact)
        assert mean_error(first_logits(engine, token_ids), exact) <= 1.5 * theirs


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_eight_bits_of_keys_and_values_are_enough(tmp_path: Path, family: str) -> None:
    """The weights let errors grow on their way: without scales the errors are above 1."""
    model = save_model(tmp_path, family)
    engine = make_engine(
        tmp_path, kernels="reference", dtype="float32", kv_cache_dtype="fp8", prefix_cache=False
    )
    assert engine._runner.cache.data.dtype is torch.float8_e4m3fn
    for token_ids in PROMPTS:
        exact = reference_logits(model, token_ids)[-1]
        assert mean_error(first_logits(engine, token_ids), exact) <= 0.25


def test_the_interpreter_is_not_trusted_with_half_precision(tmp_path: Path) -> None:
    save_llama(tmp_path)
    with pytest.raises(ConfigError, match=r"engine.dtype to float32"):
        make_engine(tmp_path, kernels="triton", dtype="bfloat16")


def test_triton_asks_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_llama(tmp_path)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="needs a CUDA device"):
        make_engine(tmp_path, kernels="triton")


@pytest.fixture
def _rows_by_themselves() -> Iterator[None]:
    with rows_by_themselves():
        yield


@pytest.mark.usefixtures("_rows_by_themselves")
def test_deterministic_tokens_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    """The bits are the same alone, in a crowd, with the prompt in chunks, cold and warm."""
    save_llama(tmp_path, num_hidden_layers=1, vocab_size=67)
    shared = prompt(0, 17, vocab_size=67)
    watched = request("watched", [*shared, 5, 6], max_tokens=3, temperature=1.0, seed=1, logprobs=1)
    company = [
        request("decodes", [3], max_tokens=6, temperature=1.0, seed=2),
        request("prefills", prompt(3, 9, vocab_size=67), max_tokens=2, seed=3),
    ]

    def answer(engine: Engine) -> list[TokenLogprob]:
        engine.add(watched)
        return [e for o in drain(engine) if o.request_id == "watched" for e in o.logprobs]

    def deterministic(**config: Any) -> Engine:
        return make_engine(
            tmp_path,
            kernels="triton",
            dtype="float32",
            deterministic=True,
            cuda_graphs=False,
            **config,
        )

    engine = deterministic(max_batch_tokens=32)
    alone = answer(engine)
    assert len(alone) == 3
    warm = answer(engine)
    assert engine.stats().prefix_hit_tokens == 16
    crowded = deterministic(max_batch_tokens=11)
    for other in company:
        crowded.add(other)
    crowded.step()
    assert alone == warm == answer(crowded)
