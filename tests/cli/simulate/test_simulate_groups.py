"""Workers of several devices in ``millrace simulate``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from millrace.cli.main import main
from millrace.simulation.collectives import GroupLink, ModelShape, collective_times
from millrace.simulation.settings import SimulationSettings
from millrace.simulation.traces.trace import write_trace
from tests.cli.simulate.simulating import (
    SIMULATION,
    make_load,
    make_request,
    make_settings,
    report_trace,
    run_trace,
)


def _group(num_devices: int, **collectives: float) -> SimulationSettings:
    settings = make_settings(1, slots=1, simulation=replace(SIMULATION, **collectives))
    engine = replace(settings.config.worker.engine, tensor_parallel=num_devices)
    worker = replace(settings.config.worker, engine=engine)
    return replace(settings, config=replace(settings.config, worker=worker), gpu_hour_price=3.6)


def test_exchange_times_match_a_calculation_by_hand() -> None:
    """A 70B model over 4 devices: 160 sums of 8,192 numbers a token, of which a device sends one
    and a half times as many, and 128,256 logits a sequence, of which it has not got three
    quarters."""
    shape = ModelShape(num_layers=80, hidden_size=8_192, vocab_size=128_256)
    times = collective_times(shape, GroupLink(bytes_per_s=450e9), 4)
    assert times.collective_ms == pytest.approx((160 * (6.6 + 6 * 0.6) + 6.6 + 3 * 0.6) / 1e3)
    assert times.collective_ms_per_token == pytest.approx(160 * 1.5 * 16_384 / 450e9 * 1e3)
    assert times.collective_ms_per_sequence == pytest.approx(0.75 * 4 * 128_256 / 450e9 * 1e3)
    told = collective_times(shape, GroupLink(latency_s=5e-6), 4)
    assert told.collective_ms == pytest.approx(161 * 5 / 1e3)


def test_a_group_is_faster_by_its_devices_and_slower_by_what_it_exchanges() -> None:
    # A prompt of 100 tokens takes 100 ms of one device, each token behind the first 10.
    (alone,) = run_trace([make_request(0.0)], _group(1, collective_ms=1.0)).outcomes
    assert (alone.first_s, alone.end_s) == pytest.approx((0.1, 0.2), abs=1e-6)
    (together,) = run_trace([make_request(0.0)], _group(4, collective_ms=1.0)).outcomes
    assert (together.first_s, together.end_s) == pytest.approx((0.026, 0.061), abs=1e-6)


def test_all_devices_of_a_group_are_paid_for() -> None:
    report = report_trace([make_request(0.0)], _group(4))
    assert report.cost.gpu_hours == pytest.approx(4 * 0.05 / 3_600)
    group = replace(_group(4), gpus_per_worker=8.0)
    assert report_trace([make_request(0.0)], group).cost.gpu_hours == pytest.approx(
        8 * 0.05 / 3_600
    )


def _run(folder: Path, arguments: str) -> tuple[int, Any]:
    trace, path = folder / "trace.jsonl", folder / "report.json"
    with trace.open("w") as file:
        write_trace(make_load(20, 0.5, prompt_tokens=200, output_tokens=60), file)
    code = main(["simulate", "--trace", str(trace), "--json", str(path), *arguments.split()])
    return code, json.loads(path.read_bytes()) if code == 0 else None


def test_the_command_divides_and_adds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = "--step-ms 40 --step-ms-per-sequence 0 --step-ms-per-kv-token 0"
    code, report = _run(
        tmp_path,
        f"{steps} --tensor-parallel 4 --model-shape 80,8192,128256 --group-gbytes-per-s 450 "
        "--collective-us 10",
    )
    assert code == 0
    shown = capsys.readouterr().out
    assert "4 devices share that; a step takes 1.61 ms + 0.00874 ms a token + 0.000855" in shown
    setup, (fair,) = report["setup"], report["policies"]
    assert (setup["gpus_per_worker"], setup["worker"]["engine"]["tensor_parallel"]) == (4.0, 4)
    alone_ms = 40 / 4 + 161 * 0.01 + 0.00874 + 0.000855
    assert fair["overall"]["tpot_ms"]["p50"] == pytest.approx(alone_ms, rel=0.01)


def test_one_device_exchanges_nothing(tmp_path: Path) -> None:
    _, plain = _run(tmp_path, "")
    _, group = _run(tmp_path, "--tensor-parallel 1")
    assert plain["policies"] == group["policies"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--tensor-parallel 0", "--tensor-parallel must be between 1 and"),
        ("--model-shape 80,8192,128256", "--model-shape goes with --tensor-parallel"),
        ("--tensor-parallel 2 --model-shape 80,8192", "does not look like 80,8192,128256"),
        ("--tensor-parallel 2 --group-gbytes-per-s 0", "--group-gbytes-per-s must be above 0"),
        ("--tensor-parallel 2 --collective-us -1", "--collective-us must be 0 or more"),
    ],
)
def test_what_makes_no_sense_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert _run(tmp_path, arguments)[0] == 2
    assert message in capsys.readouterr().err
