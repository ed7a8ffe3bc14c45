"""An answer that OpenAI's client gets within a JSON schema."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai

from tests.support.system import System


async def check_schema_answer(
    system: System, question: str, *, longest: int, **options: Any
) -> None:
    """Check that an answer of at most ``longest`` characters matches its schema."""
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {
            "answer": {"type": "string", "maxLength": longest},
            "sure": {"type": "boolean"},
        },
        "required": ["answer", "sure"],
        "additionalProperties": False,
    }
    async with openai.AsyncOpenAI(base_url=f"{system.http}/v1", api_key="none") as client:
        completion = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": schema, "strict": True},
            },
            **options,
        )
    choice = completion.choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content is not None
    jsonschema.validate(json.loads(choice.message.content), schema)
