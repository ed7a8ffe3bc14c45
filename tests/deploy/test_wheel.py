"""Installed package: it owns one name, and files in the working directory do not shadow it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import psutil
import pytest

from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.repository import PACKAGES, ROOT
from tests.support.system import System

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(reason="builds a wheel and starts a system from it"),
]

# A user's own modules, named as packages of ours and as ones of Python that our processes import.
_NAMESAKES = (*PACKAGES, "millrace", "asyncio", "json", "queue", "uuid", "torch", "msgspec")

_LLM = """
import sys
import millrace
from millrace.engine import LLM, SamplingParams

assert millrace.__file__.startswith(sys.argv[1]), "not what is installed"
with LLM(sys.argv[2], device="cpu", dtype="bfloat16", num_threads=1) as llm:
    for output in llm.generate(["What is TTFT?"], SamplingParams(temperature=0, max_tokens=6)):
        print(len(output.token_ids))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the contents of the wheel, as pip installs them beside other
    distributions."""
    source = tmp_path_factory.mktemp("source")
    for name in (*PACKAGES, "millrace"):
        unwanted = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=unwanted)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", "."],
        cwd=source,
        check=True,
        timeout=100,
    )
    [wheel] = (source / "dist").glob("millrace-*.whl")
    target = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(target)
    return target


def test_the_wheel_has_one_package_of_all_that_is_in_the_repository(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if path.suffix != ".dist-info"}
    assert names == {"millrace"}
    for package in PACKAGES:
        ours = {path.relative_to(ROOT) for path in (ROOT / package).rglob("*.py")}
        theirs = {path.relative_to(installed / "millrace") for path in installed.rglob("*.py")}
        assert ours <= theirs, package


def test_the_engine_is_a_library(installed: Path, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny")
    done = subprocess.run(
        [sys.executable, "-P", "-c", _LLM, str(installed), str(checkpoint)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) <= 6


def test_installed_package_serves_in_a_folder_full_of_namesakes(
    installed: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    for name in _NAMESAKES:
        (folder / f"{name}.py").write_text("raise SystemExit('the user\\'s own module ran')\n")
    system = System(
        tmp_path / "data",
        environment={"PYTHONPATH": str(installed)},
        folder=folder,
    )
    system.start()
    try:
        answer = httpx.post(
            f"{system.http}/v1/chat/completions",
            json={
                "model": "demo",
                "messages": [{"role": "user", "content": "What is TTFT?"}],
                "response_format": {"type": "json_object"},
                "max_tokens": 4,
            },
            timeout=30.0,
        )
        assert answer.status_code == 200, answer.text
        for part in ("telemetry-1", "scheduler-1", "worker-1", "gateway-1"):
            process = psutil.Process(system.pid(part))
            assert "-P" in process.cmdline()
            assert process.environ()["PYTHONPATH"] == str(installed), "not a checkout's"
    finally:
        assert system.stop() == 0
