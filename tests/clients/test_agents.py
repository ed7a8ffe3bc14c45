"""Real agents and frameworks against a real system, configured as docs/agents.md says.

The model is scripted, so each client makes the same calls at each run: it reads a file, writes one,
changes one, runs a command, and says how it went.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.clients.agents_page import entries
from tests.clients.coding_agents import AGENTS, IS, SAID, Agent
from tests.clients.libraries import JAVASCRIPT, PYTHON, Library
from tests.clients.packages import need, npm_packages, python_packages
from tests.clients.scripted_model import NAME, WINDOW_TOKENS, ScriptedModel, write_model
from tests.support.openai_server import OpenAiServer
from tests.support.system import System

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow(reason="installs agents of other people and starts the whole system"),
    pytest.mark.timeout(1_200),
]

_HERE = Path(__file__).parent
_ANSWER = "All four steps are done."
_CLIENT_TIMEOUT_S = 120.0
_AIDER = {
    "AIDER_ANALYTICS": "false",
    "AIDER_CHECK_UPDATE": "false",
    "AIDER_GIT": "false",
    "AIDER_SHOW_RELEASE_NOTES": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


@dataclass
class Room:
    """Home folder and working folder, with the files of the page's ``section``."""

    home: Path
    work: Path
    code: str = ""
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, command: Sequence[str], *programs: Path, **environment: str) -> str:
        """Return a client's output when it ends; after a limit it is killed with its children."""
        path = os.pathsep.join([*map(str, programs), os.environ["PATH"]])
        variables = {"HOME": str(self.home), "PATH": path, **self.environment, **environment}
        return _run(command, self.work, variables)

    def check(self) -> None:
        """All four tools have done their work."""
        assert (self.work / "notes.txt").read_text() == f"{SAID}\n"
        assert (self.work / "answer.txt").read_text() == "millrace\n"
        assert (self.work / "shell.txt").read_text() == f"{SAID}\nmillrace\n"


@pytest.fixture(scope="module")
def model() -> ScriptedModel:
    return ScriptedModel()


@pytest.fixture(scope="module")
def system(model: ScriptedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("agents")
    with OpenAiServer().running() as server:
        server.script = model.says
        arguments = (
            *("--port", "0", "--engine", "openai", "--engine-url", server.url),
            *("--model", str(write_model(folder / NAME))),
        )
        running = System(folder / "data", arguments).start()
        yield running
        assert running.stop() == 0


@pytest.fixture
def room(section: str, system: System, tmp_path: Path) -> Room:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "notes.txt").write_text(f"{IS} millrace.\n")
    entry = entries(system.http, NAME, WINDOW_TOKENS)[section]
    entry.write(home)
    return Room(home, work, entry.code, entry.environment)


@pytest.mark.parametrize(
    ("section", "agent"), [pytest.param(one.section, one, id=one.section) for one in AGENTS]
)
def test_an_agent_runs_its_tools(agent: Agent, room: Room, model: ScriptedModel) -> None:
    need("npm")
    model.plays(agent.calls_in(room.work), _ANSWER)
    programs = (_npm_programs(*agent.packages), _npm_programs("node@22.23.3"))
    assert _ANSWER in room.run(agent.command, *programs, **agent.environment)
    room.check()


@pytest.mark.parametrize(
    ("section", "library"), [pytest.param(one.section, one, id=one.section) for one in PYTHON]
)
def test_a_python_library_runs_its_tools(
    library: Library, room: Room, model: ScriptedModel
) -> None:
    model.plays(library.calls, _ANSWER, result=library.result)
    (room.work / "configured.py").write_text(room.code)
    for name in ("frameworks.py", "agent_tools.py"):
        shutil.copy(_HERE / name, room.work)
    name = re.split(r"[=\[]", library.packages[0])[0]
    output = room.run(library.command, python_packages(name, *library.packages))
    assert _ANSWER in output
    room.check()


@pytest.mark.parametrize(
    ("section", "library"), [pytest.param(one.section, one, id=one.section) for one in JAVASCRIPT]
)
def test_a_javascript_library_runs_its_tools(
    library: Library, room: Room, model: ScriptedModel
) -> None:
    need("npm")
    model.plays(library.calls, _ANSWER)
    (room.work / "configured.mjs").write_text(room.code)
    shutil.copy(_HERE / "ai_sdk.mjs", room.work)
    packages = npm_packages("ai-sdk", *library.packages)
    (room.work / "node_modules").symlink_to(packages / "node_modules")
    assert _ANSWER in room.run(library.command, _npm_programs("node@22.23.3"))
    room.check()


@pytest.mark.parametrize("section", ["aider"])
def test_aider_writes_a_file(room: Room, model: ScriptedModel) -> None:
    """aider has no tools: it reads files out of the text."""
    model.plays((), _ANSWER, aside="answer.txt\n```\nmillrace\n```\n")
    command = ("aider", "--yes-always", "--no-stream", "--message", "Do it.", "answer.txt")
    assert "Applied edit" in room.run(
        command, python_packages("aider", "aider-chat==0.86.2"), **_AIDER
    )
    assert (room.work / "answer.txt").read_text() == "millrace\n"


def _npm_programs(*packages: str) -> Path:
    name = packages[0].rpartition("@")[0].rpartition("/")[2]
    return npm_packages(name, *packages) / "node_modules" / ".bin"


def _run(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> str:
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
            output, _ = process.communicate(timeout=_CLIENT_TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output
