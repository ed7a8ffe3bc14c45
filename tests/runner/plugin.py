"""Extends pytest by the slow tier, the order of the tests, and CPU times by file."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator
from typing import Any

import msgspec
import pytest

from tests.runner.cpu_times import Meter, Seconds, by_room
from tests.runner.measured import Measured, measured_run
from tests.runner.scheduling import RoomScheduling, longest_first, refuse_namesakes
from tests.runner.tiers import SHARES, SlowShare, slow_reason, taken

_MOST_ROOMS = 60


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("millrace", "the suite's own options")
    group.addoption(
        "--slow",
        choices=("all", "some", "none"),
        default="all",
        help="slow tests to run: all (the default), none, or some: those in the import closure of "
        "the change and a tenth of the others, by the commit's hash",
    )
    group.addoption(
        "--base",
        default=None,
        help="the commit since which files count as changed (default: where the branch left "
        "origin/main, or else the newest commit that is over six hours old)",
    )
    group.addoption(
        "--cpu-times", action="store_true", help="print the CPU seconds of each file of tests"
    )
    group.addoption(
        "--save-measured",
        action="store_true",
        help="write the measured times to tests/runner/measured.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Run(config), "millrace-run")


def _tell_coverage(node_id: str) -> None:
    """Have coverage record all code executed from now on as this test's, here and in processes that
    start later (see ``tests/runner/proof.py``)."""
    import coverage  # it takes 0.3 s, which other runs save

    os.environ["TEST_CONTEXT"] = node_id
    current = coverage.Coverage.current()
    if current is not None:
        current.switch_context(node_id)


class _Run:
    """Run of the tests, in each of its processes. The first process of pytest-xdist runs no test:
    it decides once, and gathers the measurements of the others."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worker_input: dict[str, Any] | None = getattr(config, "workerinput", None)
        self._measures = config.option.cpu_times or config.option.save_measured
        self._meter = Meter()
        self._times: dict[str, Seconds] = {}
        self._slow: set[str] = set()
        self._num_slow = 0
        self._outside_s = 0.0
        """CPU seconds of starting, importing and collecting, of all processes."""
        self._share: SlowShare | None = None
        if config.option.slow == "some":
            if self._worker_input is None:
                self._share = SlowShare.of_checkout(config.option.base)
            else:
                self._share = SlowShare(**self._worker_input["slow_share"])

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Hand the decision to a process of pytest-xdist."""
        if self._share is not None:
            node.workerinput["slow_share"] = dataclasses.asdict(self._share)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> RoomScheduling:
        return RoomScheduling(config, log)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        refuse_namesakes(items)
        slow = {item.nodeid for item in items if slow_reason(item) is not None}
        self._num_slow = len(slow)
        kept = slow
        if self._share is not None:
            kept = taken(slow, self._share, Measured.read())
        elif self._config.option.slow == "none":
            kept = set()
        left_out = [item for item in items if item.nodeid in slow - kept]
        items[:] = [item for item in items if item.nodeid not in slow - kept]
        self._config.hook.pytest_deselected(items=left_out)
        self._slow = kept
        if self._worker_input is not None:  # one of several processes
            items[:] = longest_first(items, Measured.read())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        if "COVERAGE_PROCESS_START" in os.environ:
            _tell_coverage(item.nodeid)
        if not self._measures:
            return (yield)
        self._outside_s += self._meter.lap().cpu_s
        result = yield
        self._times[item.nodeid] = self._meter.lap()
        return result

    def pytest_sessionfinish(self) -> None:
        output: dict[str, Any] | None = getattr(self._config, "workeroutput", None)
        if output is not None:
            output["run"] = msgspec.to_builtins(
                {
                    "times": self._times,
                    "slow": sorted(self._slow),
                    "num_slow": self._num_slow,
                    "outside_s": self._outside_s + self._meter.lap().cpu_s,
                }
            )

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Take the measurements of a process of pytest-xdist; a crashed process has none."""
        run = getattr(node, "workeroutput", {}).get("run")
        if run is not None:
            self._times |= {node_id: Seconds(*seconds) for node_id, seconds in run["times"].items()}
            self._slow |= set(run["slow"])
            self._num_slow = run["num_slow"]
            self._outside_s += run["outside_s"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        say = terminalreporter.write_line
        if self._share is not None:
            say(
                f"Slow tier: {len(self._slow)} of {self._num_slow} tests were chosen: the share "
                f"{self._share.share} of {SHARES}, and tests that the change affects."
            )
        if self._config.option.cpu_times:
            self._print_times(say)
        if self._config.option.save_measured:
            measured_run(self._times, self._slow).write()

    def _print_times(self, say: Any) -> None:
        rooms = sorted(by_room(self._times).items(), key=lambda room: -room[1].cpu_s)
        total_s = sum(seconds.cpu_s for _, seconds in rooms)
        say(f"{'CPU s':>8} {'wall s':>8}  file of tests")
        for room, seconds in rooms[:_MOST_ROOMS]:
            say(f"{seconds.cpu_s:8.1f} {seconds.wall_s:8.1f}  {room}")
        say(f"{total_s:8.1f} {'':8}  all {len(rooms)} files")
        say(f"{self._outside_s:8.1f} {'':8}  starting, importing and collecting")
