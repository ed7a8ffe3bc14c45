"""Printed and stored figures of the comparison."""

from __future__ import annotations

import msgspec

from benchmarks.engine.ceilings import Ceilings, lines
from benchmarks.peers.loads import LOADS, MILLRACE_ENGINE
from benchmarks.peers.report import MILLRACE, Report, table
from benchmarks.support.figures import Figures
from benchmarks.system.start import import_times_ms

CEILINGS = Ceilings(
    num_threads=2,
    read_bytes_per_s=20e9,
    gemm_flops=1.2e12,
    instruction_flops=0.0,
    weight_bytes=164_000_000,
    batch_1_tokens_per_s=122.0,
    gemm_only_ms={1: 10.0, 8: 11.0, 32: 16.0},
)


def _figures(tokens_per_s: float) -> Figures:
    return Figures(
        tokens_per_s=tokens_per_s, ttft_p50_ms=1, ttft_p99_ms=2, itl_p50_ms=3, itl_p99_ms=4
    )


def test_ratios_are_of_millrace_over_each_other_system() -> None:
    report = Report(ceilings=CEILINGS)
    report.add(LOADS[2].name, MILLRACE, _figures(900.0))
    report.add(LOADS[2].name, "other", _figures(300.0))
    report.add(LOADS[2].name, MILLRACE_ENGINE, _figures(1000.0))
    report.failures["broken"] = "it did not start"
    assert report.ratios() == {LOADS[2].name: {"other": 3.0, MILLRACE_ENGINE: 0.9}}
    text = "\n".join(table(LOADS[2], report))
    assert "3.00x" in text
    assert "linear maps alone: 2000 tokens/s" in text
    assert "over the 16.00 ms of these: 0.19x" in text
    kept = msgspec.json.decode(msgspec.json.encode(report.content()))
    assert kept["ratios"] == report.ratios()
    assert kept["ceilings"]["gemm_only_ms"]["32"] == 16.0
    assert kept["failures"] == {"broken": "it did not start"}


def test_without_millrace_there_are_no_ratios() -> None:
    report = Report(ceilings=CEILINGS)
    report.add(LOADS[0].name, "other", _figures(300.0))
    assert report.ratios() == {LOADS[0].name: {}}
    assert "reading all weights once a token: 122 tokens/s" in "\n".join(table(LOADS[0], report))
    assert any("20.0 GB/s" in line for line in lines(CEILINGS))


def test_import_times_are_added_up_by_package() -> None:
    own_ms, cumulative_ms = import_times_ms(
        [
            "import time: self [us] | cumulative | imported package",
            "import time:      1500 |       1500 |     torch._C",
            "import time:       500 |       2000 |   torch",
            "import time:       100 |       2100 | millrace.engine.step.engine",
            "a line of the program",
        ]
    )
    assert own_ms == {"torch": 2.0, "millrace": 0.1}
    assert cumulative_ms == {"millrace.engine.step.engine": 2.1}
