"""A loop of four tool calls by Pydantic AI, over chat completions and over responses.

Run by the environment that ``pydantic-ai`` is in, with the system's address and a file, in which it
writes each body that it sent, a line for each.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import openai
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

_CALLS: list[int] = []


def work(step: int) -> str:
    """Do one step of the work."""
    _CALLS.append(step)
    return f"done {step}"


async def run(model: Any, settings: Any) -> None:
    _CALLS.clear()
    agent = Agent(model, instructions="Do all steps.", tools=[work])
    result = await agent.run("Do the work.", model_settings=settings)
    assert result.output == "All is done.", result.output
    assert _CALLS == [1, 2, 3, 4], _CALLS


async def main(url: str, file: Path) -> None:
    sent: list[str] = []

    async def note(request: Any) -> None:
        sent.append(f"{request.url.path} {request.content.decode()}")

    http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [note]}, trust_env=False)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
    provider = OpenAIProvider(openai_client=client)
    for model in (OpenAIChatModel, OpenAIResponsesModel):
        for settings in (None, {"parallel_tool_calls": False}):
            await run(model("demo", provider=provider), settings)
    file.write_text("\n".join(sent) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
