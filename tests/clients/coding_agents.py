"""Agents that run tools in a folder: their installation, start and tool names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.scripted_model import Call

SAID = "The word was millrace."
WAS, IS = "The word was", "The word is"
SHOW = "cat notes.txt answer.txt | tee shell.txt"


@dataclass(frozen=True)
class Agent:
    """``section`` is the agent's heading in docs/agents.md. ``calls`` read notes.txt, write
    answer.txt, change notes.txt, and run a command that shows both; ``{work}`` stands for the
    folder. ``environment`` switches telemetry and updates off, and lets the agent work without
    questions."""

    section: str
    packages: tuple[str, ...]
    command: tuple[str, ...]
    calls: tuple[Call, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    def calls_in(self, work: Path) -> list[Call]:
        """The calls with the folder's path in their arguments."""
        return [
            Call(
                call.name,
                json.loads(json.dumps(call.arguments).replace("{work}", str(work))),
                call.result,
            )
            for call in self.calls
        ]


def _calls(read: Call, write: Call, edit: Call, shell: Call) -> tuple[Call, ...]:
    return (
        Call(read.name, read.arguments, f"{IS} millrace."),
        write,
        edit,
        Call(shell.name, {"command": SHOW, **shell.arguments}, SAID),
    )


_NOTES, _ANSWER = "{work}/notes.txt", "{work}/answer.txt"
_TEXT = "millrace\n"

_CLAUDE = _calls(
    Call("Read", {"file_path": _NOTES}),
    Call("Write", {"file_path": _ANSWER, "content": _TEXT}),
    Call("Edit", {"file_path": _NOTES, "old_string": IS, "new_string": WAS}),
    Call("Bash", {"description": "Show both"}),
)
_CODEX = tuple(
    Call("exec_command", {"cmd": command}, result)
    for command, result in (
        ("cat notes.txt", f"{IS} millrace."),
        ("echo millrace > answer.txt", "code 0"),
        ("sed -i s/is/was/ notes.txt", "code 0"),
        (SHOW, SAID),
    )
)
_OPENCODE = _calls(
    Call("read", {"filePath": _NOTES}),
    Call("write", {"filePath": _ANSWER, "content": _TEXT}),
    Call("edit", {"filePath": _NOTES, "oldString": IS, "newString": WAS}),
    Call("bash", {"description": "Show both"}),
)
_QWEN = _calls(
    Call("read_file", {"file_path": _NOTES}),
    Call("write_file", {"file_path": _ANSWER, "content": _TEXT}),
    Call("edit", {"file_path": _NOTES, "old_string": IS, "new_string": WAS}),
    # Qwen Code loses the output of a command that ends before its terminal is read.
    Call(
        "run_shell_command",
        {"command": f"{SHOW}; sleep 1", "description": "Show both", "is_background": False},
    ),
)
_PI = _calls(
    Call("read", {"path": "notes.txt"}),
    Call("write", {"path": "answer.txt", "content": _TEXT}),
    Call("edit", {"path": "notes.txt", "edits": [{"oldText": IS, "newText": WAS}]}),
    Call("bash", {}),
)
_CONTINUE = _calls(
    Call("Read", {"filepath": _NOTES}),
    Call("Write", {"filepath": _ANSWER, "content": _TEXT}),
    Call("Edit", {"file_path": _NOTES, "old_string": IS, "new_string": WAS}),
    Call("Bash", {}),
)
_COPILOT = _calls(
    Call("view", {"path": _NOTES}),
    Call("create", {"path": _ANSWER, "file_text": _TEXT}),
    Call("edit", {"path": _NOTES, "old_str": IS, "new_str": WAS}),
    Call("bash", {"description": "Show both"}),
)
_QUIET_OPENCODE = {
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
}
_TASK = "Do it."
_PI_COMMAND = ("pi", "--print", "--provider", "millrace", "--model", "scripted", _TASK)
_QWEN_COMMAND = ("qwen", "--yolo", "--prompt", _TASK, "--auth-type")

AGENTS = (
    Agent(
        "Claude Code",
        ("@anthropic-ai/claude-code@2.1.332",),
        ("claude", "--print", "--dangerously-skip-permissions", _TASK),
        _CLAUDE,
        {"IS_SANDBOX": "1", "DISABLE_AUTOUPDATER": "1"},
    ),
    Agent(
        "Codex",
        ("@openai/codex@0.171.0",),
        (
            *("codex", "exec", "--skip-git-repo-check"),
            *("--dangerously-bypass-approvals-and-sandbox", _TASK),
        ),
        _CODEX,
    ),
    *(
        Agent(
            section,
            ("opencode-ai@1.18.33",),
            ("opencode", "run", _TASK),
            _OPENCODE,
            _QUIET_OPENCODE,
        )
        for section in ("opencode", "opencode, Messages API")
    ),
    *(
        Agent(
            section,
            ("@qwen-code/qwen-code@0.24.4",),
            (*_QWEN_COMMAND, api),
            _QWEN,
        )
        for section, api in (("qwen-code", "openai"), ("qwen-code, Messages API", "anthropic"))
    ),
    *(
        Agent(section, ("@earendil-works/pi-coding-agent@1.6.0",), _PI_COMMAND, _PI)
        for section in ("pi", "pi, Messages API")
    ),
    Agent(
        "Continue",
        ("@continuedev/cli@1.5.47",),
        ("cn", "--print", "--auto", _TASK),
        _CONTINUE,
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
    ),
    Agent(
        "GitHub Copilot CLI",
        ("@github/copilot@1.0.102",),
        ("copilot", "--allow-all-tools", "--prompt", _TASK),
        _COPILOT,
    ),
)
