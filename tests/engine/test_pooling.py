"""Embeddings against transformers: in any chunking and company, preempted, without a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.frames import FinishReason
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import SamplingParams
from tests.engine.checkpoints import SMALL, save_base_model, save_llama
from tests.engine.conftest import MakeEngine
from tests.engine.support import drain, last_by_request, prompt, request

RUNNERS = ("host", "device")
EMBEDDINGS = (Pooling.LAST, Pooling.MEAN)

PROMPTS = [prompt(seed, length) for seed, length in ((1, 100), (2, 1), (3, 33), (4, 16), (5, 47))]


def embed(name: str, token_ids: list[int], pooling: Pooling, **changes: Any) -> EngineRequest:
    return EngineRequest(
        request_id=name, prompt_token_ids=tuple(token_ids), pooling=pooling, **changes
    )


def reference(base: Any, token_ids: list[int], pooling: Pooling) -> torch.Tensor:
    with torch.inference_mode():
        states: torch.Tensor = base(torch.tensor([token_ids])).last_hidden_state[0]
    return states[-1] if pooling is Pooling.LAST else states.mean(0)


def check(base: Any, token_ids: list[int], pooling: Pooling, output: EngineOutput) -> None:
    expected = reference(base, token_ids, pooling)
    error = (torch.tensor(output.embedding) - expected).abs().max() / expected.abs().max()
    assert float(error) <= 1e-4
    assert (output.finish_reason, output.token_ids, output.error) == (FinishReason.STOP, (), None)


@pytest.mark.parametrize("budget", [512, 7])
@pytest.mark.parametrize("pooling", EMBEDDINGS)
def test_embeddings_are_those_of_transformers(
    llama: tuple[Path, Any], make_engine: MakeEngine, pooling: Pooling, budget: int
) -> None:
    engine = make_engine(max_batch_tokens=budget)
    for name in ("cold", "warm"):
        for i, token_ids in enumerate(PROMPTS):
            engine.add(embed(f"{name}{i}", token_ids, pooling))
        engine.add(request(f"{name}-tokens", prompt(9, 20), max_tokens=5))
        outputs = drain(engine)
        last = last_by_request(outputs)
        assert sum(len(o.token_ids) for o in outputs) == 5
        for i, token_ids in enumerate(PROMPTS):
            check(llama[1].model, token_ids, pooling, last[f"{name}{i}"])
    stats = engine.stats()
    assert (stats.num_free_blocks, stats.outstanding_tokens) == (128, 0)


@pytest.mark.parametrize("pooling", EMBEDDINGS)
def test_only_the_last_token_needs_no_earlier_ones(
    make_engine: MakeEngine, pooling: Pooling
) -> None:
    engine = make_engine()
    for name in ("cold", "warm"):
        engine.add(embed(name, PROMPTS[0], pooling))
        outputs = drain(engine)
    assert max(o.num_cached_tokens for o in outputs) == (96 if pooling is Pooling.LAST else 0)


def test_a_preempted_embedding_starts_over(
    llama: tuple[Path, Any], make_engine: MakeEngine
) -> None:
    # Room for one of them and little more; the chunks are small, so they stand in each other's way.
    engine = make_engine(num_blocks=8, max_batch_tokens=16)
    engine.add(request("tokens", prompt(9, 10), max_tokens=60))
    for i, token_ids in enumerate(PROMPTS):
        engine.add(embed(str(i), token_ids, Pooling.MEAN, priority=i))
    last = last_by_request(drain(engine))
    for i, token_ids in enumerate(PROMPTS):
        check(llama[1].model, token_ids, Pooling.MEAN, last[str(i)])


@pytest.mark.parametrize(
    ("family", "kernels"),
    [
        *((family, "auto") for family in ("Llama", "Qwen2", "Qwen3", "Mistral")),
        ("Qwen3", "reference"),  # as the runner of a device computes
    ],
)
def test_a_checkpoint_without_a_head_embeds_only(tmp_path: Path, family: str, kernels: str) -> None:
    base = save_base_model(tmp_path, family)
    config = EngineConfig(num_blocks=32, device="cpu", kernels=kernels, max_num_sequences=4)
    engine = Engine.load(tmp_path, config)
    engine.add(embed("mean", PROMPTS[0], Pooling.MEAN))
    engine.add(embed("last", PROMPTS[2], Pooling.LAST))
    engine.add(request("tokens", PROMPTS[1]))
    last = last_by_request(drain(engine))
    check(base, PROMPTS[0], Pooling.MEAN, last["mean"])
    check(base, PROMPTS[2], Pooling.LAST, last["last"])
    error = last["tokens"].error
    assert error is not None
    assert "embeddings only" in error[1]


def test_a_prompt_may_fill_the_whole_window(tmp_path: Path) -> None:
    model = save_llama(tmp_path, max_position_embeddings=64)
    engine = Engine.load(tmp_path, EngineConfig(num_blocks=8, device="cpu"))
    full = prompt(1, 64)
    engine.add(embed("full", full, Pooling.LAST))
    engine.add(embed("longer", [*full, 1], Pooling.LAST))
    last = last_by_request(drain(engine))
    check(model.model, full, Pooling.LAST, last["full"])
    error = last["longer"].error
    assert error is not None
    assert error[0] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sampling": SamplingParams(n=2)}, "n"),
        ({"sampling": SamplingParams(prompt_logprobs=1)}, "prompt_logprobs"),
        ({"output_token_ids": (3,)}, "output_token_ids"),
    ],
)
def test_what_an_embedding_cannot_have_is_refused(
    make_engine: MakeEngine, changes: dict[str, Any], field: str
) -> None:
    engine = make_engine()
    engine.add(embed("a", PROMPTS[2], Pooling.LAST, **changes))
    error = last_by_request(drain(engine))["a"].error
    assert error is not None
    assert field in error[1]


@pytest.mark.parametrize("pooling", EMBEDDINGS)
@pytest.mark.parametrize("length", [1, 20])
def test_states_that_are_not_finite_end_their_own_request(
    tmp_path: Path, pooling: Pooling, length: int
) -> None:
    bad = 7
    model = save_llama(tmp_path, nan_token=bad)
    engine = Engine.load(tmp_path, EngineConfig(num_blocks=8, device="cpu"))
    good = [t for t in PROMPTS[2] if t != bad]
    engine.add(embed("bad", [*good[: length - 1], bad], pooling))
    engine.add(embed("good", good, pooling))
    last = last_by_request(drain(engine))
    error = last["bad"].error
    assert error is not None
    assert error[0].startswith("non_finite")
    check(model.model, good, pooling, last["good"])
    assert bool(torch.isfinite(engine._runner.cache.data).all())


def test_cancelled_half_way(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=16)
    engine.add(embed("a", PROMPTS[0], Pooling.MEAN))
    engine.step()
    engine.cancel("a")
    assert drain(engine) == []
    assert engine.stats().num_free_blocks == 128


def test_an_embedding_is_as_long_as_the_hidden_size(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(embed("a", PROMPTS[0], Pooling.MEAN))
    assert len(drain(engine)[-1].embedding) == SMALL["hidden_size"]
