"""Comparison of answers with and without proposed tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.checkpoints import FIRST_TEXT_TOKEN, LlamaShape
from benchmarks.speculation.copier import write_copier
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.sampling import Grammar, GrammarKind, SamplingParams

# Small, because time is not measured.
_SHAPE = LlamaShape(
    hidden_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=256,
    vocab_size=2048,
)
_FEW = tuple(range(300, 312))
_REGEX = Grammar(kind=GrammarKind.REGEX, text="(red|green){1,9}millrace wheels")
_OBJECT = Grammar(kind=GrammarKind.JSON_OBJECT)
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "allowed_token_ids": _FEW},
    {"temperature": 0.7, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0.0, "frequency_penalty": 0.6, "logprobs": 2},
    {"temperature": 1.0, "n": 3, "allowed_token_ids": _FEW, "logprobs": 1},
    {"temperature": 0.0, "grammar": _REGEX, "ignore_eos": False},
    {"temperature": 1.0, "grammar": _OBJECT, "ignore_eos": False},
    {"temperature": 0.8, "min_tokens": 20, "stop_token_ids": tuple(range(600, 900))},
)
_AT_A_TIME = 250


class Equality(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a comparison.

    ``num_different`` requests had another token, log-probability or end. ``num_moved`` requests
    were moved to another engine on their way.
    """

    num_requests: int
    num_moved: int
    num_different: int
    proposed: int
    accepted: int


class _Answer(NamedTuple):
    token_ids: list[int]
    logprobs: list[Any]
    ends: list[str]


_Answers = dict[tuple[str, int], _Answer]


def compare(folder: Path, num_requests: int) -> Equality:
    """Answer all requests with and without proposals, on a small checkpoint made in ``folder``."""
    path = write_copier(folder / "small", _SHAPE)
    generator = random.Random(5)
    requests = [_request(number, generator) for number in range(num_requests)]
    # Less memory than they need, so that they are preempted, too.
    without, with_ = _engine(path, "off", 700), _engine(path, "ngram", 300)
    num_different = num_moved = 0
    for start in range(0, num_requests, _AT_A_TIME):
        part = requests[start : start + _AT_A_TIME]
        known, told = _answers(without, part), _answers(with_, part)
        cuts = {
            one.request_id: generator.randrange(1, max(2, len(told[one.request_id, 0].token_ids)))
            for one in part[::2]
            if one.sampling.n == 1 and told[one.request_id, 0].token_ids
        }
        moved = [
            msgspec.structs.replace(
                one,
                output_token_ids=tuple(told[one.request_id, 0].token_ids[: cuts[one.request_id]]),
            )
            for one in part
            if one.request_id in cuts
        ]
        for key, rest in _answers(without, moved).items():
            cut = cuts[key[0]]
            before = told[key]
            told[key] = _Answer(
                before.token_ids[:cut] + rest.token_ids,
                before.logprobs[:cut] + rest.logprobs,
                rest.ends,
            )
        num_moved += len(moved)
        num_different += len({key[0] for key in known if known[key] != told.get(key)})
    stats = with_.stats()
    return Equality(
        num_requests=num_requests,
        num_moved=num_moved,
        num_different=num_different,
        proposed=stats.proposed_tokens,
        accepted=stats.accepted_tokens,
    )


def _request(number: int, generator: random.Random) -> EngineRequest:
    size = _SHAPE.vocab_size
    part = [generator.randrange(FIRST_TEXT_TOKEN, size) for _ in range(generator.randrange(1, 60))]
    kind = _KINDS[number % len(_KINDS)]
    max_tokens = generator.randrange(20, 80)
    sampling = {"seed": number, "max_tokens": max_tokens, "ignore_eos": True} | kind
    return EngineRequest(
        request_id=str(number),
        prompt_token_ids=tuple(part * generator.randrange(1, 3)),
        sampling=SamplingParams(**sampling),
        eos_token_ids=(1,),
    )


def _engine(path: Path, speculation: str, num_blocks: int) -> Engine:
    config = EngineConfig(device="cpu", dtype="bfloat16", kernels="native", num_blocks=num_blocks)
    settings = msgspec.convert({"speculation": speculation}, EngineConfig)
    return Engine.load(
        path, msgspec.structs.replace(config, speculation=settings.speculation, prefix_cache=False)
    )


def _answers(engine: Engine, requests: list[EngineRequest]) -> _Answers:
    answers: _Answers = {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for output in engine.step():
            key = output.request_id, output.choice
            answer = answers.setdefault(key, _Answer([], [], []))
            answer.token_ids.extend(output.token_ids)
            answer.logprobs.extend(output.logprobs)
            if output.error is not None:
                answer.ends.append(output.error[0])
            elif output.finish_reason is not None:
                answer.ends.append(output.finish_reason.value)
    return answers
