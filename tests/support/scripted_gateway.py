"""A server that speaks ``millrace.v1`` from a script, and misbehaves on demand.

It stands for a gateway where a test of the browser's client needs what a good one does not do:
silence, lost and repeated tokens, parting in the middle of a message's tokens.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from millrace.gateway.api import pages
from millrace.schemas.websocket import SUBPROTOCOL
from tests.support.servers import free_port
from tests.support.waiting import eventually

Json = dict[str, Any]
# A token's text, or another message that comes at this point.
Script = Callable[[Json], Sequence[str | Json]]

MODEL = "scripted"
TOOL = {"name": "clock", "description": "What time it is", "parameters": {"type": "object"}}


class Run(msgspec.Struct):
    """A request that was accepted, with or without a listener."""

    request_id: str
    request: Json
    items: Sequence[str | Json]
    session: Json | None = None
    cancelled: bool = False
    stored: bool = False


class ScriptedGateway:
    """``received`` holds every message of every client. Streams wait before token ``hold_before``
    until ``release``; a client that resumes gets ``overlap`` tokens more than it asked for; a token
    in ``lose`` is left out once; connections that were open while it was ``mute`` are never
    answered, not even with pongs. While it is ``shut`` it takes no new ones."""

    def __init__(self) -> None:
        self.port = free_port()
        self.script: Script = lambda request: list(request["messages"][-1]["content"])
        self.token = ""
        self.refusal: Json | None = None
        self.mute_after_refusal = False
        self.refuse_resume: Json | None = None
        self.hold_before: int | None = None
        self.overlap = 0
        self.lose: set[int] = set()
        self._mute = False
        self._silent: set[WebSocket] = set()
        self._known: set[WebSocket] = set()
        self.received: list[Json] = []
        self.runs: dict[str, Run] = {}
        self.sessions: dict[str, list[Json]] = {}
        self.sockets: list[WebSocket] = []
        self.shut = False
        self.num_sockets = 0
        self._keys: dict[str, str] = {}
        self._numbers = itertools.count(1)
        self._moved = asyncio.Condition()
        app = Starlette(
            routes=[
                WebSocketRoute("/v1/ws", self._serve),
                Route("/v1/models", self._models),
                Route("/v1/tools", self._tools),
                Route("/ops/api/{query}", self._operations),
                Route("/v1/sessions/{id}", self._session, methods=["GET", "DELETE"]),
                *pages.routes(),
            ],
            middleware=[Middleware(CORSMiddleware, allow_origins=["*"])],
        )
        self.server = uvicorn.Server(
            uvicorn.Config(
                app,
                port=self.port,
                log_level="error",
                ws="websockets-sansio",
                timeout_graceful_shutdown=1,
            )
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def mute(self) -> bool:
        return self._mute

    @mute.setter
    def mute(self, mute: bool) -> None:
        self._mute = mute
        if mute:
            self._silent.update(self.sockets)

    def messages(self, kind: str) -> list[Json]:
        """Return the clients' messages of one type."""
        return [message for message in self.received if message["type"] == kind]

    async def release(self) -> None:
        """Let streams run to their end."""
        async with self._moved:
            self.hold_before = None
            self._moved.notify_all()

    async def say(self, message: Json) -> None:
        """Send a message to every client."""
        for socket in list(self.sockets):
            await socket.send_json(message)

    async def part(self, code: int = 1012) -> None:
        """Close every connection."""
        for socket in list(self.sockets):
            await socket.close(code)

    # HTTP.

    def _is_known(self, request: Request) -> bool:
        return not self.token or request.headers.get("authorization") == f"Bearer {self.token}"

    async def _models(self, request: Request) -> Response:
        if not self._is_known(request):
            return _refuse(401, "invalid_api_key", "An API key is needed.")
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "description": "Scripted"}]})

    async def _operations(self, request: Request) -> Response:
        if not self._is_known(request):
            return _refuse(403, "insufficient_permissions", "This key may not see that.")
        return _refuse(503, "telemetry_unavailable", "The telemetry process does not answer.")

    async def _tools(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [TOOL]})

    async def _session(self, request: Request) -> Response:
        session_id = request.path_params["id"]
        messages = self.sessions.get(session_id)
        if messages is None:
            return _refuse(404, "session_not_found", "There is no such session.")
        if request.method == "DELETE":
            del self.sessions[session_id]
            return Response(status_code=204)
        history = {"session_id": session_id, "version": 1, "messages": messages}
        return JSONResponse({**history, "summary": "", "num_summarised": 0, "expires_in_s": 3600.0})

    # The socket.

    async def _serve(self, socket: WebSocket) -> None:
        if self.shut:
            await socket.close()
            return
        await socket.accept(SUBPROTOCOL)
        self.num_sockets += 1
        self.sockets.append(socket)
        if self._mute:
            self._silent.add(socket)
        streams: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                message = await socket.receive_json()
                self.received.append(message)
                if socket in self._silent:
                    continue
                if not await self._answer(socket, message, streams):
                    return
        except WebSocketDisconnect:
            pass
        finally:
            self.sockets.remove(socket)
            self._silent.discard(socket)
            self._known.discard(socket)
            for stream in streams.values():
                stream.cancel()
            await asyncio.gather(*streams.values(), return_exceptions=True)

    async def _answer(
        self, socket: WebSocket, message: Json, streams: dict[str, asyncio.Task[None]]
    ) -> bool:
        """Handle one message; False: the client was parted with."""
        match message["type"]:
            case "authenticate" if message["token"] == self.token:
                self._known.add(socket)
                await socket.send_json({"type": "authenticated", "tenant": "acme", "tier": "pro"})
            case "authenticate":
                await socket.send_json(_error("invalid_api_key", "The key is not valid."))
                await socket.close(1008)
                return False
            case "ping":
                await socket.send_json({"type": "pong"})
            case "generate" if self.token and socket not in self._known:
                error = _error("invalid_api_key", "Send authenticate first.")
                await socket.send_json({**error, "id": message["id"]})
            case "resume" if self.refuse_resume is not None:
                await socket.send_json({**self.refuse_resume, "type": "error", "id": message["id"]})
                self.refuse_resume = None
            case "generate" if self.refusal is not None:
                await socket.send_json({**self.refusal, "type": "error", "id": message["id"]})
                self.refusal = None
                if self.mute_after_refusal:
                    self.mute = True
            case "generate":
                run = self._run_of(message)
                self._stream(socket, message["id"], run, 0, streams)
            case "resume" if message["request_id"] in self.runs:
                run = self.runs[message["request_id"]]
                index = max(0, message["next_index"] - self.overlap)
                self._stream(socket, message["id"], run, index, streams)
            case "resume":
                error = _error("request_not_found", "It is not there any more.")
                await socket.send_json({**error, "id": message["id"]})
            case "cancel":
                run = self._named(message["id"])
                async with self._moved:
                    run.cancelled = True
                    self._moved.notify_all()
        return True

    def _run_of(self, message: Json) -> Run:
        key: str = message.get("idempotency_key") or message["id"]
        if key not in self._keys:
            request_id = f"chatcmpl-{next(self._numbers)}"
            run = Run(request_id, message, self.script(message), self._session_info(message))
            self.runs[request_id] = run
            self._keys[key] = request_id
        return self.runs[self._keys[key]]

    def _named(self, generation_id: str) -> Run:
        for message in reversed(self.received):
            if message.get("id") == generation_id and message["type"] in {"generate", "resume"}:
                if message["type"] == "resume":
                    return self.runs[message["request_id"]]
                return self._run_of(message)
        raise AssertionError(f"no generation {generation_id}")

    def _session_info(self, message: Json) -> Json | None:
        session_id = message.get("session_id")
        if session_id is None:
            return None
        kept = self.sessions.setdefault(session_id, [])
        del kept[message.get("session_keep", len(kept)) :]
        return {"session_id": session_id, "version": 1, "num_messages": len(kept)}

    def _stream(
        self,
        socket: WebSocket,
        generation_id: str,
        run: Run,
        index: int,
        streams: dict[str, asyncio.Task[None]],
    ) -> None:
        streams[generation_id] = asyncio.create_task(self._tell(socket, generation_id, run, index))

    async def _tell(self, socket: WebSocket, generation_id: str, run: Run, from_index: int) -> None:
        names = {"id": generation_id, "request_id": run.request_id}
        accepted: Json = {"type": "accepted", **names}
        if run.session is not None:
            accepted["session"] = run.session
        await socket.send_json(accepted)
        started = {"type": "started", **names, "prompt_tokens": 7, "cached_tokens": 3}
        await socket.send_json(started)
        index = 0
        for item in run.items:
            if run.cancelled:
                break
            if isinstance(item, str):
                if await self._wait(run, index):
                    break
                index += 1
                if index <= from_index:
                    continue
                if index - 1 in self.lose:
                    self.lose.remove(index - 1)
                    continue
                delta = {"type": "delta", **names, "index": index - 1, "num_tokens": 1}
                await socket.send_json({**delta, "text": item})
            elif index > from_index or from_index == 0:
                await socket.send_json({**item, **names})
        reason = "cancelled" if run.cancelled else "stop"
        done: Json = {"type": "done", **names, "finish_reason": reason}
        if not run.cancelled:
            details = {"cached_tokens": 3}
            counts = {"prompt_tokens": 7, "completion_tokens": index, "total_tokens": 7 + index}
            done["usage"] = {**counts, "prompt_tokens_details": details}
        self._store(run)
        await socket.send_json(done)

    async def _wait(self, run: Run, index: int) -> bool:
        """Wait before a token as long as it is held; True if the run was cancelled."""
        async with self._moved:
            await self._moved.wait_for(
                lambda: run.cancelled or self.hold_before is None or index < self.hold_before
            )
        return run.cancelled

    def _store(self, run: Run) -> None:
        session_id = run.request.get("session_id")
        if session_id is None or run.stored:
            return
        run.stored = True
        text = "".join(item for item in run.items if isinstance(item, str))
        self.sessions[session_id] += [
            *run.request["messages"],
            {"role": "assistant", "content": text},
        ]


def _error(code: str, message: str) -> Json:
    return {"type": "error", "code": code, "message": message}


def _refuse(status: int, code: str, message: str) -> Response:
    kind = "authentication_error" if status == 401 else "invalid_request_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": error}, status_code=status)


@asynccontextmanager
async def scripted_gateway() -> AsyncIterator[ScriptedGateway]:
    """Serve on a free port until the block ends."""
    made = ScriptedGateway()
    serving = asyncio.create_task(made.server.serve())
    await eventually(lambda: made.server.started)
    yield made
    await made.part()
    made.server.should_exit = True
    await serving
