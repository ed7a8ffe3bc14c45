"""A service that publishes a job in JSON with nothing but nats-py, and follows its stream.

python docs/examples/publish_job.py data/run/nats.url "What is a lease?"

The address is nats://USER:PASSWORD@HOST:4222, or a file that holds it: `millrace up` writes one
that only its own user may read. On a server with users of its own (docs/nats-accounts.md) the
user is service-example.
"""

import asyncio
import json
import sys
import uuid
from pathlib import Path

import nats
from nats.aio.msg import Msg

TENANT = "example"


async def ask(url: str, question: str) -> str:
    """The answer's text, printed as it comes."""
    connection = await nats.connect(url, inbox_prefix=f"_INBOX.service.{TENANT}")
    request_id = f"example-{uuid.uuid4().hex}"
    ended = asyncio.Event()
    pieces: list[str] = []

    async def on_frame(message: Msg) -> None:
        frame = json.loads(message.data)
        if frame["type"] == "delta":
            pieces.append(frame["text"])
            print(frame["text"], end="", flush=True)
        elif frame["type"] in {"done", "cancelled", "expired", "shed", "failed"}:
            ended.set()

    await connection.subscribe(f"tok.{TENANT}.{request_id}", cb=on_frame)
    job = {
        "request_id": request_id,
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "sampling": {"temperature": 0},
        "reply": TENANT,
        "store_result": True,
    }
    # The acknowledgement says that the job is stored: from here on it will be answered.
    await connection.jetstream().publish(
        f"jobs.demo.free.{TENANT}",
        json.dumps(job).encode(),
        headers={"Content-Type": "application/json", "Nats-Msg-Id": request_id},
    )
    await asyncio.wait_for(ended.wait(), timeout=60)
    print()
    await connection.close()
    return "".join(pieces)


def address_in(where: str) -> str:
    """``where``, or what the file of that name holds."""
    return where if "://" in where else Path(where).read_text(encoding="utf-8").strip()


if __name__ == "__main__":
    asyncio.run(ask(address_in(sys.argv[1]), sys.argv[2]))
