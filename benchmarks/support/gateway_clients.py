"""What the gateway's benchmarks send, byte by byte: their clients parse no more than they must."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.support.simulated_worker import MODEL
from millrace.bench.clients.socket_client import frame

TEXT_FRAME = 0x1
HANDSHAKE = (
    b"GET /v1/ws HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
    b"sec-websocket-protocol: millrace.v1\r\n\r\n"
)


def sse_request(**fields: Any) -> bytes:
    """A streamed chat completion, with its HTTP head."""
    messages = [{"role": "user", "content": "go"}]
    body = json.dumps({"model": MODEL, "stream": True, "messages": messages, **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def socket_request(name: str = "a", **fields: Any) -> bytes:
    """A ``generate`` of millrace.v1, as a frame."""
    message = {"type": "generate", "id": name, "model": MODEL, "prompt": "go", **fields}
    return frame(TEXT_FRAME, json.dumps(message).encode())
