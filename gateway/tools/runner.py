"""Runner of the gateway's own tools for a model: bounded in time, size, number and addresses."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from typing import Any, NamedTuple
from urllib.parse import urlencode, urljoin

import httpcore
import jsonschema
import msgspec

from millrace.gateway.tools.catalogue import Headers, Origin, ServerTool, ToolCatalogue, origin_of
from millrace.gateway.tools.network import CheckedNetwork, ForbiddenAddressError, Resolve, resolve
from millrace.runtime.clock import Clock
from millrace.schemas.config import GatewayConfig
from millrace.schemas.errors import ConfigError

MAX_REDIRECTS = 3

_KEEP_IDLE_S = 5.0
_MAX_PROBLEM_CHARACTERS = 300
_MAX_REFUSAL_CHARACTERS = 1_000
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_SAME_REQUEST = frozenset({307, 308})
_JSON_BODY: Headers = ((b"content-type", b"application/json"),)
# The limit on read bytes applies to unpacked answers, so request no compression.
_ALWAYS: Headers = (
    (b"accept", b"application/json, text/*;q=0.9, */*;q=0.1"),
    (b"accept-encoding", b"identity"),
    (b"user-agent", b"millrace"),
)

_log = logging.getLogger(__name__)

# Reading all trusted certificates takes longer than starting a gateway.
_tls_context = functools.cache(httpcore.default_ssl_context)


class ToolResult(msgspec.Struct, frozen=True):
    """Result of a tool. ``output`` is for the model: the tool's answer, or the error. It is stored
    in Redis for a gateway that continues the response.
    """

    ok: bool
    output: str
    duration_ms: float


class _ToolError(Exception):
    """Error message of a tool for the model."""


class _Request(NamedTuple):
    method: str
    url: str
    headers: Headers
    body: bytes


class ToolRunner:
    """Runner of tools by name, at most ``config.max_tool_runs`` at a time.

    Owns a pool of connections for each tool, until ``close``. Raises ConfigError for a bound of
    zero runs, and for a tool whose host is not in ``config.tool_allowed_hosts``.
    """

    def __init__(
        self,
        catalogue: ToolCatalogue,
        config: GatewayConfig,
        clock: Clock,
        resolver: Resolve = resolve,
    ) -> None:
        if config.max_tool_runs < 1:
            raise ConfigError("gateway.max_tool_runs must be at least 1.")
        self.catalogue = catalogue
        self._allowed_hosts = tuple(host.lower() for host in config.tool_allowed_hosts)
        self._clock = clock
        self._slots = asyncio.Semaphore(config.max_tool_runs)
        self._pools: dict[str, httpcore.AsyncConnectionPool] = {}
        context = _tls_context() if any(catalogue) else None
        for tool in catalogue:
            origin = tool.origin
            if not self._is_allowed_host(origin.host):
                raise ConfigError(
                    f"The tool {tool.name} leads to {origin.host}, which is not among "
                    "gateway.tool_allowed_hosts."
                )
            private_host = (origin.host, origin.port) if tool.allow_private else None
            self._pools[tool.name] = httpcore.AsyncConnectionPool(
                ssl_context=context,
                max_connections=config.max_tool_runs,
                max_keepalive_connections=4,
                keepalive_expiry=_KEEP_IDLE_S,
                network_backend=CheckedNetwork(resolver, private_host),
            )

    async def run(self, name: str, arguments: str) -> ToolResult:
        """Call a tool with arguments in JSON. Never raises for errors of tool or model."""
        start_s = self._clock.monotonic()
        ok, output = await self._outcome(name, arguments)
        return ToolResult(ok, output, (self._clock.monotonic() - start_s) * 1e3)

    async def close(self) -> None:
        """Close all connections."""
        for pool in self._pools.values():
            await pool.aclose()

    async def _outcome(self, name: str, arguments: str) -> tuple[bool, str]:
        tool = self.catalogue.get(name)
        if tool is None:
            return False, f"There is no tool {name!r:.80}."
        try:
            request = _first_request(tool, _checked_arguments(tool, arguments))
            async with asyncio.timeout(tool.timeout_s), self._slots:
                return True, _without_secret(tool, await self._answer(tool, request))
        except _ToolError as error:
            return False, _without_secret(tool, str(error))
        except TimeoutError:
            return False, f"The tool did not answer within {tool.timeout_s:g} s."
        except ForbiddenAddressError as error:
            _log.warning("tool %s: %s", name, error)
            return False, "The tool leads to an address that is not allowed."
        except (OSError, UnicodeError, httpcore.NetworkError, httpcore.ProtocolError) as error:
            _log.warning("tool %s: %s: %s", name, type(error).__name__, error)
            return False, "The tool cannot be reached."
        except Exception:  # noqa: BLE001 (the model continues without the tool)
            _log.exception("tool %s failed", name)
            return False, "The tool failed."

    async def _answer(self, tool: ServerTool, request: _Request) -> str:
        for _ in range(MAX_REDIRECTS + 1):
            async with self._pools[tool.name].stream(
                request.method,
                request.url,
                headers=list(request.headers),
                content=request.body or None,
            ) as response:
                if response.status not in _REDIRECTS:
                    return await _text_of(tool, response)
                request = self._redirected(tool, request, response)
        raise _ToolError(f"The tool redirects more than {MAX_REDIRECTS} times.")

    def _redirected(
        self, tool: ServerTool, request: _Request, response: httpcore.Response
    ) -> _Request:
        """Return the redirected request. The tool's own headers go to its own origin only."""
        url = urljoin(request.url, _header_of(response, b"location"))
        try:
            origin = origin_of(url)
        except ValueError as error:
            raise _ToolError("The tool redirects to an invalid web address.") from error
        downgraded = tool.origin.scheme == "https" and origin.scheme == "http"
        if downgraded or not self._is_allowed_host(origin.host):
            raise ForbiddenAddressError(f"it redirects to {origin.scheme}://{origin.host}")
        if response.status in _SAME_REQUEST or request.method == "GET":
            method, body = request.method, request.body
        else:
            method, body = "GET", b""
        return _Request(method, url, _headers_for(tool, origin, body), body)

    def _is_allowed_host(self, host: str) -> bool:
        return not self._allowed_hosts or any(
            host.endswith(allowed[1:]) if allowed.startswith("*.") else host == allowed
            for allowed in self._allowed_hosts
        )


def _checked_arguments(tool: ServerTool, text: str) -> dict[str, Any]:
    """Return the arguments as an object that fits the schema. Raises _ToolError."""
    try:
        arguments = json.loads(text or "{}", parse_constant=_no_constant)
        if not isinstance(arguments, dict):
            raise _ToolError("The arguments must be a JSON object.")
        problem = jsonschema.exceptions.best_match(tool.errors_of(arguments))
    except ValueError as error:
        raise _ToolError(f"The arguments are not valid JSON: {error}.") from error
    except RecursionError as error:
        raise _ToolError("The arguments are nested too deeply.") from error
    if problem is not None:
        what = problem.message[:_MAX_PROBLEM_CHARACTERS]
        raise _ToolError(f"The arguments do not fit the tool: {problem.json_path}: {what}")
    return arguments


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _first_request(tool: ServerTool, arguments: dict[str, Any]) -> _Request:
    if tool.method != "GET":
        body = json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace")
        headers = _headers_for(tool, tool.origin, body)
        return _Request(tool.method, tool.url, headers, body)
    texts = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in arguments.items()
    }
    query = urlencode(texts, errors="replace")
    joint = "&" if "?" in tool.url else "?"
    url = f"{tool.url}{joint}{query}" if query else tool.url
    return _Request("GET", url, _headers_for(tool, tool.origin, b""), b"")


def _headers_for(tool: ServerTool, origin: Origin, body: bytes) -> Headers:
    ours = _ALWAYS + _JSON_BODY if body else _ALWAYS
    if origin != tool.origin:
        return ours
    own = tool.headers if tool.secret is None else (*tool.headers, tool.secret)
    names = {name for name, _ in own}
    return (*(pair for pair in ours if pair[0] not in names), *own)


async def _text_of(tool: ServerTool, response: httpcore.Response) -> str:
    """Return the body of a valid answer. Raises _ToolError."""
    ok = 200 <= response.status < 300
    limit = tool.max_response_bytes
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in response.aiter_stream():
        num_bytes += len(chunk)
        if num_bytes > limit:
            raise _ToolError(f"The tool's answer is larger than {limit} bytes.")
        chunks.append(chunk)
    if response.status >= 500:
        raise _ToolError(f"The tool answered with HTTP status {response.status}.")
    try:
        text = b"".join(chunks).decode(_charset(response))
    except (UnicodeDecodeError, LookupError) as error:
        raise _ToolError("The tool's answer is not text.") from error
    if not ok:
        raise _ToolError(
            f"The tool answered with HTTP status {response.status}: "
            f"{text[:_MAX_REFUSAL_CHARACTERS]}"
        )
    return text


def _charset(response: httpcore.Response) -> str:
    for part in _header_of(response, b"content-type").split(";")[1:]:
        name, _, value = part.partition("=")
        if name.strip().lower() == "charset":
            return value.strip().strip('"')
    return "utf-8"


def _header_of(response: httpcore.Response, name: bytes) -> str:
    for key, value in response.headers:
        if key.lower() == name:
            return value.decode("latin-1")
    return ""


def _without_secret(tool: ServerTool, text: str) -> str:
    """Remove the secret from a text: tools may echo it, also without its scheme."""
    if tool.secret is None:
        return text
    whole = tool.secret[1].decode()
    for secret in (whole, whole.split()[-1]):
        text = text.replace(secret, "[secret]")
    return text
