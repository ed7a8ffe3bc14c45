"""``millrace bench``: whole runs against a server whose answers are known exactly."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import msgspec
import pytest
from jsonschema import Draft202012Validator

from millrace.bench.report.report import LoadReport, read_report
from millrace.bench.report.schema import report_schema, to_text
from millrace.bench.runner import run_load
from millrace.bench.settings import LoadError, LoadSettings, Slo, TargetApi
from millrace.bench.spread import Spread, SpreadKind, fixed
from millrace.cli.arguments import parse_slo
from millrace.cli.bench.arguments import settings_of
from millrace.cli.main import build_parser, main
from millrace.schemas.errors import ConfigError
from tests.cli.bench.bench_server import AROUND_TOKENS, scripted_server

SCHEMA_FILE = Path(__file__).parents[3] / "docs" / "bench-report.schema.json"
NUM_TOKENS = 6
NUM_PARTS = 3


def settings(url: str, **changes: object) -> LoadSettings:
    base = LoadSettings(
        url=url,
        concurrency=4,
        num_requests=20,
        input_tokens=fixed(40),
        output_tokens=fixed(NUM_TOKENS),
        drain_s=5.0,
        timeout_s=10.0,
    )
    return msgspec.structs.replace(base, **changes)


# Whole runs.


@pytest.mark.parametrize("api", list(TargetApi))
def test_a_closed_loop_counts_what_the_server_sent(api: TargetApi) -> None:
    with scripted_server(gap_s=0.02) as server:
        is_socket = api is TargetApi.WEBSOCKET
        url = server.socket_url if is_socket else server.url
        model = "scripted" if is_socket else ""
        report = run_load(settings(url, api=api, model=model), keep_samples=True)
        sent = server.bodies

    assert report.settings.model == "scripted"
    assert report.requests.num_sent == report.requests.num_succeeded == 20
    assert report.errors == {}
    assert report.tokens.num_output == 20 * NUM_TOKENS
    assert report.tokens.num_prompt == pytest.approx(20 * 40, rel=0.05)
    assert report.tokens.num_cached == 20
    assert report.tokens.counted_by == "server"
    assert report.tokens.parts_counted_by == ("server" if is_socket else "evenly")
    assert report.tokens.tokens_per_part == pytest.approx(2.0)
    assert all(body["model"] == "scripted" for body in sent)
    # Three parts of two tokens, 20 ms from one to the next.
    gap, itl, tpot = (report.latencies[name] for name in ("gap", "itl", "tpot"))
    assert gap.count == 20 * (NUM_PARTS - 1)
    assert itl.count == 20 * (NUM_PARTS - 1) * 2
    assert 19.0 <= gap.p50 <= 60.0
    assert itl.p50 == pytest.approx(gap.p50 / 2, rel=0.01)
    assert tpot.p50 == pytest.approx(gap.p50 * 2 / (NUM_TOKENS - 1), rel=0.3)
    assert len(report.samples) == 20
    assert all(len(sample.gaps_ms) == NUM_PARTS - 1 for sample in report.samples)


def test_an_open_loop_sends_when_requests_are_due_whatever_the_server_does() -> None:
    """Requests that are due while the server stalls for 0.8 s wait for the rest of the stall."""
    with scripted_server() as server:
        server.stall(after_requests=40, seconds=0.8)
        report = run_load(
            settings(
                server.url,
                concurrency=None,
                rate_per_s=50.0,
                num_requests=None,
                duration_s=2.5,
                model="scripted",
                num_processes=2,
            ),
            keep_samples=True,
        )
    assert 80 <= report.requests.num_sent <= 180
    assert report.requests.num_succeeded == report.requests.num_sent
    late = [sample for sample in report.samples if (sample.ttft_ms or 0) > 100]
    # About 40 were due in the stall, each with its own share of it still before it.
    assert len(late) >= 10
    assert report.latencies["ttft"].max > 400
    assert report.latencies["client_delay"].p50 < 50
    indices = [sample.index for sample in report.samples]
    assert sorted(indices) == list(range(len(indices)))


def test_the_warm_up_is_sent_but_not_counted() -> None:
    with scripted_server() as server:
        report = run_load(
            settings(server.url, concurrency=2, num_requests=None, duration_s=0.5, warm_up_s=0.5)
        )
    assert report.requests.num_warm_up > 0
    assert report.requests.num_sent > 0
    assert report.measured_s == pytest.approx(0.5)
    assert report.settings.warm_up_s == 0.5
    assert sum(one.tokens_per_s * one.width_s for one in report.timeline) == pytest.approx(
        (report.requests.num_warm_up + report.requests.num_sent) * NUM_TOKENS, rel=0.01
    )


def test_goodput_counts_what_keeps_every_bound() -> None:
    with scripted_server(gap_s=0.03) as server:
        good = run_load(settings(server.url, slo=Slo(ttft_ms=5_000.0, e2e_ms=9_000.0)))
        bad = run_load(settings(server.url, slo=Slo(ttft_ms=5_000.0, tpot_ms=1.0)))
    assert good.goodput is not None
    assert good.goodput.num_good == 20
    assert good.goodput.share == 1.0
    assert bad.goodput is not None
    assert bad.goodput.num_good == 0


def test_without_usage_parts_are_counted_and_the_report_says_so() -> None:
    with scripted_server(has_usage=False) as server:
        report = run_load(settings(server.url, model="scripted"))
    assert report.tokens.counted_by == "parts"
    assert report.tokens.num_output == 20 * NUM_PARTS


def test_the_same_seed_asks_the_same(tmp_path: Path) -> None:
    lines = [{"prompt": f"line {n}", "max_tokens": n + 1} for n in range(5)]
    lines.append({"messages": [{"role": "user", "content": "a talk"}]})
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines))
    asked = []
    for processes in (1, 2):
        with scripted_server() as server:
            run_load(
                settings(
                    server.url, dataset=str(file), num_requests=6, num_processes=processes, seed=3
                )
            )
            asked.append(
                sorted((b["messages"][0]["content"], b["max_tokens"]) for b in server.bodies[1:])
            )
    assert asked[0] == asked[1]
    assert ("a talk", NUM_TOKENS) in asked[0]
    assert ("line 2", 3) in asked[0]


def test_extra_fields_and_the_key_reach_the_server_and_no_report() -> None:
    with scripted_server() as server:
        report = run_load(
            settings(
                server.url + "/v1/",
                api_key="sk-secret",
                headers=(("x-trace", "hidden"),),
                ignore_eos=True,
                extra_body={"top_k": 5},
            )
        )
        assert server.bodies[-1]["top_k"] == 5
        assert server.bodies[-1]["ignore_eos"] is True
        assert "authorization: Bearer sk-secret" in server.heads[-1]
        assert "x-trace: hidden" in server.heads[-1]
    written = msgspec.json.encode(report).decode()
    assert "sk-secret" not in written
    assert "hidden" not in written


def test_a_server_that_refuses_is_told_apart_before_the_load() -> None:
    with scripted_server(refuse=429) as server:
        with pytest.raises(LoadError, match="429 too_busy"):
            run_load(settings(server.url))
        assert len(server.bodies) == 1


# The command.


def test_the_command_writes_a_report_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, page = tmp_path / "run.json", tmp_path / "run.html"
    with scripted_server(gap_s=0.005) as server:
        code = main(
            [
                *f"bench --url {server.url} --concurrency 3 --requests 12".split(),
                *["--output-tokens", "uniform:2:6", "--slo", "ttft=2s,tpot=500ms"],
                *("--json", str(file), "--html", str(page)),
            ]
        )
    assert code == 0
    shown = capsys.readouterr().out
    assert "12 sent, 12 succeeded, 0 failed" in shown
    assert "within TTFT 2000 ms, TPOT 500 ms" in shown
    report = read_report(file)
    assert report.schema == "millrace.bench/1"
    assert report.samples == ()
    Draft202012Validator(json.loads(SCHEMA_FILE.read_text())).validate(json.loads(file.read_text()))
    _check_page(page.read_text(), report)

    assert main(["bench", "--compare", str(file), str(file)]) == 0
    compared = capsys.readouterr().out
    assert "TTFT p99, ms" in compared
    assert "settings that differ" not in compared


def _check_page(text: str, report: LoadReport) -> None:
    """Check that the page fetches nothing and that its pictures are well-formed XML."""
    for fetching in ("<script", "src=", "href=", "@import", "url("):
        assert fetching not in text
    pictures = text.split("<svg")[1:]
    assert len(pictures) == 10
    for picture in pictures:
        ElementTree.fromstring("<svg" + picture.split("</svg>")[0] + "</svg>")
    assert f"{report.latencies['ttft'].p50:,.2f}" in text


def test_an_interrupt_ends_the_run_and_reports_what_there_is(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    with scripted_server(gap_s=0.01) as server:
        process = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "millrace.cli",
                    "bench",
                    "--url",
                    server.url,
                    "--json",
                    str(file),
                ),
                *["--concurrency", "4", "--duration", "60s", "--processes", "2"],
            ],
            stdout=subprocess.PIPE,
            text=True,
            # A shell ignores SIGINT for tests that run in the background.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        try:
            give_up_s = time.monotonic() + 30.0
            while len(server.bodies) < 40:
                assert process.poll() is None
                assert time.monotonic() < give_up_s
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            shown, _ = process.communicate(timeout=60.0)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "The run was ended early" in shown
    report = read_report(file)
    assert report.interrupted
    assert report.requests.num_succeeded > 0
    assert report.requests.num_failed == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--rate"),
        (["--rate", "1", "--concurrency", "1"], "either --rate"),
        (["--rate", "0"], "--rate must be more than 0"),
        (["--rate", "nan"], "--rate must be more than 0"),
        (["--concurrency", "-1"], "--concurrency"),
        (["--rate", "1", "--duration", "5 years"], "--duration"),
        (["--rate", "1", "--duration", "0s"], "--duration"),
        (["--rate", "1", "--duration", "5s", "--requests", "3"], "either --duration"),
        (["--rate", "1", "--url", "localhost:80"], "--url"),
        (["--rate", "1", "--url", "http://x:99999"], "--url"),
        (["--rate", "1", "--slo", "speed=1s"], "speed"),
        (["--rate", "1", "--slo", "ttft=fast"], "ttft"),
        (["--rate", "1", "--input-tokens", "gauss:1:2"], "gauss"),
        (["--rate", "1", "--input-tokens", "uniform:9:2"], "not fall"),
        (["--rate", "1", "--output-tokens", "lognormal:9"], "lognormal"),
        (["--rate", "1", "--extra-body", "[1]"], "--extra-body"),
        (["--rate", "1", "--extra-body", "{"], "--extra-body"),
        (["--rate", "1", "--header", "nothing"], "--header"),
        (["--rate", "1", "--header", "a: b\nc: d"], "--header"),
        (["--rate", "1", "--samples"], "--json"),
        (["--rate", "1", "--json", "no/such/folder/x.json"], "folder"),
        (["--concurrency", "2", "--processes", "3"], "--processes"),
        (["--rate", "1", "--dataset", "no-such-file"], "--dataset"),
        (["--rate", "1", "--url", "http://127.0.0.1:1"], "lists no model"),
        (["--compare", "no-such-file", "other"], "cannot be read"),
    ],
)
def test_bad_arguments_are_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_arguments_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from-the-environment")
    parsed = build_parser().parse_args(
        [
            *[
                "bench",
                "--rate",
                "2.5",
                "--duration",
                "1.5m",
                "--warm-up",
                "500ms",
                "--api",
                "websocket",
            ],
            *("--input-tokens", "lognormal:400:0.6:2000", "--header", "X-A: b"),
        ]
    )
    made = settings_of(parsed)
    assert (made.rate_per_s, made.duration_s, made.warm_up_s) == (2.5, 90.0, 0.5)
    assert made.input_tokens == Spread(kind=SpreadKind.LOGNORMAL, mean=400.0, sigma=0.6, high=2_000)
    assert made.api_key == "from-the-environment"
    assert made.headers == (("X-A", "b"),)


def test_an_slo_may_have_any_of_its_bounds() -> None:
    assert parse_slo("ttft=200ms, e2e=5s") == Slo(ttft_ms=200.0, e2e_ms=5_000.0)
    with pytest.raises(ConfigError, match="itl"):
        parse_slo("itl=1s")


def test_the_schema_that_is_checked_in_is_that_of_the_reports() -> None:
    assert SCHEMA_FILE.read_text() == to_text(report_schema())


def test_a_report_of_another_schema_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"schema": "millrace.bench/99"}')
    with pytest.raises(ConfigError, match="bench/99"):
        read_report(file)
    file.write_text("{")
    with pytest.raises(ConfigError, match="no report"):
        read_report(file)


def test_a_prompt_holds_the_tokens_that_are_asked_for() -> None:
    with scripted_server() as server:
        run_load(settings(server.url, input_tokens=fixed(64), shared_prefix_tokens=30))
        prompts = [body["messages"][0]["content"].split() for body in server.bodies[-20:]]
    assert all(len(words) + AROUND_TOKENS == pytest.approx(64, abs=2) for words in prompts)
    assert len({tuple(words[:30]) for words in prompts}) == 1
    assert len({tuple(words[30:]) for words in prompts}) == 20
