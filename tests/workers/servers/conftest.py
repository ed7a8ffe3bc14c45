"""Fixtures of the tests of inference servers."""

from __future__ import annotations

import pytest

from millrace.registry.served import ServedModel
from tests.workers.scripted import served_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Return a model with a context window of 128 tokens, without weights."""
    return served_model(tmp_path_factory.mktemp("model"))
