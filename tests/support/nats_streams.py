"""Every test starts on a server without streams."""

from __future__ import annotations

import nats
from nats.js.errors import NotFoundError


async def delete_streams(url: str) -> None:
    """Delete every stream, with its consumers and messages."""
    client = await nats.connect(url, connect_timeout=5)
    try:
        manager = client.jsm()
        for stream in await manager.streams_info():
            try:
                await manager.delete_stream(stream.config.name or "")
            except NotFoundError:
                continue  # a client that is closing may have raced us
    finally:
        await client.close()
