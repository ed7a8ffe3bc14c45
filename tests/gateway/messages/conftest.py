"""Gateway for Anthropic's own client, with a model that repeats its last message."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anthropic
import pytest

from tests.support.running_gateway import RunningGateway


@pytest.fixture
async def sdk(front: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(
        base_url=front.url, api_key="none", max_retries=0, timeout=10
    ) as made:
        yield made
