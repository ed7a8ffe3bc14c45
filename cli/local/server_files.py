"""The configuration files of the servers that ``millrace up`` starts. They hold passwords."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit


def nats_config(url: str, store: Path) -> str:
    """For nats-server to listen at ``url``, for whoever has the name and password in it."""
    place = urlsplit(url)
    # A JSON string is a string of NATS's configuration too, but for the escapes of letters.
    user, password = json.dumps(place.username), json.dumps(place.password)
    folder = json.dumps(str(store), ensure_ascii=False)
    return "\n".join(
        [
            f"listen: {place.hostname}:{place.port}",
            "server_name: millrace",
            f"authorization {{ user: {user}, password: {password} }}",
            "max_payload: 8MB",
            # An accepted job is on the disk before its publisher hears so.
            # How full the disk may be is for ``storage.min_free_bytes`` to say.
            f"jetstream {{ store_dir: {folder}, sync_interval: always",
            "max_file_store: 1PB }",
            "",
        ]
    )


def redis_config(url: str, store: Path) -> str:
    """For redis-server to listen at ``url``, for whoever has the password in it. It is not on the
    command line, which every user of the machine can read."""
    place = urlsplit(url)
    # Redis reads bytes as they are, and JSON's escapes of what it must.
    folder = json.dumps(str(store), ensure_ascii=False)
    return "\n".join(
        [
            f"bind {place.hostname}",
            f"port {place.port}",
            f"requirepass {place.password}",
            f"dir {folder}",
            "appendonly yes",
            'save ""',
            # It looks after what expires once a second: what is asked for is looked at then, too.
            "hz 1",
            "",
        ]
    )
