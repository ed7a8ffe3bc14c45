"""Fixtures of commands that run an engine in their own process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engine.checkpoints_made import write_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command sets these for its process; here they go back."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
