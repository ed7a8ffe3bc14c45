"""Models over several devices, here processes on the CPU, compared with the same model on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from millrace.engine.scheduling.cost_model import CostModel
from millrace.engine.step.engine import Engine
from millrace.engine.step.sequence import UNREAD_TOKEN
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.pooling import Pooling
from tests.engine.adapters.saved import engine_adapter, save_adapter, with_adapter
from tests.engine.checkpoints import save_model
from tests.engine.devices.cuda.test_device_runner import answers, mixed_requests
from tests.engine.kv.test_host_cache import fast_swaps
from tests.engine.parallel.group_engines import MOE, SHAPE, load, runner_of
from tests.engine.support import drain, last_by_request, prompt, request, tokens_by_request
from tests.support.engine.warm_fixture import warm_processes as warm_processes

pytestmark = pytest.mark.usefixtures("warm_processes")


def ask_all(engine: Engine, requests: list[EngineRequest]) -> list[EngineOutput]:
    for one in requests:
        engine.add(one)
    return drain(engine)


# Nothing recorded, which would be computed at the start, nor launched ahead.
EXACT = {"cuda_graphs": False, "overlap": False}
LAYERS = {"num_hidden_layers": 3}
TWO_STAGES = {"pipeline_parallel": 2, "collectives": "gloo", **EXACT}
THREE_STAGES = {"pipeline_parallel": 3, "quantization": "int4"}


@pytest.mark.parametrize(
    ("family", "shape", "ranks", "settings"),
    [
        pytest.param("Llama", {"tie_word_embeddings": True}, 4, EXACT, id="fewer key heads, tied"),
        pytest.param("Qwen3", {}, 2, {}, id="recorded"),
        pytest.param("Qwen3Moe", MOE, 2, {"collectives": "gloo"}, id="slices of experts, by gloo"),
        pytest.param("Qwen3Moe", MOE, 2, {"expert_parallel": True}, id="whole experts"),
        pytest.param("Llama", {}, 2, {"quantization": "int4"}, id="quantized"),
        pytest.param("Qwen3", LAYERS, 1, THREE_STAGES, id="three stages, quantized"),
        pytest.param("Qwen3Moe", MOE, 2, TWO_STAGES, id="two stages of two ranks, by gloo"),
    ],
)
def test_a_group_has_the_tokens_of_one_rank(
    tmp_path: Path, family: str, shape: dict[str, Any], ranks: int, settings: dict[str, Any]
) -> None:
    save_model(tmp_path, family, **SHAPE | shape, vocab_size=203)
    asked = [request(f"r{i}", prompt(i, 9 + 7 * i, 199), logprobs=3) for i in range(5)]
    quantization = settings.get("quantization")
    alone = ask_all(load(tmp_path, 1, quantization=quantization), asked)
    together = ask_all(load(tmp_path, ranks, dtype="float32", **settings), asked)
    assert tokens_by_request(together) == tokens_by_request(alone)
    for one in asked:
        logprobs = [
            torch.tensor(
                [
                    token.logprob
                    for output in outputs
                    if output.request_id == one.request_id
                    for token in output.logprobs
                ]
            )
            for outputs in (alone, together)
        ]
        torch.testing.assert_close(*logprobs, atol=1e-4, rtol=0.0)


# Of the tests below, which share a group: the embedding of a token that is not finite, and adapters
# of all weights.
BAD_TOKEN = 198


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Save a checkpoint and an adapter for it; return both folders."""
    path, adapter = tmp_path_factory.mktemp("llama"), tmp_path_factory.mktemp("adapter")
    save_adapter(adapter, save_model(path, "Llama", **SHAPE, nan_token=BAD_TOKEN), strength=4.0)
    return path, adapter


SETTINGS = {"num_blocks": 16, "max_adapters": 1, "host_cache_bytes": 1 << 21}
STAGES = {"ranks": 1, "pipeline_parallel": 2}


@pytest.fixture(scope="module")
def of_one(folders: tuple[Path, Path]) -> Engine:
    """Load an engine of one rank, with so few blocks that sequences are preempted."""
    return load(folders[0], 1, **SETTINGS)


@pytest.fixture(scope="module", params=[{"ranks": 2}, STAGES], ids=["ranks", "stages"])
def engines(
    request: pytest.FixtureRequest, folders: tuple[Path, Path], of_one: Engine
) -> list[Engine]:
    """Return engines of one rank and of two ranks, which slice each layer or have one each."""
    return [of_one, load(folders[0], **request.param, **SETTINGS)]


def both(engines: list[Engine], requests: list[EngineRequest]) -> dict[tuple[str, int], list[Any]]:
    """Assert that two ranks answer as one does, and return the answers."""
    alone, together = (answers(engine, requests) for engine in engines)
    assert together == alone
    assert all(not engine.stats().num_running for engine in engines)
    return together


def finite_requests(seed: int) -> list[EngineRequest]:
    return [one for one in mixed_requests(seed) if not set(one.prompt_token_ids) & {BAD_TOKEN}]


@pytest.mark.parametrize("seed", range(2))
def test_all_kinds_of_requests_are_answered_as_by_one_rank(
    engines: list[Engine], seed: int
) -> None:
    """The requests are drawn with seeds and penalties, with log-probabilities of tokens and
    prompts, several choices, and cached prefixes whose last block is copied."""
    assert len(both(engines, finite_requests(seed))) > 8


def test_sequences_are_preempted_and_swapped_alike(engines: list[Engine]) -> None:
    before = engines[1].stats()
    for engine in engines:
        fast_swaps(engine)
    long = [
        request(f"long {i}", prompt(20 + i, 60, 190), max_tokens=30, priority=i % 3)
        for i in range(6)
    ]
    both(engines, long)
    both(
        engines,
        [
            request(f"again {i}", list(one.prompt_token_ids), max_tokens=3)
            for i, one in enumerate(long)
        ],
    )
    after = engines[1].stats()
    assert after.num_preemptions > before.num_preemptions
    assert after.num_swaps > before.num_swaps
    assert after.num_reloaded_blocks > before.num_reloaded_blocks
    assert runner_of(engines[1]).cache.block_bytes == engines[0]._runner.cache.block_bytes


def test_adapters_take_turns_in_the_slot_of_every_rank(
    engines: list[Engine], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    save_adapter(tmp_path / "other", save_model(tmp_path, "Llama", **SHAPE), seed=5, strength=4.0)
    adapters = [engine_adapter(folders[1]), engine_adapter(tmp_path / "other"), None]
    asked = [
        with_adapter(adapters[i % 3], request(f"r{i}", prompt(30, 20, 190), max_tokens=5))
        for i in range(6)
    ]
    answered = both(engines, asked)
    assert len({tuple(answered[f"r{i}", 0]) for i in range(3)}) == 3
    assert engines[1].stats().num_adapter_evictions >= 2


def test_unreadable_adapter_is_refused(engines: list[Engine], tmp_path: Path) -> None:
    save_adapter(tmp_path / "gone", save_model(tmp_path, "Llama", **SHAPE), seed=5)
    adapter = engine_adapter(tmp_path / "gone")
    (tmp_path / "gone" / "adapter_model.safetensors").unlink()
    answered = both(engines, [with_adapter(adapter, request("r", prompt(30, 20, 190)))])
    [[_, error]] = answered["r", 0]
    assert error is not None


def test_numbers_that_are_not_finite_are_of_their_own_request(engines: list[Engine]) -> None:
    """Blocks with such numbers are scrubbed on every rank before other requests have them."""
    bad = [request(f"bad {i}", [*prompt(40 + i, 20, 190), BAD_TOKEN]) for i in range(2)]
    answered = both(engines, [*bad, request("good", prompt(42, 20, 190))])
    assert all(answered[one.request_id, 0][-1][1][0].startswith("non_finite") for one in bad)
    assert answered["good", 0][-1][1] is None
    assert runner_of(engines[1]).cache.finite_blocks(list(range(16))) == [True] * 16


def test_embeddings_are_those_of_one_rank(engines: list[Engine]) -> None:
    asked = [
        msgspec.structs.replace(request(f"e{i}", prompt(50 + i, 70, 190)), pooling=pooling)
        for i, pooling in enumerate((Pooling.LAST, Pooling.MEAN))
    ]
    made = []
    for engine in engines:
        last = last_by_request(ask_all(engine, asked))
        made.append(torch.tensor([last[one.request_id].embedding for one in asked]))
    torch.testing.assert_close(made[0], made[1], atol=1e-4, rtol=1e-4)


def test_a_cancelled_request_leaves_its_blocks(engines: list[Engine]) -> None:
    for engine in engines:
        engine.add(request("gone", prompt(60, 20, 190), max_tokens=100))
        engine.add(request("stays", prompt(61, 20, 190), max_tokens=100))
        for _ in range(4):
            engine.step()
        engine.cancel("gone")
        assert set(tokens_by_request(drain(engine))) == {"stays"}
        assert engine.stats().num_free_blocks == 16
        engine.check_integrity()
    both(engines, finite_requests(5))


def test_a_stage_computes_a_step_while_another_is_in_the_next_one(engines: list[Engine]) -> None:
    """A step has half the sequences, so that there are twice as many steps."""
    engine = engines[1]
    before = engine.stats().num_steps
    asked = [request(f"r{i}", prompt(70 + i, 8, 190), max_tokens=10) for i in range(4)]
    both(engines, asked)
    num_stages = engine._runner.num_stages
    assert (engine.stats().num_steps - before > 9 * 2) == (num_stages == 2)


def test_sequence_that_ends_within_a_step_leaves_its_row_alone(engines: list[Engine]) -> None:
    """Another sequence has the row at once, and its penalised tokens are counted there."""
    for engine in engines:
        for i in range(6):
            engine.add(request(f"r{i}", prompt(80 + i, 8, 190), max_tokens=20))
        while (step := engine._executor._unread) is None or step.work.prefill_tokens:
            engine.step()
        ends = step.plan[0].sequence
        known = [token for token in ends.token_ids if token != UNREAD_TOKEN]
        engine.cancel(ends.request_id)
        # It begins with the token that the other one would have had.
        params = {"max_tokens": 4, "frequency_penalty": 2.0}
        engine.add(request("new", known, **params))
        made = tokens_by_request(drain(engine))["new"]
        assert (
            made == tokens_by_request(ask_all(engine, [request("alone", known, **params)]))["alone"]
        )


def test_a_stream_of_exact_rows_is_the_same_alone_and_in_company(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are proposed, too."""
    # A small model's steps take as long as Python does: nothing would ever be worth its row.
    monkeypatch.setattr(CostModel, "is_warm", property(lambda _: False))
    save_model(tmp_path, "Llama", **SHAPE)
    engine = load(tmp_path, 2, deterministic=True, speculation="ngram")
    assert engine._runner.is_row_exact
    asked = [request(f"r{i}", [*prompt(i, 8)] * 4, max_tokens=40) for i in range(3)]
    together = tokens_by_request(ask_all(engine, asked))
    assert engine.stats().proposed_tokens > 0
    alone = load(tmp_path, 1, deterministic=True)
    for one in asked:
        assert tokens_by_request(ask_all(alone, [one])) == {
            one.request_id: together[one.request_id]
        }
