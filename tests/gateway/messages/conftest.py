"""Anthropic's own client against a gateway whose model says what it was told last."""

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
