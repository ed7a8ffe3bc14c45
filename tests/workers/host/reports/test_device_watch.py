"""Watch of a CUDA device's driver, with a stand-in for the driver's library."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.registry.served import ServedModel
from millrace.workers.host.reports.device_watch import DeviceReading, DeviceWatch
from tests.workers.scripted import bench


class _NvmlError(Exception):
    """Stand-in for pynvml's error."""


class _Nvml:
    """Stand-in for the driver's library; ``missing`` is the call that fails."""

    NVMLError = _NvmlError

    def __init__(self, missing: str = "") -> None:
        self.missing = missing
        self.asked: list[str] = []

    def _may_fail(self, name: str) -> None:
        if name == self.missing:
            raise _NvmlError("Driver Not Loaded")

    def nvmlInit(self) -> None:
        self._may_fail("init")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=3 << 30, total=80 << 30)

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA Something"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        self._may_fail("rates")
        return SimpleNamespace(gpu=75, memory=10)


@pytest.mark.parametrize("uuid", ["0123-45", "GPU-0123-45"])
async def test_a_device_is_found_by_its_uuid(monkeypatch: pytest.MonkeyPatch, uuid: str) -> None:
    nvml = _Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    reading = await DeviceWatch(lambda: uuid).read()
    assert reading == DeviceReading("NVIDIA Something", 0.75, 3 << 30, 80 << 30)
    assert nvml.asked == ["GPU-0123-45"]


@pytest.mark.parametrize("missing", ["init", "rates", "library"])
async def test_without_library_or_driver_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    nvml = None if missing == "library" else _Nvml(missing)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    watch = DeviceWatch(lambda: "0123")
    assert [await watch.read() for _ in range(3)] == [DeviceReading()] * 3
    assert caplog.text.count("the device cannot be watched") == 1


async def test_a_worker_without_a_cuda_device_never_asks(
    demo: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    async with bench(demo, sample_interval_s=1.0) as b:
        await b.settle(1.0)
        (sample,) = await b.samples()
        assert (sample.device_name, sample.device_share, sample.device_memory_bytes) == ("", 0.0, 0)


async def test_a_sample_shows_the_device(
    demo: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _Nvml())
    async with bench(demo, sample_interval_s=60.0) as b:
        b.engine.device_uuid = "0123"
        await b.worker._status.sample()
        (sample,) = await b.samples()
        assert (sample.device_name, sample.device_share) == ("NVIDIA Something", 0.75)
        assert sample.device_memory_bytes < sample.device_memory_total_bytes == 80 << 30
