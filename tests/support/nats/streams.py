"""Every test starts on a server without streams."""

from __future__ import annotations

import nats
from nats.js.errors import NotFoundError

from tests.support.servers import NatsServer
from tests.support.waiting import eventually


async def delete_streams(server: NatsServer) -> None:
    """Delete every stream, with its consumers and messages.

    The server removes the files of a deleted stream in the background; a stream that is created
    again before that may come up with its old messages, so the files are waited for.
    """
    client = await nats.connect(server.url, connect_timeout=5)
    try:
        manager = client.jsm()
        for stream in await manager.streams_info():
            try:
                await manager.delete_stream(stream.config.name or "")
            except NotFoundError:
                continue  # a client that is closing may have raced us
    finally:
        await client.close()

    def are_gone() -> bool:
        try:
            return not list(server.store_path.glob("jetstream/*/streams/*"))
        except FileNotFoundError:  # a folder was removed while it was read
            return False

    await eventually(are_gone, what="removing the files of deleted streams")
