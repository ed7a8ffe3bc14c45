"""What ``millrace bench`` does once its arguments are read."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.report.compare import render_comparison
from bench.report.page import render_page
from bench.report.report import read_report, write_file, write_report
from bench.report.table import render
from bench.runner import run_load
from bench.settings import Settings


def measure(
    settings: Settings, *, json_file: Path | None, html_file: Path | None, samples: bool
) -> int:
    """Run the load and write what was asked for; 0 if a request was answered well, else 1."""
    report = run_load(settings, keep_samples=samples, progress=sys.stderr.isatty())
    sys.stdout.write(render(report))
    if json_file is not None:
        write_report(report, json_file)
    if html_file is not None:
        write_file(html_file, render_page(report).encode())
    return 0 if report.requests.num_succeeded else 1


def compare(before: Path, after: Path) -> int:
    """Print how two reports differ."""
    sys.stdout.write(render_comparison(read_report(before), read_report(after)))
    return 0
