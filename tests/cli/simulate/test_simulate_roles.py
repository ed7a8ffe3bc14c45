"""Separate prefill and decode workers in a simulation: streams continue with pulled blocks."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from millrace.cli.main import main
from millrace.schemas.config import AutoscaleConfig, SchedulerConfig
from millrace.schemas.engines import WorkerRole
from millrace.schemas.records import Status
from millrace.simulation.report.measure import policy_report
from millrace.simulation.settings import Failure, KvLink, SimulationSettings
from millrace.simulation.traces.trace import TraceRequest, write_trace
from millrace.simulation.world import Result
from tests.cli.simulate.simulating import make_load, make_request, make_settings, run_trace

_PREFILL, _DECODE = WorkerRole.PREFILL, WorkerRole.DECODE
# A token is computed in 1 ms and pulled in 0.01 ms.
_LINK = KvLink(bytes_per_token=1_000.0, bytes_per_s=1e8, overhead_s=0.005)


def _settings(
    *roles: WorkerRole, transfer: bool | None = None, **changes: Any
) -> SimulationSettings:
    settings = make_settings(
        len(roles) or changes.pop("num_workers", 2), slots=16, roles=roles, link=_LINK, **changes
    )
    worker = settings.config.worker
    engine = msgspec.structs.replace(worker.engine, transfer=transfer)
    config = msgspec.structs.replace(
        settings.config, worker=msgspec.structs.replace(worker, engine=engine)
    )
    return msgspec.structs.replace(settings, config=config)


def _beside_a_stream(*others: TraceRequest) -> list[TraceRequest]:
    """Return a trace of one stream from the start, and ``others`` that would delay its tokens."""
    return [make_request(0.0, prompt_tokens=100, output_tokens=400), *others]


# --- what can be worked out by hand ---


def test_a_prompt_is_pulled_while_it_is_computed() -> None:
    # 8,192 tokens are computed in two steps of 4.1 s and pulled in 2.05 s, which is longer than is
    # waited for. The first half comes while the second is computed, so that half of it is left.
    link = KvLink(bytes_per_token=1_000.0, bytes_per_s=4e6, overhead_s=0.005)
    trace = [
        make_request(0.0, prompt_tokens=100, output_tokens=1_500),
        make_request(0.5, prompt_tokens=8_192, output_tokens=500),
    ]
    settings = msgspec.structs.replace(_settings(_PREFILL, _DECODE), link=link)
    result = run_trace(trace, settings)
    _check_all_done(result.outcomes)
    second = result.outcomes[1]
    assert second.num_runs == 2
    assert result.num_pulled_tokens >= 8_100
    assert second.taken_s - second.first_s < 1.5


def test_a_stream_goes_on_behind_its_prompt_with_pulled_blocks() -> None:
    # The first prompt is short and stays where it decodes. The second takes 1 s at the worker for
    # prompts, and goes on there while 62 blocks come, in 9.92 ms of bytes and 5 ms beside. When it
    # is taken away, the step under way is waited for, 10 ms. The last 9 tokens of the prompt and
    # 2 made meanwhile are computed in a step with the first stream, 21 ms, after the running step
    # of that stream, 10 ms at most.
    trace = _beside_a_stream(make_request(0.5, prompt_tokens=1_000, output_tokens=101))
    result = run_trace(trace, _settings(_PREFILL, _DECODE))
    first, second = result.outcomes
    assert (first.num_runs, first.worker_id, first.num_tokens) == (1, "worker-2-1", 400)
    assert (second.num_runs, second.worker_id, second.epoch) == (2, "worker-2-1", 2)
    assert second.num_tokens == 101
    assert second.first_s == pytest.approx(1.5)
    assert result.streams_moved == {"pulled": 1}
    assert result.num_pulled_tokens == 62 * 16
    least_s = 0.010 + 0.021
    assert least_s <= result.inter_token.max_s <= least_s + 0.010 + 1e-6
    assert second.end_s == pytest.approx(1.5 + result.inter_token.max_s + 99 * 0.01)
    # 399 and 100 gaps, of which two are long: that of the move, and the other stream's beside it.
    assert result.inter_token.count == 499
    assert result.inter_token.at(0.99) == pytest.approx(0.010, rel=0.006)
    assert first.end_s == pytest.approx(0.1 + 399 * 0.01 + 0.011)


def test_mixed_workers_hold_up_streams_instead() -> None:
    trace = _beside_a_stream(
        *(make_request(0.5 + 0.01 * n, prompt_tokens=1_000, output_tokens=2) for n in range(2))
    )
    result = run_trace(trace, _settings(num_workers=2))
    assert result.streams_moved == {}
    assert result.num_pulled_tokens == 0
    assert result.inter_token.max_s == pytest.approx(1.01)


def test_a_stream_stays_where_its_blocks_take_longer_than_computing_them() -> None:
    slow = KvLink(bytes_per_token=1_000.0, bytes_per_s=5e5, overhead_s=0.005)
    trace = _beside_a_stream(
        *(make_request(0.5 + 2 * n, prompt_tokens=1_000, output_tokens=101) for n in range(2))
    )
    settings = msgspec.structs.replace(_settings(_PREFILL, _DECODE), link=slow)
    result = run_trace(trace, settings)
    # The link is not measured before the first pull, which does not begin: all is computed.
    assert result.num_pulled_tokens == 0
    assert all(outcome.status is Status.DONE for outcome in result.outcomes)


def test_pulled_blocks_are_cached_at_the_pulling_worker() -> None:
    shared = (("same", 999),)
    trace = _beside_a_stream(
        make_request(0.5, prompt_tokens=1_000, prefix=shared, output_tokens=20),
        make_request(4.0, prompt_tokens=1_000, prefix=shared, output_tokens=20),
    )
    trace[0] = msgspec.structs.replace(trace[0], output_tokens=600)
    *_, last = run_trace(trace, _settings(_PREFILL, _DECODE)).outcomes
    # It is cached where it decodes, so it takes no first hop.
    assert (last.num_runs, last.worker_id, last.num_cached_tokens) == (1, "worker-2-1", 992)


# --- what always holds ---


def _check_all_done(outcomes: list[Any]) -> None:
    for outcome in outcomes:
        assert outcome.status is Status.DONE
        assert outcome.num_terminals == 1
        assert outcome.num_tokens == outcome.request.output_tokens
        assert outcome.sent_s <= outcome.first_s <= outcome.end_s


@pytest.mark.parametrize("dead", [1, 2, 3, 4])
def test_every_request_ends_once_whoever_dies(dead: int) -> None:
    trace = make_load(60, 0.15, prompt_tokens=400, output_tokens=80)
    settings = _settings(
        _PREFILL, _PREFILL, _DECODE, _DECODE,
        failures=(Failure(worker=dead, at_s=4.0),), mtbf_s=20.0, restart_s=1.0,
    )  # fmt: skip
    result = run_trace(trace, settings)
    assert result.num_deaths >= 1
    assert result.streams_moved["pulled"] > 10
    _check_all_done(result.outcomes)


def test_workers_for_prompts_take_turns() -> None:
    trace = make_load(200, 0.1, prompt_tokens=500, output_tokens=100)
    result = run_trace(trace, _settings(*[_PREFILL] * 8, *[_DECODE] * 8))
    _check_all_done(result.outcomes)
    prompts = {
        one.name: one.batch.prefill_tokens
        for one in result.incarnations
        if one.role is _PREFILL and one.batch is not None
    }
    assert len(prompts) == 8
    assert max(prompts.values()) <= 2 * min(prompts.values())


def test_what_a_drained_worker_runs_pulls_its_blocks_before_that_is_gone() -> None:
    short = make_load(300, 0.05, output_tokens=100)
    long = [
        make_request(10.0 + number, prompt_tokens=800, output_tokens=1_500) for number in range(40)
    ]
    autoscale = AutoscaleConfig(
        min_workers=1, max_workers=8, cold_start_s=2.0, scale_down_after_s=5.0
    )
    settings = _settings(
        num_workers=1, transfer=True, scheduler=SchedulerConfig(autoscale=autoscale)
    )
    trace = sorted([*short, *long], key=lambda request: request.at_s)
    result = run_trace(trace, settings)
    assert result.streams_moved["pulled"] > 0
    assert result.num_pulled_tokens > 0
    _check_all_done(result.outcomes)


def _late_share(result: Result, from_s: float) -> float:
    """Return the share of requests sent since ``from_s`` whose first token took longer than 2 s."""
    later = [one for one in result.outcomes if one.request.at_s >= from_s]
    return sum(one.first_s - one.sent_s > 2.0 for one in later) / len(later)


def test_a_wrong_split_is_mended_while_it_serves() -> None:
    # 4 prompts a second of 1 s each need 5 workers, and 2 have that role. The decode workers have
    # a quarter of their slots taken.
    trace = make_load(240, 0.25, prompt_tokens=1_000, output_tokens=400)
    roles = [_PREFILL] * 2 + [_DECODE] * 6
    stays = run_trace(trace, _settings(*roles))
    settings = _settings(*roles, scheduler=SchedulerConfig(switch_roles=True))
    switched = run_trace(trace, settings)
    _check_all_done(switched.outcomes)
    assert stays.num_role_changes == 0
    assert 2 <= switched.num_role_changes <= 5
    assert _late_share(stays, 40.0) > 0.4
    assert _late_share(switched, 40.0) == 0
    assert policy_report("fair", switched, settings).num_role_changes == switched.num_role_changes


def test_a_load_that_a_split_carries_switches_nothing() -> None:
    trace = make_load(100, 0.5, prompt_tokens=1_000, output_tokens=40)
    scheduler = SchedulerConfig(switch_roles=True)
    result = run_trace(trace, _settings(*[_PREFILL] * 4, *[_DECODE] * 4, scheduler=scheduler))
    _check_all_done(result.outcomes)
    assert result.num_role_changes == 0


@pytest.mark.parametrize("dead", [1, 3])
def test_every_request_ends_once_while_roles_change_and_workers_die(dead: int) -> None:
    trace = make_load(160, 0.15, prompt_tokens=800, output_tokens=400)
    settings = _settings(
        _PREFILL, _DECODE, _DECODE, _DECODE, _DECODE,
        failures=(Failure(worker=dead, at_s=9.0),), restart_s=1.0,
        scheduler=SchedulerConfig(switch_roles=True),
    )  # fmt: skip
    result = run_trace(trace, settings)
    assert result.num_role_changes >= 1
    _check_all_done(result.outcomes)


def test_workers_that_come_and_go_keep_the_shares_of_roles() -> None:
    # 8 prompts a second of 0.4 s each, and then nearly none.
    trace = [
        *make_load(240, 0.125, prompt_tokens=400, output_tokens=100),
        *(make_request(30.0 + 4.0 * number, prompt_tokens=400) for number in range(30)),
    ]
    autoscale = AutoscaleConfig(
        min_workers=2, max_workers=12, cold_start_s=1.0, scale_down_after_s=10.0
    )
    settings = _settings(_PREFILL, _DECODE, scheduler=SchedulerConfig(autoscale=autoscale))
    result = run_trace(trace, settings)
    _check_all_done(result.outcomes)
    roles = Counter(one.role for one in result.incarnations)
    assert abs(roles[_PREFILL] - roles[_DECODE]) <= 1
    assert roles.total() > 4
    end_s = max(one.gone_s or 0.0 for one in result.incarnations)
    left = Counter(one.role for one in result.incarnations if one.gone_s == end_s)
    assert left == {_PREFILL: 1, _DECODE: 1}
    assert result.streams_moved["pulled"] > 100


def test_the_report_tells_of_roles() -> None:
    trace = make_load(60, 0.1, prompt_tokens=400, output_tokens=80)
    settings = _settings(_PREFILL, _DECODE)
    result = run_trace(trace, settings)
    report = policy_report("fair", result, settings)
    assert set(report.utilisation_by_role) == {_PREFILL, _DECODE}
    assert report.streams_moved == result.streams_moved
    assert report.itl_ms is not None
    assert report.itl_ms.count == sum(one.num_tokens - 1 for one in result.outcomes)
    assert report.goodput_requests_per_s is None
    counted = Counter(one.num_runs for one in result.outcomes)
    assert report.num_runs_moved == counted[2] == report.streams_moved["pulled"]


# --- the command ---


def _trace_file(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    with path.open("w") as file:
        write_trace(make_load(80, 0.05, prompt_tokens=2_000, output_tokens=60), file)
    return path


def test_the_command_takes_roles_as_up_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = []
    for number in range(2):
        path, page = tmp_path / f"{number}.json", tmp_path / "page.html"
        running = f"simulate --trace {_trace_file(tmp_path)} --workers prefill:2,decode:1"
        running += " --kv-bytes-per-token 1000 --link-gbytes-per-s 2 --pull-overhead 2ms"
        running += f" --slo ttft=1s,tpot=50ms --json {path} --html {page}"
        assert main(running.split()) == 0
        reports.append(json.loads(path.read_bytes()))
    assert reports[0] == reports[1]
    shown = capsys.readouterr().out
    for text in (
        "3 of demo (2 prefill, 1 decode)", "2 GB/s, 2 ms each pull", "utilisation, prefill",
        "streams moved", "tokens pulled", "ITL p99, ms", "TTFT p99, ms", "goodput, requests/s",
    ):  # fmt: skip
        assert text in shown
        assert text in page.read_text()
    setup, (fair,) = reports[0]["setup"], reports[0]["policies"]
    assert setup["roles"] == {"prefill": 2, "decode": 1}
    assert setup["link"] == {"bytes_per_token": 1e3, "bytes_per_s": 2e9, "overhead_s": 0.002}
    assert fair["streams_moved"]["pulled"] > 0
    assert fair["num_pulled_tokens"] >= 1_900 * fair["streams_moved"]["pulled"]
    assert fair["itl_ms"]["p50"] <= fair["itl_ms"]["p99"] <= fair["itl_ms"]["max"]
    assert 0 < fair["goodput_requests_per_s"] <= fair["requests_per_s"]


def test_a_plain_count_moves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert main(f"simulate --trace {_trace_file(tmp_path)} --workers 3 --json {path}".split()) == 0
    assert "streams moved" not in capsys.readouterr().out
    report = json.loads(path.read_bytes())
    assert report["setup"]["roles"] == {}
    assert report["setup"]["link"] is None
    assert report["policies"][0]["streams_moved"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--workers prefill:0", "prefill:1,decode:2"),
        ("--workers prefill:1,serve:2", "roles of both, prefill, decode"),
        ("--workers prefill=1,decode", "have no roles"),
        ("--workers demo=prefill:1", "have no roles"),
        ("--workers=-3", "between 1 and"),
        ("--workers 4 --switch-roles", "--switch-roles"),
        ("--link-gbytes-per-s 0", "--link-gbytes-per-s"),
        ("--kv-bytes-per-token nan", "--kv-bytes-per-token"),
        ("--pull-overhead soon", "--pull-overhead"),
    ],
)
def test_what_makes_no_sense_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    trace = str(_trace_file(tmp_path))
    assert main(["simulate", "--trace", trace, *arguments.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "message"),
    [("transfer: false", "--workers"), ("transfer: true, prefix_cache: false", "prefix_cache")],
)
def test_roles_take_blocks_that_can_be_pulled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, message: str
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"worker:\n  engine: {{{engine}}}\n")
    running = f"simulate --trace {_trace_file(tmp_path)} --config {config}"
    assert main([*running.split(), "--workers", "prefill:1,decode:1"]) == 2
    assert message in capsys.readouterr().err


def test_the_command_says_how_often_roles_were_switched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    running = f"simulate --trace {_trace_file(tmp_path)} --workers prefill:1,decode:3"
    running += f" --prefill-tokens-per-s 5000 --switch-roles --json {path}"
    assert main(running.split()) == 0
    assert "roles switched" in capsys.readouterr().out
    report = json.loads(path.read_bytes())
    assert report["setup"]["scheduler"]["switch_roles"] is True
    assert report["policies"][0]["num_role_changes"] >= 1
