"""HTTP connection to one inference server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from millrace.schemas.errors import MillraceError
from millrace.schemas.redaction import redact_urls

_ANSWER_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0
_SHOWN_CHARACTERS = 500
_BOUNDARY = b"\n\n"
_DATA = b"data:"
_MAX_EVENT_BYTES = 16 << 20


class ServerUnreachableError(MillraceError, code="engine_unreachable", retryable=True):
    """Server that does not answer, or not in time."""


class AnswerError(MillraceError, code="engine_failed"):
    """Answer that is an error, or not of the expected form; ``status`` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def blames_caller(self) -> bool:
        """True if the request is at fault, and would be at any time."""
        is_busy = self.status in (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.TOO_MANY_REQUESTS)
        return self.status < HTTPStatus.INTERNAL_SERVER_ERROR and not is_busy


class ServerClient:
    """HTTP client of a server at ``url``, or behind the Unix socket ``socket``. Owns its
    connections until ``close``.
    """

    def __init__(self, url: str, *, socket: Path | None = None, api_key: str = "") -> None:
        self.url = url.rstrip("/")
        # The server may close a kept connection while a request is on its way, and a POST cannot
        # tell whether the server received it. A new connection costs a fraction of a token's time.
        connector: aiohttp.BaseConnector = (
            aiohttp.TCPConnector(limit=0, force_close=True)
            if socket is None
            else aiohttp.UnixConnector(str(socket), limit=0, force_close=True)
        )
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
            # No proxy and no netrc file: the address is the server's own.
            trust_env=False,
        )

    async def get(self, path: str) -> bytes:
        """Return the body of a GET. Raises ServerUnreachableError or AnswerError."""
        return await self._request("GET", path)

    async def get_json(self, path: str) -> Any:
        """Return the decoded JSON of a GET. Raises ServerUnreachableError or AnswerError."""
        return _decoded(path, await self._request("GET", path))

    async def post_json(self, path: str, body: dict[str, Any]) -> Any:
        """Return the decoded JSON answer to a POST. Raises ServerUnreachableError or
        AnswerError.
        """
        return _decoded(path, await self._request("POST", path, body))

    async def post(self, path: str, body: dict[str, Any]) -> bytes:
        """Return the body of the answer to a POST. Raises ServerUnreachableError or AnswerError."""
        return await self._request("POST", path, body)

    async def is_healthy(self, path: str) -> bool:
        """Return whether a GET succeeds."""
        try:
            await self._request("GET", path)
        except MillraceError:
            return False
        return True

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the data of each server-sent event that answers a POST.

        Closing the iterator ends the request at the server.

        Raises:
            ServerUnreachableError: the connection breaks.
            AnswerError: the answer is not a stream.
        """
        try:
            async with self._session.post(
                self.url + path,
                data=msgspec.json.encode(body),
                headers={"Content-Type": "application/json", "Accept": "text/event-stream"},
            ) as response:
                if response.status != HTTPStatus.OK:
                    raise _answer_error(path, response.status, await response.read())
                rest = b""
                async for chunk in response.content.iter_any():
                    *events, rest = (rest + chunk).replace(b"\r\n", b"\n").split(_BOUNDARY)
                    for event in events:
                        data = _data_of(event)
                        if data:
                            yield data
                    if len(rest) > _MAX_EVENT_BYTES:
                        raise AnswerError(
                            f"{path} sent an event of more than {_MAX_EVENT_BYTES} bytes.",
                            response.status,
                        )
        except (aiohttp.ClientError, OSError) as error:
            raise _unreachable(self.url, error) from error

    async def whole(self, path: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        """Yield the one answer to a POST, in the form of ``stream``, without a timeout.

        Closing the iterator ends the request. Raises as ``stream`` does.
        """
        yield await self._request("POST", path, body, timeout_s=None)

    async def close(self) -> None:
        await self._session.close()

    async def _request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = _ANSWER_TIMEOUT_S,
    ) -> bytes:
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers={"Content-Type": "application/json"} if body is not None else {},
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S),
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise _unreachable(self.url, error) from error
        if response.status != HTTPStatus.OK:
            raise _answer_error(path, response.status, answer)
        return answer


def _data_of(event: bytes) -> bytes:
    lines = [line[len(_DATA) :].strip() for line in event.split(b"\n") if line.startswith(_DATA)]
    return b"\n".join(lines)


def _decoded(path: str, answer: bytes) -> Any:
    try:
        return msgspec.json.decode(answer)
    except msgspec.DecodeError as error:
        raise AnswerError(f"{path} sent invalid JSON: {_shown(answer)}", HTTPStatus.OK) from error


def _answer_error(path: str, status: int, answer: bytes) -> AnswerError:
    return AnswerError(f"{path} answered with status {status}: {_shown(answer)}", status)


def _shown(answer: bytes) -> str:
    return answer[:_SHOWN_CHARACTERS].decode(errors="replace").strip() or "nothing"


def _unreachable(url: str, error: BaseException) -> ServerUnreachableError:
    return ServerUnreachableError(
        f"The server at {redact_urls(url)} cannot be reached: {error or 'timeout'}"
    )
