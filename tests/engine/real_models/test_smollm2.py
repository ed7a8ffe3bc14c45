"""SmolLM2-135M-Instruct in the engine: its published GGUF file, and a checkpoint in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.quality.own import measure_own
from benchmarks.quality.reshaping import write_permuted
from benchmarks.quality.scores import Reference
from benchmarks.quality.texts import Window, windows
from benchmarks.support.processes import in_new_process
from millrace.engine import LLM, Grammar, SamplingParams
from millrace.registry.catalogue import ModelEntry
from millrace.registry.source import gguf_file
from millrace.registry.tokenizers.tokenizer import Tokenizer
from tests.support.real_models import fetched_smollm2, write_wide

pytestmark = [
    pytest.mark.slow(reason="runs a real model of 135M parameters, minutes of CPU"),
    pytest.mark.timeout(900),
]

# Float32 answers them with clear margins.
_QUESTIONS = (
    "Count from 1 to 10.",
    "List the months of the year.",
    "What is the chemical formula of water?",
    "Repeat after me: the mill grinds wheat into flour.",
    "How many days are in a week?",
)
_ANSWER_TOKENS = 48
# Differences of logits below this margin are decided by rounding.
_CLEAR_MARGIN = 0.15
_NUM_WINDOWS = 4
_SETTINGS: dict[str, Any] = {"device": "cpu", "kv_cache_bytes": 1 << 29}


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Restore the environment, which LLM sets for its process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        yield


@pytest.fixture(scope="module")
def entry() -> ModelEntry:
    return fetched_smollm2()


@pytest.fixture(scope="module")
def checkpoint(entry: ModelEntry, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_wide(entry, tmp_path_factory.mktemp("smollm2") / "bf16", "bfloat16")


@pytest.fixture(scope="module")
def float32(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


@pytest.fixture(scope="module", params=["gguf", "bf16"])
def model(request: pytest.FixtureRequest, entry: ModelEntry, checkpoint: Path) -> Path:
    return gguf_file(entry) if request.param == "gguf" else checkpoint


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, speculation="ngram", **_SETTINGS) as running:
        yield running


def _messages(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _clear_answer(model: PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    """Return the greedy tokens of ``model`` until the first token that rounding could change."""
    with torch.inference_mode():
        made = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=_ANSWER_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    tokens = made.sequences[0, len(prompt) :].tolist()
    best = torch.stack(made.logits)[:, 0].float().topk(2).values
    unclear = (best[:, 0] - best[:, 1] < _CLEAR_MARGIN).nonzero()[:, 0].tolist()
    return list(tokens[: min(unclear, default=len(tokens))])


def test_answers_are_those_of_transformers_in_float32(llm: LLM, float32: PreTrainedModel) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=_ANSWER_TOKENS)
    answers = llm.chat([_messages(question) for question in _QUESTIONS], greedy)
    num_compared = 0
    for answer in answers:
        clear = _clear_answer(float32, answer.prompt_token_ids)
        assert list(answer.token_ids[: len(clear)]) == clear
        num_compared += len(clear)
    assert num_compared >= 100


def test_the_capital_of_france(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=_ANSWER_TOKENS)
    (answer,) = llm.chat([_messages("What is the capital of France?")], greedy)
    assert answer.text == "The capital of France is Paris."


def test_200_answers_keep_to_a_schema(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "number": {"type": "integer", "minimum": 0, "maximum": 1000},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        },
        "required": ["name", "number", "tags"],
        "additionalProperties": False,
    }
    asked = SamplingParams(seed=4, max_tokens=120, grammar=Grammar.json_schema(schema))
    questions = [f"Describe thing number {number}." for number in range(200)]
    answers = llm.chat([_messages(question) for question in questions], asked)
    assert len(answers) == len(questions)
    for answer in answers:
        jsonschema.validate(json.loads(answer.text), schema)


def test_speculation_changes_no_token(llm: LLM, model: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=96)
    drawn = SamplingParams(seed=11, max_tokens=96)
    questions = [_messages(f"{question} Say it twice.") for question in _QUESTIONS]
    usual = [*llm.chat(questions, greedy), *llm.chat(questions, drawn)]
    with LLM(model, speculation="off", **_SETTINGS) as plain:
        without = [*plain.chat(questions, greedy), *plain.chat(questions, drawn)]
    assert [one.token_ids for one in usual] == [one.token_ids for one in without]


@pytest.fixture(scope="module")
def texts(checkpoint: Path) -> list[Window]:
    return windows(Tokenizer.load(checkpoint), _NUM_WINDOWS)


@pytest.fixture(scope="module")
def reference(
    checkpoint: Path, texts: list[Window], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("reference") / "float32.npy"
    Reference.compute(path, checkpoint, texts)
    return path


# Bounds of (change of NLL, mean |Δlogprob|). int4 is measured on the permuted checkpoint, as the
# published weights have 4 bits already. NLL varies by some hundredths over so few tokens.
_WAYS: dict[str, tuple[dict[str, Any], float, float]] = {
    "bf16": ({}, 0.0015, 0.015),
    "int8": ({"quantization": "int8"}, 0.003, 0.045),
    "int4": ({"quantization": "int4"}, 0.2, 0.48),
    "kv-int8": ({"kv_cache_dtype": "int8"}, 0.003, 0.033),
    "gguf": ({}, 0.0015, 0.02),
}


@pytest.mark.parametrize("way", list(_WAYS))
def test_quality_is_within_bounds(
    way: str,
    entry: ModelEntry,
    checkpoint: Path,
    texts: list[Window],
    reference: Path,
    tmp_path: Path,
) -> None:
    settings, max_change, max_distance = _WAYS[way]
    model = checkpoint
    if way == "gguf":
        model = gguf_file(entry)
    elif way == "int4":
        model = write_permuted(tmp_path / "permuted", checkpoint)
    score = in_new_process(measure_own, model, settings, texts, reference)
    assert abs(score.nll_change) <= max_change
    assert score.distance is not None
    assert score.distance <= max_distance
