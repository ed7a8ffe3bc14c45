"""``make setup`` notices an environment that was copied from another checkout."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.repository import ROOT


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a checkout with a ready environment, as far as ``make`` looks at it."""
    made = tmp_path / "first"
    scripts = made / ".venv" / "bin"
    scripts.mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, made)
    (scripts / "millrace").write_text(f"#!{scripts}/python\n", encoding="utf-8")
    (made / ".venv" / ".ready").touch()
    return made


def _set_up(checkout: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "setup", "PYTHON=false"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


def test_an_environment_of_this_checkout_is_ready(checkout: Path) -> None:
    done = _set_up(checkout)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_copied_environment_is_refused(checkout: Path) -> None:
    second = checkout.with_name("second")
    shutil.copytree(checkout, second)
    refused = _set_up(second)
    assert refused.returncode != 0
    assert f"{second}/.venv was made for another checkout" in refused.stderr
    assert "rm -rf .venv" in refused.stderr
    shutil.rmtree(second / ".venv")
    # Without it the environment is made: by a Python that does nothing here.
    assert "another checkout" not in _set_up(second).stderr
