"""Adapters on the runner of a device: against PEFT, beside the host, alone and in company."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.engine.devices.cuda.adapters import SlotAdapter, pack_adapters
from millrace.engine.devices.cuda.device import MemoryInfo
from millrace.engine.devices.cuda.inputs import exact_shape, shifted
from millrace.engine.kernels.gpu.adapter_step import AdapterTiling
from millrace.engine.scheduling.schedule import ScheduledSequence
from millrace.engine.step.batch import lay_out
from millrace.engine.step.engine import Engine
from millrace.engine.step.sequence import Sequence
from millrace.engine.types import EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import AdapterError, ConfigError
from millrace.schemas.frames import TokenLogprob
from millrace.schemas.models.adapters import AdapterRef
from tests.engine.adapters.saved import engine_adapter, save_adapter, with_adapter
from tests.engine.adapters.test_against_peft import (
    SUBSETS,
    TOLERANCE,
    check_prompt,
    logprobs_of,
)
from tests.engine.checkpoints import save_llama, save_model
from tests.engine.devices.cuda.late_device import LateDevice
from tests.engine.devices.cuda.test_device_runner import answers
from tests.engine.devices.cuda.test_device_runner import make_engine as on_late_device
from tests.engine.support import drain, prompt, request
from tests.support.engine.triton_products import rows_by_themselves

# As small as can be: Triton's interpreter is slow.
TINY = {
    "num_hidden_layers": 1,
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("base")
    return path, save_llama(path)


@pytest.fixture(scope="module")
def engine(llama: tuple[Path, Any]) -> Engine:
    return _engine(llama[0])


def _engine(path: Path, **config: Any) -> Engine:
    chosen: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "kernels": "reference",
        "num_blocks": 128,
        "max_num_sequences": 16,
        "max_adapters": 3,
        "max_adapter_rank": 16,
    }
    return Engine.load(path, EngineConfig(**(chosen | config)))


@pytest.mark.parametrize("targets", SUBSETS, ids=" ".join)
def test_each_subset_of_projections(
    llama: tuple[Path, Any], engine: Engine, tmp_path: Path, targets: tuple[str, ...]
) -> None:
    adapted = save_adapter(tmp_path / "one", llama[1], targets=targets)
    check_prompt(engine, adapted, engine_adapter(tmp_path / "one"))


def test_ranks_of_their_own_in_each_layer(
    llama: tuple[Path, Any], engine: Engine, tmp_path: Path
) -> None:
    ranks = {"q_proj": 16, r"layers\.1\.mlp\.down_proj": 2, "k_proj": 1}
    adapted = save_adapter(tmp_path / "one", llama[1], r=9, rank_pattern=ranks, use_rslora=True)
    check_prompt(engine, adapted, engine_adapter(tmp_path / "one"))


def test_attention_beside_experts(tmp_path: Path) -> None:
    model = save_model(
        tmp_path / "base",
        "Qwen3Moe",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    adapted = save_adapter(tmp_path / "one", model, targets=SUBSETS[-3])
    check_prompt(_engine(tmp_path / "base"), adapted, engine_adapter(tmp_path / "one"))


def test_the_gpus_kernels_compute_all_subsets_in_one_batch(tmp_path: Path) -> None:
    """Triton's interpreter computes all subsets beside a request of the base."""
    model = save_llama(tmp_path / "base", **TINY)
    models: dict[str, Any] = {"base": model}
    requests = [request("base", prompt(9, 3, 67), max_tokens=1, prompt_logprobs=0)]
    for number, targets in enumerate(SUBSETS):
        folder = tmp_path / f"a{number}"
        models[folder.name] = save_adapter(folder, model, number, targets, r=1 + 3 * number)
        one = request(folder.name, prompt(number, 3, 67), max_tokens=1, prompt_logprobs=0)
        requests.append(with_adapter(engine_adapter(folder), one))
    engine = _engine(
        tmp_path / "base",
        kernels="triton",
        max_adapters=len(SUBSETS),
        max_adapter_rank=48,
        cuda_graphs=False,
    )
    for one in requests:
        engine.add(one)
    found = {o.request_id: o.prompt_logprobs for o in drain(engine) if o.prompt_logprobs}
    for one in requests:
        expected = logprobs_of(models[one.request_id], list(one.prompt_token_ids))
        entries = [e.logprob for e in found[one.request_id] if e is not None]
        error = (torch.tensor(entries) - expected).abs().max() / expected.abs().max()
        assert float(error) <= TOLERANCE, one.request_id


def test_the_gpus_kernels_add_to_quantized_weights(tmp_path: Path) -> None:
    """Triton's interpreter adds to quantized weights as the references add to the widened
    weights."""
    model = save_llama(tmp_path / "base", **(TINY | {"hidden_size": 64, "intermediate_size": 128}))
    save_adapter(tmp_path / "one", model)
    one = request("r", prompt(1, 4, 67), max_tokens=1, prompt_logprobs=0)
    found = []
    for kernels in ("triton", "reference"):
        engine = _engine(tmp_path / "base", kernels=kernels, quantization="int4", cuda_graphs=False)
        engine.add(with_adapter(engine_adapter(tmp_path / "one"), one))
        entries = next(o.prompt_logprobs for o in drain(engine) if o.prompt_logprobs)
        found.append([entry.logprob for entry in entries if entry is not None])
    assert found[0] == pytest.approx(found[1], abs=TOLERANCE)


def mixed_requests(adapters: list[AdapterRef | None]) -> list[EngineRequest]:
    kinds: list[dict[str, Any]] = [
        {"logprobs": 1},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"temperature": 0.7, "seed": 6, "presence_penalty": 0.5},
        {"temperature": 1.0, "seed": 7, "n": 2},
        {"logit_bias": {5: 3.0}, "min_tokens": 4},
        {"prompt_logprobs": 1},
        {"use_beam_search": True, "n": 2},
        {"max_tokens": 30},
    ]
    return [
        with_adapter(
            adapters[i % len(adapters)],
            request(f"r{i}", prompt(i, 5 + 7 * i), **({"max_tokens": 12} | kind)),
        )
        for i, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize("recorded", [False, True])
def test_a_device_answers_as_the_host_does(
    llama: tuple[Path, Any], tmp_path: Path, recorded: bool
) -> None:
    """The device has too few slots and blocks, so that adapters come and go while steps run."""
    path, model = llama
    adapters: list[AdapterRef | None] = [None]
    for number in range(4):
        save_adapter(tmp_path / f"a{number}", model, number, SUBSETS[-1 - number], r=3 + number)
        adapters.append(engine_adapter(tmp_path / f"a{number}"))
    requests = mixed_requests(adapters)
    host = Engine.load(path, EngineConfig(device="cpu", num_blocks=128, kernels="torch"))
    device = LateDevice()
    engine = on_late_device(
        path,
        device,
        max_adapters=2,
        num_blocks=24,
        max_num_sequences=6,
        max_batch_tokens=48,
        cuda_graphs=recorded,
        overlap=recorded,
    )
    assert answers(engine, requests) == answers(host, requests)
    assert engine.stats().num_adapter_evictions > 0
    assert (device.num_replays > 0) == recorded


def test_steps_without_adapters_are_those_of_an_engine_that_takes_none(
    llama: tuple[Path, Any], tmp_path: Path
) -> None:
    save_adapter(tmp_path / "one", llama[1])
    engine = on_late_device(llama[0], max_adapters=1, max_num_sequences=4)
    runner = engine._runner
    outcomes: list[object] = []
    adapters = runner._adapted.adapters  # type: ignore[attr-defined]
    own = adapters.tell

    def tell(*step: Any) -> None:
        outcomes.append(step)
        own(*step)

    adapters.tell = tell
    engine.add(request("base", prompt(1, 9)))
    drain(engine)
    assert not outcomes
    engine.add(with_adapter(engine_adapter(tmp_path / "one"), request("r", prompt(1, 9))))
    drain(engine)
    assert outcomes


@pytest.fixture
def _rows_by_themselves() -> Iterator[None]:
    with rows_by_themselves():
        yield


@pytest.mark.usefixtures("_rows_by_themselves")
def test_deterministic_tokens_do_not_depend_on_others_and_their_adapters(tmp_path: Path) -> None:
    model = save_llama(tmp_path / "base", **TINY)
    refs = []
    for number, rank in enumerate((3, 17)):
        save_adapter(tmp_path / f"a{number}", model, seed=number, r=rank)
        refs.append(engine_adapter(tmp_path / f"a{number}"))

    def one(name: str, adapter: AdapterRef | None, num_tokens: int = 2) -> EngineRequest:
        asked = request(name, prompt(3, 5, 67), max_tokens=num_tokens, seed=1, logprobs=1)
        return with_adapter(adapter, asked)

    def answered(outputs: list[Any], name: str) -> list[TokenLogprob]:
        return [entry for o in outputs if o.request_id == name for entry in o.logprobs]

    config: dict[str, Any] = {
        "kernels": "triton",
        "deterministic": True,
        "cuda_graphs": False,
        "prefix_cache": False,
        "max_adapter_rank": 32,
    }
    alone = _engine(tmp_path / "base", **config)
    watched = {"base": None, "adapted": refs[1]}
    expected = {}
    for name, adapter in watched.items():
        alone.add(one(name, adapter))
        expected[name] = answered(drain(alone), name)
    crowded = _engine(tmp_path / "base", max_batch_tokens=8, **config)
    crowded.add(one("other", refs[0], num_tokens=4))
    crowded.add(one("same", refs[1], num_tokens=4))
    outputs = crowded.step()
    for name, adapter in watched.items():
        crowded.add(one(name, adapter))
    outputs += drain(crowded)
    for name in watched:
        assert len(expected[name]) == 2
        assert answered(outputs, name) == expected[name]
    assert expected["base"] != expected["adapted"]


def test_an_engine_without_slots_refuses_adapters(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """An engine on a GPU has no adapter slots by default."""
    save_adapter(tmp_path / "one", llama[1])
    adapter = engine_adapter(tmp_path / "one")
    engine = _engine(llama[0], max_adapters=None)
    assert engine.stats().max_adapters == 0
    engine.add(with_adapter(adapter, request("r", prompt(1, 4))))
    (output,) = drain(engine)
    assert output.error is not None
    assert output.error[0] == AdapterError.code
    assert "engine.max_adapters" in output.error[1]
    with pytest.raises(AdapterError, match=r"engine\.max_adapters"):
        engine._runner.load_adapter(adapter, 0, max_rank=64)


def test_slots_that_do_not_fit_are_refused_with_the_numbers(llama: tuple[Path, Any]) -> None:
    device = LateDevice(MemoryInfo(total=2 << 30, free=1 << 30, allocated=0))
    with pytest.raises(ConfigError, match=r"max_adapters: 9999 slots of .* remaining 1\.00 GiB"):
        on_late_device(llama[0], device, max_adapters=9999)


@pytest.mark.parametrize("changes", [{"max_adapters": -1}, {"max_adapter_rank": 257}], ids=str)
def test_settings_out_of_range_are_refused_by_name(
    llama: tuple[Path, Any], changes: dict[str, int]
) -> None:
    (name,) = changes
    with pytest.raises(ConfigError, match=rf"engine\.{name} must be"):
        _engine(llama[0], **changes)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_sequences=st.integers(1, 12),
    fixed=st.booleans(),
    padded=st.booleans(),
)
def test_tiles_say_who_has_which_adapter(
    seed: int, num_sequences: int, fixed: bool, padded: bool
) -> None:
    rng = random.Random(seed)
    plan = []
    for number in range(num_sequences):
        sequence = Sequence(
            request(str(number), [1] * 300, max_tokens=2), arrival=0, key=0, max_total_tokens=302
        )
        if rng.random() < 0.7:
            sequence.adapter_weights = SlotAdapter(rng.randrange(4), 1)
        plan.append(ScheduledSequence(sequence, rng.choice((1, 1, 2, 17, 200))))
    layout, tiling = lay_out(plan), AdapterTiling(4, fixed)
    shape = exact_shape(layout)
    if padded:
        shape = shape._replace(
            num_single=shape.num_single + 3,
            num_tokens=shape.num_tokens + 7,
            num_sequences=shape.num_sequences + 4,
        )
    packed = torch.from_numpy(pack_adapters(layout, shape, tiling))
    tiles, order = tiling.views(packed, shape.num_tokens)
    found: dict[int, int] = {}
    for slot, first, count, _ in tiles.tolist():
        if slot >= 0:
            assert 0 < count <= tiling.tile_rows(shape.num_tokens)
            rows = order[first : first + count].tolist()
            assert found.keys().isdisjoint(rows)
            found |= dict.fromkeys(rows, slot)
    expected = {
        shifted(row, layout, shape): sequence.adapter_weights.slot
        for sequence, query in zip(layout.sequences, layout.ranges, strict=True)
        for row in range(query.start, query.start + query.num_tokens)
        if sequence.adapter_weights is not None
    }
    assert found == expected
