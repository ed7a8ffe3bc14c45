"""The runner of a device, its kernels in plain torch: with overlap, the tokens are the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.config import EngineConfig
from tests.engine.grammar import grammars
from tests.engine.support import (
    drain,
    last_by_request,
    prompt,
    request,
    tokens_by_request,
)

_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9},
    {"temperature": 0.8, "top_k": 20, "logprobs": 2},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "temperature": 0.7},
    {"presence_penalty": 0.5},
    {"prompt_logprobs": 1},
    {"n": 2, "temperature": 1.0},
    {"logit_bias": {9: 1.0}},
)


def _requests(seed: int) -> list[EngineRequest]:
    pick = random.Random(seed)
    items = []
    for number in range(14):
        token_ids = prompt(pick.randint(1, 2), pick.choice((0, 16, 33)), 190)
        token_ids += prompt(100 * seed + number, pick.randint(1, 20), 190)
        options = pick.choice(_KINDS) | {"seed": number, "max_tokens": pick.randint(5, 30)}
        items.append(
            request(
                f"r{number}",
                token_ids,
                priority=pick.randint(0, 2),
                stop_token_ids=tuple(prompt(number, pick.choice((0, 4)), 190)),
                **options,
            )
        )
    return items


def _serve(engine: Engine, items: list[EngineRequest]) -> list[EngineOutput]:
    outputs = []
    for item in items:
        engine.add(item)
        outputs += engine.step()
        engine.check_integrity()
    return outputs + drain(engine)


def _told(outputs: list[EngineOutput]) -> dict[tuple[str, int], list[int]]:
    found: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        found.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
    return found


def _load(path: Path, **config: Any) -> Engine:
    return Engine.load(path, EngineConfig(device="cpu", kernels="reference", **config))


@pytest.mark.parametrize("seed", range(2))
def test_overlap_changes_no_token(llama: tuple[Path, Any], seed: int) -> None:
    items = _requests(seed)
    expected = _told(_serve(_load(llama[0], num_blocks=256, overlap=False), items))
    engine = _load(llama[0], num_blocks=14, max_num_sequences=6, max_batch_tokens=40)
    for _ in range(2):  # the second time much is cached
        outputs = _serve(engine, items)
        assert _told(outputs) == expected
        assert all(token >= 0 for output in outputs for token in output.token_ids)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_free_blocks == 14


def test_sequences_under_a_grammar_come_and_go_among_others(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    path = grammars.save_checkpoint(tmp_path_factory.mktemp("grammars"))
    items = [
        grammars.ask("number", grammars.regex("[0-9]{3,9}")),
        grammars.ask("free", None, max_tokens=60),
        grammars.ask("penalised", None, max_tokens=40, frequency_penalty=0.3),
        grammars.ask("word", grammars.regex("(yes|no)")),
    ]
    found = []
    for overlap in (False, True):
        engine = grammars.load_engine(path, kernels="reference", overlap=overlap)
        found.append(_told(_serve(engine, items)))
    assert found[0] == found[1]
    assert set(found[0]) == {(item.request_id, 0) for item in items}


def test_after_a_failure_the_device_receives_all_sequences_anew(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device counts tokens for penalties, even if a token is chosen twice."""
    items = [
        request(f"r{i}", prompt(i, 9, 190), max_tokens=25, presence_penalty=0.7, seed=i)
        for i in range(4)
    ]
    expected = tokens_by_request(_serve(_load(llama[0], num_blocks=64, overlap=False), items))
    engine = _load(llama[0], num_blocks=64)
    device: Any = engine._runner._device  # type: ignore[attr-defined]
    faults = random.Random(3)
    failed = []
    for name in ("write", "read_back"):
        working = getattr(device, name)

        def failing(*arguments: Any, working: Any = working, name: str = name) -> Any:
            # Alone, a sequence would be blamed for it.
            if len(engine._planner.running) > 2 and faults.random() < 0.1:
                failed.append(name)
                raise RuntimeError("out of memory")
            done = working(*arguments)
            return failing_read(done) if name == "read_back" else done

        monkeypatch.setattr(device, name, failing)

    def failing_read(wait: Any) -> Any:
        def read() -> Any:
            if faults.random() < 0.1:
                failed.append("read")
                raise RuntimeError("the device is lost")
            return wait()

        return read

    outputs = _serve(engine, items)
    last = last_by_request(outputs)
    for name, tokens in tokens_by_request(outputs).items():
        if last[name].error is None:
            assert tokens == expected[name]
        else:
            assert tokens == expected[name][: len(tokens)]
    assert {"write", "read"} <= set(failed)
    assert sum(output.error is None for output in last.values()) >= 2
