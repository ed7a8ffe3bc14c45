"""HTTP tools that the gateway runs itself, from a YAML file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import jsonschema
import msgspec
from referencing import Registry

from millrace.schemas.errors import ConfigError, ParameterError
from millrace.schemas.tools import ToolDefinition

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\x20-\x7E\t]*")
_OWN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
_DEFAULT_PORTS = {"http": 80, "https": 443}

Headers = tuple[tuple[bytes, bytes], ...]


class Origin(msgspec.Struct, frozen=True):
    """Origin of a URL: the receiver of secrets and connections."""

    scheme: str
    host: str
    port: int


@dataclass(frozen=True, kw_only=True, eq=False)
class ServerTool:
    """Tool, ready to be called. ``secret`` never leaves for another origin than that of ``url``,
    and is in no text that is made of the tool.
    """

    definition: ToolDefinition
    url: str
    origin: Origin
    method: str
    timeout_s: float
    max_response_bytes: int
    headers: Headers = field(repr=False)
    secret: tuple[bytes, bytes] | None = field(repr=False)
    allow_private: bool
    errors_of: Callable[[Any], Iterator[jsonschema.ValidationError]] = field(repr=False)

    @property
    def name(self) -> str:
        return self.definition.name


class ToolCatalogue:
    """Tools by name, in the order of the file. Immutable."""

    def __init__(self, tools: Sequence[ServerTool] = ()) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def __iter__(self) -> Iterator[ServerTool]:
        return iter(self._tools.values())

    def get(self, name: str) -> ServerTool | None:
        return self._tools.get(name)

    def definitions(self, names: Sequence[str]) -> tuple[ToolDefinition, ...]:
        """Return the definitions of the tools of these names for the model, each once. Raises
        ParameterError("server_tools") for an unknown name.
        """
        for name in names:
            if name not in self._tools:
                known = ", ".join(self._tools) or "none"
                raise ParameterError(
                    "server_tools", f"There is no server tool {name!r:.80}. There are: {known}."
                )
        return tuple(self._tools[name].definition for name in dict.fromkeys(names))


class _SecretHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    env: str


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    url: str
    description: str = ""
    parameters: dict[str, Any] | None = None
    strict: bool = False
    method: Literal["POST", "PUT", "GET"] = "POST"
    timeout_s: float = 10.0
    max_response_bytes: int = 65_536
    headers: dict[str, str] = {}
    secret_header: _SecretHeader | None = None
    allow_private: bool = False


def load_tools(path: str, env: Mapping[str, str]) -> ToolCatalogue:
    """Read a file of tools; "" has none. Secrets come from ``env``.

    Raises ConfigError that names the file, the tool and the invalid key.
    """
    if not path:
        return ToolCatalogue()
    file = Path(path).expanduser()
    try:
        data = msgspec.yaml.decode(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid YAML: {error}.") from error
    if not isinstance(data, dict) or not isinstance(data.get("tools"), dict):
        raise ConfigError(f"{file} must hold a mapping `tools` from names to tools.")
    unknown = [str(key) for key in data if key != "tools"]
    if unknown:
        raise ConfigError(f"{file} has unknown keys: {', '.join(unknown)}; it takes `tools` only.")
    tools = []
    for name, raw in data["tools"].items():
        try:
            tools.append(_tool(name, msgspec.convert(raw, _Entry), env))
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"{file}: tool {name}: {error}") from error
    return ToolCatalogue(tools)


def origin_of(url: str) -> Origin:
    """Return the origin of a URL. Raises ValueError unless it is an http or https URL in ASCII
    without user and password.
    """
    split = urlsplit(url)
    if (
        split.scheme not in _DEFAULT_PORTS
        or not split.hostname
        or split.username is not None
        or not url.isascii()
        or any(character.isspace() for character in url)
    ):
        raise ValueError("url must be http:// or https:// with a host, in ASCII, without a user")
    return Origin(split.scheme, split.hostname, split.port or _DEFAULT_PORTS[split.scheme])


def _tool(name: object, entry: _Entry, env: Mapping[str, str]) -> ServerTool:
    if not isinstance(name, str):
        raise ValueError("its name must be text")  # noqa: TRY004 (told like any bad value)
    if not 0 < entry.timeout_s <= 600:
        raise ValueError("timeout_s must be above 0 and at most 600")
    if entry.max_response_bytes < 1:
        raise ValueError("max_response_bytes must be at least 1")
    return ServerTool(
        definition=ToolDefinition(
            name=name,
            description=entry.description,
            parameters=entry.parameters,
            strict=entry.strict,
        ),
        url=entry.url,
        origin=origin_of(entry.url),
        method=entry.method,
        timeout_s=entry.timeout_s,
        max_response_bytes=entry.max_response_bytes,
        headers=tuple(_header("headers", *pair) for pair in entry.headers.items()),
        secret=_secret(entry.secret_header, env),
        allow_private=entry.allow_private,
        errors_of=_validator(entry.parameters),
    )


def _secret(header: _SecretHeader | None, env: Mapping[str, str]) -> tuple[bytes, bytes] | None:
    if header is None:
        return None
    value = env.get(header.env, "").strip()
    if not value:
        raise ValueError(f"secret_header.env: the environment has no variable {header.env}")
    return _header("secret_header", header.name, value)


def _header(key: str, name: str, value: str) -> tuple[bytes, bytes]:
    """Return a header. Errors do not contain the value, which may be a secret."""
    if not _HEADER_NAME.fullmatch(name) or name.lower() in _OWN_HEADERS:
        raise ValueError(f"{key}: {name!r:.80} is not a header that can be set")
    if not _HEADER_VALUE.fullmatch(value):
        raise ValueError(f"{key}: the value of {name} must be one line of ASCII")
    return name.lower().encode(), value.encode()


def _validator(
    parameters: dict[str, Any] | None,
) -> Callable[[Any], Iterator[jsonschema.ValidationError]]:
    schema = {"additionalProperties": False} if parameters is None else parameters
    if schema.get("type", "object") != "object":
        raise ValueError("parameters.type must be object")
    try:
        jsonschema.Draft202012Validator.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"parameters is not a JSON Schema: {error.message}") from error
    # With an empty registry, no reference of a schema is fetched from the network.
    return jsonschema.Draft202012Validator(schema, registry=Registry()).iter_errors
