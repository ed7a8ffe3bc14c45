"""Service that publishes a JSON job and reads its stream. It needs only nats-py.

python docs/examples/publish_job.py data/run/nats.env "What is a lease?" [REQUEST_ID]

The first argument is a file with NATS_URL=…, NATS_USER=… and NATS_PASSWORD=…, as `millrace up`
writes it. On a server with users (docs/nats-accounts.md) the user is service-example. A repeated
request id gets the first request's answer. Ctrl-C cancels the job.
"""

import asyncio
import json
import shlex
import sys
import uuid
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

TENANT = "example"
ENDS = ("done", "cancelled", "expired", "shed", "failed")
# Read the stored result after this time without a frame: a lost connection loses frames.
QUIET_S = 5.0


async def ask(access: dict[str, str], question: str, request_id: str) -> str:
    """Print the answer as it arrives and return its text. Raises RuntimeError if there is none."""
    # Many libraries ignore a user and password in the URL.
    connection = await nats.connect(
        access["NATS_URL"],
        user=access["NATS_USER"],
        password=access["NATS_PASSWORD"],
        inbox_prefix=f"_INBOX.service.{TENANT}",
    )
    frames: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def on_frame(message: Msg) -> None:
        frames.put_nowait(json.loads(message.data))

    await connection.subscribe(f"tok.{TENANT}.{request_id}", cb=on_frame)
    # The body of a chat completion, with the fields of a job beside its own.
    job = {
        "request_id": request_id,
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        # The tenant's name, optionally with a slash and a listener's name.
        "reply": TENANT,
        "store_result": True,
    }
    # The acknowledgement means that the job is stored and will be answered.
    stored = await connection.jetstream().publish(
        f"jobs.demo.free.{TENANT}",
        json.dumps(job).encode(),
        headers={"Content-Type": "application/json", "Nats-Msg-Id": request_id},
    )
    if stored.duplicate:
        print("this id was used before: its answer follows", file=sys.stderr)
    try:
        return await read(connection, frames, request_id)
    except asyncio.CancelledError:
        await connection.publish(f"ctl.cancel.{TENANT}.{request_id}", b"")
        await connection.flush()
        raise
    finally:
        await connection.close()


async def read(connection: Client, frames: asyncio.Queue[dict[str, Any]], request_id: str) -> str:
    """Return an answer's text from frames, or from the stored result if frames are missing."""
    text, num_tokens = "", 0
    while True:
        try:
            frame = await asyncio.wait_for(frames.get(), QUIET_S)
        except TimeoutError:
            frame = {"type": "nothing"}
        index = frame.get("index", 0)
        if frame["type"] == "delta" and index <= num_tokens < index + len(frame["token_ids"]):
            # Frames may repeat: skip the text of known tokens.
            had = num_tokens - index
            ends = frame.get("text_ends") or [len(frame.get("text", ""))]
            new = frame.get("text", "")[ends[had - 1] if had else 0 :]
            num_tokens = index + len(frame["token_ids"])
            text += new
            print(new, end="", flush=True)
        elif frame["type"] == "done" and frame["num_tokens"] == num_tokens:
            print()
            return text
        elif frame["type"] in ENDS and frame["type"] != "done":
            why = frame.get("message", "")
            raise RuntimeError(f"{frame['type']} {frame.get('code', '')}: {why}")
        elif frame["type"] in ("done", "nothing"):
            result = await find_result(connection, request_id)
            if result is not None and result["status"] == "done":
                print(result["text"][len(text) :])
                return str(result["text"])
            if result is not None:
                raise RuntimeError(f"{result['status']}: {result.get('error_message', '')}")


async def find_result(connection: Client, request_id: str) -> dict[str, Any] | None:
    """Return the stored result, which ``store_result`` keeps for a day, or None while it may come.

    Raises RuntimeError if there is none.
    """
    answer = await connection.request(f"ctl.result.{TENANT}.{request_id}", b"", timeout=5.0)
    found: dict[str, Any] = json.loads(answer.data)
    if "error" not in found:
        return found
    if found["error"]["retryable"]:
        return None
    raise RuntimeError(found["error"]["message"])


def access_in(file: str) -> dict[str, str]:
    """Read the variables of a file such as nats.env."""
    lines = shlex.split(Path(file).read_text(encoding="utf-8"), comments=True)
    return dict(line.split("=", 1) for line in lines)


if __name__ == "__main__":
    chosen = sys.argv[3] if len(sys.argv) > 3 else f"example-{uuid.uuid4().hex}"
    asyncio.run(ask(access_in(sys.argv[1]), sys.argv[2], chosen))
