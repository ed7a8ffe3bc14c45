"""Beam search in the engine: the answers of a plain search, with a pool of any size."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.frames import FinishReason
from tests.engine.checkpoints import save_llama
from tests.engine.conftest import MakeEngine
from tests.engine.support import (
    drain,
    embedding_of,
    last_by_request,
    prompt,
    request,
    tokens_by_request,
)

RUNNERS = ("host", "device")

# (tokens, sum of log-probabilities or about that, why it ended)
Found = tuple[tuple[int, ...], Any, FinishReason]


def beams(request_id: str, prompt_ids: list[int], **params: Any) -> EngineRequest:
    settings = {"use_beam_search": True, "n": 4, "max_tokens": 12}
    return request(request_id, prompt_ids, **(settings | params))


def answers(outputs: list[EngineOutput], request_id: str = "r") -> list[Found]:
    """Return a request's answers in the order of its choices; one step must report them all."""
    last = [o for o in outputs if o.request_id == request_id and o.finished]
    assert [output.choice for output in last] == list(range(len(last)))
    places = [outputs.index(output) for output in last]
    assert places == list(range(places[0], places[0] + len(last)))
    found: list[Found] = []
    for output in last:
        assert output.finish_reason is not None, output.error
        logprob = pytest.approx(output.cumulative_logprob, abs=1e-3)
        found.append((output.token_ids, logprob, output.finish_reason))
    return found


def reference(
    model: Any,
    prompt_ids: list[int],
    *,
    n: int = 4,
    max_tokens: int = 12,
    stops: Collection[int] = (),
    min_tokens: int = 0,
    temperature: float = 0.0,
    length_penalty: float = 1.0,
) -> list[Found]:
    """Search plainly: compute every beam anew for every token, and never end early."""
    done: list[Found] = []
    live: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for length in range(1, max_tokens + 1):
        rows = torch.tensor([[*prompt_ids, *tokens] for tokens, _ in live])
        with torch.no_grad():
            logits = model(rows).logits[:, -1].double()
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        longer = []
        for (tokens, total), row in zip(live, logprobs, strict=True):
            if length <= min_tokens:
                row[list(stops)] = -math.inf
            top = row.topk(2 * n)
            for value, token in zip(top.values.tolist(), top.indices.tolist(), strict=True):
                if token not in stops:
                    longer.append(((*tokens, token), total + value))
                else:
                    done.append(((*tokens, token), total + value, FinishReason.STOP))
        live = sorted(longer, key=lambda beam: -beam[1])[:n]
    done += [(*beam, FinishReason.LENGTH) for beam in live]
    return sorted(done, key=lambda a: -a[1] / len(a[0]) ** length_penalty)[:n]


@pytest.mark.parametrize(("num_prompt_tokens", "n"), [(1, 2), (15, 5), (16, 1), (17, 3), (40, 5)])
def test_answers_are_those_of_a_plain_search(
    make_engine: MakeEngine, llama: tuple[Path, Any], num_prompt_tokens: int, n: int
) -> None:
    engine = make_engine()
    ids = prompt(3, num_prompt_tokens)
    engine.add(beams("r", ids, n=n, max_tokens=20))
    assert answers(drain(engine)) == reference(llama[1], ids, n=n, max_tokens=20)
    assert engine.stats().num_free_blocks == 128
    assert engine.stats().outstanding_tokens == 0


@pytest.mark.parametrize(
    "params",
    [
        {"length_penalty": 0.0},
        {"length_penalty": -1.5},
        {"length_penalty": 3.0},
        {"temperature": 0.3},
        {"temperature": 2.0, "length_penalty": 0.5},
        {"min_tokens": 5},
        {"min_tokens": 12, "length_penalty": -1.0},
        {"max_tokens": 1},
        {"n": 16, "max_tokens": 6},
    ],
)
def test_stop_tokens_end_beams_by_their_score(
    make_engine: MakeEngine, llama: tuple[Path, Any], params: dict[str, Any]
) -> None:
    """A tenth of all tokens end a sequence, so that answers have all lengths."""
    stops = tuple(range(0, 199, 10))
    ids = prompt(8, 20)
    engine = make_engine()
    engine.add(beams("r", ids, stop_token_ids=stops[5:], eos_token_ids=stops[:5], **params))
    outputs = drain(engine)
    assert answers(outputs) == reference(llama[1], ids, stops=stops, **params)
    assert engine.stats().num_free_blocks == 128


def test_no_end_of_sequence_ends_a_beam_if_it_is_ignored(
    make_engine: MakeEngine, llama: tuple[Path, Any]
) -> None:
    ids = prompt(8, 20)
    engine = make_engine()
    engine.add(beams("r", ids, eos_token_ids=tuple(range(0, 199, 3)), ignore_eos=True))
    assert answers(drain(engine)) == reference(llama[1], ids)


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": 5},
        {"num_blocks": 7, "max_batch_tokens": 16, "prefix_cache": False},
        {"max_num_sequences": 1},
        {"max_num_sequences": 2, "prefix_cache": False},
        {"max_num_sequences": 3, "max_batch_tokens": 2},
        {"max_batch_tokens": 7, "block_size_tokens": 1},
    ],
    ids=str,
)
def test_answers_depend_on_neither_slots_nor_blocks(
    make_engine: MakeEngine, llama: tuple[Path, Any], limits: dict[str, Any]
) -> None:
    """Answers stay the same even where one beam fits at a time, and the others are recomputed for
    every token."""
    ids = prompt(5, 50)
    engine = make_engine(**limits)
    engine.add(beams("r", ids, max_tokens=16))
    assert answers(drain(engine)) == reference(llama[1], ids, max_tokens=16)
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert (stats.num_running, stats.num_waiting, stats.outstanding_tokens) == (0, 0, 0)


def test_searches_that_need_one_another_s_blocks_all_end(
    make_engine: MakeEngine, llama: tuple[Path, Any]
) -> None:
    engine = make_engine(num_blocks=7, max_batch_tokens=32)
    asked = {f"r{number}": prompt(number, 30 + 7 * number) for number in range(4)}
    for name, ids in asked.items():
        engine.add(beams(name, ids, max_tokens=25, n=3))
    outputs = drain(engine)
    for name, ids in asked.items():
        assert answers(outputs, name) == reference(llama[1], ids, max_tokens=25, n=3)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_free_blocks == 7


@pytest.mark.parametrize("limits", [{}, {"num_blocks": 12, "max_num_sequences": 5}])
def test_searches_and_other_requests_do_not_change_one_another(
    make_engine: MakeEngine, llama: tuple[Path, Any], limits: dict[str, int]
) -> None:
    others = [
        request("greedy", prompt(1, 30), max_tokens=25),
        request("drawn", prompt(2, 25), temperature=1.0, seed=3, max_tokens=30, logprobs=2),
        request("choices", prompt(4, 20), temperature=1.0, seed=5, n=2, max_tokens=20),
        request("urgent", prompt(6, 50), priority=2, max_tokens=15),
    ]
    expected: dict[str, list[int]] = {}
    alone = make_engine()
    for other in others:
        alone.add(other)
        expected |= tokens_by_request(drain(alone))
    engine = make_engine(**limits)
    ids = prompt(3, 35)
    engine.add(beams("r", ids, max_tokens=24))
    outputs: list[EngineOutput] = []
    for other in others:
        outputs += engine.step()
        engine.add(other)
    outputs += drain(engine)
    assert answers(outputs) == reference(llama[1], ids, max_tokens=24)
    tokens = tokens_by_request([o for o in outputs if o.request_id not in ("r", "choices")])
    assert tokens == {name: own for name, own in expected.items() if name != "choices"}
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_beams_share_the_blocks_of_what_they_have_in_common(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(beams("r", prompt(3, 160 + 5), max_tokens=8))
    engine.step()
    engine.step()
    # Ten full blocks together, and a last one for each beam that the four go on from.
    assert 10 < 128 - engine.stats().num_free_blocks <= 10 + 4
    drain(engine)
    assert engine.stats().prefill_tokens == 165
    assert engine.stats().decode_tokens == 7 * 4


def test_a_prompt_that_is_cached_gives_the_same_answers(
    make_engine: MakeEngine, llama: tuple[Path, Any]
) -> None:
    engine = make_engine()
    ids = prompt(3, 64)
    expected = reference(llama[1], ids)
    for num_cached in (0, 48):
        engine.add(beams("r", ids))
        outputs = drain(engine)
        assert answers(outputs) == expected
        assert {o.num_cached_tokens for o in outputs if o.started} == {num_cached}


def test_search_reports_admission_first_tokens_and_answers(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=16)
    engine.add(beams("r", prompt(3, 20), n=2, max_tokens=3))
    assert [(o.started, o.finished) for o in engine.step()] == [(True, False)]
    assert [(o.started, o.finished) for o in engine.step()] == [(False, False)]
    last = drain(engine)
    assert [(o.started, o.finished, len(o.token_ids)) for o in last] == [
        (False, True, 3),
        (True, True, 3),
    ]
    engine.add(beams("s", prompt(3, 10), n=2, max_tokens=1))
    assert [(o.started, o.finished) for o in engine.step()] == [(True, True)] * 2


@pytest.mark.parametrize("limits", [{}, {"num_blocks": 6}, {"max_num_sequences": 2}])
def test_a_cancel_frees_all_beams_in_every_state(
    make_engine: MakeEngine, limits: dict[str, int]
) -> None:
    engine = make_engine(max_batch_tokens=24, **limits)
    baseline = engine.stats().num_free_blocks
    for num_steps in (0, 1, 2, 3, 4, 6, 9, 13):
        engine.add(beams("r", prompt(num_steps, 60), max_tokens=20))
        for _ in range(num_steps):
            engine.step()
        engine.cancel("r")
        engine.check_integrity()
        stats = engine.stats()
        assert not engine.has_work
        assert stats.num_free_blocks == baseline
        assert (stats.num_running, stats.num_waiting, stats.outstanding_tokens) == (0, 0, 0)
        assert [(t.request_id, t.over) for t in engine.pop_device_times()] == [("r", True)]


def test_all_device_time_is_charged_once(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add(beams("r", prompt(3, 40), max_tokens=6))
    outputs: list[EngineOutput] = []
    for _ in range(3):
        outputs += engine.step()
    (so_far,) = engine.pop_device_times(live=True)
    assert so_far.device_us == pytest.approx(engine.stats().charged_s * 1e6)
    outputs += drain(engine)
    taken = [output.device_us for output in outputs if output.finished]
    assert taken == [pytest.approx(engine.stats().charged_s * 1e6), 0, 0, 0]


def test_a_beam_that_fails_ends_its_search_only(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.add(beams("r", prompt(3, 40)))
    engine.add(request("other", prompt(2, 10)))
    for _ in range(3):
        engine.step()
    whole = engine._runner.launch

    def spoil(plan: Any) -> Any:
        step = whole(plan)
        logits = step.logits.clone()
        for row, sequence in enumerate(step.by_host):
            if sequence.fork_group is not None and sequence is sequence.fork_group.members[-1]:
                logits[row, 7] = math.nan
        return step._replace(logits=logits)

    monkeypatch.setattr(engine._runner, "launch", spoil)
    outputs = drain(engine)
    failed = [o for o in outputs if o.request_id == "r"]
    assert [(o.choice, o.error and o.error[0]) for o in failed] == [
        (choice, "non_finite_logits") for choice in range(4)
    ]
    assert last_by_request([o for o in outputs if o.request_id == "other"])["other"].error is None
    assert engine.stats().num_free_blocks == 128


@pytest.mark.parametrize("best", [0, 3])
def test_nothing_of_a_poisoned_beam_stays_in_the_cache(
    make_engine: MakeEngine, llama: tuple[Path, Any], best: int
) -> None:
    """Blocks of a poisoned beam are clean for their next owner, whichever beam was poisoned."""
    engine = make_engine(num_blocks=16)
    ids = prompt(3, 40)
    second_tokens = [tokens[1] for tokens, _, _ in reference(llama[1], ids, max_tokens=2)]
    embedding_of(engine)[second_tokens[best]] = math.nan
    engine.add(beams("r", ids, max_tokens=20))
    failed = [o.error and o.error[0] for o in drain(engine) if o.finished]
    assert failed == ["non_finite_logits"] * 4
    assert engine._runner.cache.data.isfinite().all()
    assert engine.stats().num_free_blocks == 16


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"output_token_ids": (5,)}, "output_token_ids"),
        ({"n": 16, "stop_token_ids": tuple(range(180))}, "n is too large"),
    ],
)
def test_unsupported_options_of_a_search_are_refused_by_name(
    make_engine: MakeEngine, params: dict[str, Any], says: str
) -> None:
    engine = make_engine()
    engine.add(beams("r", prompt(3, 10), **params))
    (refused,) = engine.step()
    assert refused.error is not None
    assert refused.error[0] == "invalid_parameter"
    assert says in refused.error[1]
    assert not engine.has_work


@pytest.fixture(scope="module")
def ending_llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a checkpoint of this module's own, since transformers stores generation settings with
    it."""
    path = tmp_path_factory.mktemp("ending")
    return path, save_llama(path)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_transformers_finds_the_same(
    make_engine: MakeEngine, ending_llama: tuple[Path, Any], length_penalty: float
) -> None:
    """The methods are equal without an end of sequence. With one, transformers ends only extensions
    among the ``num_beams`` likeliest of a step; we (and vLLM) end all that are among the
    candidates, so that its answers score no better than ours. Unless ``early_stopping`` is "never",
    transformers guesses that no better answer can come, which we prove."""
    model, ids = ending_llama[1], prompt(3, 30)
    settings = {
        "num_beams": 4,
        "num_return_sequences": 4,
        "max_new_tokens": 15,
        "do_sample": False,
        "length_penalty": length_penalty,
        "early_stopping": "never",
        "return_dict_in_generate": True,
        "output_scores": True,
        "pad_token_id": 0,
    }

    def both(stops: tuple[int, ...]) -> tuple[list[EngineOutput], list[float], Any]:
        """Return our answers with their scores, and transformers'."""
        engine = make_engine()
        params = {"max_tokens": 15, "length_penalty": length_penalty, "eos_token_ids": stops}
        engine.add(beams("r", ids, **params))
        ours = [output for output in drain(engine) if output.finished]
        scores = [o.cumulative_logprob / len(o.token_ids) ** length_penalty for o in ours]
        model.generation_config.eos_token_id = list(stops) or None
        return ours, scores, model.generate(torch.tensor([ids]), **settings)

    ours, scores, theirs = both(())
    tokens = theirs.sequences[:, len(ids) :].tolist()
    assert [list(output.token_ids) for output in ours] == tokens
    assert scores == pytest.approx(theirs.sequences_scores.tolist(), abs=1e-4)
    _, scores, theirs = both(tuple(range(0, 199, 10)))
    for our_score, their_score in zip(scores, theirs.sequences_scores.tolist(), strict=True):
        assert our_score >= their_score - 1e-4


def test_a_search_is_over_before_its_last_token_if_nothing_better_can_come(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    engine.add(beams("r", prompt(3, 10), n=2, max_tokens=200, eos_token_ids=tuple(range(100))))
    outputs = drain(engine)
    assert engine.stats().num_steps < 200
    assert all(o.finish_reason is FinishReason.STOP for o in outputs if o.finished)


def test_engines_of_both_kinds_agree(llama: tuple[Path, Any], make_engine: MakeEngine) -> None:
    """The host chooses beams and the device chooses other requests' tokens, if steps overlap."""
    overlapping: Engine = make_engine(kernels="reference", overlap=True)
    ids = prompt(3, 35)
    overlapping.add(request("other", prompt(1, 30), max_tokens=25))
    overlapping.step()
    overlapping.add(beams("r", ids, max_tokens=18))
    outputs = drain(overlapping)
    assert answers(outputs) == reference(llama[1], ids, max_tokens=18)
    alone = make_engine()
    alone.add(request("other", prompt(1, 30), max_tokens=25))
    assert tokens_by_request([o for o in outputs if o.request_id == "other"]) == (
        tokens_by_request(drain(alone))
    )


def test_searches_run_whole_or_wait(make_engine: MakeEngine, llama: tuple[Path, Any]) -> None:
    """A search runs only with slots for all its beams; smaller requests do not take these slots."""
    engine = make_engine(max_num_sequences=10)
    asked = {f"r{number}": prompt(number, 20) for number in range(5)}
    for name, ids in asked.items():
        engine.add(beams(name, ids))
    engine.add(request("other", prompt(9, 10), max_tokens=30))
    outputs = drain(engine)
    for name, ids in asked.items():
        assert answers(outputs, name) == reference(llama[1], ids)
    assert engine.stats().num_preemptions == 0
    # Two at a time, and one; what is drawn has a slot beside them only then.
    assert engine.stats().num_steps < 3 * 12 + 30 + 5
