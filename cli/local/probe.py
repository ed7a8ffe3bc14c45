"""A first request to each model of a stack that has just come up."""

from __future__ import annotations

import asyncio
import os
import random

from millrace.bus.api import Bus
from millrace.registry.catalogue import load_catalogue
from millrace.registry.served import outline_of
from millrace.registry.source import resolve
from millrace.schemas.config import Config
from millrace.schemas.frames import TERMINAL_FRAMES, Frame
from millrace.schemas.jobs import Job, Tier
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import SamplingOptions
from millrace.schemas.tenants import own_reply

PROBE_TENANT = "system"
# For the first answer of a model, whose worker may still warm up.
_FIRST_ANSWER_S = 60.0


def probe_pooling(config: Config, model: str) -> Pooling | None:
    """Models that make no tokens are asked for an embedding or labels. Raises MillraceError."""
    entry = load_catalogue(config.catalogue).get(model)
    outline = outline_of(entry, resolve(entry))
    if outline.has_head:
        return None
    return Pooling.MEAN if outline.classifier is None else Pooling.CLASSIFY


async def serve_one(bus: Bus, model: str, pooling: Pooling | None) -> None:
    """One token, or what else the model makes, by the whole path: queue, scheduler, worker, frames.
    Raises TimeoutError."""
    request_id = f"probe-{os.getpid()}-{random.getrandbits(32):08x}"
    reply = own_reply(PROBE_TENANT, request_id)
    ended = asyncio.get_running_loop().create_future()

    def on_frame(_request_id: str, frame: Frame) -> None:
        if isinstance(frame, TERMINAL_FRAMES) and not ended.done():
            ended.set_result(frame)

    subscription = await bus.frames.subscribe(reply, on_frame)
    await bus.jobs.publish(
        Job(
            request_id=request_id,
            model=model,
            prompt="Hello",
            sampling=SamplingOptions(max_tokens=1),
            pooling=pooling,
            reply=reply,
            tenant=PROBE_TENANT,
            tier=Tier.ENTERPRISE,
        )
    )
    async with asyncio.timeout(_FIRST_ANSWER_S):
        await ended
    await subscription.close()
