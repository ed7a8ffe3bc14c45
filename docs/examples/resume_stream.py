"""SSE stream that survives its gateway, with the standard library alone.

python docs/examples/resume_stream.py http://127.0.0.1:8000 "What happens when a gateway dies?"
"""

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator


def answer(url: str, question: str, **options: object) -> Iterator[str]:
    """Yield each piece of the answer's text once."""
    message = {"role": "user", "content": question}
    body = {"model": "demo", "messages": [message], "stream": True, **options}
    # The key makes it safe to send the request again.
    headers = {"Content-Type": "application/json", "Idempotency-Key": uuid.uuid4().hex}
    while True:
        try:
            yield from _until_lost(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, urllib.error.HTTPError) and error.code != 503:
                raise
            time.sleep(0.2)  # then another gateway; an application would limit the retries
        else:
            return


def _until_lost(url: str, body: bytes, headers: dict[str, str]) -> Iterator[str]:
    """Yield text and keep the position in ``headers``. Raises OSError if the stream breaks off."""
    request = urllib.request.Request(url, body, headers)  # noqa: S310 (the user's own address)
    event_id, pieces = "", list[str]()
    with urllib.request.urlopen(request, timeout=30) as events:  # noqa: S310
        for line in events:
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if value == "[DONE]":
                yield from pieces
                return
            if field == "id":
                event_id = value
            elif field == "data":
                chunk = json.loads(value)
                if "error" in chunk:
                    is_passing = chunk["error"]["code"] == "gateway_restarting"
                    raise (ConnectionError if is_passing else RuntimeError)(chunk["error"])
                pieces += [choice["delta"].get("content") or "" for choice in chunk["choices"]]
            elif not field and event_id:
                # The event is complete: a resume starts after it.
                yield from pieces
                headers["Last-Event-ID"] = event_id
                event_id, pieces = "", []
    raise ConnectionError("the stream ended before the answer did")


if __name__ == "__main__":
    for piece in answer(*sys.argv[1:3]):
        print(piece, end="", flush=True)
    print()
