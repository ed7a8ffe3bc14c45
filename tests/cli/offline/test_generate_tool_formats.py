"""Forced calls from a checkpoint of each family: its template, its special tokens, the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.schemas.tools import ToolFormat
from tests.cli.offline.generating import generate
from tests.registry.tool_formats import templates
from tests.support.engine.checkpoints_made import write_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

PARAMETERS = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "room": {"enum": ["hall", "attic"]},
        "level": {"type": "integer", "minimum": 0, "maximum": 9},
        "note": {"type": "string", "maxLength": 6},
    },
    "required": ["on", "room", "note"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "light", "parameters": PARAMETERS}}
BIAS = 100


@pytest.mark.parametrize("tool_format", templates.FAMILIES)
def test_a_forced_call(tmp_path: Path, tool_format: ToolFormat) -> None:
    source, specials = templates.FAMILIES[tool_format]
    checkpoint = write_checkpoint(
        tmp_path / "tiny",
        chat_template=source,
        special_tokens=specials,
        max_position_embeddings=4_096,
    )
    served = ServedModel.load(load_catalogue("").with_model(str(checkpoint)), "tiny")
    assert served.tool_format is tool_format
    tags = {_id(served, token) for token in specials}
    line: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Light!"}],
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "temperature": 0,
        "logit_bias": {str(token_id): BIAS for token_id in tags},
    }
    again = {
        "messages": [
            *line["messages"],
            {"role": "assistant", "content": None, "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": _CALL["id"], "content": "done"},
        ]
    }
    code, (called, *_) = generate(tmp_path, checkpoint, [line, line | again])
    assert code == 0
    (call,) = called["tool_calls"]
    assert call["function"]["name"] == "light"
    jsonschema.validate(json.loads(call["function"]["arguments"]), PARAMETERS)
    assert tags.isdisjoint(called["token_ids"]) is not bool(specials)


_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "light", "arguments": '{"on": true, "room": "hall"}'},
}


def _id(served: ServedModel, token: str) -> int:
    (token_id,) = served.tokenizer.encode(token, add_special_tokens=False)
    return token_id
