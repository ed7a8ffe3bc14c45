"""A loop of four tool calls by the OpenAI Agents SDK, over responses and over chat completions.

Run by the environment that ``openai-agents`` is in, with the system's address and a file, in which
it writes each body that it sent, a line for each.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import agents
import openai

_CALLS: list[int] = []


def work(step: int) -> str:
    """Do one step of the work.

    Args:
        step: The number of the step, from 1.
    """
    _CALLS.append(step)
    return f"done {step}"


async def run(url: str, api: str, sent: list[str]) -> None:
    async def note(request: Any) -> None:
        sent.append(f"{request.url.path} {request.content.decode()}")

    http = openai.DefaultAsyncHttpxClient(event_hooks={"request": [note]}, trust_env=False)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
    models = {
        "responses": agents.OpenAIResponsesModel,
        "chat": agents.OpenAIChatCompletionsModel,
    }
    for settings in (agents.ModelSettings(), agents.ModelSettings(parallel_tool_calls=False)):
        _CALLS.clear()
        agent = agents.Agent(
            name="worker",
            instructions="Do all steps.",
            tools=[agents.function_tool(work)],
            model=models[api](model="demo", openai_client=client),
            model_settings=settings,
        )
        result = await agents.Runner.run(agent, "Do the work.")
        assert result.final_output == "All is done.", result.final_output
        assert _CALLS == [1, 2, 3, 4], _CALLS


async def main(url: str, file: Path) -> None:
    agents.set_tracing_disabled(True)
    sent: list[str] = []
    for api in ("responses", "chat"):
        await run(url, api, sent)
    file.write_text("\n".join(sent) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
