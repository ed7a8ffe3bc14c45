"""``LLM`` on tiny checkpoints: its results equal those of the engine behind the bus."""

from __future__ import annotations

import json
import math
import random
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from millrace.engine import (
    LLM,
    EngineClosedError,
    GenerationDelta,
    GenerationOutput,
    Grammar,
    RequestFailedError,
    SamplingOptions,
    SamplingParams,
)
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.registry.catalogue import load_catalogue
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.registry.served import ServedModel
from millrace.schemas.config import EngineConfig
from millrace.schemas.frames import FinishReason
from millrace.schemas.jobs import ChatMessage, Job
from tests.engine.checkpoints import reference_greedy
from tests.engine.support import drain
from tests.support.adapters import write_adapter
from tests.support.engine.checkpoints_made import write_checkpoint

PROMPTS: list[str | list[int]] = ["mill wheel", "water", [5, 6, 7, 8]]
MIXED: list[str | list[int]] = ["mill wheel", [5, 6, 7, 8]]
SEEDED = SamplingParams(seed=3, max_tokens=8, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SMALL: dict[str, Any] = {"device": "cpu", "num_threads": 1, "num_blocks": 64}


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    """Restore the environment, which LLM sets for its process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("OMP_WAIT_POLICY", "PASSIVE")
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def adapter(checkpoint: Path) -> Path:
    return write_adapter(checkpoint.parent / "sql", read_model_config(checkpoint))


@pytest.fixture(scope="module")
def llm(checkpoint: Path, adapter: Path) -> Iterator[LLM]:
    with LLM(checkpoint, adapters={"sql": adapter}, **SMALL) as made:
        yield made


def served_tokens(checkpoint: Path, *jobs: Job) -> list[tuple[int, ...]]:
    """Return the tokens of jobs that are prepared as by a scheduler and computed as by a worker."""
    served = ServedModel.load(load_catalogue("").with_model(str(checkpoint)), "tiny")
    engine = Engine.load(checkpoint, EngineConfig(**SMALL))
    for job in jobs:
        ready = served.prepare(job, random.Random(1))
        assert ready.prompt_token_ids is not None
        engine.add(
            EngineRequest(
                request_id=job.request_id,
                prompt_token_ids=ready.prompt_token_ids,
                sampling=SamplingParams.of(ready.sampling),
                eos_token_ids=served.eos_token_ids,
            )
        )
    outputs = drain(engine)
    return [
        tuple(token for o in outputs if o.request_id == job.request_id for token in o.token_ids)
        for job in jobs
    ]


def test_tokens_are_those_of_the_engine_that_serves(llm: LLM, checkpoint: Path) -> None:
    fields: list[dict[str, Any]] = [
        {"prompt": "mill wheel"},
        {"prompt": "water"},
        {"prompt_token_ids": (5, 6, 7, 8)},
    ]
    jobs = [
        Job(request_id=str(i), model="tiny", sampling=SEEDED, **one) for i, one in enumerate(fields)
    ]
    outputs = llm.generate(PROMPTS, SEEDED)
    assert [output.token_ids for output in outputs] == served_tokens(checkpoint, *jobs)
    for output in outputs:
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert output.finish_reason is FinishReason.LENGTH
    assert [len(output.prompt_token_ids) for output in outputs][2] == 4


def test_greedy_tokens_are_those_of_transformers(llm: LLM, checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    (output,) = llm.generate([5, 6, 7, 8], GREEDY)
    assert list(output.token_ids) == reference_greedy(model, [5, 6, 7, 8], 8)


def test_each_prompt_has_parameters_of_its_own(llm: LLM) -> None:
    several = SamplingParams(seed=3, max_tokens=4, n=3, logprobs=2, prompt_logprobs=1)
    one, two = llm.generate(MIXED, [several, GREEDY])
    assert len(one.completions) == 3
    assert [len(entry.top) for entry in one.logprobs] == [2] * len(one.token_ids)
    assert one.prompt_logprobs[0] is None
    assert len(one.prompt_logprobs) == len(one.prompt_token_ids)
    assert (len(two.completions), two.logprobs) == (1, ())
    # A stop string may be alone; it is no part of the text.
    whole = llm.generate("mill wheel", GREEDY)[0].text
    (cut,) = llm.generate("mill wheel", SamplingParams(**_stop_at(whole)))
    assert cut.text == whole[: whole.index(whole[3])]
    assert (cut.finish_reason, cut.completions[0].stop_reason) == (FinishReason.STOP, whole[3])
    last = two.token_ids[2]
    ended = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=(last,), ignore_eos=True)
    (cut,) = llm.generate([5, 6, 7, 8], ended)
    assert cut.completions[0].stop_reason == last


def _stop_at(text: str) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": 8, "ignore_eos": True, "stop": text[3]}


def test_omitted_parameters_are_as_the_model_recommends(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    (path / "generation_config.json").write_text(json.dumps({"do_sample": True, "top_k": 1}))
    with LLM(path, **SMALL) as llm:
        recommended = llm.generate("mill", SamplingOptions(max_tokens=6, ignore_eos=True))
        greedy = llm.generate("mill", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        assert recommended == greedy
        drawn = [
            llm.generate("mill", SamplingParams(seed=seed, max_tokens=6, ignore_eos=True))
            for seed in range(3)
        ]
        assert any(one[0].token_ids != greedy[0].token_ids for one in drawn)


def test_a_chat_is_that_of_the_template(llm: LLM, checkpoint: Path) -> None:
    messages = [{"role": "user", "content": "What is a mill?"}]
    job = Job(
        request_id="r",
        model="tiny",
        messages=(ChatMessage(role="user", content="What is a mill?"),),
        sampling=SEEDED,
    )
    (output,) = llm.chat(messages, SEEDED)
    assert [output.token_ids] == served_tokens(checkpoint, job)
    text = llm.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
    assert text == "<|user|>What is a mill?<|end|><|assistant|>"
    one, two = llm.chat([messages, [{"role": "user", "content": "And?"}]], SEEDED)
    assert one.token_ids == output.token_ids
    assert two.prompt_token_ids != one.prompt_token_ids
    (own,) = llm.chat(
        messages, GREEDY, chat_template="{{ messages[0].content }} {{ word }}",
        chat_template_kwargs={"word": "please"},
    )  # fmt: skip
    assert llm.tokenizer.decode(own.prompt_token_ids) == "What is a mill? please"


def test_tools_are_called(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", max_position_embeddings=1_024)
    tool = {
        "type": "function",
        "function": {
            "name": "turn",
            "parameters": {
                "type": "object",
                "properties": {"speed": {"enum": [1, 2]}},
                "required": ["speed"],
                "additionalProperties": False,
            },
        },
    }
    with LLM(path, **SMALL) as llm:
        (output,) = llm.chat(
            [{"role": "user", "content": "Turn."}],
            SamplingParams(seed=1, max_tokens=80),
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
        )
    (call,) = output.tool_calls
    function = call["function"]
    assert isinstance(function, dict)
    assert function["name"] == "turn"
    assert json.loads(function["arguments"])["speed"] in (1, 2)


def test_grammars_hold_completions(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    grammars = [
        Grammar.regex("[0-9]{4}-[0-9]{2}"),
        Grammar.choice(["yes.", "(no)"]),
        Grammar.json_schema(schema),
        Grammar.ebnf('start: "a" "b"+ "c"'),
    ]
    asked = [SamplingParams(seed=2, max_tokens=60, grammar=grammar) for grammar in grammars]
    month, word, document, letters = llm.generate(["x"] * 4, asked)
    assert re.fullmatch("[0-9]{4}-[0-9]{2}", month.text)
    assert word.text in ("yes.", "(no)")
    assert json.loads(document.text)["a"] in (True, False)
    assert re.fullmatch("ab+c?", letters.text)


def test_an_adapter_is_applied_to_the_prompts_that_name_it(llm: LLM) -> None:
    base, adapted = llm.generate([[5, 6, 7, 8]] * 2, GREEDY, adapter=[None, "sql"])
    assert base.token_ids == llm.generate([5, 6, 7, 8], GREEDY)[0].token_ids
    assert adapted.token_ids == llm.generate([5, 6, 7, 8], GREEDY, adapter="sql")[0].token_ids
    assert adapted.token_ids != base.token_ids


def joined(llm: LLM, outputs: list[GenerationOutput], **sampling: Any) -> None:
    texts: dict[tuple[int, int], str] = {}
    tokens: dict[tuple[int, int], list[int]] = {}
    ended = set()
    for delta in llm.stream(PROMPTS, SamplingParams(**sampling)):
        key = delta.prompt, delta.choice
        assert key not in ended
        texts[key] = texts.get(key, "") + delta.text
        tokens.setdefault(key, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            ended.add(key)
    for i, output in enumerate(outputs):
        for j, completion in enumerate(output.completions):
            assert texts[i, j] == completion.text
            assert tuple(tokens[i, j]) == completion.token_ids
            assert (i, j) in ended


def test_a_stream_has_the_same_tokens_as_they_come(llm: LLM) -> None:
    sampling: dict[str, Any] = {"seed": 3, "max_tokens": 8, "n": 2, "ignore_eos": True}
    joined(llm, llm.generate(PROMPTS, SamplingParams(**sampling)), **sampling)
    deltas = list(llm.stream_chat([{"role": "user", "content": "Hi"}], GREEDY))
    assert len(deltas) > 2, "tokens come step by step"
    (whole,) = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
    assert "".join(delta.text for delta in deltas) == whole.text


def test_streams_share_the_batch_and_one_that_is_left_is_cancelled(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    alone = llm.generate("mill wheel", long)[0]
    stream = llm.stream("mill wheel", long)
    first = next(stream)
    other = llm.generate("water", GREEDY)[0]
    assert other == llm.generate("water", GREEDY)[0]
    text = first.text + "".join(delta.text for delta in stream)
    assert text == alone.text
    left = llm.stream("mill wheel", long)
    next(left)
    assert llm.stats().num_running == 1
    left.close()
    assert llm.stats().num_running == 0
    assert llm.stats().num_free_blocks == llm.stats().num_blocks
    llm.engine.check_integrity()


def test_threads_take_turns(llm: LLM) -> None:
    alone = llm.generate(PROMPTS, GREEDY)
    made: dict[int, list[GenerationOutput]] = {}

    def ask(number: int) -> None:
        made[number] = llm.generate(PROMPTS, GREEDY)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outputs in made.values():
        assert [one.token_ids for one in outputs] == [one.token_ids for one in alone]
    assert len(made) == 3


def test_a_request_that_fails_in_the_engine_leaves_the_others(llm: LLM) -> None:
    bad = SamplingParams(max_tokens=4, grammar=Grammar.regex("("))
    with pytest.raises(RequestFailedError, match="1 of 2 requests failed") as caught:
        llm.generate(MIXED, [bad, GREEDY])
    assert caught.value.reason[0] == "grammar_invalid"
    failed, made = caught.value.outputs
    assert failed.completions[0].error == caught.value.reason
    assert made.token_ids == llm.generate([5, 6, 7, 8], GREEDY)[0].token_ids
    deltas: list[GenerationDelta] = []
    with pytest.raises(RequestFailedError):
        deltas += llm.stream(MIXED, [bad, GREEDY])
    assert llm.stats().num_running == 0


def test_more_prompts_than_run_at_a_time(checkpoint: Path) -> None:
    with LLM(checkpoint, max_num_sequences=2, **SMALL) as llm:
        outputs = llm.generate([f"mill {i % 3}" for i in range(7)], GREEDY)
        assert [one.token_ids for one in outputs[:3]] == [one.token_ids for one in outputs[3:6]]
        assert llm.summary().num_requests == 7
        assert llm.num_tokens == 56


def test_embeddings(llm: LLM, checkpoint: Path) -> None:
    raw = llm.embed(MIXED, pooling="last", normalize=False)
    assert [len(one.embedding) for one in raw] == [32, 32]
    assert raw[1].num_prompt_tokens == 4
    for scaled, one in zip(llm.embed(MIXED, pooling="last"), raw, strict=True):
        assert math.hypot(*scaled.embedding) == pytest.approx(1)
        size = math.hypot(*one.embedding)
        assert scaled.embedding == pytest.approx([value / size for value in one.embedding])
    # A model without a classification head compares embeddings.
    same, other = llm.score("mill wheel", ["mill wheel", "water"])
    assert same.score == pytest.approx(1)
    assert -1 <= other.score < same.score
    (cut,) = llm.embed([5, 6, 7, 8], truncate_prompt_tokens=2, pooling="mean")
    assert cut == llm.embed([7, 8], pooling="mean")[0]


def classifier(path: Path, num_labels: int) -> Path:
    return write_checkpoint(
        path,
        architectures=["LlamaForSequenceClassification"],
        num_labels=num_labels,
        id2label={str(i): f"label {i}" for i in range(num_labels)},
        pad_token_id=0,
    )


def test_labels_are_those_of_transformers(tmp_path: Path) -> None:
    path = classifier(tmp_path / "labels", 3)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path).eval()
    import torch

    with torch.inference_mode():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0].softmax(-1).tolist()
    with LLM(path, **SMALL) as llm:
        (output,) = llm.classify([5, 6, 7])
        assert list(output.probabilities.values()) == pytest.approx(expected, abs=1e-4)
        assert output.label == f"label {expected.index(max(expected))}"


def test_a_cross_encoder_scores_pairs(tmp_path: Path) -> None:
    with LLM(classifier(tmp_path / "scorer", 1), **SMALL) as llm:
        one, two = llm.score("mill", ["wheel", "water"])
        assert 0 < one.score < 1
        assert one != two
        assert llm.score(["mill", "mill"], ["wheel", "water"]) == [one, two]


def test_close_frees_what_it_has(checkpoint: Path) -> None:
    llm = LLM(checkpoint, **SMALL)
    stream = llm.stream("mill", GREEDY)
    next(stream)
    engine = weakref.ref(llm.engine)
    llm.close()
    assert engine() is None, "weights and cache are still held"
    llm.close()
    for call in (
        lambda: next(stream),
        lambda: llm.generate("mill"),
        lambda: llm.stream("mill"),
        lambda: llm.embed("mill"),
        llm.stats,
        lambda: llm.engine,
    ):
        with pytest.raises(EngineClosedError, match="Make another one"):
            call()
