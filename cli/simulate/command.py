"""Execution of ``millrace simulate`` after its arguments are parsed."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from millrace.bench.report.report import write_file, write_report
from millrace.schemas.errors import ConfigError
from millrace.schemas.jobs import PUBLIC_MODEL_AUTO
from millrace.simulation.report.measure import policy_report, report_of
from millrace.simulation.report.page import render_page
from millrace.simulation.report.table import render
from millrace.simulation.settings import Policy, SimulationSettings
from millrace.simulation.traces.trace import TraceRequest
from millrace.simulation.world import simulate

_GC_THRESHOLDS = (50_000, 50, 100)


def compare(
    trace: Sequence[TraceRequest],
    settings: SimulationSettings,
    policies: Sequence[Policy],
    *,
    json_file: Path | None,
    html_file: Path | None,
) -> int:
    """Run the trace under each policy, print the results and write the reports.

    Returns 1 if requests were unfinished. Raises ConfigError.
    """
    models = sorted({request.model for request in trace})
    if PUBLIC_MODEL_AUTO in models:
        raise ConfigError("a trace names the models that answered, none of which is auto")
    settings.check(models)
    # The scheduler's process sets the same thresholds: most objects are freed by reference counts.
    gc.set_threshold(*_GC_THRESHOLDS)
    reports = []
    with _quiet():
        for policy in policies:
            begun_s = time.perf_counter()
            result = simulate(trace, settings, policy)
            took_s = time.perf_counter() - begun_s
            if sys.stderr.isatty():
                print(
                    f"{policy.name}: {result.end_s:,.0f} s simulated in {took_s:,.1f} s",
                    file=sys.stderr,
                )
            reports.append(policy_report(policy.name, result, settings))
    report = report_of(trace, settings, reports)
    sys.stdout.write(render(report))
    if json_file is not None:
        write_report(report, json_file)
    if html_file is not None:
        write_file(html_file, render_page(report).encode())
    return 1 if any(one.overall.num_unfinished for one in report.policies) else 0


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the scheduler's log of losses and refusals, which the report covers."""
    loggers = [logging.getLogger(name) for name in ("scheduler", "bus")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
