"""The service of a tenant that publishes jobs with nothing but nats-py."""

from __future__ import annotations

import json
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg

from tests.support.waiting import eventually

WITHIN_S = 60.0
ENDS = ("done", "cancelled", "expired", "shed", "failed")


class Service:
    """Service of a tenant: it publishes jobs and reads its frames and results."""

    def __init__(self, client: Client, tenant: str) -> None:
        self.client = client
        self.tenant = tenant
        self.frames: dict[str, list[dict[str, Any]]] = {}

    async def open(self) -> Service:
        await self.client.subscribe(f"tok.{self.tenant}.>", cb=self._on_frame)
        await self.client.subscribe(f"resume.{self.tenant}.*", cb=self._on_resume)
        await self.client.flush()
        return self

    async def _on_frame(self, message: Msg) -> None:
        request_id = message.subject.rpartition(".")[2]
        self.frames.setdefault(request_id, []).append(json.loads(message.data))

    async def _on_resume(self, message: Msg) -> None:
        has = {"token_ids": self.token_ids(message.subject.rpartition(".")[2])}
        await self.client.publish(
            message.reply, json.dumps(has).encode(), headers={"Content-Type": "application/json"}
        )

    def token_ids(self, request_id: str) -> list[int]:
        known: list[int] = []
        for frame in self.frames.get(request_id, ()):
            if frame["type"] == "delta":
                index = frame.get("index", 0)
                assert index <= len(known), "a token is missing"
                known += frame["token_ids"][len(known) - index :]
        return known

    def end(self, request_id: str) -> dict[str, Any] | None:
        ends = [one for one in self.frames.get(request_id, ()) if one["type"] in ENDS]
        assert len(ends) <= 1, ends
        return ends[0] if ends else None

    async def publish(self, request_id: str, max_tokens: int = 20, **fields: Any) -> None:
        job = {
            "request_id": request_id,
            "model": "demo",
            "prompt": "What is a lease?",
            "sampling": {"max_tokens": max_tokens, "ignore_eos": True, "seed": 1},
            "reply": self.tenant,
            "store_result": True,
            **fields,
        }
        await self.client.jetstream().publish(
            f"jobs.demo.free.{self.tenant}",
            json.dumps(job).encode(),
            headers={"Content-Type": "application/json", "Nats-Msg-Id": request_id},
        )

    async def ended(self, request_id: str) -> dict[str, Any]:
        await eventually(lambda: self.end(request_id) is not None, WITHIN_S, f"{request_id}'s end")
        end = self.end(request_id)
        assert end is not None
        return end

    async def result(self, request_id: str) -> dict[str, Any]:
        subject = f"$JS.API.DIRECT.GET.RESULTS.results.{self.tenant}.{request_id}"
        found: dict[str, Any] = {}

        async def is_there() -> bool:
            answer = await self.client.request(subject, b"", timeout=5.0)
            if answer.data:
                found.update(json.loads(answer.data))
            return bool(found)

        await eventually(is_there, WITHIN_S, f"{request_id}'s result")
        return found
