"""``/reset_prefix_cache`` and ``/flush_cache``."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from millrace.gateway.tenancy.identity import LOCAL
from tests.support.running_gateway import RunningGateway


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
@pytest.mark.parametrize("query", ["", "?model=echo", "?reset_external=false"])
async def test_each_worker_is_told(
    http: httpx.AsyncClient, front: RunningGateway, path: str, query: str
) -> None:
    answer = await http.post(path + query)
    assert answer.status_code == 200, answer.text
    assert answer.json() == {
        "object": "prefix_cache_reset",
        "workers": [{"worker_id": "echo-1", "model": "echo"}],
    }
    assert front.worker.num_resets == 1


async def test_a_worker_that_cannot_is_named(
    http: httpx.AsyncClient, front: RunningGateway
) -> None:
    front.worker.keeps_prefixes = "A tgi server has no path that empties its cache."
    answer = await http.post("/reset_prefix_cache")
    assert answer.status_code == 409
    error = answer.json()["error"]
    assert error["code"] == "prefix_cache_kept"
    assert error["message"] == (
        "Not every prefix cache was emptied: worker echo-1 of echo: A tgi server has no path "
        "that empties its cache."
    )


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ("model=other", 404, "model"),
        ("model=", 404, "model"),
        ("reset_running_requests=true", 400, "reset_running_requests"),
        ("reset_external=1", 400, "reset_external"),
    ],
)
async def test_what_cannot_be_asked(
    http: httpx.AsyncClient, front: RunningGateway, query: str, status: int, param: str
) -> None:
    answer = await http.post(f"/reset_prefix_cache?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert (await http.get("/flush_cache")).status_code == 405
    assert front.worker.num_resets == 0


async def test_it_needs_an_administrator(
    http: httpx.AsyncClient, front: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def caller(_scope: object) -> object:
        return msgspec.structs.replace(LOCAL, is_admin=False)

    monkeypatch.setattr(front.gateway.identity, "caller", caller)
    answer = await http.post("/reset_prefix_cache")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "insufficient_permissions")
    assert front.worker.num_resets == 0
