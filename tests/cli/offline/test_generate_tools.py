"""``millrace generate`` on conversations with tools, as OpenAI's clients write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.main import main
from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.schemas.errors import ModelNotFoundError
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.tools import ToolCall, ToolDefinition
from tests.cli.offline.generating import generate
from tests.support.engine.checkpoints_made import write_checkpoint
from tests.support.engine.gguf_made import write_metadata

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "light", "description": "Switch it.", "parameters": PARAMETERS},
}
CUSTOM: dict[str, Any] = {"type": "custom", "custom": {"name": "switch"}}
CUSTOM["custom"]["format"] = {
    "type": "grammar",
    "grammar": {"syntax": "regex", "definition": r'"on"|off\\'},
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Light"}, {"type": "text", "text": "!"}]},
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "light", "arguments": '{"on": true}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "done"},
]
# The same as jobs have it.
JOB_MESSAGES = (
    ChatMessage("system", "Be short."),
    ChatMessage("user", "Light!"),
    ChatMessage(
        "assistant", "", tool_calls=(ToolCall(id="c1", name="light", arguments='{"on": true}'),)
    ),
    ChatMessage("tool", "done", tool_call_id="c1"),
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny", max_position_embeddings=4_096)


def test_messages_and_tools_of_openais_api(tmp_path: Path, checkpoint: Path) -> None:
    served = ServedModel.load(load_catalogue("").with_model(str(checkpoint)), "tiny")
    tools = (ToolDefinition(name="light", description="Switch it.", parameters=PARAMETERS),)
    job_messages = json.loads(json.dumps([_as_of_a_job(message) for message in JOB_MESSAGES]))
    common = {"max_tokens": 60, "temperature": 0}
    lines = [
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"} | common,
        {"messages": MESSAGES} | common,
        {"messages": job_messages} | common,
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "none"} | common,
        {"messages": MESSAGES, "tools": [CUSTOM], "tool_choice": "required"} | common,
    ]
    code, answers = generate(tmp_path, checkpoint, lines)
    assert code == 0
    called, plain, of_a_job, without, custom = answers
    (call,) = custom["tool_calls"][:1]
    assert (call["type"], call["custom"]["name"]) == ("custom", "switch")
    assert call["custom"]["input"] in ('"on"', "off\\")
    assert called["prompt_tokens"] == len(served.tokenizer.encode_chat(JOB_MESSAGES, tools))
    (call,) = called["tool_calls"][:1]
    assert (call["type"], call["function"]["name"]) == ("function", "light")
    assert isinstance(json.loads(call["function"]["arguments"])["on"], bool)
    assert plain["prompt_tokens"] == len(served.tokenizer.encode_chat(JOB_MESSAGES))
    assert plain["token_ids"] == of_a_job["token_ids"] == without["token_ids"]
    assert not any("tool_calls" in answer for answer in answers[1:4])


def _as_of_a_job(message: ChatMessage) -> dict[str, Any]:
    calls = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in message.tool_calls]
    fields = {"role": message.role, "content": message.content, "tool_calls": calls}
    return fields | ({"tool_call_id": message.tool_call_id} if message.tool_call_id else {})


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"messages": [{"role": "wizard", "content": "x"}]}, "wizard"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "colour"),
        ({"messages": []}, "at least one message"),
        ({"messages": MESSAGES, "tools": [TOOL, TOOL]}, "two tools with the name light"),
        ({"messages": MESSAGES, "tool_choice": "required"}, "there are no tools"),
        ({"messages": MESSAGES, "tools": [{"type": "web_search"}]}, "tools[0]: tool_left_out"),
        ({"prompt": "x", "tools": [TOOL]}, "tools: allowed only with messages"),
    ],
)
def test_bad_conversations_are_named(
    tmp_path: Path,
    checkpoint: Path,
    fields: dict[str, Any],
    word: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert generate(tmp_path, checkpoint, [fields]) == (2, [])
    shown = capsys.readouterr().err
    assert "line 1: " in shown
    assert word in shown


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("./nowhere", "The folder nowhere does not exist"),
        ("nowhere.gguf", "The file nowhere.gguf does not exist"),
        ("models/nowhere.gguf", "The file models/nowhere.gguf does not exist"),
        ("weights.bin", "weights.bin is a file; a model is a folder"),
        ("empty.gguf", "empty.gguf is not a GGUF file"),
        ("tiny.gguf", "this command cannot compute: its architecture is tiny. Serve it on llama.c"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "embed"])
def test_paths_that_lead_to_no_checkpoint_are_told_apart(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    model: str,
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("weights.bin", "empty.gguf", "in.jsonl"):
        (tmp_path / name).touch()
    write_metadata(tmp_path / "tiny.gguf")
    arguments = ["--model", model, "--input", "in.jsonl", "--output", "out.jsonl"]
    assert main([command, *arguments]) != 0
    assert sentence in capsys.readouterr().err


def test_names_are_no_paths() -> None:
    catalogue = load_catalogue("")
    assert catalogue.entry_for("org/model/file.gguf").is_gguf
    with pytest.raises(ModelNotFoundError, match="Models: demo"):
        catalogue.entry_for("nothing")
