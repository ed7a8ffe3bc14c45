"""Models with scripted text, and systems that serve them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from millrace.registry.served import ServedModel
from millrace.schemas.chat.reasoning import ReasoningFormat
from tests.e2e.jobs.scribe_system import ScribeSystem, scribe_model, scribe_system


@pytest.fixture(scope="package")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return scribe_model(tmp_path_factory.mktemp("thinker"), reasoning=ReasoningFormat())


@pytest.fixture
async def scribe(thinker: ServedModel) -> AsyncIterator[ScribeSystem]:
    async with scribe_system(thinker) as system:
        yield system
