"""A service that publishes a job in JSON with nothing but nats-py, and follows its stream.

python docs/examples/publish_job.py data/run/nats.env "What is a lease?" [REQUEST_ID]

The first argument is a file with the lines NATS_URL=…, NATS_USER=… and NATS_PASSWORD=…: `millrace
up` writes one that only its own user may read. On a server with users of its own
(docs/nats-accounts.md) the user is service-example. A request id that was used before gets the
answer of that request. Ctrl-C cancels the job.
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
# After this long without a frame the result is looked up: a lost connection loses frames.
QUIET_S = 5.0


async def ask(access: dict[str, str], question: str, request_id: str) -> str:
    """The answer's text, printed as it comes. Raises RuntimeError if there is none."""
    # Many libraries do not read a user and password in the URL, so they stand apart.
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
        # The tenant's name, alone or followed by a slash and a name: frames go nowhere else.
        "reply": TENANT,
        "store_result": True,
    }
    # The acknowledgement says that the job is stored: from here on it will be answered.
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
    """The text of an answer, from its frames, or from its stored result if frames are missing."""
    text, num_tokens = "", 0
    while True:
        try:
            frame = await asyncio.wait_for(frames.get(), QUIET_S)
        except TimeoutError:
            frame = {"type": "nothing"}
        index = frame.get("index", 0)
        if frame["type"] == "delta" and index <= num_tokens < index + len(frame["token_ids"]):
            # Frames may come twice: the text of tokens that are here already is left out.
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
    """The result of a request, which ``store_result`` keeps for a day after its end; None while it
    may still come. Raises RuntimeError if there is none."""
    answer = await connection.request(f"ctl.result.{TENANT}.{request_id}", b"", timeout=5.0)
    found: dict[str, Any] = json.loads(answer.data)
    if "error" not in found:
        return found
    if found["error"]["retryable"]:
        return None
    raise RuntimeError(found["error"]["message"])


def access_in(file: str) -> dict[str, str]:
    """The variables in a file such as nats.env."""
    lines = shlex.split(Path(file).read_text(encoding="utf-8"), comments=True)
    return dict(line.split("=", 1) for line in lines)


if __name__ == "__main__":
    chosen = sys.argv[3] if len(sys.argv) > 3 else f"example-{uuid.uuid4().hex}"
    asyncio.run(ask(access_in(sys.argv[1]), sys.argv[2], chosen))
