"""Sampling defaults of generation_config.json, for fields that a request leaves out."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.gateway.__main__ import models_of
from millrace.registry.catalogue import Catalogue, load_catalogue
from millrace.registry.requests.decoding import decode
from millrace.registry.requests.parsing import parse_chat, parse_completion
from millrace.registry.served import ServedModel
from millrace.schemas.config import Config
from millrace.schemas.errors import CheckpointError, ConfigError
from millrace.schemas.jobs import Job
from millrace.schemas.openai import ChatCompletionRequest, CompletionRequest
from millrace.schemas.sampling import SamplingDefaults, SamplingOptions, SamplingParams
from tests.cli.offline.generating import generate
from tests.support.engine.checkpoints_made import CONTEXT_WINDOW_TOKENS, write_checkpoint

# As Qwen3 has it, and a bound on completions.
CONFIG: dict[str, Any] = {
    "do_sample": True,
    "eos_token_id": [1, 3],
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "max_new_tokens": 9,
    "transformers_version": "4.51.0",
}
DEFAULTS = SamplingDefaults(
    max_tokens=9, temperature=0.6, top_p=0.95, top_k=20, min_p=0.02, repetition_penalty=1.1
)
ALL = {name: getattr(DEFAULTS, name) for name in DEFAULTS.__struct_fields__}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return recommend(write_checkpoint(tmp_path / "tiny"), CONFIG)


def recommend(path: Path, config: dict[str, Any]) -> Path:
    (path / "generation_config.json").write_text(json.dumps(config))
    return path


def catalogue_of(path: Path, *lines: str) -> Catalogue:
    file = path.parent / "models.yaml"
    entry = "".join(f"    {line}\n" for line in lines)
    file.write_text(f"models:\n  tiny:\n    source: {path}\n{entry}")
    return load_catalogue(str(file))


def load(path: Path, *lines: str) -> ServedModel:
    return ServedModel.load(catalogue_of(path, *lines), "tiny")


def sampled(served: ServedModel, sampling: SamplingOptions) -> dict[str, Any]:
    job = Job(request_id="r", model="tiny", prompt="mill", sampling=sampling)
    ready = served.prepare(job, random.Random(1)).sampling
    return {name: getattr(ready, name) for name in DEFAULTS.__struct_fields__}


def chat(**fields: Any) -> SamplingOptions:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "mill"}]} | fields
    decoder = msgspec.json.Decoder(ChatCompletionRequest)
    return parse_chat(decode(decoder, json.dumps(body))).sampling


def published(**sampling: Any) -> SamplingOptions:
    job = {"request_id": "r", "model": "tiny", "prompt": "mill", "sampling": sampling}
    return msgspec.json.decode(json.dumps(job), type=Job).sampling


def test_every_endpoint_has_the_same_defaults(path: Path) -> None:
    served = load(path)
    assert served.sampling_defaults == DEFAULTS
    for parse in (chat, published):
        assert sampled(served, parse()) == ALL
        asked = {"temperature": 1.0, "top_k": 0, "max_tokens": 4}
        assert sampled(served, parse(**asked)) == ALL | asked
        neutral = {"top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        assert sampled(served, parse(**neutral)) == ALL | neutral
    # Of OpenAI's two endpoints one has a length of its own.
    body = json.dumps({"model": "tiny", "prompt": "mill"})
    completion = decode(msgspec.json.Decoder(CompletionRequest), body)
    assert sampled(served, parse_completion(completion).sampling) == ALL | {"max_tokens": 16}


def test_a_beam_search_is_not_sampled_as_recommended(path: Path) -> None:
    served = load(path)
    plain = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    for parse in (chat, published):
        beams = parse(use_beam_search=True, n=3)
        assert sampled(served, beams) == plain | {"max_tokens": ALL["max_tokens"]}
        warmer = parse(use_beam_search=True, temperature=0.5)
        assert sampled(served, warmer)["temperature"] == 0.5
        job = Job(request_id="r", model="tiny", prompt="mill", sampling=beams)
        ready = served.prepare(job, random.Random(1))
        assert (ready.sampling.n, ready.max_completion_tokens) == (3, 3 * ALL["max_tokens"])
        assert served.prepare(ready, random.Random(2)) == ready


def test_generate_draws_as_if_they_had_been_asked_for(path: Path, tmp_path: Path) -> None:
    prompt = {"prompt": "mill wheel", "seed": 3, "ignore_eos": True}
    code, answers = generate(tmp_path, path, [prompt, prompt | ALL, prompt | {"temperature": 0}])
    assert code == 0
    silent, explicit, greedy = (answer["token_ids"] for answer in answers)
    assert len(silent) == 9
    assert silent == explicit != greedy


def test_a_job_keeps_what_it_was_accepted_with(path: Path) -> None:
    """The job keeps its values over the wire, and after a reload of the model with another
    recommendation or none."""
    job = Job(request_id="r", model="tiny", prompt="mill", sampling=SamplingOptions(top_p=1.0))
    ready = load(path).prepare(job, random.Random(1))
    plain = load(path, "generation_config: ignore").prepare(job, random.Random(1))
    later = load(recommend(path, {"temperature": 0.1, "top_k": 3}))
    for accepted in (ready, plain):
        stored = msgspec.msgpack.decode(msgspec.msgpack.encode(accepted), type=Job)
        assert later.prepare(stored, random.Random(2)) == accepted
        params = SamplingParams.of(stored.sampling)
        assert msgspec.structs.asdict(params) == msgspec.structs.asdict(accepted.sampling)


def test_without_a_recommendation_all_is_as_ever(tmp_path: Path) -> None:
    served = load(write_checkpoint(tmp_path / "tiny"))
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    num_prompt_tokens = len(served.tokenizer.encode("mill"))
    left = CONTEXT_WINDOW_TOKENS - num_prompt_tokens
    assert sampled(served, chat()) == usual | {"max_tokens": left}
    recommend(served.path, {"max_new_tokens": 100_000})
    assert sampled(load(served.path), chat())["max_tokens"] == left


def test_ignored_by_the_catalogue(path: Path) -> None:
    served = load(path, "generation_config: ignore")
    assert served.sampling_defaults == SamplingDefaults()
    assert sampled(served, chat())["temperature"] == 1.0
    assert set(served.eos_token_ids) == {1, 3}
    with pytest.raises(ConfigError, match=r"model tiny.*generation_config"):
        catalogue_of(path, "generation_config: never")


def test_min_tokens_go_before_the_usual_length(path: Path) -> None:
    assert sampled(load(path), chat(min_tokens=12))["max_tokens"] == 12


def test_an_engine_is_not_asked_for_what_it_cannot_do(path: Path) -> None:
    served = load(path, "engine: {kind: openai, url: 'http://127.0.0.1:1'}")
    defaults = served.sampling_defaults
    assert (defaults.temperature, defaults.top_p) == (0.6, 0.95)
    assert (defaults.top_k, defaults.min_p, defaults.repetition_penalty) == (None, None, None)
    assert sampled(served, chat())["top_k"] == 0


def test_models_show_their_defaults(path: Path) -> None:
    models = models_of(catalogue_of(path), Config())
    assert models.card("tiny").sampling_defaults == SamplingDefaults()
    asyncio.run(models.get("tiny"))
    shown = json.loads(msgspec.json.encode(models.card("tiny")))["sampling_defaults"]
    assert shown == ALL


def test_minus_one_is_vllms_word_for_no_top_k(path: Path) -> None:
    assert load(recommend(path, {"top_k": -1})).sampling_defaults == SamplingDefaults(top_k=0)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": "most"}, "top_p"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_a_recommendation_that_cannot_be_followed_is_refused(
    path: Path, config: dict[str, Any], field: str
) -> None:
    recommend(path, config)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: .*\b{field}\b.*ignore"):
        load(path)
    load(path, "generation_config: ignore")
