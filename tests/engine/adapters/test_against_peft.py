"""Requests with adapters against PEFT: every projection, any mixture of adapters in a batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.models.adapters import AdapterRef
from millrace.schemas.pooling import Pooling
from tests.engine.adapters.saved import (
    ALL_TARGETS,
    engine_adapter,
    save_adapter,
    with_adapter,
)
from tests.engine.checkpoints import reference_greedy, save_llama, save_model
from tests.engine.support import (
    drain,
    last_by_request,
    prompt,
    request,
    tokens_by_request,
)

TOLERANCE = 1e-4
SUBSETS = [
    *((target,) for target in ALL_TARGETS),
    ("q_proj", "v_proj"),
    ("k_proj", "v_proj"),
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("gate_proj", "up_proj", "down_proj"),
    ALL_TARGETS,
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("base")
    return path, save_llama(path)


@pytest.fixture(scope="module")
def engine(llama: tuple[Path, Any]) -> Engine:
    return _engine(llama[0])


def _engine(path: Path, **config: Any) -> Engine:
    chosen: dict[str, Any] = {"num_blocks": 128, "device": "cpu", "max_adapters": 4} | config
    return Engine.load(path, EngineConfig(**chosen))


def logprobs_of(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Return the log-probability of each prompt token but the first."""
    with torch.inference_mode():
        rows: torch.Tensor = model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]


def check_prompt(engine: Engine, model: Any, adapter: AdapterRef | None) -> None:
    token_ids = prompt(3, 40)
    engine.add(with_adapter(adapter, request("scored", token_ids, prompt_logprobs=0, max_tokens=1)))
    outputs = drain(engine)
    entries = next(o.prompt_logprobs for o in outputs if o.prompt_logprobs)
    found = torch.tensor([entry.logprob for entry in entries[1:] if entry is not None])
    expected = logprobs_of(model, token_ids)
    assert float((found - expected).abs().max() / expected.abs().max()) <= TOLERANCE


@pytest.mark.parametrize("targets", SUBSETS, ids=" ".join)
def test_each_subset_of_projections(
    llama: tuple[Path, Any], engine: Engine, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    model = llama[1]
    adapted = save_adapter(tmp_path / "one", model, targets=targets)
    check_prompt(engine, adapted, engine_adapter(tmp_path / "one"))
    check_prompt(engine, model, None)


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True, "r": 9},
        {"r": 1, "lora_alpha": 5},
        {"rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.down_proj": 2}},
        {"alpha_pattern": {"v_proj": 3, "layers.2.self_attn.o_proj": 1}, "use_rslora": True},
        {"layers_to_transform": [1]},
    ],
    ids=str,
)
def test_ranks_and_scales(
    llama: tuple[Path, Any], engine: Engine, tmp_path: Path, config: dict[str, Any]
) -> None:
    adapted = save_adapter(tmp_path / "one", llama[1], **config)
    check_prompt(engine, adapted, engine_adapter(tmp_path / "one"))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen2", {}),
        ("Qwen3", {}),
        ("Mistral", {"sliding_window": 17}),
        ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_each_family(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    model = save_model(tmp_path / "base", family, **changes)
    targets = ALL_TARGETS[:4] if "num_experts" in changes else ALL_TARGETS
    adapted = save_adapter(tmp_path / "one", model, targets=targets)
    check_prompt(_engine(tmp_path / "base"), adapted, engine_adapter(tmp_path / "one"))


def test_a_batch_mixes_adapters_of_any_rank_and_none(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    path, model = llama
    models: dict[str, Any] = {"": model}
    for number, rank in enumerate((1, 4, 16)):
        folder = tmp_path / f"a{number}"
        models[folder.name] = save_adapter(
            folder, model, seed=number, targets=SUBSETS[-1 - number], r=rank, lora_alpha=2 * rank
        )
    prompts = {f"r{i}": prompt(i, 10 + 7 * i) for i in range(8)}
    names = dict(zip(prompts, itertools.cycle(models), strict=False))
    engine = _engine(path, max_batch_tokens=48)
    for round_ in ("cold", "warm"):
        for key, token_ids in prompts.items():
            adapter = engine_adapter(tmp_path / names[key]) if names[key] else None
            engine.add(with_adapter(adapter, request(round_ + key, token_ids, max_tokens=6)))
        tokens = tokens_by_request(drain(engine))
        for key, token_ids in prompts.items():
            expected = reference_greedy(models[names[key]], token_ids, 6)
            assert tokens[round_ + key] == expected, (round_, key)
    loaded = engine.stats().adapters
    assert [one.name for one in loaded] == ["a0", "a1", "a2"] or len(loaded) == 3
    assert all(one.num_running == 0 for one in loaded)


def test_embeddings(llama: tuple[Path, Any], engine: Engine, tmp_path: Path) -> None:
    adapted, token_ids = save_adapter(tmp_path / "one", llama[1]), prompt(5, 33)
    for pooling in (Pooling.LAST, Pooling.MEAN):
        one = EngineRequest(
            request_id=pooling.value, prompt_token_ids=tuple(token_ids), pooling=pooling
        )
        engine.add(with_adapter(engine_adapter(tmp_path / "one"), one))
    with torch.inference_mode():
        states = adapted.base_model.model.model(torch.tensor([token_ids])).last_hidden_state[0]
    last = last_by_request(drain(engine))
    for pooling, expected in ((Pooling.LAST, states[-1]), (Pooling.MEAN, states.mean(0))):
        found = torch.tensor(last[pooling.value].embedding)
        assert float((found - expected).abs().max() / expected.abs().max()) <= TOLERANCE


_KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    "penalised": {"temperature": 0.7, "seed": 6, "presence_penalty": 0.5},
    "choices": {"temperature": 1.0, "seed": 7, "n": 3},
    "beams": {"use_beam_search": True, "n": 2},
}


@pytest.fixture(scope="module")
def three_adapters(
    llama: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[AdapterRef]:
    folders = [tmp_path_factory.mktemp("adapters") / f"a{number}" for number in range(3)]
    for number, folder in enumerate(folders):
        save_adapter(folder, llama[1], seed=number)
    return [engine_adapter(folder) for folder in folders]


@pytest.mark.parametrize("kind", _KINDS)
def test_a_request_is_the_same_alone_and_preempted_among_others(
    llama: tuple[Path, Any], three_adapters: list[AdapterRef], kind: str
) -> None:
    path = llama[0]
    adapters = [None, *three_adapters]
    requests = [
        with_adapter(adapter, request(f"r{i}", prompt(i, 20 + i), max_tokens=45, **_KINDS[kind]))
        for i, adapter in enumerate([*adapters, *adapters[:2]])
    ]
    alone: dict[tuple[str, int], list[int]] = {}
    engine = _engine(path, prefix_cache=False)
    for one in requests:
        engine.add(one)
        alone |= _texts(drain(engine))
    # Two requests do not fit, however late adapters are loaded: the base model has two at once.
    crowded = _engine(path, num_blocks=9, max_batch_tokens=32, max_adapters=2)
    for one in requests:
        crowded.add(one)
    assert _texts(drain(crowded)) == alone
    assert crowded.stats().num_preemptions > 0


def _texts(outputs: list[Any]) -> dict[tuple[str, int], list[int]]:
    texts: dict[tuple[str, int], list[int]] = {}
    for output in outputs:
        assert output.error is None, output.error
        texts.setdefault((output.request_id, output.choice), []).extend(output.token_ids)
    return texts


_QUANTIZED: dict[str, Callable[[], dict[str, Any]]] = {
    "bfloat16": lambda: {"dtype": "bfloat16"},
    "int8": lambda: {"quantization": "int8"},
    "int4": lambda: {"quantization": "int4"},
}


@pytest.fixture(scope="module")
def aligned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """Save a base model and an adapter in sizes of the compiled kernels; return the folder of both,
    the base model and the adapted one."""
    path = tmp_path_factory.mktemp("aligned")
    shape = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32, "num_attention_heads": 4}
    model = save_llama(path / "base", **shape)
    return path, model, save_adapter(path / "one", model, r=6, lora_alpha=12)


@pytest.mark.parametrize("kernels", ["torch", "auto", "reference"])
@pytest.mark.parametrize("weights", _QUANTIZED)
def test_in_bfloat16_and_beside_quantized_weights(
    aligned: tuple[Path, Any, Any], weights: str, kernels: str
) -> None:
    path, model, adapted = aligned
    engine = _engine(path / "base", kernels=kernels, **_QUANTIZED[weights]())
    token_ids = prompt(4, 48)
    adapter = engine_adapter(path / "one")
    for name, one in (("base", None), ("adapted", adapter)):
        engine.add(with_adapter(one, request(name, token_ids, prompt_logprobs=0, max_tokens=4)))
    outputs = drain(engine)
    found = {
        o.request_id: torch.tensor([e.logprob for e in o.prompt_logprobs[1:] if e is not None])
        for o in outputs
        if o.prompt_logprobs
    }
    bound = {"bfloat16": 0.05, "int8": 0.15, "int4": 0.5}[weights]
    for name, reference in (("base", model), ("adapted", adapted)):
        expected = logprobs_of(reference, token_ids)
        error = float((found[name] - expected).abs().mean() / expected.abs().mean())
        assert error <= bound, name
    # What the adapter changes is far more than what rounding does.
    assert float((found["adapted"] - found["base"]).abs().mean()) > 0.3
