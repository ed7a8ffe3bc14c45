"""Energy in joules: readings of counters, and their division among requests and the idle device."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.engine.types import EngineOutput
from millrace.registry.served import ServedModel
from millrace.schemas.frames import FinishReason
from millrace.schemas.records import Attempt, sum_energy
from millrace.workers.host.energy import (
    EnergyMeter,
    EnergyShare,
    NvmlCounter,
    RaplCounter,
    UnreadableCounterError,
)
from tests.workers.scripted import bench

RANGE_UJ = 262_143_328_850


def _zone(root: Path, folder: str, name: str, energy_uj: int) -> Path:
    zone = root / folder
    zone.mkdir(parents=True)
    (zone / "name").write_text(f"{name}\n")
    (zone / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (zone / "energy_uj").write_text(f"{energy_uj}\n")
    return zone


def test_rapl_counts_packages_and_memory_past_their_wrap(tmp_path: Path) -> None:
    package = _zone(tmp_path, "intel-rapl:0", "package-0", RANGE_UJ - 1_000_000)
    memory = _zone(tmp_path, "intel-rapl:0:1", "dram", 5_000_000)
    core = _zone(tmp_path, "intel-rapl:0:0", "core", 7)
    platform = _zone(tmp_path, "intel-rapl:1", "psys", 7)
    counter = RaplCounter(tmp_path)
    begun_j = counter.read_j()
    (package / "energy_uj").write_text("999999")
    (memory / "energy_uj").write_text("8000000")
    for other in (core, platform):
        (other / "energy_uj").write_text("900000000")
    assert counter.read_j() - begun_j == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("file", "text"), [("energy_uj", "no number"), ("name", "core"), ("energy_uj", None)]
)
def test_a_counter_that_cannot_be_read_says_why(
    tmp_path: Path, file: str, text: str | None
) -> None:
    zone = _zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (zone / file).unlink()
    if text is not None:
        (zone / file).write_text(text)
    with pytest.raises(UnreadableCounterError, match="no RAPL counter under"):
        RaplCounter(tmp_path).read_j()


def test_one_that_only_root_may_read_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zone = _zone(tmp_path, "intel-rapl:0", "package-0", 1)

    def refuse(path: Path, *_: object) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UnreadableCounterError, match="may be read by root only"):
        RaplCounter(zone.parent).read_j()


def test_rapl_of_this_machine() -> None:
    root = Path("/sys/class/powercap")
    if not any(root.glob("intel-rapl:*/energy_uj")):
        with pytest.raises(UnreadableCounterError):
            RaplCounter(root).read_j()
        return
    with contextlib.suppress(UnreadableCounterError):  # for root only
        counter = RaplCounter(root)
        assert counter.read_j() <= counter.read_j()


class _NvmlError(Exception):
    """Stand-in for pynvml's error."""


def test_nvml_counts_in_mj_and_says_what_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def total(handle: str) -> int:
        if len(asked) > 1:
            raise _NvmlError("Not Supported")
        asked.append(handle)
        return 12_345

    nvml = SimpleNamespace(
        NVMLError=_NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetTotalEnergyConsumption=total,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    counter = NvmlCounter("0123-45")
    assert (counter.read_j(), counter.read_j()) == (12.345, 12.345)
    assert asked == ["GPU-0123-45"] * 2
    with pytest.raises(UnreadableCounterError, match="Not Supported"):
        counter.read_j()


class _World:
    """Device with power, load and clock set by the test."""

    def __init__(self) -> None:
        self.now_s = self.busy_s = 0.0
        self.joules = 1_000.0
        self.meter = EnergyMeter(self, lambda: self.busy_s, lambda: self.now_s)

    def read_j(self) -> float:
        return self.joules

    def passes(self, seconds: float, watts: float, *busy: tuple[EnergyShare, float]) -> None:
        self.now_s += seconds
        self.joules += seconds * watts
        for share, part in busy:
            self.busy_s += seconds * part
            share.device_us += seconds * part * 1e6
            self.meter.note_device_time(share)


_EVENTS = st.lists(
    st.tuples(
        st.floats(0.001, 5.0),
        st.floats(1.0, 700.0),
        st.lists(st.tuples(st.integers(0, 5), st.floats(0.0, 0.15)), max_size=6),
        st.booleans(),
        st.integers(0, 5),
    ),
    max_size=30,
)


@given(events=_EVENTS)
async def test_shares_and_idle_are_all_that_was_counted(
    events: list[tuple[float, float, list[tuple[int, float]], bool, int]],
) -> None:
    world = _World()
    meter = world.meter
    await meter.read()
    shares = {number: EnergyShare() for number in range(6)}
    ended_j = 0.0
    for seconds, watts, busy, reads, ending in events:
        world.passes(seconds, watts, *((shares[number], part) for number, part in busy))
        if reads:
            await meter.read()
        else:
            joules = meter.settle(shares[ending])
            if joules is not None:
                ended_j += joules
                shares[ending] = EnergyShare()
        given_j = ended_j + sum(share.energy_j for share in shares.values())
        assert meter.charged_j == pytest.approx(given_j)
        total_j = meter.charged_j + meter.idle_j + meter.carried_j
        assert total_j == pytest.approx(meter.counted_j, rel=1e-9, abs=1e-6)
    for _ in range(2):
        world.passes(1.0, 50.0)
        await meter.read()
    assert meter.carried_j == 0.0
    assert meter.counted_j == pytest.approx(world.joules - 1_000.0)
    assert meter.charged_j + meter.idle_j == pytest.approx(meter.counted_j)


async def test_busy_energy_is_shared_and_idle_energy_is_not_charged() -> None:
    world = _World()
    meter = world.meter
    await meter.read()
    world.passes(10.0, 100.0)
    await meter.read()
    long, short = EnergyShare(), EnergyShare()
    # A second of which the device is busy for half at 700 W, and idles for half at 100 W.
    world.passes(1.0, 400.0, (long, 0.375), (short, 0.125))
    await meter.read()
    assert meter.idle_j == pytest.approx(1_050.0)
    assert meter.settle(long) == pytest.approx(350 * 0.75)
    assert meter.settle(short) == pytest.approx(350 * 0.25)


async def test_without_a_counter_nothing_is_said_to_be_zero() -> None:
    meter = EnergyMeter(None, lambda: 1.0, lambda: 1.0)
    await meter.read()
    share = EnergyShare()
    share.device_us = 5.0
    meter.note_device_time(share)
    assert (meter.settle(share), meter.totals) == (None, None)


def test_a_sum_needs_all_of_its_parts() -> None:
    assert sum_energy([1.5, 2.0]) == 3.5
    assert sum_energy([1.5, None]) is None
    assert sum_energy([]) is None


@pytest.mark.parametrize(("before_j", "expected"), [(2.5, 2.5 + 350.0), (None, None)])
async def test_a_record_has_the_joules_of_all_its_attempts(
    demo: ServedModel, tmp_path: Path, before_j: float | None, expected: float | None
) -> None:
    package = _zone(tmp_path, "intel-rapl:0", "package-0", 0)
    before = Attempt(epoch=1, worker_id="gone", started_ns=5, device_us=7, energy_j=before_j)
    async with bench(demo, powercap_path=str(tmp_path)) as b:
        await b.worker.energy.read()
        await b.dispatch(epoch=2, attempts=(before,))
        await b.settle(1.0)
        # No reading of the dispatch's is under way that would find these joules before the step.
        await b.worker.energy.read()
        (package / "energy_uj").write_text("350000000")
        b.engine.step(
            EngineOutput(
                request_id="r1:2",
                token_ids=(20,),
                started=True,
                finish_reason=FinishReason.LENGTH,
                device_us=1_000_000,
            ),
            busy_s=1.0,
        )
        await b.ended()
        (record,) = await b.records()
        assert record.energy_j == (None if expected is None else pytest.approx(expected))
        assert record.device_us == 1_000_007
