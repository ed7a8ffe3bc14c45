"""The decoder and the engine against transformers, on random checkpoints of every family."""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from millrace.engine.devices.cpu.runner import ModelRunner
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.engine import Engine
from millrace.engine.step.sequence import Sequence
from millrace.schemas.config import EngineConfig
from tests.engine.checkpoints import cached_logits, reference_logits, save_model
from tests.engine.models.drawn import (
    FAMILIES,
    MAX_PROMPT_TOKENS,
    NUM_TOKENS_OUT,
    checkpoints,
)
from tests.engine.support import drain, prompt, request, resolved, tokens_by_request

TOLERANCE = 1e-4
NUM_DECODED = 8
NUM_BLOCKS = 80

QUICK = settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
WIDE = settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


def theirs(model: Any, token_ids: list[int], num_prompt_tokens: int) -> torch.Tensor:
    """Return transformers' logits after the prompt's last token and every later one.

    Dynamic scaling depends on the length there, so those checkpoints are decoded with a cache, as
    in transformers' own generation.
    """
    if model.config.rope_parameters["rope_type"] == "dynamic":
        return cached_logits(model, token_ids, num_prompt_tokens)
    return reference_logits(model, token_ids)[num_prompt_tokens - 1 :]


def ours(runner: ModelRunner, token_ids: list[int], chunks: list[int]) -> torch.Tensor:
    """Return the logits after each chunk."""
    sequence = Sequence(
        request("a", token_ids), arrival=0, key=0, max_total_tokens=len(token_ids) + 1
    )
    # Out of order, as in a pool that has been used for a while.
    sequence.block_table = list(range(NUM_BLOCKS))[::-1]
    rows = []
    for num_tokens in chunks:
        sequence.token_ids = token_ids[: sequence.num_computed_tokens + num_tokens]
        rows.append(runner.launch([ScheduledSequence(sequence, num_tokens)]).logits[0])
        sequence.num_computed_tokens += num_tokens
    return torch.stack(rows)


def check_logits(model: Any, path: Path, token_ids: list[int], cuts: list[int]) -> None:
    """Check the prompt in chunks that end at ``cuts``, then NUM_DECODED tokens one by one."""
    num_prompt_tokens = len(token_ids) - NUM_DECODED
    runner = ModelRunner.load(path, resolved(path, num_blocks=NUM_BLOCKS, device="cpu"))
    ends = sorted({0, num_prompt_tokens, *(cut for cut in cuts if cut < num_prompt_tokens)})
    chunks = [end - start for start, end in pairwise(ends)] + [1] * NUM_DECODED
    mine = ours(runner, token_ids, chunks)[-NUM_DECODED - 1 :]
    reference = theirs(model, token_ids, num_prompt_tokens)
    scale = reference.abs().amax(-1, keepdim=True)
    assert float(((mine - reference) / scale).abs().max()) <= TOLERANCE


def check_greedy(model: Any, prompt_ids: list[int], tokens: list[int]) -> None:
    """Assert that each token is transformers' choice after the tokens before it, or ties with that
    choice within the tolerance of the logits."""
    assert len(tokens) == NUM_TOKENS_OUT
    rows = theirs(model, prompt_ids + tokens[:-1], len(prompt_ids))
    short = rows.amax(-1) - rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert bool((short <= TOLERANCE * rows.abs().amax(-1)).all())


def check_completions(model: Any, path: Path, prompts: list[list[int]], budget: int) -> None:
    """Check the first prompt alone, again on a warm cache, then with all others in small chunks."""
    alone = Engine.load(path, EngineConfig(num_blocks=NUM_BLOCKS, device="cpu"))
    completions = []
    block_size = EngineConfig().block_size_tokens
    for name, cached in (("cold", 0), ("warm", (len(prompts[0]) - 1) // block_size * block_size)):
        alone.add(request(name, prompts[0], max_tokens=NUM_TOKENS_OUT))
        outputs = drain(alone)
        assert max(output.num_cached_tokens for output in outputs) == cached
        completions.append(tokens_by_request(outputs)[name])
    together = Engine.load(
        path, EngineConfig(num_blocks=NUM_BLOCKS, device="cpu", max_batch_tokens=budget)
    )
    for i, prompt_ids in enumerate(prompts):
        together.add(request(str(i), prompt_ids, max_tokens=NUM_TOKENS_OUT))
    in_company = tokens_by_request(drain(together))
    # Most often one, which transformers computes once.
    for tokens in {tuple(tokens) for tokens in (*completions, in_company["0"])}:
        check_greedy(model, prompts[0], list(tokens))
    for i, prompt_ids in enumerate(prompts[1:], 1):
        check_greedy(model, prompt_ids, in_company[str(i)])


def check(
    family: str, config: dict[str, Any], lengths: list[int], cuts: list[int], budget: int
) -> None:
    vocab_size = config["vocab_size"]
    prompts = [prompt(i, length, vocab_size) for i, length in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder), family, **config)
        more = prompt(99, NUM_DECODED, vocab_size)
        check_logits(model, Path(folder), prompts[0] + more, cuts)
        check_completions(model, Path(folder), prompts, budget)


LENGTHS = st.lists(st.integers(1, MAX_PROMPT_TOKENS), min_size=3, max_size=3)
CUTS = st.lists(st.integers(1, MAX_PROMPT_TOKENS), max_size=4)
BUDGETS = st.integers(3, 40)


@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(data=st.data(), lengths=LENGTHS, cuts=CUTS, budget=BUDGETS)
def test_logits_and_completions_are_those_of_transformers(
    family: str, data: st.DataObject, lengths: list[int], cuts: list[int], budget: int
) -> None:
    check(family, data.draw(checkpoints(family)), lengths, cuts, budget)


@pytest.mark.slow(reason="draws many more checkpoints than the quick test above")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
@WIDE
@given(data=st.data(), lengths=LENGTHS, cuts=CUTS, budget=BUDGETS)
def test_many_more_checkpoints(
    family: str, data: st.DataObject, lengths: list[int], cuts: list[int], budget: int
) -> None:
    check(family, data.draw(checkpoints(family)), lengths, cuts, budget)
