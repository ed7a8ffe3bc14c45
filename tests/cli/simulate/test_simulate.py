"""``millrace simulate``: the real scheduler, simulated workers, virtual time."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from millrace.cli.main import main
from millrace.schemas.config import (
    AutoscaleConfig,
    SchedulerConfig,
)
from millrace.schemas.jobs import Tier
from millrace.schemas.records import Status
from millrace.simulation.outcomes import RequestOutcome
from millrace.simulation.report.measure import policy_report
from millrace.simulation.settings import Failure
from millrace.simulation.traces.trace import write_trace
from tests.cli.simulate.simulating import (
    SIMULATION,
    make_load,
    make_request,
    make_settings,
    report_trace,
    run_trace,
)


def _check_conserved(outcomes: Sequence[RequestOutcome]) -> None:
    for outcome in outcomes:
        assert outcome.num_terminals == 1, outcome
        assert outcome.status is not None
        if outcome.status is Status.DONE:
            assert outcome.num_tokens == outcome.request.output_tokens
            assert outcome.sent_s <= outcome.taken_s <= outcome.started_s
            assert outcome.started_s <= outcome.first_s <= outcome.end_s


# --- what can be worked out by hand ---


def test_a_trace_of_three_by_hand() -> None:
    # A prompt takes 100 ms, each token behind the first 10 ms. The second finds the worker's only
    # slot taken until 0.2 s; so does the third, whose prompt begins with that of the first, which
    # has gone into the cache: 96 of its tokens, whole blocks.
    shared = (("same", 99),)
    trace = [
        make_request(0.0, prefix=shared),
        make_request(0.05),
        make_request(0.06, prefix=shared, output_tokens=1),
    ]
    first, second, third = run_trace(trace, make_settings(1, slots=1)).outcomes
    assert (first.first_s, first.end_s) == pytest.approx((0.1, 0.2), abs=1e-6)
    assert (second.taken_s, second.first_s, second.end_s) == pytest.approx(
        (0.2, 0.3, 0.4), abs=1e-6
    )
    assert (third.first_s, third.end_s) == pytest.approx((0.404, 0.404), abs=1e-6)
    assert third.num_cached_tokens == 96
    _check_conserved([first, second, third])


def test_the_report_of_a_trace_by_hand() -> None:
    trace = [make_request(0.0), make_request(0.05)]
    settings = make_settings(1, slots=1, gpu_hour_price=3.6, gpus_per_worker=2.0)
    report = report_trace(trace, settings)
    assert report.end_s == pytest.approx(0.4)
    assert report.overall.ttft_ms is not None
    assert report.overall.ttft_ms.mean == pytest.approx((100 + 250) / 2)
    assert report.overall.tpot_ms is not None
    assert report.overall.tpot_ms.max == pytest.approx(10.0)
    assert report.utilisation == pytest.approx(1.0)
    assert report.cost.gpu_hours == pytest.approx(2 * 0.4 / 3_600)
    assert report.cost.per_1m_output_tokens == pytest.approx(3.6 * 0.8 / 3_600 / 22 * 1e6)
    assert sum(one.arrivals_per_s * one.width_s for one in report.timeline) == pytest.approx(2)


def test_the_turns_of_a_session_follow_one_another() -> None:
    trace = [
        make_request(0.0, session="s", prompt_tokens=100, output_tokens=28),
        make_request(0.01, session="s", prompt_tokens=200, output_tokens=2),
        make_request(0.02, session="other", prompt_tokens=16, output_tokens=2),
    ]
    first, second, other = run_trace(trace, make_settings(1)).outcomes
    assert second.sent_s == pytest.approx(first.end_s)
    assert other.sent_s == pytest.approx(0.02)
    # All earlier tokens except the last one, whose keys and values were not computed.
    assert second.num_cached_tokens == 112


# --- what always holds ---


def test_every_request_ends_once_whatever_dies() -> None:
    trace = [
        make_request(0.1 * number, tenant=f"t{number % 3}", tier=list(Tier)[number % 4])
        for number in range(120)
    ]
    trace = [msgspec.structs.replace(one, output_tokens=60) for one in trace]
    settings = make_settings(
        3, waiting=2, failures=(Failure(worker=1, at_s=3.0), Failure(worker=2, at_s=3.1)),
        mtbf_s=15.0, restart_s=1.0,
    )  # fmt: skip
    result = run_trace(trace, settings)
    assert result.num_deaths >= 2
    assert sum(outcome.num_runs > 1 for outcome in result.outcomes) >= 2
    assert all(outcome.status is Status.DONE for outcome in result.outcomes)
    _check_conserved(result.outcomes)


def test_deadlines_and_refusals_are_ends_too() -> None:
    trace = make_load(60, 0.01, output_tokens=100, deadline_s=2.0)
    config = SchedulerConfig(max_queued_jobs=30)
    for policy in ("fair", "fifo"):
        result = run_trace(trace, make_settings(1, scheduler=config), policy)
        statuses = {outcome.status for outcome in result.outcomes}
        assert {Status.DONE, Status.EXPIRED} <= statuses <= {*Status}
        _check_conserved(result.outcomes)
        assert all(o.end_s <= o.sent_s + 2.3 for o in result.outcomes if o.status != Status.SHED)


def test_without_workers_requests_are_unfinished() -> None:
    settings = make_settings(
        1, failures=(Failure(worker=1, at_s=0.0),), restart_s=1e6, drain_s=30.0
    )
    report = report_trace([make_request(1.0)], settings)
    assert report.overall.num_unfinished == 1
    assert report.overall.ttft_ms is None
    assert report.end_s == pytest.approx(31.0)


def test_the_same_seed_gives_the_same_report_in_any_process(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    with trace.open("w") as file:
        write_trace([make_request(0.05 * n, tenant=f"t{n % 5}") for n in range(100)], file)
    arguments = ["simulate", "--trace", str(trace), "--workers", "3", "--mtbf", "4s"]
    arguments += ["--restart-time", "1s", "--max-num-sequences", "4", "--policy", "fair,fifo"]
    reports = []
    for hash_seed in ("1", "2"):
        path = tmp_path / f"{hash_seed}.json"
        subprocess.run(
            [sys.executable, "-m", "millrace.cli", *arguments, "--json", str(path)],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
        )
        reports.append(path.read_bytes())
    assert reports[0] == reports[1]
    fair = json.loads(reports[0])["policies"][0]
    assert fair["num_deaths"] > 0
    assert fair["overall"]["num_done"] == 100


# --- what theory says ---


def test_fair_sharing_spares_a_quiet_tenant_what_arrival_order_does_not() -> None:
    noisy = make_load(400, 0.01, tenant="noisy", output_tokens=40)
    quiet = make_load(20, 0.2, tenant="quiet", output_tokens=40)
    trace = sorted([*noisy, *quiet], key=lambda request: request.at_s)
    reports = {policy: report_trace(trace, make_settings(2), policy) for policy in ("fair", "fifo")}
    quiet_ttft = {}
    for policy, report in reports.items():
        ttft = report.by_tenant["quiet"].ttft_ms
        assert ttft is not None
        quiet_ttft[policy] = ttft.p99
        assert report.overall.num_done == 420
    assert quiet_ttft["fair"] < quiet_ttft["fifo"] / 4


def test_backlogged_tenants_are_served_alike_by_tokens() -> None:
    short = make_load(150, 0.01, tenant="short", output_tokens=20)
    long = make_load(50, 0.03, tenant="long", output_tokens=60)
    trace = sorted([*short, *long], key=lambda request: request.at_s)
    fair = report_trace(trace, make_settings(1), "fair").fairness["free"]
    fifo = report_trace(trace, make_settings(1), "fifo").fairness["free"]
    assert fair.jain >= 0.98
    assert fair.max_gap_tokens <= fair.bound_tokens
    assert fair.max_gap_tokens < fifo.max_gap_tokens


@pytest.mark.parametrize("gap_s", [1.0, 0.1])
@pytest.mark.parametrize("num_shared", [0, 39, 99])
def test_short_prompts_are_spread_over_equal_workers(gap_s: float, num_shared: int) -> None:
    """The spread holds for equal and for different prompts, one at a time and several at a time."""
    shared = (("same", num_shared),) if num_shared else ()
    trace = make_load(120, gap_s, prompt_tokens=num_shared + 1, prefix=shared, output_tokens=20)
    outcomes = run_trace(trace, make_settings(2, slots=16)).outcomes
    counts = Counter(outcome.worker_id for outcome in outcomes)
    assert len(counts) == 2
    assert max(counts.values()) <= 1.1 * min(counts.values())


def test_a_long_prompt_goes_where_it_is_cached() -> None:
    trace = make_load(40, 3.0, prompt_tokens=1_000, prefix=(("same", 999),), output_tokens=20)
    outcomes = run_trace(trace, make_settings(2, slots=16)).outcomes
    assert len({outcome.worker_id for outcome in outcomes}) == 1
    assert all(outcome.num_cached_tokens for outcome in outcomes[1:])


def test_prefixes_draw_requests_to_the_workers_that_have_them() -> None:
    # Five prompts for four workers: round-robin does not send a prompt to the same worker again.
    trace = [
        make_request(
            0.25 * number, prompt_tokens=500, output_tokens=5, prefix=((f"p{number % 5}", 480),)
        )
        for number in range(60)
    ]
    affine = report_trace(trace, make_settings(4), "affine")
    apart = report_trace(trace, make_settings(4), "least_loaded")
    assert affine.prefix_hit_rate > apart.prefix_hit_rate
    assert affine.overall.ttft_ms is not None
    assert apart.overall.ttft_ms is not None
    assert affine.overall.ttft_ms.mean < apart.overall.ttft_ms.mean


def test_batch_work_gives_way_to_interactive_requests() -> None:
    batch = make_load(40, 0.01, tier=Tier.BATCH, output_tokens=400)
    chat = [make_request(2.0 + number, tier=Tier.PRO, output_tokens=50) for number in range(10)]
    trace = sorted([*batch, *chat], key=lambda request: request.at_s)
    report = report_trace(trace, make_settings(1))
    ttft_ms = report.by_tier["pro"].ttft_ms
    assert ttft_ms is not None
    assert ttft_ms.p90 < 250.0  # its prefill, and the steps under way
    assert report.num_preemptions > 0
    assert report.overall.num_done == 50


def test_the_shortest_come_first_of_one_tenant_only() -> None:
    lengths = [200, 10, 20, 30] * 20
    trace = [make_request(0.001 * n, output_tokens=length) for n, length in enumerate(lengths)]
    by_arrival, shortest = (
        report_trace(trace, make_settings(1), name) for name in ("fair", "shortest")
    )
    assert by_arrival.overall.e2e_ms is not None
    assert shortest.overall.e2e_ms is not None
    assert shortest.overall.e2e_ms.mean < by_arrival.overall.e2e_ms.mean


def test_each_model_has_workers_of_its_own() -> None:
    trace = [make_request(0.1 * n, model=("small", "large")[n % 2]) for n in range(20)]
    settings = msgspec.structs.replace(make_settings(), num_workers={"small": 2, "": 1})
    result = run_trace(trace, settings)
    assert [one.model for one in result.incarnations] == ["large", "small", "small"]
    _check_conserved(result.outcomes)


def test_the_autoscaler_adds_workers_for_a_load_and_drains_them_behind_it() -> None:
    short = make_load(300, 0.05, output_tokens=100)
    long = [make_request(10.0 + number, output_tokens=1_500) for number in range(40)]
    trace = sorted([*short, *long], key=lambda request: request.at_s)
    autoscale = AutoscaleConfig(
        min_workers=1, max_workers=8, cold_start_s=2.0, scale_down_after_s=5.0
    )
    settings = make_settings(
        1,
        scheduler=SchedulerConfig(autoscale=autoscale),
        simulation=msgspec.structs.replace(SIMULATION, start_s=2.0),
    )
    result = run_trace(trace, settings)
    report = policy_report("fair", result, settings)
    workers = [one.num_workers for one in report.timeline]
    assert max(workers) > 2
    assert workers[-1] < max(workers)
    assert report.num_deaths == 0
    assert report.num_runs_moved > 0, "what a drained worker runs goes on elsewhere"
    assert report.overall.num_done == len(trace)
    _check_conserved(result.outcomes)
    assert report.cost.gpu_hours < 8 * report.end_s / 3_600


# --- the command ---


def test_policies_side_by_side_with_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page, report = (tmp_path / name for name in ("t.jsonl", "p.html", "r.json"))
    drawing = "simulate synthesise --kind multiturn --rate 5 --duration 8s --seed 3"
    drawing += " --tenants a:pro:1,b:free:3 --system-prompts 2"
    assert main(drawing.split()) == 0
    trace.write_text(capsys.readouterr().out)
    running = f"simulate --trace {trace} --workers 2 --policy fair,fifo+least_loaded"
    running += f" --slo ttft=1s,tpot=50ms --json {report} --html {page}"
    assert main(running.split()) == 0
    shown = capsys.readouterr().out
    for text in ("fifo+least_loaded", "TTFT p99, ms", "goodput", "GPU-hours", "by tier"):
        assert text in shown
    read = json.loads(report.read_bytes())
    assert read["schema"] == "millrace.simulate/1"
    assert [one["policy"] for one in read["policies"]] == ["fair", "fifo+least_loaded"]
    html = page.read_text()
    assert html.count("<svg") == 9
    assert "http" not in html.replace("http-equiv", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "random"], "--policy"),
        (["--policy", "fair+fifo"], "--policy"),
        (["--policy", "fair,fair"], "twice"),
        (["--workers", "0"], "--workers"),
        (["--workers", "other=2"], "demo"),
        (["--fail", "worker=1"], "--fail"),
        (["--fail", "worker=2@1s"], "no worker 2"),
        (["--autoscale", "3:1"], "--autoscale"),
        (["--heartbeat", "0s"], "--heartbeat"),
        (["--slo", "speed=1s"], "--slo"),
        (["--step-ms", "-1"], "step_ms"),
        (["--from-clickhouse"], "either"),
        (["--since", "2026-01-01"], "--since"),
        (["--num-blocks", "0"], "--num-blocks"),
    ],
)
def test_arguments_that_make_no_sense_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    trace = tmp_path / "t.jsonl"
    with trace.open("w") as file:
        write_trace([make_request(0.0)], file)
    assert main(["simulate", "--trace", str(trace), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_trace_is_written_as_it_is_read() -> None:
    file = io.StringIO()
    write_trace([make_request(0.5, prefix=(("p", 3),))], file)
    assert json.loads(file.getvalue()) == {
        "at_s": 0.5, "prompt_tokens": 100, "output_tokens": 11, "prefix": [["p", 3]],
    }  # fmt: skip


def test_what_services_publish_waits_for_the_limits_of_its_tenant() -> None:
    """A gateway's jobs, of 300 jobs at once, are shed above the queue's bound.

    A service's jobs run eight at a time, the limit of the tier free.
    """
    settings = make_settings(1, scheduler=SchedulerConfig(max_queued_jobs=50))
    burst = [make_request(0.0, tenant="service", published=True) for _ in range(300)]
    outcomes = run_trace(burst, settings).outcomes
    _check_conserved(outcomes)
    assert Counter(outcome.status for outcome in outcomes) == {Status.DONE: 300}
    begun = sorted(outcome.started_s for outcome in outcomes)
    assert begun[60] > 1.0, "a minute has sixty"
    admitted = [make_request(0.0, tenant="service") for _ in range(300)]
    ends = Counter(outcome.status for outcome in run_trace(admitted, settings).outcomes)
    assert ends[Status.SHED] > 200
