"""``millrace generate`` on a tiny checkpoint, and the batch runner on a scripted engine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from millrace.cli.main import main
from millrace.engine.offline.batch import OfflineBatch
from millrace.engine.offline.generated import Generated, OfflineRequest
from millrace.engine.types import EngineOutput, EngineRequest, EngineStats
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.frames import FinishReason
from millrace.schemas.jobs import Job
from millrace.schemas.sampling import SamplingParams
from tests.cli.offline.generating import generate

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_file_of_requests(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"id": "a", "prompt": "mill wheel", "max_tokens": 40, "temperature": 0, "ignore_eos": True},
        "",
        {
            "id": 7,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": 3,
            "seed": 5,
            "ignore_eos": True,
            "logprobs": 2,
        },
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 3, "temperature": 0, "ignore_eos": True},
    ]
    code, answers = generate(tmp_path, checkpoint, lines, "--max-batch", "2")
    assert code == 0
    # In the order of the file, though the first ends last; without an id, the line's number.
    assert [answer["id"] for answer in answers] == ["a", 7, 4]
    assert [answer["completion_tokens"] for answer in answers] == [40, 3, 3]
    assert [answer["finish_reason"] for answer in answers] == ["length"] * 3
    tokenizer = Tokenizer.load(checkpoint)
    for answer in answers:
        assert answer["text"] == tokenizer.decode(answer["token_ids"])
    assert answers[0]["prompt_tokens"] == len(tokenizer.encode("mill wheel"))
    assert "logprobs" not in answers[0]
    assert [x["token_id"] for x in answers[1]["logprobs"]] == answers[1]["token_ids"]
    assert [len(x["top"]) for x in answers[1]["logprobs"]] == [2, 2, 2]
    summary = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert summary["num_requests"] == 3
    assert summary["completion_tokens"] == 46
    assert min(summary[key] for key in ("tokens_per_s", "mean_ttft_ms", "mean_tpot_ms")) > 0


def test_the_same_seed_gives_the_same_tokens_in_any_batch(tmp_path: Path, checkpoint: Path) -> None:
    lines = [{"prompt": f"wheel {i % 3}", "seed": i % 3, "max_tokens": 6} for i in range(6)]
    _, together = generate(tmp_path, checkpoint, lines)
    _, alone = generate(tmp_path, checkpoint, lines, "--max-batch", "1")
    assert [x["token_ids"] for x in together] == [x["token_ids"] for x in alone]
    assert together[0]["token_ids"] == together[3]["token_ids"]


def test_bad_lines_are_named_before_anything_runs(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"id": 1, "prompt": "good"},
        {"id": 2},
        {"prompt": "x", "prompt_token_ids": [3]},
        {"prompt": "x", "colour": "red"},
        "not json",
        {"prompt": "x", "max_tokens": 0},
        {"prompt": "x", "max_tokens": 500},
        {"prompt_token_ids": [99999]},
        {"messages": [{"role": "wizard", "content": "x"}]},
        {"id": 1, "prompt": "again"},
        {"prompt": ""},
    ]
    code, answers = generate(tmp_path, checkpoint, lines)
    assert (code, answers) == (2, [])
    shown = capsys.readouterr().err.splitlines()
    assert [line.split("in.jsonl, ")[1].split(":")[0] for line in shown] == [
        f"line {number}" for number in range(2, 12)
    ]
    for number, word in ((4, "colour"), (7, "500"), (8, "99999"), (9, "wizard"), (10, "line 1")):
        assert word in shown[number - 2]


def test_a_request_that_the_cache_can_never_hold_fails_alone(
    tmp_path: Path, checkpoint: Path
) -> None:
    lines = [
        {"id": "big", "prompt": "x", "max_tokens": 100, "ignore_eos": True},
        {"id": "small", "prompt": "x", "max_tokens": 2, "ignore_eos": True},
    ]
    code, answers = generate(tmp_path, checkpoint, lines, "--kv-cache-bytes", "16384")
    assert code == 1
    assert answers[0]["error"]["code"] == "kv_capacity_exceeded"
    assert answers[1]["completion_tokens"] == 2


def test_files_that_cannot_be_opened(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--model", str(checkpoint), "--input", str(tmp_path / "no")]
    assert main([*arguments, "--output", str(tmp_path / "out")]) == 2
    assert "no cannot be read" in capsys.readouterr().err
    (tmp_path / "in").write_text("")
    arguments[-1] = str(tmp_path / "in")
    assert main([*arguments, "--output", str(tmp_path / "no" / "out")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_lines_may_use_every_feature_of_the_engine(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = list(range(5, 45))
    common = {"prompt_token_ids": prompt, "max_tokens": 4, "ignore_eos": True, "seed": 1}
    lines = [
        common | {"id": "alone"},
        common | {"id": "several", "n": 3, "logprobs": 1, "priority": 2},
        common | {"id": "left", "max_tokens": 50, "cancel_after_tokens": 3},
        common | {"id": "left at once", "cancel_after_tokens": 0},
        common | {"id": "salted", "cache_salt": "another tenant"},
        common | {"id": "biased", "logit_bias": {"9": 100.0}, "temperature": 0},
        common | {"id": "scored", "prompt_logprobs": 1},
    ]
    code, answers = generate(tmp_path, checkpoint, lines, "--num-blocks", "40", "--max-batch", "1")
    assert code == 0
    alone, several, left, at_once, salted, biased, scored = answers
    assert [len(choice["token_ids"]) for choice in several["choices"]] == [4, 4, 4]
    assert several["choices"][0]["token_ids"] == alone["token_ids"] == salted["token_ids"]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert [len(choice["logprobs"]) for choice in several["choices"]] == [4, 4, 4]
    assert several["completion_tokens"] == 12
    assert "token_ids" not in several
    assert (left["completion_tokens"], left["cancelled"], left["finish_reason"]) == (3, True, None)
    assert (at_once["token_ids"], at_once["cancelled"]) == ([], True)
    assert biased["token_ids"] == [9] * 4
    assert scored["prompt_logprobs"][0] is None
    assert [entry["token_id"] for entry in scored["prompt_logprobs"][1:]] == prompt[1:]
    assert several["cached_tokens"] == 32
    assert "cached_tokens" not in salted
    summary = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert summary["num_cancelled"] == 2
    assert summary["prefix_hit_tokens"] >= 32
    assert summary["peak_rss_bytes"] > 1 << 20


@pytest.mark.parametrize("rows", [slice(199, 200), slice(None)], ids=["one token", "all"])
def test_nan_weights_end_only_the_requests_that_use_them(
    tmp_path: Path, checkpoint: Path, rows: slice
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    weights = load_file(broken / "model.safetensors")
    # The head is another tensor than the embedding: a tied one would spoil everybody's logits.
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][rows] = float("nan")
    save_file(weights, broken / "model.safetensors")
    config = json.loads((broken / "config.json").read_text()) | {"tie_word_embeddings": False}
    (broken / "config.json").write_text(json.dumps(config))
    shared = list(range(5, 37))
    line = {"max_tokens": 4, "ignore_eos": True, "logit_bias": {"199": -100}, "seed": 1}
    lines = [
        line | {"id": i, "prompt_token_ids": [*shared, 199 if i % 2 else 50, *shared]}
        for i in range(6)
    ]
    code, answers = generate(tmp_path, broken, lines, "--max-batch", "2")
    assert code == 1
    for answer in answers:
        if answer["id"] % 2 or rows == slice(None):
            assert answer["error"]["code"] == "non_finite_logits"
        else:
            assert answer["completion_tokens"] == 4


def test_bad_lines_are_answered_if_so_asked(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"id": "bad", "prompt_token_ids": [99999]},
        "not json",
        {"id": "good", "prompt": "x", "max_tokens": 2, "ignore_eos": True},
        {"id": "good", "prompt": "again"},
        {"prompt": "x", "priority": 10**9},
        {"prompt": "x", "cancel_after_tokens": -1},
    ]
    code, answers = generate(tmp_path, checkpoint, lines, "--answer-bad-lines")
    assert code == 1
    assert [answer["id"] for answer in answers] == ["bad", 2, "good", 4, 5, 6]
    codes = [answer["error"]["code"] if "error" in answer else None for answer in answers]
    bad, unreadable = "invalid_parameter", "invalid_input"
    assert codes == [bad, unreadable, None, unreadable, bad, bad]
    summary = json.loads(capsys.readouterr().err.splitlines()[-1])
    assert (summary["num_requests"], summary["num_failed"]) == (6, 5)


class ScriptedEngine:
    """Gives each choice of a request its own prompt back, one token a step and a second of time
    each."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.most_at_once = 0
        self.cancelled: list[str] = []
        self._left: dict[str, list[int]] = {}
        self._num_choices: dict[str, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._left)

    def stats(self) -> EngineStats:
        return EngineStats(num_preemptions=3)

    def add(self, request: EngineRequest) -> None:
        self._left[request.request_id] = list(request.prompt_token_ids)
        self._num_choices[request.request_id] = request.sampling.n
        self.most_at_once = max(self.most_at_once, len(self._left))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        del self._left[request_id]

    def step(self) -> list[EngineOutput]:
        self.now_s += 1.0
        outputs = []
        for request_id, left in list(self._left.items()):
            token_id = left.pop(0)
            finish_reason = None if left else FinishReason.LENGTH
            outputs += [
                EngineOutput(
                    request_id=request_id,
                    choice=choice,
                    token_ids=(token_id,),
                    finish_reason=finish_reason,
                )
                for choice in range(self._num_choices[request_id])
            ]
            if not left:
                del self._left[request_id]
        return outputs


def _request(
    request_id: str,
    prompt_token_ids: Sequence[int],
    cancel_after_tokens: int | None = None,
    **sampling: Any,
) -> OfflineRequest:
    job = Job(
        request_id=request_id,
        model="m",
        prompt_token_ids=tuple(prompt_token_ids),
        sampling=SamplingParams(**sampling),
    )
    return OfflineRequest(id=request_id, job=job, cancel_after_tokens=cancel_after_tokens)


def test_the_batch_is_bounded_and_measured(checkpoint: Path) -> None:
    engine = ScriptedEngine()
    tokenizer = Tokenizer.load(checkpoint)
    batch = OfflineBatch(engine, tokenizer, max_batch=2, monotonic=lambda: engine.now_s)
    # Some end while the others go on, and some steps end none.
    requests = [_request(str(i), (5, 6, 7, 8)[: 2 + i % 3]) for i in range(6)]
    ended = [generated.request.id for generated in batch.run(requests)]
    assert sorted(ended) == ["0", "1", "2", "3", "4", "5"]
    assert engine.most_at_once == 2
    summary = batch.summary()
    assert summary.completion_tokens == 18
    assert summary.mean_ttft_ms == 1000.0
    assert summary.mean_tpot_ms == 1000.0
    assert summary.wall_s == engine.now_s
    assert summary.tokens_per_s == round(18 / engine.now_s, 2)


def test_a_stop_string_ends_a_request_and_frees_it(checkpoint: Path) -> None:
    engine = ScriptedEngine()
    tokenizer = Tokenizer.load(checkpoint)
    ids = tuple(tokenizer.encode("a b STOP and more", add_special_tokens=False))
    batch = OfflineBatch(engine, tokenizer, max_batch=1, monotonic=lambda: engine.now_s)
    (generated,) = batch.run([_request("r", ids, stop=("STOP",))])
    (choice,) = generated.choices
    # The text goes on behind a prompt that is the same text.
    assert "".join(choice.text) == "a b "
    assert choice.finish_reason is FinishReason.STOP
    assert len(choice.token_ids) < len(ids)
    assert engine.cancelled == ["r"]


def test_a_caller_goes_away_after_some_tokens(checkpoint: Path) -> None:
    engine = ScriptedEngine()
    batch = OfflineBatch(engine, Tokenizer.load(checkpoint), 4, lambda: engine.now_s)
    requests = [
        _request("at once", (5, 6, 7), 0),
        _request("two", (5, 6, 7), 2),
        _request("at its end", (5, 6, 7), 3),
        # Three choices: the sixth token is the last of the second step.
        _request("all choices", (5, 6, 7, 8), 6, n=3),
    ]
    ended = {str(generated.request.id): generated for generated in batch.run(requests)}
    assert {name: generated.num_tokens for name, generated in ended.items()} == {
        "at once": 0,
        "two": 2,
        "at its end": 3,
        "all choices": 6,
    }
    assert [name for name, generated in ended.items() if not generated.cancelled] == ["at its end"]
    assert sorted(engine.cancelled) == ["all choices", "at once", "two"]
    summary = batch.summary(num_refused=2)
    assert (summary.num_requests, summary.num_cancelled, summary.num_failed) == (6, 3, 2)
    assert summary.num_preemptions == 3
    assert summary.peak_rss_bytes > 1 << 20


def test_choices_end_one_by_one(checkpoint: Path) -> None:
    tokenizer = Tokenizer.load(checkpoint)
    generated = Generated(_request("r", (5, 6), n=2), tokenizer, 0.0)
    generated.add_output(EngineOutput(request_id="r", token_ids=(7,), started=True), 1.0)
    generated.add_output(EngineOutput(request_id="r", choice=1, token_ids=(8,), started=True), 1.0)
    generated.add_output(EngineOutput(request_id="r", error=("non_finite_logits", "why")), 2.0)
    before = generated.ended
    generated.add_output(
        EngineOutput(request_id="r", choice=1, token_ids=(9,), finish_reason=FinishReason.LENGTH),
        2.0,
    )
    assert (before, generated.ended, generated.ended_in_engine) == (False, True, True)
    assert generated.error == ("non_finite_logits", "why")
    assert [choice.token_ids for choice in generated.choices] == [[7], [8, 9]]


def test_a_refusal_ends_all_choices(checkpoint: Path) -> None:
    generated = Generated(_request("r", (5, 6), n=2), Tokenizer.load(checkpoint), 0.0)
    generated.add_output(EngineOutput(request_id="r", error=("kv_capacity_exceeded", "why")), 1.0)
    assert generated.ended
    assert generated.ended_in_engine
