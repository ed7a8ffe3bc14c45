"""Answers that were mostly predicted, on engines with and without proposals."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.gpu.engine_runs import EngineRun, engine_config
from benchmarks.gpu.report import EQUAL_ANSWERS, LLAMA_8B, predicted
from benchmarks.gpu.scope import Scope
from benchmarks.support.closed_loop import answers, greedy_request

_PROMPT, _SMOKE_PROMPT = 512, 4
_OUTPUT, _SMOKE_OUTPUT = 256, 6
_STREAMS, _SMOKE_STREAMS = (1, 32), (2,)
# Per cent of a prediction's tokens that are wrong.
_PERCENT_WRONG = 20
_Answers = dict[str, list[int]]


class _Answered(NamedTuple):
    answers: _Answers
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers.values())) / self.elapsed_s


def run(scope: Scope) -> None:
    with tempfile.TemporaryDirectory() as name:
        plain = _engine(scope, Path(name) / "plain", "off")
        proposing = _engine(scope, Path(name) / "proposing", "ngram")
        for streams in _SMOKE_STREAMS if scope.smoke else _STREAMS:
            case = predicted(streams)
            if scope.out_of_time(case):
                continue
            with scope.case(case):
                _compare(scope, plain, proposing, streams)


def _engine(scope: Scope, folder: Path, speculation: str) -> EngineRun:
    """Load an engine with the same random weights and a small KV cache: two share a device."""
    config = engine_config(
        scope,
        kernels="reference" if scope.smoke else "triton",
        cuda_graphs=not scope.smoke,
        deterministic=True,
        speculation=speculation,
        num_blocks=32 if scope.smoke else 4_096,
    )
    return EngineRun(scope, LLAMA_8B, folder, config)


def _compare(scope: Scope, plain: EngineRun, proposing: EngineRun, streams: int) -> None:
    prompts = plain.prompts(streams, _SMOKE_PROMPT if scope.smoke else _PROMPT)
    _answer(scope, plain, prompts, {})  # warms up
    without = _answer(scope, plain, prompts, {})
    predictions = _spoiled(scope, proposing, without.answers)
    _answer(scope, proposing, prompts, predictions)
    proposed = _answer(scope, proposing, prompts, predictions)
    stats = proposing.engine.stats()
    scope.emit(
        predicted(streams),
        proposed.tokens_per_s / without.tokens_per_s,
        "x",
        details={
            "tokens_per_s_without": without.tokens_per_s,
            "tokens_per_s_with": proposed.tokens_per_s,
            "proposed": stats.proposed_tokens,
            "accepted": stats.accepted_tokens,
        },
    )
    num_equal = sum(proposed.answers[key] == own for key, own in without.answers.items())
    scope.emit(f"{EQUAL_ANSWERS}, {streams} streams", num_equal, "requests", ceiling=streams)


def _answer(
    scope: Scope, run: EngineRun, prompts: list[tuple[int, ...]], predictions: _Answers
) -> _Answered:
    """Return greedy answers by the numbers of their prompts."""
    begin_s = time.perf_counter()
    num_tokens = _SMOKE_OUTPUT if scope.smoke else _OUTPUT
    requests = [
        msgspec.structs.replace(
            greedy_request(str(number), prompt, num_tokens),
            prediction_token_ids=tuple(predictions.get(str(number), ())),
        )
        for number, prompt in enumerate(prompts)
    ]
    return _Answered(answers(run.engine, requests), time.perf_counter() - begin_s)


def _spoiled(scope: Scope, run: EngineRun, answers: _Answers) -> _Answers:
    generator = random.Random(scope.seed)
    return {
        key: [
            generator.randrange(run.model.vocab_size)
            if generator.randrange(100) < _PERCENT_WRONG
            else token
            for token in answer
        ]
        for key, answer in answers.items()
    }
