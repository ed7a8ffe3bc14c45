"""The engine of docs/engines.md passes the conformance suite."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from millrace.runtime.clock import SystemClock
from millrace.schemas.config import EngineConfig
from millrace.schemas.engines import EngineKind
from millrace.schemas.errors import ConfigError
from millrace.workers.engine_like import EngineLike, load_engine_class
from tests.workers.conformance import EngineConformance, running
from tests.workers.scripted import served_model

_FILE = Path(__file__).parents[2] / "docs" / "examples" / "echo_engine.py"
_NAME = f"{_FILE}:EchoEngine"
_ENGINE_CLASS = load_engine_class(_NAME)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineLike]:
    model = served_model(tmp_path_factory.mktemp("model"))
    config = EngineConfig(kind=EngineKind.CUSTOM, command=_NAME, max_num_sequences=4)
    async with running(await _ENGINE_CLASS.start(model, config, SystemClock())) as engine:
        yield engine


class TestEchoEngine(EngineConformance):
    kind = EngineKind.CUSTOM
    promises = _ENGINE_CLASS.promises  # type: ignore[attr-defined]
    has_prefix_cache = False


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "module:Class"),
        ("no_such_module:Engine", "cannot be imported: ModuleNotFoundError"),
        ("nowhere.py:Engine", "cannot be imported: ImportError"),
        (f"{_FILE}:Missing", "has no class Missing"),
        (f"{_FILE}:Clock", "derives from EngineLike"),
        ("millrace.workers.engine_like:EngineLike", "no class method"),
    ],
)
def test_a_name_that_leads_to_no_engine_is_explained(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_engine_class(name)
