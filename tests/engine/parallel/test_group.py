"""Engines with a model over several ranks, compared with one rank: real processes."""

from __future__ import annotations

import gc
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch

from millrace.engine.parallel.cpu_runner import GroupRunner
from millrace.engine.parallel.ranks import RankLostError
from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput, EngineRequest, EngineStats
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import AdapterError, CheckpointError, ConfigError
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.pooling import Pooling
from tests.engine.adapters.saved import engine_adapter, save_adapter, with_adapter
from tests.engine.checkpoints import save_model
from tests.engine.parallel.shapes import MOE, SHAPE
from tests.engine.support import (
    drain,
    prompt,
    request,
    tokens_by_request,
)
from tests.support.engine.warm_fixture import warm_processes as warm_processes
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("warm_processes")


def load(path: Path, ranks: int, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"device": "cpu", "num_threads": 1, "num_blocks": 40}
    return Engine.load(path, EngineConfig(**settings | {"tensor_parallel": ranks} | changes))


def runner_of(engine: Engine) -> GroupRunner:
    runner = engine._runner
    assert isinstance(runner, GroupRunner)
    return runner


def ask_all(engine: Engine, requests: list[EngineRequest]) -> list[EngineOutput]:
    for one in requests:
        engine.add(one)
    return drain(engine)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("llama")
    return path, save_model(path, "Llama", **SHAPE, vocab_size=203)


@pytest.fixture(
    params=[{}, {"tensor_parallel": 1, "pipeline_parallel": 2}], ids=["ranks", "stages"]
)
def pair(request: pytest.FixtureRequest, llama: tuple[Path, Any]) -> Iterator[Engine]:
    """Yield a group of 2, which one test may break."""
    engine = load(llama[0], 2, rank_timeout_s=1.0, **request.param)
    members = runner_of(engine).members
    yield engine
    for pid in members.pids:
        if psutil.pid_exists(pid):
            psutil.Process(pid).resume()
    members.close()


@pytest.mark.parametrize(
    ("family", "shape", "ranks", "settings"),
    [
        pytest.param("Llama", SHAPE, 4, {}, id="fewer key heads than ranks"),
        pytest.param("Llama", SHAPE, 2, {"kernels": "torch"}, id="torch"),
        pytest.param("Llama", SHAPE, 2, {"collectives": "gloo"}, id="gloo"),
        pytest.param("Qwen3Moe", MOE, 2, {}, id="slices of experts"),
        pytest.param("Qwen3Moe", MOE, 2, {"expert_parallel": True}, id="whole experts"),
        pytest.param("Llama", SHAPE, 1, {"pipeline_parallel": 2}, id="two stages"),
        pytest.param("Llama", SHAPE, 1, {"pipeline_parallel": 3}, id="three stages"),
        pytest.param("Qwen3Moe", MOE, 2, {"pipeline_parallel": 2}, id="two stages of two ranks"),
    ],
)
def test_a_group_has_the_tokens_of_one_rank(
    tmp_path: Path, family: str, shape: dict[str, Any], ranks: int, settings: dict[str, Any]
) -> None:
    num_layers = save_model(tmp_path, family, **shape).config.num_hidden_layers
    asked = [request(f"r{i}", prompt(i, 9 + 7 * i, 199), logprobs=3) for i in range(5)]
    one_rank = load(tmp_path, 1, kernels=settings.get("kernels", "auto"))
    alone = ask_all(one_rank, asked)
    group = load(tmp_path, ranks, **settings)
    together = ask_all(group, asked)
    _check_counted(group.stats(), one_rank.stats(), shape, num_layers, settings)
    assert tokens_by_request(together) == tokens_by_request(alone)
    for one in asked:
        logprobs = [
            torch.tensor([token.logprob for output in outputs for token in output.logprobs])
            for outputs in (_of(one, alone), _of(one, together))
        ]
        torch.testing.assert_close(*logprobs, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("settings", [{"ranks": 2}, {"ranks": 1, "pipeline_parallel": 2}], ids=str)
def test_all_kinds_of_requests_run_on_a_group(
    llama: tuple[Path, Any], tmp_path: Path, settings: dict[str, int]
) -> None:
    """The requests are log-probabilities of prompts, embeddings, several choices, beams, adapters,
    cached prefixes and preempted ones."""
    path, model = llama
    save_adapter(tmp_path / "adapter", model, strength=4.0)
    adapter = engine_adapter(tmp_path / "adapter")
    long = prompt(7, 100, 199)
    asked = [
        request("scored", prompt(1, 20, 199), prompt_logprobs=2),
        request("many", prompt(2, 20, 199), n=3, temperature=1.0, seed=5),
        request("beams", prompt(5, 20, 199), n=3, use_beam_search=True),
        with_adapter(adapter, request("adapted", prompt(3, 20, 199))),
        msgspec.structs.replace(request("embedded", prompt(4, 20, 199)), pooling=Pooling.LAST),
        # In several chunks, of which the next begins before the one before it is read.
        msgspec.structs.replace(request("mean", prompt(6, 100, 199)), pooling=Pooling.MEAN),
        *(request(f"long {i}", [*long, i], max_tokens=60) for i in range(5)),
    ]
    # Five long ones do not fit: some are preempted.
    made = []
    for how in ({"ranks": 1}, settings):
        engine = load(path, **how, num_blocks=24, max_adapters=2, max_batch_tokens=64)
        outputs = ask_all(engine, asked)
        outputs += ask_all(engine, [request("again", [*long, 1, 2])])
        stats = engine.stats()
        assert stats.num_preemptions > 0
        assert stats.prefix_hit_tokens > 0
        made.append(outputs)
    for outputs in made:
        assert all(output.error is None for output in outputs)
    assert _tokens(made[1]) == _tokens(made[0])
    scored = [
        [output.prompt_logprobs for output in outputs if output.prompt_logprobs] for outputs in made
    ]
    for alone, together in zip(*scored, strict=True):
        assert alone[0] is together[0] is None
        torch.testing.assert_close(
            *(torch.tensor([one.logprob for one in own if one]) for own in (alone, together)),
            atol=1e-4,
            rtol=0.0,
        )
    embeddings = [
        torch.tensor([output.embedding for output in outputs if output.embedding])
        for outputs in made
    ]
    torch.testing.assert_close(*embeddings, atol=1e-4, rtol=1e-4)


def _check_counted(
    group: EngineStats,
    alone: EngineStats,
    shape: dict[str, Any],
    num_layers: int,
    settings: dict[str, Any],
) -> None:
    """Check the counts of exchanges over shared memory and of chosen experts; a pipeline counts the
    experts of the first stage's layers."""
    is_counted = settings.get("collectives") != "gloo" and "pipeline_parallel" not in settings
    assert (group.num_exchanges > 0) == (group.num_exchanged_bytes > 0)
    if is_counted:
        assert group.num_exchanges >= 2 * num_layers * group.num_steps
        assert group.exchange_wait_s > 0.0
    assert alone.num_exchanges == alone.num_exchanged_bytes == alone.exchange_wait_s == 0
    num_tokens = alone.prefill_tokens + alone.decode_tokens
    assert len(alone.expert_choices) == shape.get("num_experts", 0)
    assert sum(alone.expert_choices) == num_tokens * num_layers * shape.get(
        "num_experts_per_tok", 0
    )
    if settings.get("pipeline_parallel", 1) == 1:
        assert group.expert_choices == alone.expert_choices


def _of(one: EngineRequest, outputs: list[EngineOutput]) -> list[EngineOutput]:
    return [output for output in outputs if output.request_id == one.request_id]


def _tokens(outputs: list[EngineOutput]) -> dict[tuple[str, int], list[int]]:
    """Collect tokens by request and choice."""
    tokens: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for output in outputs:
        tokens[output.request_id, output.choice] += output.token_ids
    return dict(tokens)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
        {"tensor_parallel": 1, "pipeline_parallel": 2},
    ],
    ids=str,
)
def test_a_stream_of_a_group_is_the_same_alone_and_in_company(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    """A bfloat16 step is one call on every rank; tokens are proposed, too."""
    save_model(tmp_path, "Llama", **SHAPE, stored_dtype=torch.bfloat16)
    engine = load(tmp_path, 2, dtype="bfloat16", kernels="native", **settings)
    assert engine._runner.is_row_exact
    asked = [request(f"r{i}", prompt(i, 20 + 17 * i, 9), max_tokens=24) for i in range(4)]
    # Random weights may not repeat themselves; this answer does.
    asked.append(request("same", prompt(4, 20), max_tokens=60, logit_bias={5: 100.0}))
    together = tokens_by_request(ask_all(engine, asked))
    assert (engine.stats().proposed_tokens > 0) == (engine._runner.num_stages == 1)
    engine = load(tmp_path, 2, dtype="bfloat16", kernels="native", prefix_cache=False, **settings)
    for one in asked:
        alone = tokens_by_request(ask_all(engine, [one]))
        assert alone == {one.request_id: together[one.request_id]}


def test_a_rank_that_is_killed_ends_the_engine(pair: Engine) -> None:
    [pid] = runner_of(pair).members.pids
    pair.add(request("r", prompt(1, 20, 199), max_tokens=200))
    pair.step()
    psutil.Process(pid).kill()
    with pytest.raises(RankLostError, match=rf"rank 1 \(process {pid}\) ended with exit code -9"):
        drain(pair)


async def test_a_rank_that_is_killed_at_rest_is_noticed_at_once(pair: Engine) -> None:
    [pid] = runner_of(pair).members.pids
    pair.rest()
    psutil.Process(pid).kill()
    await eventually(lambda: bool(runner_of(pair)._lead._why))
    with pytest.raises(RankLostError, match="exit code -9"):
        pair.rest()


def test_a_rank_that_hangs_is_given_up(pair: Engine) -> None:
    [pid] = runner_of(pair).members.pids
    psutil.Process(pid).send_signal(signal.SIGSTOP)
    pair.add(request("r", prompt(1, 20, 199)))
    with pytest.raises(RankLostError, match="did not come"):
        drain(pair)


async def test_no_adapter_is_waited_for_from_a_rank_that_has_ended(pair: Engine) -> None:
    members = runner_of(pair).members
    process = psutil.Process(members.pids[0])
    process.suspend()
    # Only a rank that has stopped cannot answer that there is no such adapter.
    await eventually(lambda: process.status() == psutil.STATUS_STOPPED)
    number = members.load_adapter(AdapterRef(name="a", version="1", source="/nowhere"), 8)
    process.kill()
    with pytest.raises(AdapterError, match="ended with exit code -9"):
        members.wait_loaded(number)


async def test_failure_on_rank_0_ends_the_group(
    pair: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait in the middle of a step."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    [pid] = runner_of(pair).members.pids
    monkeypatch.setattr(runner_of(pair)._decoder, "forward", fail)
    pair.add(request("r", prompt(1, 20, 199)))
    with pytest.raises(RankLostError, match="out of memory"):
        drain(pair)
    await eventually(lambda: not _runs(pid))


def test_no_rank_outlives_its_engine(llama: tuple[Path, Any]) -> None:
    engine = load(llama[0], 2)
    [pid] = runner_of(engine).members.pids
    assert _runs(pid)
    del engine
    gc.collect()
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel": 3}, "4 query heads do not divide by 3.* over 1, 2, 4"),
        ({"tensor_parallel": 17}, "A stage has at most 16 ranks"),
        ({"tensor_parallel": 16, "pipeline_parallel": 2}, "A stage has at most 15 ranks"),
        ({"tensor_parallel": 0}, "at least 1 rank"),
        ({"expert_parallel": True}, "has none: leave it out"),
        ({"collectives": "nccl"}, "'nccl'; choose auto, shared_memory, gloo"),
        ({"rank_timeout_s": 0.0}, "rank_timeout_s must be above 0"),
        ({"pipeline_parallel": 4}, "engine.pipeline_parallel is 4"),
        (
            {
                "pipeline_parallel": 2,
                "speculation": "ngram",
                "dtype": "bfloat16",
                "kernels": "native",
            },
            "so no tokens can be proposed",
        ),
        ({"pipeline_parallel": 2, "collectives": "gloo"}, "linked by shared memory"),
        ({"kv_cache_dtype": "fp8"}, "need the kernels of a GPU"),
        ({"speculation": "eagle3=/nowhere"}, "/nowhere"),
        ({"kv_cache_bytes": 1000, "num_blocks": 0}, "kv_cache_bytes is 1000, but one block"),
        ({"start_timeout_s": 0.001}, r"rank 1 \(process \d+\) was not loaded within the 0.001 s"),
    ],
    ids=str,
)
def test_unsupported_settings_of_a_group_are_refused(
    llama: tuple[Path, Any], settings: dict[str, Any], message: str
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises((ConfigError, CheckpointError), match=message):
        load(llama[0], settings.pop("tensor_parallel", 2), **settings)
    gc.collect()
    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_rank_that_cannot_be_loaded_is_named(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.engine.parallel.members._MODULE", "millrace.engine.nowhere")
    with pytest.raises(ConfigError, match=r"rank 1 \(process \d+\) ended with exit code 1 before"):
        load(llama[0], 2)
