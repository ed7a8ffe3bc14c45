"""Real agents against a real system, configured as docs/agents.md says.

The model is scripted, so each agent makes the same calls at each run: it reads a file, writes one,
changes one, runs a command, and says how it went.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.clients.agents import AGENTS, SAID, Agent
from tests.clients.agents_page import entries
from tests.clients.packages import need, npm_packages
from tests.clients.scripted_model import NAME, WINDOW_TOKENS, ScriptedModel, write_model
from tests.support.system import System

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(reason="installs agents of other people and starts the whole system"),
    pytest.mark.timeout(1_200),
]

_ANSWER = "All four steps are done."
_AGENT_TIMEOUT_S = 120.0


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture(scope="module")
def system(model: ScriptedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("agents")
    with model.serving() as url:
        arguments = (
            *("--port", "0", "--engine", "openai", "--engine-url", url),
            *("--model", str(write_model(folder / NAME))),
        )
        running = System(folder / "data", arguments).start()
        yield running
        assert running.stop() == 0


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.section)
def test_an_agent_runs_its_tools(
    agent: Agent, system: System, model: ScriptedModel, tmp_path: Path
) -> None:
    need("npm")
    name = agent.packages[0].rpartition("@")[0].rpartition("/")[2]
    programs = [
        npm_packages(one, *packages) / "node_modules" / ".bin"
        for one, packages in ((name, agent.packages), ("node", ("node@22.23.3",)))
    ]
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "notes.txt").write_text("The word is millrace.\n")
    entry = entries(system.http, NAME, WINDOW_TOKENS)[agent.section]
    entry.write(home)
    model.plays(agent.calls_in(work), _ANSWER)
    environment = {
        "HOME": str(home),
        "PATH": os.pathsep.join([*map(str, programs), os.environ["PATH"]]),
        **entry.environment,
        **agent.environment,
    }
    said = _run(agent.command, work, environment)
    assert _ANSWER in said, said
    assert (work / "notes.txt").read_text() == f"{SAID}\n"
    assert (work / "answer.txt").read_text() == "millrace\n"
    assert (work / "shell.txt").read_text() == f"{SAID}\nmillrace\n"


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
    """What an agent says until it ends; it and all that it started are killed after a while."""
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=_AGENT_TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said
    return said
