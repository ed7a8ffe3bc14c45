"""What the tests of inference servers have in common."""

from __future__ import annotations

import pytest

from millrace.registry.served import ServedModel
from tests.workers.scripted import served_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """Of 128 tokens, with no weights."""
    return served_model(tmp_path_factory.mktemp("model"))
