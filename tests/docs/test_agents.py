"""``docs/agents.md`` has the examples that the tests with real clients run."""

from __future__ import annotations

import json

import pytest

from tests.clients.agents_page import PAGE, Entry, entries
from tests.clients.coding_agents import AGENTS, Agent
from tests.clients.libraries import JAVASCRIPT, PYTHON, Library

_ENTRIES = entries("http://127.0.0.1:1", "m", 4_096)


@pytest.mark.parametrize("entry", _ENTRIES.values(), ids=_ENTRIES)
def test_an_entry_takes_five_lines_at_most(entry: Entry) -> None:
    assert 1 <= entry.num_lines <= 5
    for name, text in entry.files.items():
        if name.endswith(".json"):
            json.loads(text)
    said = "".join([*entry.files.values(), *entry.environment.values(), entry.code])
    assert "http://127.0.0.1:1" in said
    assert "localhost" not in said


@pytest.mark.parametrize(
    "client", [*AGENTS, *PYTHON, *JAVASCRIPT], ids=lambda client: str(client.section)
)
def test_the_page_names_the_version_that_is_run(client: Agent | Library) -> None:
    section, packages = client.section, client.packages
    name = section.partition(",")[0]
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| [{name}]")]
    version = packages[0].replace("==", "@").rpartition("@")[2]
    assert row.split("|")[2].strip() == version
