"""EAGLE-3 head: it predicts many tokens of a target that it knows, and changes none of them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.checkpoints import FIRST_TEXT_TOKEN, LlamaShape
from benchmarks.speculation.copier import write_copier, write_copier_head
from millrace.engine.scheduling.cost_model import CostModel
from millrace.engine.speculation.making import HeadDraft
from millrace.engine.step import features
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.schemas.errors import CheckpointError, ConfigError
from tests.engine.eagle_heads import HEAD, head_tensors, save_head
from tests.engine.speculation.test_equality import _behind, _load
from tests.engine.speculation.worlds import VOCAB_SIZE, Answers, load, run
from tests.engine.support import prompt, request
from tests.support.engine.warm_fixture import warm_processes as warm_processes

_SHAPE = LlamaShape(
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=256,
    vocab_size=VOCAB_SIZE,
    context_window_tokens=2048,
)
_AGREEMENT = 0.8
_WORLDS = ("random", "copier")


class _World:
    """Target, a head for it, and the target's answers."""

    def __init__(self, target: Path, head: Path) -> None:
        self.target = target
        self.head = head
        self.known = run(load(target, "off"), _load(0))

    def engine(self, **settings: Any) -> Engine:
        return load(self.target, f"eagle3={self.head}", **settings)


@pytest.fixture(scope="module")
def copier(tmp_path_factory: pytest.TempPathFactory) -> _World:
    folder = tmp_path_factory.mktemp("copier")
    target = write_copier(folder / "target", _SHAPE)
    head = write_copier_head(folder / "head", target, _SHAPE, agreement=_AGREEMENT)
    return _World(target, head)


@pytest.fixture(scope="module", params=_WORLDS)
def world(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> _World:
    """Return a world whose head knows nothing, or most answers."""
    if request.param == "copier":
        copier: _World = request.getfixturevalue("copier")
        return copier
    config = HEAD | {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    head = save_head(tmp_path_factory.mktemp("random"), config, head_tensors(config))
    return _World(checkpoint, head)


@pytest.fixture(autouse=True)
def _rows_are_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rows cheap: a small model's steps take as long as Python does, so nothing would be
    drafted."""
    monkeypatch.setattr(CostModel, "is_warm", property(lambda _: False))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_sequences": 4},
        {"num_blocks": 20, "max_batch_tokens": 24},
        {"num_blocks": 16, "host_cache_bytes": 0, "prefix_cache": False},
        {"num_blocks": 40, "block_size_tokens": 8},
        {"num_blocks": 24, "block_size_tokens": 8, "kv_cache_dtype": "int8"},
        {"quantization": "int8"},
    ],
)
def test_head_changes_no_token(world: _World, settings: dict[str, Any]) -> None:
    gaps = [random.Random(3).randrange(4) for _ in range(26)]
    known = world.known
    other = {
        name: settings[name] for name in ("kv_cache_dtype", "quantization") if name in settings
    }
    if other:
        known = run(load(world.target, "off", **other), _load(0))
    engine = world.engine(**settings)
    assert run(engine, _load(0), gaps) == known
    stats = engine.stats()
    assert stats.proposed_tokens > 50
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_preemptions > 0 or settings.get("num_blocks", 40) == 40


def test_a_request_goes_on_behind_any_of_its_tokens(world: _World) -> None:
    """The request resumes as after a failover from an engine without a head."""
    generator = random.Random(1)
    requests = [
        _behind(one, tokens[: generator.randrange(len(tokens) + 1)])
        for one in _load(0)
        if one.sampling.n == 1
        and one.sampling.prompt_logprobs is None
        and (tokens := world.known[one.request_id, 0].token_ids)
    ]
    answers = run(world.engine(), requests)
    for one in requests:
        whole, rest = world.known[one.request_id, 0], answers[one.request_id, 0]
        assert [*one.output_token_ids, *rest.token_ids] == whole.token_ids
        assert rest.ends == whole.ends


def _texts(temperature: float, num_tokens: int = 300, **more: Any) -> list[EngineRequest]:
    """Return requests of text prompts, which the target continues in a fixed way."""
    return [
        request(
            f"r{i}",
            [FIRST_TEXT_TOKEN + t for t in prompt(i, num_tokens, VOCAB_SIZE - FIRST_TEXT_TOKEN)],
            max_tokens=80,
            temperature=temperature,
            seed=i,
            **more,
        )
        for i in range(3)
    ]


def _share(engine: Engine, requests: list[EngineRequest], known: Answers | None = None) -> float:
    """Return the accepted share of proposed tokens; at least every fifth token must be accepted."""
    before = engine.stats()
    answers = run(engine, requests)
    stats = engine.stats()
    accepted = stats.accepted_tokens - before.accepted_tokens
    assert accepted > 0.2 * sum(len(answer.token_ids) for answer in answers.values())
    assert known is None or answers == known
    return accepted / (stats.proposed_tokens - before.proposed_tokens)


# So narrow a target is only sure of anything where it is cold.
@pytest.mark.parametrize("temperature", [0.0, 0.2])
def test_most_head_tokens_are_accepted_drawn_or_greedy(copier: _World, temperature: float) -> None:
    requests = _texts(temperature)
    known = run(load(copier.target, "off"), requests)
    assert _share(copier.engine(), requests, known) > 0.5


def test_head_drafts_for_all_completions_of_a_prompt(copier: _World) -> None:
    requests = _texts(0.2, 45, n=3)
    known = run(load(copier.target, "off"), requests)
    assert _share(copier.engine(), requests, known) > 0.5


@pytest.mark.usefixtures("warm_processes")
def test_head_drafts_for_a_group_of_ranks(copier: _World) -> None:
    requests = _texts(0.0)
    without = load(copier.target, "off", tensor_parallel=2)
    known, known_of_load = run(without, requests), run(without, _load(0))
    engine = copier.engine(tensor_parallel=2)
    assert _share(engine, requests, known) > 0.5
    assert run(engine, _load(0)) == known_of_load


@pytest.mark.parametrize("num_tokens", [290, 304, 305])
def test_head_begins_behind_cached_blocks(copier: _World, num_tokens: int) -> None:
    engine = copier.engine()
    _share(engine, _texts(0.0, num_tokens))
    computed = engine.stats().prefill_tokens
    assert _share(engine, _texts(0.0, num_tokens)) > 0.5
    assert engine.stats().prefill_tokens <= computed + 3 * 16


def test_head_begins_late_where_more_features_wait_than_are_kept(
    copier: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features, "MOST_WAITING_TOKENS", 50)
    requests = _texts(0.0, 700)
    known = run(load(copier.target, "off"), requests)
    assert _share(copier.engine(), requests, known) > 0.5


def test_a_head_that_fails_costs_its_proposals_only(
    copier: _World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = copier.engine()
    assert engine._speculator is not None
    draft = engine._speculator._draft
    assert isinstance(draft, HeadDraft)
    generator = random.Random(2)
    runner = draft._runner
    launch = runner.launch

    def failing(plan: Any) -> Any:
        step = launch(plan)
        if generator.random() < 0.3:
            raise RuntimeError("can't allocate memory")
        return step

    monkeypatch.setattr(runner, "launch", failing)
    assert run(engine, _load(0)) == copier.known
    assert engine.stats().accepted_tokens > 0
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_no_features_are_kept_without_a_head(copier: _World) -> None:
    engine = load(copier.target, "ngram")
    engine.add(_texts(0.0)[0])
    engine.step()
    assert [one.features for one in engine._live] == [None]


def test_a_head_for_another_model_is_refused(copier: _World, checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="hidden_size must be 64, the model's hidden_size"):
        load(checkpoint, f"eagle3={copier.head}")


def test_a_head_that_is_not_there_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent"):
        load(checkpoint, f"eagle3={tmp_path / 'absent'}")


@pytest.mark.parametrize("settings", [{"dtype": "float32"}, {"kernels": "torch"}])
def test_rows_that_are_not_exact_have_no_head(copier: _World, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="compiled kernels of a CPU"):
        copier.engine(**settings)


def test_a_draft_of_any_share_agrees_as_it_was_made(tmp_path: Path) -> None:
    target = write_copier(tmp_path / "target", _SHAPE)
    shares = []
    for agreement in (0.3, 1.0):
        head = write_copier_head(tmp_path / f"head{agreement}", target, _SHAPE, agreement=agreement)
        engine = load(target, f"eagle3={head}", num_blocks=512)
        run(engine, _texts(0.0))
        stats = engine.stats()
        shares.append(stats.accepted_tokens / stats.proposed_tokens)
    assert shares[0] < 0.6
    assert shares[1] > 0.9


def test_the_target_is_not_asked_to_keep_its_rows(copier: _World) -> None:
    """Features are copied out of a step, so that one row does not keep all rows in memory."""
    engine = copier.engine()
    engine.add(_texts(0.0)[0])
    engine.step()
    (one,) = engine._live
    rows = one.features.rows(0, 1)
    assert rows.dtype is torch.bfloat16
    assert rows.shape == (1, 3 * _SHAPE.hidden_size)
