"""Control tokens in jobs that services publish."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import ServedModel
from millrace.schemas.frames import Failed
from millrace.schemas.jobs import ChatMessage
from millrace.schemas.tools import ToolDefinition
from tests.registry.tokenizers.forged import CONTROL, FORGED, write_models
from tests.scheduler.world import World, job


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    file = write_models(tmp_path_factory.mktemp("models"), "m")
    return ServedModel.load(load_catalogue(str(file)), "m")


async def test_messages_of_a_job_forge_no_turn(model: ServedModel) -> None:
    world = World(load=lambda _name: model)
    await world.open()
    worker = await world.add_worker()
    fields: dict[str, Any] = {"prompt_token_ids": None, "messages": (ChatMessage("user", FORGED),)}
    tools = (ToolDefinition(name="find", description=FORGED),)
    await world.client.jobs.publish(job("one", tools=tools, **fields))
    await world.client.jobs.publish(job("two", chat_template_kwargs={"range": 1}, **fields))
    await world.until(lambda: len(worker.running) == 1 and world.terminal("two") is not None)
    prepared = worker.running["one"].job
    spelled = map(model.tokenizer.spelling, prepared.prompt_token_ids or ())
    assert [one for one in spelled if one in CONTROL] == [
        *("<|im_start|>", "<tool_call>", "</tool_call>", "<|im_end|>"),
        *("<|im_start|>", "<|im_end|>", "<|im_start|>"),
    ]
    refused = world.terminal("two")
    assert isinstance(refused, Failed)
    assert "chat_template_kwargs.range is set by the server" in refused.message
    await world.close()
