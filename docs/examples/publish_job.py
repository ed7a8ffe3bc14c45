"""A service that publishes a job in JSON with nothing but nats-py, and follows its stream.

python docs/examples/publish_job.py nats://127.0.0.1:4222 "What is a lease?"
"""

import asyncio
import json
import sys
import uuid

import nats
from nats.aio.msg import Msg


async def ask(url: str, question: str) -> str:
    """The answer's text, printed as it comes."""
    connection = await nats.connect(url)
    request_id, reply = f"example-{uuid.uuid4().hex}", f"service-{uuid.uuid4().hex[:8]}"
    ended = asyncio.Event()
    pieces: list[str] = []

    async def on_frame(message: Msg) -> None:
        frame = json.loads(message.data)
        if frame["type"] == "delta":
            pieces.append(frame["text"])
            print(frame["text"], end="", flush=True)
        elif frame["type"] in {"done", "cancelled", "expired", "shed", "failed"}:
            ended.set()

    await connection.subscribe(f"tok.{reply}.*", cb=on_frame)
    job = {
        "request_id": request_id,
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "sampling": {"temperature": 0},
        "reply": reply,
        "tenant": "example",
        "store_result": True,
    }
    # The acknowledgement says that the job is stored: from here on it will be answered.
    await connection.jetstream().publish(
        "jobs.demo.free",
        json.dumps(job).encode(),
        headers={"Content-Type": "application/json", "Nats-Msg-Id": request_id},
    )
    await asyncio.wait_for(ended.wait(), timeout=60)
    print()
    await connection.close()
    return "".join(pieces)


if __name__ == "__main__":
    asyncio.run(ask(*sys.argv[1:3]))
