"""A short soak, and what its checks find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import __main__ as soak
from benchmarks.soak.requests import LONGEST_TOKENS, Expected, problems


@pytest.mark.slow(reason="serves 300 random requests on an engine with few blocks")
@pytest.mark.timeout(180)
def test_mixed_requests_on_a_tiny_pool_end_as_they_have_to(tmp_path: Path) -> None:
    requests = soak.draw(300, seed=1)
    assert {request.error_code for request in requests} > {"", "grammar_invalid"}
    outcome = soak.run(tmp_path, requests, soak.num_blocks(requests), limit_s=150.0)
    assert soak.findings(requests, outcome) == []
    assert outcome.summary["num_cancelled"] >= 10
    assert outcome.summary["num_preemptions"] > 0
    assert outcome.summary["prefix_hit_tokens"] > 0


def test_every_option_is_drawn() -> None:
    requests = [request for request in soak.draw(2_000, seed=2) if not request.error_code]
    drawn = set[str]().union(*(request.fields for request in requests))
    assert drawn >= {
        *("id", "prompt_token_ids", "max_tokens", "seed", "priority", "cache_salt"),
        *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
        *("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "min_tokens"),
        *("ignore_eos", "stop", "stop_token_ids", "logprobs", "prompt_logprobs", "n", "grammar"),
        "cancel_after_tokens",
    }
    lengths = [len(r.fields["prompt_token_ids"]) + r.fields["max_tokens"] for r in requests]
    assert min(lengths) <= 3
    assert LONGEST_TOKENS * 0.9 < max(lengths) <= LONGEST_TOKENS
    cancelled = sum("cancel_after_tokens" in request.fields for request in requests)
    assert 0.05 < cancelled / len(requests) < 0.15


def _fields(**changes: Any) -> dict[str, Any]:
    return {"id": "r0", "prompt_token_ids": [300, 301], "max_tokens": 2} | changes


def _answer(**changes: Any) -> dict[str, Any]:
    return {
        "id": "r0",
        "token_ids": [300, 301],
        "text": "abcd",
        "finish_reason": "length",
        "prompt_tokens": 2,
        "completion_tokens": 2,
    } | changes


@pytest.mark.parametrize(
    ("fields", "answer", "said"),
    [
        ({}, {}, ""),
        ({}, {"id": "r1"}, "answered as r1"),
        ({"max_tokens": 3}, {}, "for its length with 2"),
        ({"max_tokens": 1}, {}, "more than max_tokens"),
        ({}, {"finish_reason": None}, "finish_reason is None"),
        ({}, {"finish_reason": None, "cancelled": True}, "without a request to cancel"),
        ({"cancel_after_tokens": 2}, {"finish_reason": None, "cancelled": True}, ""),
        ({"cancel_after_tokens": 1}, {"finish_reason": None, "cancelled": True}, "after 2 tokens"),
        ({"min_tokens": 2}, {"token_ids": [1], "completion_tokens": 1}, "length with 1"),
        (
            {"min_tokens": 2},
            {"token_ids": [1], "completion_tokens": 1, "finish_reason": "stop"},
            "before min_tokens",
        ),
        ({"bad_words": ["bc"]}, {}, "bad word"),
        ({"stop": ["cd"]}, {}, "stop string"),
        ({"logit_bias": {"300": -100}}, {}, "bias forbids"),
        ({"n": 2}, {}, "1 completions for n = 2"),
        ({"prompt_logprobs": 0}, {}, "0 prompt_logprobs, not 2"),
        ({"logprobs": 0}, {"logprobs": []}, "0 logprobs for 2"),
        (
            {"grammar": {"kind": "ebnf", "text": "…"}},
            {"finish_reason": "stop"},
            "does not match its grammar",
        ),
        ({}, {"error": {"code": "internal_error", "message": "why"}}, "failed"),
    ],
)
def test_findings_name_what_is_wrong(
    fields: dict[str, Any], answer: dict[str, Any], said: str
) -> None:
    found = list(problems([Expected(_fields(**fields))], [_answer(**answer)]))
    assert bool(found) == bool(said)
    assert said in "".join(found)


def test_errors_are_those_asked_for() -> None:
    request = Expected(_fields(), error_code="grammar_invalid")
    assert list(problems([request], [_answer()])) == ["r0 ended with no error, not grammar_invalid"]
    assert not list(problems([request], [{"id": "r0", "error": {"code": "grammar_invalid"}}]))
    assert list(problems([request], [])) == ["there are 1 requests, but 0 answers"]


def test_growth_leaves_the_warm_up_out() -> None:
    flat = [10, 50, 90] + [100] * 7
    assert soak.growth(flat) == 0.0
    assert soak.growth([*flat, 200]) > soak.MAX_GROWTH
