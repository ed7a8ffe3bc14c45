"""The runner of a device: recorded steps, padding, tokens that stay there, state rows, memory."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from millrace.engine.config import KVMemoryShare, StepBounds
from millrace.engine.devices.cuda.device import HostDevice, MemoryInfo
from millrace.engine.devices.cuda.inputs import DeviceState, fits
from millrace.engine.devices.cuda.loading import cache_bytes, load_device_runner
from millrace.engine.devices.cuda.runner import DeviceRunner
from millrace.engine.devices.cuda.steps import ladder
from millrace.engine.kernels.gpu.step_inputs import StepShape
from millrace.engine.step.engine import Engine
from millrace.engine.step.sequence import Sequence, SequenceState
from millrace.engine.types import DeviceLostError, EngineOutput, EngineRequest
from millrace.registry.checkpoints.checkpoint import read_model_config
from millrace.schemas.config import EngineConfig
from millrace.schemas.errors import ConfigError
from tests.engine.checkpoints import save_llama
from tests.engine.devices.cuda.late_device import LateDevice
from tests.engine.support import drain, prompt, request, resolved, tokens_by_request

CPU = torch.device("cpu")
GIB = 1 << 30


def make_runner(path: Path, device: HostDevice | None = None, **config: Any) -> DeviceRunner:
    given_settings: dict[str, Any] = {"num_blocks": 128, "kernels": "reference"} | config
    engine = resolved(path, on=CPU, **given_settings)
    return load_device_runner(path, read_model_config(path), engine, device or LateDevice())


def make_engine(path: Path, device: HostDevice | None = None, **config: Any) -> Engine:
    runner = make_runner(path, device, **config)
    return Engine(runner, resolved(path, **{"kernels": "reference"} | config))


def mixed_requests(seed: int) -> list[EngineRequest]:
    """Return greedy, drawn, narrowed and penalised requests, some with log-probabilities and
    choices."""
    rng = random.Random(seed)
    requests = []
    for i in range(9):
        params: dict[str, Any] = {"temperature": rng.choice((0.0, 0.7, 1.2)), "seed": 100 + i}
        if i % 3 == 1:
            params |= {"top_p": 0.9, "top_k": 30, "min_p": 0.01}
        if i % 4 == 2:
            params |= {"repetition_penalty": 1.3, "presence_penalty": 0.4}
        if i == 3:
            params |= {"logprobs": 2}
        if i == 5:
            params |= {"n": 3, "frequency_penalty": 0.5}
        if i == 7:
            params |= {"logit_bias": {5: 3.0}, "min_tokens": 4}
        if i == 8:
            params |= {"prompt_logprobs": 1}
        shared = prompt(seed, 20) if i % 2 else []
        own = prompt(seed + i, rng.randrange(1, 40))
        requests.append(request(f"r{i}", shared + own, max_tokens=rng.randrange(2, 14), **params))
    return requests


def answers(engine: Engine, requests: list[EngineRequest]) -> dict[tuple[str, int], list[Any]]:
    """Return the outputs of each choice of each request, with logprobs to four digits."""
    outputs: list[EngineOutput] = []
    for i, item in enumerate(requests):
        engine.add(item)
        if i % 3 == 2:
            outputs += engine.step()
    outputs += drain(engine)
    made: dict[tuple[str, int], list[Any]] = {}
    for output in outputs:
        own = made.setdefault((output.request_id, output.choice), [])
        own += output.token_ids
        own += [(e.token_id, round(e.logprob, 4), [t for t, _ in e.top]) for e in output.logprobs]
        if output.finished:
            own.append((output.finish_reason, output.error))
    return made


@pytest.mark.parametrize("num_blocks", [128, 14])
@pytest.mark.parametrize(
    ("overlap", "cuda_graphs"), [(False, False), (False, True), (True, False), (True, True)]
)
def test_a_device_answers_as_the_host_does(
    llama: tuple[Path, Any], num_blocks: int, overlap: bool, cuda_graphs: bool
) -> None:
    host = Engine.load(llama[0], EngineConfig(device="cpu", num_blocks=128))
    device = LateDevice()
    config: dict[str, Any] = {
        "overlap": overlap,
        "cuda_graphs": cuda_graphs,
        "num_blocks": num_blocks,
        "max_num_sequences": 6,
        "max_batch_tokens": 48,
    }
    for seed in range(2):
        requests = mixed_requests(seed)
        engine = make_engine(llama[0], device, **config)
        assert answers(engine, requests) == answers(host, requests)
        assert (device.num_replays > 0) == cuda_graphs


def test_padding_changes_no_logits(llama: tuple[Path, Any]) -> None:
    """Recorded steps, padded to larger shapes, give the tokens of exact ones; NaN in unowned blocks
    stays there."""
    exact = make_engine(llama[0], cuda_graphs=False, overlap=False, max_num_sequences=8)
    padded = make_engine(llama[0], cuda_graphs=True, overlap=False, max_num_sequences=8)
    padded._runner.cache.data[:, -1] = float("nan")
    requests = [
        request(f"r{i}", prompt(i, 3 + 11 * i), max_tokens=5 + i, logprobs=1) for i in range(7)
    ]
    assert answers(padded, requests) == answers(exact, requests)


class _NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that fails on operations that make a host wait for its device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "item", "unique", "masked_select"), (
            f"{name} waits for the device"
        )
        return func(*args, **(kwargs or {}))


def test_a_launch_waits_for_nothing(tmp_path: Path) -> None:
    """The kernels are Triton's, in its interpreter. The model is minimal, since that is slow."""
    save_llama(tmp_path, num_hidden_layers=1, vocab_size=67)
    config: dict[str, Any] = {
        "kernels": "triton",
        "cuda_graphs": False,
        "max_num_sequences": 3,
        "max_batch_tokens": 8,
    }
    engine = make_engine(tmp_path, LateDevice(), **config)
    host = Engine.load(tmp_path, EngineConfig(device="cpu", num_blocks=128, kernels="torch"))
    requests = [
        request("greedy", [1, 2, 3, 4, 5], max_tokens=3),
        request("drawn", [9, 8, 7], max_tokens=3, temperature=0.9, seed=3, top_p=0.9, top_k=20),
        request("penalised", [6, 6], max_tokens=3, repetition_penalty=1.5, logprobs=1),
    ]
    launch = engine._runner.launch

    def watched(plan: Any) -> Any:
        with _NoWaiting():  # type: ignore[no-untyped-call]
            return launch(plan)

    engine._runner.launch = watched  # type: ignore[method-assign]
    assert answers(engine, requests) == answers(host, requests)


def test_failed_launch_ends_no_other_request(
    llama: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = mixed_requests(5)
    expected = answers(make_engine(llama[0], max_num_sequences=6), requests)
    engine = make_engine(llama[0], max_num_sequences=6)
    runner = engine._runner
    assert isinstance(runner, DeviceRunner)
    compute, calls = runner._compute, iter(range(10**6))

    def failing(shape: StepShape) -> torch.Tensor:
        states = compute(shape)
        if next(calls) % 7 == 5 and shape.num_sequences > 1:
            raise RuntimeError("out of memory")
        return states

    monkeypatch.setattr(runner, "_compute", failing)
    runner._recorded = type(runner._recorded)()
    assert answers(engine, requests) == expected


def test_a_request_goes_on_where_the_other_kind_of_runner_left_it(llama: tuple[Path, Any]) -> None:
    """The random stream and the counts of penalties go on too, in both directions."""
    host = Engine.load(llama[0], EngineConfig(device="cpu", num_blocks=128))
    device = make_engine(llama[0], max_num_sequences=6)
    params = {"temperature": 0.9, "seed": 8, "top_p": 0.95, "frequency_penalty": 0.6}
    whole = request("r", prompt(4, 21), max_tokens=16, **params)
    host.add(whole)
    tokens = tokens_by_request(drain(host))["r"]
    for engine in (host, device):
        for num_made in (1, 7, 15):
            made = tuple(tokens[:num_made])
            engine.add(msgspec.structs.replace(whole, output_token_ids=made))
            assert tokens_by_request(drain(engine))["r"] == tokens[num_made:]


@pytest.mark.parametrize("on_read", [False, True])
def test_an_engine_whose_device_is_lost_ends(llama: tuple[Path, Any], *, on_read: bool) -> None:
    """The engine blames no request; the parent process starts another engine."""
    engine = make_engine(llama[0], max_num_sequences=6)
    runner = engine._runner

    def lose(*_: Any) -> Any:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine.add(request("r", prompt(1, 9), max_tokens=9))
    engine.step()
    if on_read:
        runner._device.read_back = lambda _: lose  # type: ignore[attr-defined]
    else:
        runner._compute = lose  # type: ignore[attr-defined]
        runner._recorded.replay = lose  # type: ignore[attr-defined]
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        drain(engine)


def test_launch_error_of_a_lost_device_ends_the_engine(llama: tuple[Path, Any]) -> None:
    """Launches raise their usual error; the synchronization shows that the device is lost."""
    engine = make_engine(llama[0], max_num_sequences=6)
    runner = engine._runner

    def fail(*_: Any) -> Any:
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    def lost() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    engine.add(request("r", prompt(1, 9), max_tokens=9))
    engine.step()
    runner._compute = fail  # type: ignore[attr-defined]
    runner._recorded.replay = fail  # type: ignore[attr-defined]
    runner._device.synchronize = lost  # type: ignore[attr-defined]
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        drain(engine)


def test_random_weights_need_a_config_only(llama: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama[0] / "config.json").read_bytes())
    made = []
    for kernels in ("reference", "torch"):
        config = EngineConfig(
            device="cpu", num_blocks=32, load_format="dummy", kernels=kernels, max_num_sequences=4
        )
        engine = Engine.load(tmp_path, config)
        engine.add(request("r", prompt(1, 9), max_tokens=8))
        made.append(tokens_by_request(drain(engine))["r"])
    assert made[0] == made[1]
    assert len(made[0]) == 8


# --- state rows ---


class _TableState:
    """Sequences whose block tables change in every possible way."""

    def __init__(self, rng: random.Random, num_rows: int) -> None:
        self.rng = rng
        self.state = DeviceState(lambda _: True, num_rows=num_rows, max_blocks=12)
        self.tables = np.zeros((num_rows, 12), dtype=np.int64)
        self.running: list[Sequence] = []
        self.num_rows = num_rows

    def add(self) -> None:
        if len(self.running) < self.num_rows:
            item = request("r", [1, 2, 3], max_tokens=2)
            sequence = Sequence(item, arrival=0, key=0, max_total_tokens=5)
            sequence.block_table = self.blocks(self.rng.randrange(1, 5))
            sequence.state = SequenceState.RUNNING
            self.running.append(sequence)

    def blocks(self, count: int) -> list[int]:
        return [self.rng.randrange(1000) for _ in range(count)]

    def change(self) -> None:
        if not self.running:
            return
        sequence = self.rng.choice(self.running)
        kind = self.rng.randrange(4)
        if kind == 0 and len(sequence.block_table) < 10:
            sequence.block_table += self.blocks(self.rng.randrange(1, 3))
        elif kind == 1:
            sequence.block_table[-1] = self.rng.randrange(1000)  # its first writer copied it
        elif kind == 2:
            sequence.block_table = self.blocks(self.rng.randrange(1, 10))  # preempted, came back
        else:
            sequence.state = SequenceState.FINISHED
            self.running.remove(sequence)

    def check(self) -> None:
        planned = self.rng.sample(self.running, self.rng.randrange(len(self.running) + 1))
        rows = [self.state.row_of(sequence).number for sequence in planned]
        assert len(set(rows)) == len(rows)
        assert set(rows) <= set(range(self.num_rows))
        places, blocks = self.state.take_unsent()
        self.tables.flat[places] = blocks
        for row, sequence in zip(rows, planned, strict=True):
            table = self.tables[row, : len(sequence.block_table)]
            assert table.tolist() == sequence.block_table


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 5))
def test_the_device_knows_the_block_tables(seed: int, num_rows: int) -> None:
    world = _TableState(random.Random(seed), num_rows)
    for _ in range(40):
        world.rng.choice((world.add, world.change, world.check))()
    world.check()


# --- recorded shapes ---


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 300), st.integers(1, 600), st.data())
def test_a_recorded_shape_has_room_for_the_step(
    max_num_sequences: int, max_batch_tokens: int, data: st.DataObject
) -> None:
    shapes = ladder(StepBounds(max_num_sequences, max_batch_tokens, 1))
    assert len(set(shapes)) == len(shapes) < 80
    most = min(max_num_sequences, max_batch_tokens)
    singles = data.draw(st.integers(0, most))
    for shape in shapes:
        assert shape.num_tokens <= max_batch_tokens
        assert shape.num_sampled <= max_num_sequences
        assert shape.num_sequences <= 2 * max_num_sequences + 1
    decode = StepShape(singles, singles, singles, singles)
    assert not singles or any(fits(decode, shape) for shape in shapes)


def test_padding_behind_chunks_needs_a_sequence_of_its_own() -> None:
    into = StepShape(num_single=2, num_tokens=10, num_sequences=4, num_sampled=4)
    assert fits(StepShape(2, 9, 3, 3), into)
    assert not fits(StepShape(2, 9, 4, 3), into)
    assert fits(StepShape(2, 10, 4, 3), into)
    assert not fits(StepShape(3, 9, 3, 3), into)
    assert not fits(StepShape(2, 11, 3, 3), into)
    assert not fits(StepShape(2, 9, 3, 5), into)


# --- memory ---


def test_the_cache_gets_what_weights_and_work_leave() -> None:
    info = MemoryInfo(total=100 * GIB, free=60 * GIB, allocated=30 * GIB)
    left = cache_bytes(info, fraction=0.9, work_bytes=5 * GIB, block_bytes=1 << 20)
    assert left == (90 - 40 - 10) * GIB


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    info = MemoryInfo(total=24 * GIB, free=2 * GIB, allocated=20 * GIB)
    with pytest.raises(ConfigError) as refused:
        cache_bytes(info, fraction=0.9, work_bytes=GIB, block_bytes=1 << 20)
    for number in ("24.00 GiB", "0.9 gives 21.60 GiB", "20.00 GiB", "2.00 GiB", "0.0010 GiB"):
        assert number in refused.value.message


def test_blocks_are_as_many_as_the_device_has_memory_for(llama: tuple[Path, Any]) -> None:
    info = MemoryInfo(total=10_000_000, free=8_000_000, allocated=1_500_000)
    device = LateDevice(info, peak_bytes=500_000)
    engine = msgspec.structs.replace(
        resolved(llama[0], kernels="reference", max_num_sequences=256, max_batch_tokens=64),
        kv_cache_size=KVMemoryShare(0.9),
    )
    runner = load_device_runner(llama[0], read_model_config(llama[0]), engine, device)
    # 0.9 of all, less what is taken and twice the work, in blocks of 3 layers of 16 tokens of
    # 2 * 2 heads of 16 float32.
    assert runner.cache.num_blocks == (9_000_000 - 2_000_000 - 1_000_000) // (3 * 16 * 64 * 4)
