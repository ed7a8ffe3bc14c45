"""Messages, streams, tools and counts by Anthropic's client.

Run by the environment that the client is in, with the system's address and a folder for
``ok.json``, the number of right answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import anthropic

_TOOL: Any = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Bath", "York"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
_ASK: Any = {"role": "user", "content": "How is the weather in Bath?"}


def main(url: str, folder: Path) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    options: Any = {"model": "demo", "max_tokens": 64}
    num_ok = 0

    whole = client.messages.create(**options, messages=[_ASK], system="You know the weather.")
    assert whole.content[0].type == "text", whole
    num_ok += 1

    with client.messages.stream(**options, messages=[_ASK]) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert streamed.content[0].to_dict()["text"] == text, streamed
    assert streamed.usage.output_tokens > 0, streamed
    num_ok += 1

    messages: list[Any] = [_ASK]
    any_tool: Any = {"type": "any"}
    with client.messages.stream(
        **options, messages=messages, tools=[_TOOL], tool_choice=any_tool
    ) as stream:
        called = stream.get_final_message()
    (call,) = [block for block in called.content if block.type == "tool_use"]
    assert called.stop_reason == "tool_use", called
    assert call.input["city"] in {"Bath", "York"}, call
    messages += [
        {"role": "assistant", "content": called.content},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}],
        },
    ]
    answer = client.messages.create(**options, messages=messages, tools=[_TOOL])
    assert answer.role == "assistant", answer
    num_ok += 1

    count = client.messages.count_tokens(model="demo", messages=messages, tools=[_TOOL])
    usage = answer.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0), count
    num_ok += 1

    try:
        client.messages.create(**options, messages=[])
    except anthropic.BadRequestError as error:
        num_ok += error.type == "invalid_request_error"
    (folder / "ok.json").write_text(json.dumps(num_ok), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
