"""Batches for the Responses API, as the openai client meets them."""

from __future__ import annotations

from typing import Any

from tests.support.batches.batch_system import BatchGateway, by_id
from tests.support.batches.batch_worker import BatchWorker
from tests.support.running_gateway import MODEL


def _line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/responses",
        "body": {"model": MODEL, **body},
    }


async def test_answers_are_made_and_kept(front: BatchGateway, worker: BatchWorker) -> None:
    lines = [
        _line("kept", input="Grüße"),
        _line("loose", input="Grüße", store=False),
        _line("behind", input="x", background=True),
        _line("searching", input="Grüße", tools=[{"type": "web_search"}]),
        _line("unknown", input=[{"type": "item_reference", "id": "msg_x"}]),
    ]
    batch = await front.end(await front.begin(lines, "/v1/responses"))
    answers = by_id(await front.lines(batch.output_file_id))
    kept, loose = (answers[name]["response"]["body"] for name in ("kept", "loose"))
    assert (kept["object"], kept["status"], kept["store"]) == ("response", "completed", True)
    assert kept["output"][0]["content"][0]["text"] == "Grüße"
    searching = answers["searching"]["response"]["body"]
    assert searching["x-millrace-notice"][0]["detail"] == "web_search"
    assert (loose["status"], loose["store"]) == ("completed", False)
    again = await front.client.responses.retrieve(kept["id"])
    assert again.output_text == kept["output"][0]["content"][0]["text"]
    errors = by_id(await front.lines(batch.error_file_id))
    params = {name: error["response"]["body"]["error"]["param"] for name, error in errors.items()}
    assert params == {"behind": "background", "unknown": "input[0].id"}
