"""A loop of tools by litellm, whose messages go back as it keeps them.

Run by the environment that litellm is in, with the system's address and a folder for ``ok.json``,
the number of right answers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import litellm

_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bath", "York"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def ask(url: str, messages: list[Any], **options: Any) -> Any:
    return litellm.completion(
        model="openai/demo",
        api_base=f"{url}/v1",
        api_key="none",
        messages=messages,
        max_tokens=64,
        temperature=0,
        **options,
    )


def main(url: str, folder: Path) -> None:
    num_ok = 0
    for stream in (False, True):
        messages: list[Any] = [{"role": "user", "content": "How is the weather in Bath?"}]
        answer = ask(url, messages, tools=[_TOOL], tool_choice="required", stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert call.function.name == "weather", call
        assert json.loads(call.function.arguments)["city"] in {"Bath", "York"}, call
        num_ok += 1
        # With all that litellm adds: thinking_blocks, provider_specific_fields and so on.
        echoed = message.model_dump() | {
            "reasoning_content": "Hm.",
            "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}],
            "provider_specific_fields": {"refusal": None},
        }
        result = {"role": "tool", "tool_call_id": call.id, "name": "weather", "content": "Rain"}
        answer = ask(url, [*messages, echoed, result], tools=[_TOOL])
        assert answer.choices[0].message.content or answer.choices[0].message.tool_calls, answer
        num_ok += 1
    try:
        ask(url, [{"role": "user", "content": "again and again " * 5_000}])
    except litellm.ContextWindowExceededError:  # what its fallbacks to longer models wait for
        num_ok += 1
    (folder / "ok.json").write_text(json.dumps(num_ok), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
