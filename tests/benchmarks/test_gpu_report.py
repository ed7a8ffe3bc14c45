"""Report of the GPU benchmark: loads, ideals, busy shares and goals."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from benchmarks.gpu.busy import busy_of
from benchmarks.gpu.loads import (
    Prompted,
    head_flops,
    ideal,
    kv_bytes_per_token,
    linear_flops_per_token,
    nano_load,
    prefill_flops,
    thousand_load,
    weight_bytes_per_step,
    write_config,
)
from benchmarks.gpu.report import (
    KERNELS,
    LLAMA_8B,
    NANO,
    QWEN_06B,
    Ceilings,
    Report,
    Row,
    RunSettings,
    decode,
    goals_of,
    summary,
    table,
)
from benchmarks.gpu.sections import SECTIONS, Item, Section, SectionProcesses, chosen


def test_the_load_is_the_usual_one() -> None:
    load = nano_load(smoke=False, vocab_size=151_936)
    assert len(load.requests) == 256
    assert load.num_output_tokens == 133_966
    lengths = [len(request.prompt) for request in load.requests]
    assert 100 <= min(lengths) <= max(lengths) <= 1024
    assert nano_load(smoke=False, vocab_size=151_936) == load


def test_a_load_has_only_tokens_that_the_model_has() -> None:
    for load in (
        nano_load(smoke=True, vocab_size=7),
        thousand_load(smoke=True, vocab_size=7, seed=1),
    ):
        assert all(token < 7 for request in load.requests for token in request.prompt)


def test_sizes_of_the_models(tmp_path: Path) -> None:
    llama = write_config(tmp_path, LLAMA_8B, tiny=False)
    assert weight_bytes_per_step(llama) == pytest.approx(15.0e9, rel=0.01)
    assert kv_bytes_per_token(llama) == 131_072
    tied = write_config(tmp_path, QWEN_06B, tiny=False)
    # 0.6 billion, whose embedding is read as the head.
    assert weight_bytes_per_step(tied) == pytest.approx(1.19e9, rel=0.01)
    assert linear_flops_per_token(tied) + head_flops(tied) == weight_bytes_per_step(tied)


def test_the_ideal_of_two_requests(tmp_path: Path) -> None:
    """The first request has three tokens to make, the second has one."""
    model = write_config(tmp_path, QWEN_06B, tiny=True)
    ceilings = Ceilings(bytes_per_s=1e9, flops=1e9)
    best = ideal(model, [Prompted((1,) * 5, 3), Prompted((1,) * 7, 1)], ceilings)
    prefill_s = (prefill_flops(model, 5) + prefill_flops(model, 7)) / 1e9
    # Two decode steps of the first alone, with 6 and 7 tokens in its cache.
    decode_bytes = 2 * weight_bytes_per_step(model) + (6 + 7) * kv_bytes_per_token(model)
    assert best.bandwidth_s == pytest.approx(prefill_s + decode_bytes / 1e9)
    assert best.roofline_s >= best.bandwidth_s


def test_busy_is_the_union_of_what_ran() -> None:
    busy = busy_of([(30.0, 40.0), (0.0, 10.0), (5.0, 12.0), (13.0, 20.0), (14.0, 15.0)])
    assert busy.busy_s == pytest.approx((12 + 7 + 10) / 1e6)
    assert busy.span_s == pytest.approx(40e-6)
    assert busy.late_s == pytest.approx(10e-6)  # not the gap from 12 to 13
    with pytest.raises(ValueError, match="nothing that ran"):
        busy_of([])


def report(*rows: Row, smoke: bool = False) -> Report:
    return Report(command=[], smoke=smoke, seed=0, begun_utc="", rows=list(rows))


def test_goals_are_judged_by_share_or_value(tmp_path: Path) -> None:
    fast = Row(section=LLAMA_8B, name=decode(1), value=4.0, unit="ms", ceiling=3.5, share=0.875)
    slow = Row(section=QWEN_06B, name=NANO, value=23_000.0, unit="tokens/s", share=0.6)
    failed = Row(section=KERNELS, name="swiglu", failure="WrongResultError: the error is inf")
    judged = report(fast, slow, failed)
    text = "\n".join(table(judged))
    assert ">= 85% of the ceiling: met; <= 4.1 ms: met" in text
    assert ">= 24,000 tokens/s: missed" in text
    assert "failed" in text
    assert summary(judged) == "3 goals, 2 met; failed: kernels: swiglu"
    judged.save(tmp_path / "deep" / "report.json")
    saved = msgspec.json.decode((tmp_path / "deep" / "report.json").read_bytes())
    assert [goal["met"] for goal in saved["goals"]] == [True, True, False]
    assert not (tmp_path / "deep" / "report.json.partial").exists()


def test_a_smoke_run_is_not_judged() -> None:
    row = Row(section=LLAMA_8B, name=decode(1), value=4.0, unit="ms", share=0.9)
    text = "\n".join(table(report(row, smoke=True)))
    assert ">= 85% of the ceiling; <= 4.1 ms" in text
    assert "met" not in text


def test_a_goal_without_a_figure_is_missed() -> None:
    for goal in goals_of(LLAMA_8B, decode(1)):
        assert not goal.met(None, None)


def test_sections_are_chosen_by_the_beginning_of_their_names() -> None:
    assert chosen([]) == list(SECTIONS)
    names = [section.name for section in chosen(["qwen", "abl"])]
    assert names == ["ceilings", "qwen3-0.6b", "qwen3-8b", "ablation"]
    with pytest.raises(ValueError, match="nothing"):
        chosen(["nothing"])


@pytest.mark.parametrize(
    ("module", "reason"), [("no_such_module", "ModuleNotFoundError"), ("endless", "ended after")]
)
def test_a_section_that_fails_or_hangs_is_reported(
    module: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if module == "endless":
        # The time is over before its process has even begun.
        monkeypatch.setattr("benchmarks.gpu.sections._GRACE_S", 0.0)
    kept: list[Item] = []
    begin_s = time.monotonic()
    processes = SectionProcesses(RunSettings(smoke=False, seed=0))
    processes.run(Section("odd", module, 30), 30.0 * (module != "endless"), None, [], kept.append)
    assert time.monotonic() - begin_s < 60
    rows = [item for item in kept if isinstance(item, Row)]
    assert len(rows) == 1
    assert rows[0].section == "odd"
    assert reason in rows[0].failure
