"""Alerts, boards, their document and scrape settings name existing metrics."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from millrace.cli.local.scrape_targets import FILE_NAME
from millrace.runtime.alerts.rules import RULES, SCHEDULER_SILENT
from millrace.runtime.metrics_server import check_exposure, exposition, render
from millrace.runtime.settings import load_config
from millrace.telemetry.metrics import DEPRECATED
from millrace.telemetry.store.declaration import load_declaration, load_joint_views
from tests.deploy.grafana import BOARDS, FOLDER, read_board, targets
from tests.deploy.known_metrics import Known, known_metrics, registries
from tests.deploy.promql import SyntaxProblemError, named_in
from tests.support.repository import ROOT
from tests.support.scraped import exemplars

PROMETHEUS = ROOT / "deploy" / "prometheus"
DOCUMENT = ROOT / "docs" / "monitoring.md"
METRICS_PAGE = ROOT / "docs" / "metrics.md"
# What Prometheus itself adds to a sample, and what our file of targets and our relabelling do.
_TARGET_LABELS = {"instance", "job", "part", "name"}
_ELSEWHERE = {"up", "process_resident_memory_bytes"}


def _rules() -> list[dict[str, Any]]:
    tree = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
    return [rule for group in tree["groups"] for rule in group["rules"]]


def _expressions() -> Iterator[tuple[str, str]]:
    """Yield the expressions of rules and panels, each with its owner's name."""
    for rule in _rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for name, _, target in targets("prometheus"):
        yield name, target["expr"]


@pytest.fixture(scope="module")
def rules() -> list[dict[str, Any]]:
    return _rules()


async def _known() -> dict[str, Known]:
    return {one.name: one for part in (await known_metrics()).values() for one in part}


async def test_every_expression_names_what_there_is() -> None:
    known = (await _known()).values()
    samples = {sample: one for one in known for sample in one.samples}
    records = {rule["record"]: rule["expr"] for rule in _rules() if "record" in rule}
    for who, expression in _expressions():
        metrics, labels = named_in(expression)
        unknown = metrics - samples.keys() - records.keys() - _ELSEWHERE
        assert not unknown, f"{who} names {unknown}"
        there = {label for metric in metrics & samples.keys() for label in samples[metric].labels}
        assert labels <= there | _TARGET_LABELS | {"le"}, f"{who} names {labels - there}"


async def test_histograms_are_asked_at_bounds_that_they_have() -> None:
    from millrace.runtime.histogram import FIRST_TOKEN_S

    for _, expression in _expressions():
        for metric, bound in re.findall(r'(\w+)_bucket\{le="([^"]+)"\}', expression):
            assert metric == "millrace_time_to_first_token_seconds"
            assert bound in map(str, FIRST_TOKEN_S)


def test_rules_that_rate_counters_do_so_and_gauges_are_not_rated(
    rules: list[dict[str, Any]],
) -> None:
    for rule in rules:
        for metric in re.findall(r"(?:rate|increase)\((\w+)", rule["expr"]):
            assert metric.endswith(("_total", "_bucket", "_count", "_sum")), rule
        for metric in re.findall(r"\b(millrace_\w+_total)\b", rule["expr"]):
            is_rated = re.search(rf"(rate|increase|absent)\({metric}\b", rule["expr"])
            assert is_rated, f"{metric} is compared as it is"


@pytest.mark.parametrize(
    "broken", ["sum(rate(x[5m])", "x)", "x[5m", "rate(x) >", "noun(x)", "", "x ? y", "[5m]"]
)
def test_what_is_no_expression_is_told_apart(broken: str) -> None:
    with pytest.raises(SyntaxProblemError):
        named_in(broken)


def test_alerts_name_their_receiver_and_the_remedy(rules: list[dict[str, Any]]) -> None:
    alerts = [rule for rule in rules if "alert" in rule]
    names = [rule["alert"] for rule in alerts]
    assert len(set(names)) == len(names) > 20
    described = re.findall(r"^\| `(Millrace\w+)` \|", DOCUMENT.read_text(), re.MULTILINE)
    assert sorted(described) == sorted(names)
    for rule in alerts:
        assert rule["labels"]["severity"] in {"page", "ticket"}, rule
        assert rule["annotations"].keys() == {"summary", "description"}, rule
        used = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        kept = named_in(rule["expr"]).labels
        is_grouped = " by (" in rule["expr"] or "sum(" in rule["expr"]
        assert used <= (kept if is_grouped else used), f"{rule['alert']} lost {used - kept}"


def test_what_the_operations_page_tells_is_what_prometheus_would(
    rules: list[dict[str, Any]],
) -> None:
    """The names, times, bounds, severities and words are those of the document."""
    units = {"s": 1.0, "m": 60.0}
    alerts = {rule["alert"]: rule for rule in rules if "alert" in rule}
    text = DOCUMENT.read_text()
    for name, rule in RULES.items():
        row = f"| `{name}` | {rule.severity} | {rule.meaning} | {rule.advice} |"
        assert row in text, name
        if name == SCHEDULER_SILENT:
            continue
        alert = alerts[name]
        held = alert.get("for", "0s")
        assert rule.for_s == float(held[:-1]) * units[held[-1]], name
        assert rule.severity == alert["labels"]["severity"]
        if rule.bound:
            bounds = re.findall(r"[<>] (?:([\d.]+) \* )?([\d.e]+)", alert["expr"])
            told = {float(times or 1) * float(number) for times, number in bounds}
            assert rule.bound == pytest.approx(min(told - {0.0})), name


async def test_the_document_has_every_metric_with_its_meaning() -> None:
    known = await known_metrics()
    text = METRICS_PAGE.read_text()
    rows = re.findall(r"^\| `millrace_.+\|$", text, re.MULTILINE)
    wanted = [_line(one) for part in known.values() for one in part]
    assert sorted(rows) == sorted(wanted)


def _line(one: Known) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    return f"| `{one.name}` | {one.kind} | {labels} | {one.what} |"


def test_the_boards_are_as_they_would_be_made() -> None:
    made = subprocess.run(
        [sys.executable, str(FOLDER / "generate.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr


def test_boards_are_whole(rules: list[dict[str, Any]]) -> None:
    assert [file.stem for file in BOARDS] == ["capacity", "cost", "latency", "reliability"]
    sources = _provisioned("datasources", "datasources")
    known = {source["uid"]: source["type"] for source in sources}
    for board in map(read_board, BOARDS):
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {
                (place["x"] + x, place["y"] + y)
                for x in range(place["w"])
                for y in range(place["h"])
            }
            assert not taken & cells, panel["title"]
            assert place["x"] + place["w"] <= 24
            taken |= cells
            if panel["type"] != "row":
                assert panel["description"], panel["title"]
                source = panel["datasource"]
                assert known[source["uid"]] == source["type"]


def test_compose_provisions_what_the_boards_need() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    services = compose["services"]
    grafana = services["grafana"]
    mounts = dict(_split_mount(volume) for volume in grafana["volumes"])
    (provider,) = _provisioned("dashboards", "providers")
    assert provider["options"]["path"] == mounts["./deploy/grafana/boards"]
    assert mounts["./deploy/grafana/provisioning"] == "/etc/grafana/provisioning"
    for source in _provisioned("datasources", "datasources"):
        host = source["jsonData"].get("host") or source["url"].split("//")[1].split(":")[0]
        assert host in services
        assert host in grafana["depends_on"]
    clickhouse, _ = _provisioned("datasources", "datasources")
    assert clickhouse["type"] in grafana["environment"]["GF_PLUGINS_PREINSTALL_SYNC"]
    assert clickhouse["jsonData"]["defaultDatabase"] == load_config(None, {}).clickhouse.database
    name = clickhouse["secureJsonData"]["password"].removeprefix("$")
    assert grafana["environment"][name] == services["clickhouse"]["environment"][name]


async def test_user_of_boards_reads_all_tables_but_transcripts() -> None:
    text = (ROOT / "deploy" / "clickhouse" / "reader.xml").read_text()
    granted = set(re.findall(r"GRANT SELECT ON millrace\.(\w+)<", text))
    assert text.count("GRANT") == len(granted)
    declared = load_declaration().values()
    tables = {table.name for table in declared}
    asked = tables & _named_in("queries", r"\b(?:FROM|JOIN) (\w+)")
    assert asked >= {"requests", "deliveries"}
    assert asked <= granted
    readable = [table for table in declared if table.view and table.name != "transcripts"]
    of_tables = {name for table in readable for name in (table.name, table.view)}
    assert granted == of_tables | load_joint_views().keys()
    assert "<readonly>2</readonly>" in text


def test_prometheus_finds_the_parts_of_compose() -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    [found] = job["dns_sd_configs"]
    ours = {name for name, service in compose["services"].items() if "build" in service}
    assert set(found["names"]) == ours
    for name in ours:
        environment = compose["services"][name].get("environment", {})
        settings = {k: v for k, v in environment.items() if k.startswith("MILLRACE_")}
        metrics = load_config(None, settings).metrics
        assert (metrics.host, metrics.port) == ("0.0.0.0", found["port"])
        check_exposure(metrics)
        # What the parts demand is what Prometheus shows them.
        [shown] = compose["services"]["prometheus"]["configs"]
        assert metrics.token == compose["configs"][shown["source"]]["content"]
        token_file = job["authorization"]["credentials_file"]
        assert shown["target"] == f"/etc/prometheus/{token_file}"
    mounted = dict(map(_split_mount, compose["services"]["prometheus"]["volumes"]))
    for file in config["rule_files"]:
        assert mounted[f"./deploy/prometheus/{file}"] == f"/etc/prometheus/{file}"


def test_prometheus_finds_the_parts_of_a_local_system() -> None:
    config = yaml.safe_load((PROMETHEUS / "local.yml").read_text())
    [job] = config["scrape_configs"]
    [file] = job["file_sd_configs"][0]["files"]
    assert (PROMETHEUS / file).resolve() == ROOT / "data" / "run" / FILE_NAME
    assert all((PROMETHEUS / rules).is_file() for rules in config["rule_files"])
    rules = yaml.safe_load((PROMETHEUS / "alerts.yml").read_text())
    assert f'job="{job["job_name"]}"' in str(rules)


_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


@_promtool
async def test_prometheus_own_tool_agrees_with_the_names_of_metrics() -> None:
    for part, registry in (await registries()).items():
        lines = render(registry).decode().splitlines(keepends=True)
        current = "".join(line for line in lines if DEPRECATED not in line)
        checked = subprocess.run(
            ["promtool", "check", "metrics"],
            input=current,
            capture_output=True,
            text=True,
            check=False,
        )
        assert checked.stdout + checked.stderr == "", part


async def test_every_part_can_be_told_in_openmetrics() -> None:
    accept = [(b"accept", b"application/openmetrics-text")]
    for part, registry in (await registries()).items():
        body, _ = exposition(registry, accept)
        assert exemplars(body.decode()) == {}, part


@_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "rules", "alerts.yml"],
        ["check", "config", "local.yml"],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "alerts_test.yml"],
    ],
)
def test_prometheus_own_tool_agrees(arguments: list[str], tmp_path: Path) -> None:
    folder = shutil.copytree(PROMETHEUS, tmp_path / "deploy" / "prometheus")
    (folder / "metrics-token").write_text("mounted beside them, as in docker-compose.yml")
    checked = subprocess.run(
        ["promtool", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def _named_in(folder: str, pattern: str) -> set[str]:
    files = (ROOT / "telemetry" / folder).rglob("*.sql")
    return {name for file in files for name in re.findall(pattern, file.read_text())}


def _provisioned(folder: str, key: str) -> list[dict[str, Any]]:
    [file] = (FOLDER / "provisioning" / folder).glob("*.yml")
    entries: Mapping[str, Any] = yaml.safe_load(file.read_text())
    found: list[dict[str, Any]] = entries[key]
    return found


def _split_mount(volume: str) -> tuple[str, str]:
    source, target, *_ = volume.split(":")
    return source, target
