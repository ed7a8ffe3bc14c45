"""Log-probabilities of the prompt: the model's own, however the prompt is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput
from millrace.schemas.config import EngineConfig
from millrace.schemas.frames import TokenLogprob
from tests.engine.checkpoints import save_llama
from tests.engine.conftest import MakeEngine
from tests.engine.support import drain, last_by_request, prompt, request

RUNNERS = ("host", "device")


def reference(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Return log-probabilities [num_tokens - 1, vocab_size]: row i is of token i + 1."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0, :-1]
        return logits.double().log_softmax(-1)


def reported(outputs: list[EngineOutput], request_id: str) -> tuple[TokenLogprob | None, ...]:
    """Return the entries, which must be reported once."""
    (only,) = [o for o in outputs if o.request_id == request_id and o.prompt_logprobs]
    assert only.token_ids
    return only.prompt_logprobs


def check(
    entries: tuple[TokenLogprob | None, ...], model: Any, token_ids: list[int], num_top: int
) -> None:
    assert len(entries) == len(token_ids)
    assert entries[0] is None
    table = reference(model, token_ids)
    for position, (entry, token) in enumerate(zip(entries[1:], token_ids[1:], strict=True)):
        assert entry is not None
        assert entry.token_id == token
        own = float(table[position, token])
        assert entry.logprob == pytest.approx(own, abs=1e-4)
        # Tokens within the error of two sums of floats may count or not.
        num_above = int((table[position] > own + 1e-4).sum())
        assert num_above < entry.rank <= int((table[position] > own - 1e-4).sum())
        likeliest = table[position].topk(num_top).values.tolist()
        assert [value for _, value in entry.top] == pytest.approx(likeliest, abs=1e-4)
        for top_id, value in entry.top:
            assert value == pytest.approx(float(table[position, top_id]), abs=1e-4)


@pytest.mark.parametrize("max_batch_tokens", [7, 64, 4096])
def test_prompt_logprobs_are_those_of_the_model_in_any_chunks(
    make_engine: MakeEngine, llama: tuple[Path, Any], max_batch_tokens: int
) -> None:
    engine = make_engine(max_batch_tokens=max_batch_tokens, num_blocks=256)
    prompts = {"long": (prompt(1, 300), 3), "short": (prompt(2, 5), 0), "one": ([7], 2)}
    for name, (token_ids, num_top) in prompts.items():
        engine.add(request(name, token_ids, prompt_logprobs=num_top, max_tokens=3))
    engine.add(request("without", prompt(3, 40), max_tokens=3))
    outputs = drain(engine)
    for name, (token_ids, num_top) in prompts.items():
        check(reported(outputs, name), llama[1], token_ids, num_top)
    assert not any(o.prompt_logprobs for o in outputs if o.request_id == "without")


def test_a_token_as_likely_as_all_others_ranks_first(tmp_path: Path) -> None:
    """A rank counts the likelier tokens, and there are none."""
    model = save_llama(tmp_path)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    model.save_pretrained(tmp_path)
    engine = Engine.load(tmp_path, EngineConfig(num_blocks=16, device="cpu"))
    engine.add(request("r", prompt(1, 20), prompt_logprobs=2, max_tokens=1))
    entries = reported(drain(engine), "r")
    assert [entry.rank for entry in entries[1:] if entry is not None] == [1] * 19


def test_a_prefix_that_is_cached_is_computed_again(
    make_engine: MakeEngine, llama: tuple[Path, Any]
) -> None:
    engine = make_engine()
    token_ids = prompt(4, 70)
    engine.add(request("before", token_ids))
    drain(engine)
    engine.add(request("r", token_ids, prompt_logprobs=1))
    check(reported(drain(engine), "r"), llama[1], token_ids, 1)


def test_preempted_request_has_its_prompt_logprobs_once_and_whole(
    make_engine: MakeEngine, llama: tuple[Path, Any]
) -> None:
    engine = make_engine(num_blocks=14, max_batch_tokens=16)
    prompts = {f"r{i}": prompt(10 + i, 60) for i in range(4)}
    for priority, (name, token_ids) in enumerate(prompts.items()):
        engine.add(request(name, token_ids, prompt_logprobs=2, max_tokens=40, priority=priority))
    outputs = drain(engine)
    assert engine.stats().num_preemptions > 0
    for name, token_ids in prompts.items():
        check(reported(outputs, name), llama[1], token_ids, 2)


def test_first_of_several_choices_has_the_prompt_logprobs(
    make_engine: MakeEngine, llama: tuple[Path, Any]
) -> None:
    engine = make_engine()
    token_ids = prompt(5, 33)
    engine.add(request("r", token_ids, prompt_logprobs=1, n=3, temperature=1.0, seed=1))
    outputs = drain(engine)
    check(reported(outputs, "r"), llama[1], token_ids, 1)
    assert [o.choice for o in outputs if o.prompt_logprobs] == [0]


def test_resumed_request_has_logprobs_of_its_prompt_alone(
    make_engine: MakeEngine, llama: tuple[Path, Any]
) -> None:
    engine = make_engine(max_batch_tokens=16)
    token_ids = prompt(6, 30)
    item = request("r", token_ids, prompt_logprobs=1, output_token_ids=tuple(prompt(7, 8)))
    engine.add(item)
    outputs = drain(engine)
    check(reported(outputs, "r"), llama[1], token_ids, 1)
    assert last_by_request(outputs)["r"].error is None
