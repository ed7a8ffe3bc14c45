"""Steps of big models over several devices: the arithmetic, and that the page has its figures."""

from __future__ import annotations

import re

import msgspec
import pytest

from benchmarks.parallel.formulas import (
    GROUPS,
    LLAMA_70B,
    LLAMA_405B,
    Device,
    Group,
    head_gather,
    kv_tokens,
    largest,
    step_of,
)
from benchmarks.parallel.steps import FILE, Results, results, tables
from benchmarks.support.command import RESULTS
from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "parallel-steps.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def found() -> Results:
    return results()


def test_the_models_are_as_large_as_they_are_called() -> None:
    assert LLAMA_70B.num_parameters == pytest.approx(70.55e9, rel=1e-3)
    assert LLAMA_405B.num_parameters == pytest.approx(405.85e9, rel=1e-3)
    assert LLAMA_70B.kv_bytes_per_token == 327_680
    assert LLAMA_405B.kv_bytes_per_token == 516_096


def test_a_step_of_one_by_hand() -> None:
    step = step_of(Group(LLAMA_70B, 4, 1), 1, 1_024)
    read_bytes = 2 * (70.55e9 - 128_256 * 8_192) / 4
    assert step.weights_ms == pytest.approx(read_bytes / 4.3e12 * 1e3, rel=1e-3)
    assert step.kv_ms == pytest.approx(1_024 * 327_680 / 4 / 4.3e12 * 1e3)
    all_reduce_us = 6.6 + 6 * 0.6 + 1.5 * 16_384 / 450e9 * 1e6
    gather_us = 6.6 + 3 * 0.6 + 0.75 * 4 * 128_256 / 450e9 * 1e6
    assert step.exchange_ms == pytest.approx((160 * all_reduce_us + gather_us) / 1e3)
    assert step.tpot_ms == pytest.approx(step.weights_ms + step.kv_ms + step.exchange_ms)


def test_gather_times_of_a_head_by_hand() -> None:
    gather = head_gather(Group(LLAMA_70B, 4, 1), 256, 1_024)
    ring_us = 6.6 + 3 * 0.6
    assert gather.logits_us == pytest.approx(ring_us + 0.75 * 4 * 256 * 128_256 / 450e9 * 1e6)
    # Four ranks have 64 candidates of eight bytes for each row.
    assert gather.candidates_us == pytest.approx(ring_us + 0.75 * 8 * 256 * 4 * 64 / 450e9 * 1e6)
    saved_ms = (gather.logits_us - gather.candidates_us) / 1e3
    step = step_of(Group(LLAMA_70B, 4, 1), 256, 1_024)
    assert gather.saved_share == pytest.approx(saved_ms / step.tpot_ms)


def test_many_rows_are_bound_by_products() -> None:
    step = step_of(GROUPS[0], 1_024, 1)
    flop = 2 * 1_024 * (70.55e9 - 128_256 * 8_192) / 4
    assert step.weights_ms == pytest.approx(flop / 788e12 * 1e3, rel=1e-3)


def test_stages_are_one_behind_the_other() -> None:
    """Two stages have half the layers each; the last also has the head, for which the first
    waits."""
    whole, halves = Group(LLAMA_405B, 8, 1), Group(LLAMA_405B, 8, 2)
    one, parts = step_of(whole, 1, 1_024), step_of(halves, 1, 1_024)
    assert parts.weights_ms == pytest.approx(one.weights_ms)
    hops_us = 2 * 22.4 + 2 * 16_384 / 8 / 50e9 * 1e6
    hops_us += 6.6 + 7 * 0.6 + 7 / 8 * 2 * 16_384 / 450e9 * 1e6
    assert (parts.exchange_ms - one.exchange_ms) * 1e3 == pytest.approx(hops_us)
    slow = Device(network_s=0.0, network_bytes_per_s=1e18)
    two = step_of(halves, 2, 1_024, slow)
    head_ms = 2 * 128_256 * 16_384 / 8 / 4.3e12 * 1e3
    assert two.tpot_ms - (two.weights_ms + two.kv_ms + two.exchange_ms) == pytest.approx(
        head_ms, rel=0.1
    )


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("context", [1_024, 4_096])
def test_the_largest_batch_is_the_largest(group: Group, context: int) -> None:
    found = largest(group, context)
    batch = found.step.batch
    assert step_of(group, batch, context).tpot_ms <= 40.0
    assert batch * context <= kv_tokens(group)
    is_full = (batch + 1) * context > kv_tokens(group)
    assert found.bound == ("memory" if is_full else "TPOT")
    assert is_full or step_of(group, batch + 1, context).tpot_ms > 40.0


def test_the_simulation_agrees(found: Results) -> None:
    assert len(found.simulated) == 6
    for one in found.simulated:
        assert one.simulated_ms == pytest.approx(one.derived_ms, rel=0.02)
        # A line from the least to the most slots is above a corner.
        assert one.derived_ms * 0.99 <= one.with_most_slots_ms <= one.derived_ms * 1.08


def test_the_page_has_the_tables_that_the_command_prints(found: Results) -> None:
    made = list(tables(found))
    for title, lines in made:
        whole = f"{title}:\n\n" + "\n".join(lines) + "\n"
        assert whole in PAGE, "run: python -m benchmarks.parallel --only steps --save"
    section = PAGE.split("### The steps")[1]
    shown = re.findall(r"^\|.*$", section, re.MULTILINE)
    assert shown == [line for _, lines in made for line in lines]


def test_what_is_saved_is_what_is_computed(found: Results) -> None:
    saved = msgspec.json.decode((RESULTS / FILE).read_bytes(), type=Results)
    assert saved == found


def test_the_page_says_what_it_reckons_with() -> None:
    device = Device()
    for figure in (
        f"{device.bytes_per_s / 1e12:g} TB/s",
        f"{device.flop_per_s / 1e12:g} TFLOP/s",
        f"{device.nvlink_bytes_per_s / 1e9:g} GB/s",
        f"{device.network_bytes_per_s / 1e9:g} GB/s",
        f"{device.ring_base_s * 1e6:g} µs + {device.ring_hop_s * 1e6:g} µs a hop",
    ):
        assert figure in PAGE
