"""Equality of every token and bit with and without speculation, for any proposals and faults."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from millrace.engine.sampling.sampler import Sampler
from millrace.engine.speculation import verification
from millrace.engine.types import EngineRequest
from millrace.schemas.frames import FinishReason
from millrace.schemas.sampling import Grammar, GrammarKind
from tests.engine.speculation.worlds import NAN_TOKEN, Answers, Guesses, load, run
from tests.engine.support import prompt, request

_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "size": {"enum": ["big", "small"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
_FEW = tuple(range(20, 29))
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 30, "min_p": 0.01},
    {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"logprobs": 3, "temperature": 1.0, "allowed_token_ids": _FEW},
    {"n": 3, "temperature": 1.2, "allowed_token_ids": _FEW},
    {"presence_penalty": 0.5, "logit_bias": {7: 4.0}, "min_tokens": 9},
    {"prompt_logprobs": 1, "allowed_token_ids": _FEW},
    {"bad_words": ("a", "the stream"), "temperature": 0.9},
    {"stop_token_ids": tuple(range(100, 160)), "min_tokens": 4, "temperature": 1.0},
    {"use_beam_search": True, "n": 2},
    {"grammar": Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(_SCHEMA))},
    {
        "grammar": Grammar(kind=GrammarKind.REGEX, text="(ab|cd){3,9}millrace"),
        "temperature": 1.0,
        "min_tokens": 12,
        "logprobs": 1,
    },
    {"grammar": Grammar(kind=GrammarKind.REGEX, text="x(1|2)*"), "ignore_eos": True},
)


def _load(seed: int, count: int = 26) -> list[EngineRequest]:
    generator = random.Random(seed)
    return [
        request(
            f"r{number}",
            prompt(seed * 100 + number, generator.choice([1, 2, 15, 16, 17, 40]), 400),
            seed=number,
            max_tokens=max(
                generator.choice([1, 2, 20, 33, 64]),
                _OPTIONS[number % len(_OPTIONS)].get("min_tokens", 0),
            ),
            eos_token_ids=(1,),
            priority=generator.choice([0, 0, 1, -1]),
            **_OPTIONS[number % len(_OPTIONS)],
        )
        for number in range(count)
    ]


_ENGINES: tuple[dict[str, Any], ...] = (
    {},
    {"max_num_sequences": 4},
    {"num_blocks": 20, "max_batch_tokens": 24},
    {"num_blocks": 16, "host_cache_bytes": 0, "prefix_cache": False},
    {"kv_cache_dtype": "int8", "num_blocks": 24, "block_size_tokens": 8},
)


@pytest.fixture(scope="module")
def known(checkpoint: Path) -> Answers:
    return run(load(checkpoint, "off"), _load(0))


@pytest.mark.parametrize(
    ("settings", "share_right"),
    [
        *((_ENGINES[0], share_right) for share_right in (0.0, 0.6, 0.95)),
        *zip(_ENGINES[1:], (0.95, 0.6, 0.0, 0.6), strict=True),
    ],
)
def test_any_guess_changes_nothing(
    checkpoint: Path,
    known: Answers,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    share_right: float,
) -> None:
    if "kv_cache_dtype" in settings:
        known = run(load(checkpoint, "off", kv_cache_dtype="int8"), _load(0))
    gaps = [random.Random(3).randrange(4) for _ in range(26)]
    Guesses(known, 5, share_right).into(monkeypatch)
    engine = load(checkpoint, "ngram", **settings)
    assert run(engine, _load(0), gaps) == known
    stats = engine.stats()
    assert stats.proposed_tokens > 50
    assert (stats.accepted_tokens > 0.4 * stats.proposed_tokens) == (share_right > 0.9)
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_preemptions > 0 or "num_blocks" not in settings


@pytest.mark.parametrize("settings", _ENGINES[:3])
def test_proposals_of_the_speculator_change_no_token(
    checkpoint: Path, known: Answers, settings: dict[str, Any]
) -> None:
    engine = load(checkpoint, "ngram", **settings)
    assert run(engine, _load(0)) == known
    assert engine.stats().accepted_tokens > 0


def test_a_request_goes_on_behind_any_of_its_tokens(checkpoint: Path, known: Answers) -> None:
    """The request resumes as after a failover, on an engine with proposals or without."""
    generator = random.Random(1)
    for speculation in ("off", "ngram"):
        requests = [
            _behind(one, tokens[: generator.randrange(len(tokens) + 1)])
            for one in _load(0)
            if one.sampling.n == 1
            and one.sampling.prompt_logprobs is None
            and (tokens := known[one.request_id, 0].token_ids)
        ]
        answers = run(load(checkpoint, speculation), requests)
        for one in requests:
            whole, rest = known[one.request_id, 0], answers[one.request_id, 0]
            num_before = len(one.output_token_ids)
            assert [*one.output_token_ids, *rest.token_ids] == whole.token_ids
            assert rest.logprobs == whole.logprobs[num_before:]
            assert rest.ends == whole.ends


def _behind(one: EngineRequest, tokens: list[int]) -> EngineRequest:
    return request(
        one.request_id,
        list(one.prompt_token_ids),
        output_token_ids=tuple(tokens),
        eos_token_ids=one.eos_token_ids,
        **{name: getattr(one.sampling, name) for name in one.sampling.__struct_fields__},
    )


def test_proposed_non_finite_token_fails_only_a_request_that_accepts_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requests() -> list[EngineRequest]:
        forced = {"logit_bias": {NAN_TOKEN: 100.0}}
        return [
            request("well", prompt(1, 9, 400), max_tokens=30, logit_bias={NAN_TOKEN: -100.0}),
            request("ill", prompt(2, 9, 400), max_tokens=30, **forced),
            request("next", prompt(3, 40, 400), max_tokens=30, logit_bias={NAN_TOKEN: -100.0}),
        ]

    known = run(load(checkpoint, "off", max_num_sequences=2), requests())
    assert known["ill", 0].ends == ["non_finite_logits"]
    guesses = Guesses(known, 2, 1.0)
    guesses.into(monkeypatch)
    monkeypatch.setattr(guesses, "_random", _Poisoning())
    engine = load(checkpoint, "ngram", max_num_sequences=2, num_blocks=12)
    assert run(engine, requests()) == known
    assert engine.stats().proposed_tokens > 0
    cache = engine._runner.cache
    assert all(cache.finite_blocks(list(range(cache.num_blocks))))


class _Poisoning:
    """Guesses that are right except for a non-finite token in their middle."""

    def __init__(self) -> None:
        self._generator = random.Random(4)

    def random(self) -> float:
        return self._generator.choice([0.0, 0.0, 1.0])

    def randrange(self, end: int) -> int:
        return NAN_TOKEN if end > 100 else self._generator.randrange(end)


@pytest.mark.parametrize("what", ["look", "select", "launch", "sample"])
def test_failures_in_between_change_no_other_request(
    checkpoint: Path, known: Answers, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    generator = random.Random(6)
    Guesses(known, 5, 0.8).into(monkeypatch)
    engine = load(checkpoint, "ngram")
    owner, name = {
        "look": (verification, "_finite"),
        "select": (verification, "_select"),
        "launch": (engine._runner, "launch"),
        "sample": (Sampler, "_sample_rows"),
    }[what]
    working = getattr(owner, name)

    def failing(*arguments: Any, **named: Any) -> Any:
        if what == "launch" and len(arguments[0]) == 1:
            return working(*arguments, **named)
        if generator.random() < 0.3:
            if what == "select":
                return None
            if what == "look":
                return [False] * len(arguments[0])
            raise RuntimeError("can't allocate memory")
        return working(*arguments, **named)

    monkeypatch.setattr(owner, name, failing)
    answers = run(engine, _load(0))
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    if what != "sample":
        assert answers == known
    for key, answer in answers.items():
        if answer.ends[0] in tuple(FinishReason):
            assert answer == known[key]
