"""Items that are named by their ids, with OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from millrace.bus.tenancy.tenants import TenantStore
from millrace.runtime.redis.link import RedisLink
from millrace.schemas.config import GatewayConfig, RedisConfig
from tests.gateway.responses.fronts import transcribing_models
from tests.support.running_gateway import MODEL, running_gateway


def _reference(item_id: str | None) -> Any:
    return {"type": "item_reference", "id": item_id}


async def test_items_of_kept_answers_are_named(client: openai.AsyncOpenAI) -> None:
    first = await client.responses.create(model=MODEL, input="one")
    (given,) = (await client.responses.input_items.list(first.id)).data
    untyped: Any = {"id": first.output[0].id}
    second = await client.responses.create(
        model=MODEL,
        input=[
            _reference(given.id),
            untyped,
            {"role": "user", "content": "two"},
        ],
    )
    assert second.output_text == "user:one|assistant:user:one|user:two"
    third = await client.responses.create(
        model=MODEL, input=[_reference(given.id)], previous_response_id=second.id
    )
    assert third.output_text.endswith("|user:one")


async def test_unknown_items_are_refused_by_name(redis: RedisConfig) -> None:
    link = RedisLink(redis)
    store = TenantStore(link)
    tokens = [(await store.create_key(tenant, 0))[1] for tenant in ("acme", "other")]
    await link.close()
    config = GatewayConfig(auth="required")
    async with running_gateway(config, transcribing_models(), redis=redis) as front:
        acme, other = (
            openai.AsyncOpenAI(base_url=f"{front.url}/v1", api_key=token, max_retries=0)
            for token in tokens
        )
        stored = await acme.responses.create(model=MODEL, input="one")
        for client, item_id in (
            (acme, "msg_x"),
            (acme, "msg_0123456789abcdef01234567_0"),
            (other, stored.output[0].id),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                await client.responses.create(
                    model=MODEL, input=[{"role": "user", "content": "x"}, _reference(item_id)]
                )
            assert (caught.value.code, caught.value.param) == ("item_not_found", "input[1].id")
        await acme.close()
        await other.close()


async def test_input_tokens_are_counted(client: openai.AsyncOpenAI) -> None:
    counted = await client.responses.input_tokens.count(
        model=MODEL, input="two", instructions="Count."
    )
    answered = await client.responses.create(model=MODEL, input="two", instructions="Count.")
    assert answered.usage is not None
    assert counted.input_tokens == answered.usage.input_tokens == len("system:Count.|user:two")
    assert counted.object == "response.input_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.input_tokens.count(model=MODEL, input=[])
    assert caught.value.param == "input"
