"""Fixtures of the tests of ranks on devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.parallel.places import Places, folder_places, network_places


@pytest.fixture(params=[folder_places, network_places], ids=["one host", "several"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Places:
    """Return the meeting points of ranks on one host, or on several."""
    made: Places = request.param(tmp_path)
    return made
