"""Served model without weights for the tests of the worker's bus side."""

from __future__ import annotations

import pytest

from millrace.registry.served import ServedModel
from tests.workers.scripted import served_model


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(tmp_path_factory.mktemp("demo"))
