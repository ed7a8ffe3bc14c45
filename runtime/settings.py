"""Configuration from one TOML or YAML file and ``MILLRACE_*`` variables, checked before use."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from millrace.runtime.connection_settings import check_connections
from millrace.runtime.tls import read_setting_file
from millrace.schemas.config import Config
from millrace.schemas.errors import ConfigError

PREFIX = "MILLRACE_"
FILE_VARIABLE = "MILLRACE_CONFIG"
_FILE_SUFFIX = "_FILE"
_RENAMED = {
    "worker.prefixes_per_tenant": (
        'worker.prefix_scope, which is "tenant" (the default; as true was) or "shared" (as false '
        "was)"
    ),
}
# For Kubernetes Services named millrace or millrace-….
_SERVICE = r"MILLRACE(?:_+[A-Z0-9]+)*"
_SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://\S+:\d+")
_NUMBER = re.compile(r"\d+")
# Place of an error in the configuration, as msgspec reports it.
_PLACE = re.compile(r" - at `\$\.([\w.]+)`$")
_SERVICE_FORMS = (
    (re.compile(rf"{_SERVICE}_SERVICE_HOST"), re.compile(r"[0-9A-Fa-f.:]+")),
    (re.compile(rf"{_SERVICE}_SERVICE_PORT(?:_[A-Z0-9_]+)?"), _NUMBER),
    (re.compile(rf"{_SERVICE}_PORT"), _SERVICE_URL),
    (re.compile(rf"{_SERVICE}_PORT_\d+_(?:TCP|UDP|SCTP)"), _SERVICE_URL),
    (re.compile(rf"{_SERVICE}_PORT_\d+_(?:TCP|UDP|SCTP)_PROTO"), re.compile(r"tcp|udp|sctp")),
    (re.compile(rf"{_SERVICE}_PORT_\d+_(?:TCP|UDP|SCTP)_PORT"), _NUMBER),
    (
        re.compile(rf"{_SERVICE}_PORT_\d+_(?:TCP|UDP|SCTP)_ADDR"),
        re.compile(r"[0-9A-Fa-f.:]+"),
    ),
)


def load_config(path: str | None, env: Mapping[str, str]) -> Config:
    """Load the configuration from the file at ``path``, overridden by variables.

    ``MILLRACE_NATS__URL`` sets ``nats.url``. A list is comma separated, a table is JSON.
    ``MILLRACE_NATS__PASSWORD_FILE`` names a file that holds ``nats.password``. Variables that
    Kubernetes sets for its Services are ignored. Without a path, the file named by
    ``MILLRACE_CONFIG`` is read, if that is set. Raises ConfigError, which names the invalid
    setting.
    """
    path = path or env.get(FILE_VARIABLE) or None
    tree: dict[str, Any] = {} if path is None else _read(Path(path))
    _check_renamed(tree, env)
    try:
        msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_told(error, Config)}") from error
    for name in sorted(env):
        if name.startswith(PREFIX) and name != FILE_VARIABLE and not _is_foreign(name, env[name]):
            setting, text = _of_variable(name, env)
            _set_from_variable(tree, setting, text)
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        # Each variable fits its type, but together they may be inconsistent.
        raise ConfigError(f"the {PREFIX}* variables: {error}") from error
    _check_numbers(config, "")
    check_connections(config)
    return config


def _check_renamed(tree: Mapping[str, Any], env: Mapping[str, str]) -> None:
    """Raise ConfigError for a removed setting, with its replacement."""
    for setting, instead in _RENAMED.items():
        section, _, name = setting.partition(".")
        settings = tree.get(section)
        is_in_file = isinstance(settings, dict) and name in settings
        if is_in_file or names_setting(setting, env):
            raise ConfigError(f"{setting} is no longer a setting; use {instead}")


def names_setting(setting: str, env: Mapping[str, str]) -> bool:
    """Return whether a variable sets ``setting`` (``nats.url``), itself or by a file."""
    name = PREFIX + setting.upper().replace(".", "__")
    return name in env or f"{name}{_FILE_SUFFIX}" in env


def _of_variable(name: str, env: Mapping[str, str]) -> tuple[str, str]:
    """Return the variable that this one sets, and its value: its text, or that of a file."""
    setting = name.removesuffix(_FILE_SUFFIX)
    if setting == name or _is_setting(name) or not _is_setting(setting):
        return name, env[name]
    if setting in env:
        raise ConfigError(f"{setting} and {name} are both set. Remove one of them.")
    text = read_setting_file(name, env[name]).rstrip("\r\n")
    if not text:
        raise ConfigError(f"{name}: {env[name]} is empty.")
    return setting, text


def is_section(kind: Any) -> bool:
    """Return whether a type is a table of settings."""
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _is_foreign(name: str, value: str) -> bool:
    """Return whether a variable has the form of Kubernetes' variables for a Service in every pod.

    A setting of that name takes precedence.
    """
    is_of_service = any(
        names.fullmatch(name) and values.fullmatch(value) for names, values in _SERVICE_FORMS
    )
    return is_of_service and not _is_setting(name)


def _is_setting(name: str) -> bool:
    kind: Any = Config
    for key in name.removeprefix(PREFIX).lower().split("__"):
        fields = _kinds(kind) if is_section(kind) else {}
        if key not in fields:
            return False
        kind = fields[key]
    return not is_section(kind)


def _kinds(section: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(section)}


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error}") from error
    suffix = path.suffix.lower()
    try:
        if suffix == ".toml":
            tree: Any = tomllib.loads(text)
        elif suffix in {".yaml", ".yml"}:
            tree = msgspec.yaml.decode(text)
        else:
            raise ConfigError(f"{path}: a configuration file ends in .toml, .yaml or .yml")
    except (tomllib.TOMLDecodeError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: the file must hold a table of settings")
    return tree


def _set_from_variable(tree: dict[str, Any], name: str, text: str) -> None:
    keys = name.removeprefix(PREFIX).lower().split("__")
    section: Any = Config
    node = tree
    for depth, key in enumerate(keys):
        fields = _kinds(section)
        here = ".".join(keys[:depth]) or "the configuration"
        if key not in fields:
            raise ConfigError(f"{name}: {here} has no setting {key!r}; it has {', '.join(fields)}")
        kind = fields[key]
        is_last = depth == len(keys) - 1
        if is_section(kind) == is_last:
            what = "is a section" if is_last else "has nothing below it"
            raise ConfigError(f"{name}: {'.'.join(keys[: depth + 1])} {what}")
        if is_section(kind):
            section = kind
            node = node.setdefault(key, {})
        else:
            node[key] = _parse(name, text, kind)


def _parse(name: str, text: str, kind: Any) -> Any:
    value: Any = text
    if kind == tuple[str, ...]:
        value = [part.strip() for part in text.split(",") if part.strip()]
    elif text.startswith("{") and any(get_origin(one) is dict for one in get_args(kind)):
        try:
            value = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{name}: not a table in JSON: {error}") from error
    try:
        return msgspec.to_builtins(msgspec.convert(value, kind, strict=False))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {_told(error, kind)}") from error


def _told(error: msgspec.ValidationError, kind: Any) -> str:
    """Return the message of an error at a setting of type ``kind``, with the few allowed values."""
    place = _PLACE.search(str(error))
    for key in place[1].split(".") if place else ():
        kind = _kinds(kind).get(key) if is_section(kind) else None
    choices: list[str] = []
    if get_origin(kind) is Literal:
        choices = [choice for choice in get_args(kind) if choice]
    elif isinstance(kind, type) and issubclass(kind, StrEnum):
        choices = list(kind)
    return f"{error}; it is one of {', '.join(choices)}" if choices else str(error)


def _check_numbers(section: msgspec.Struct, path: str) -> None:
    """Raise ConfigError for a negative or non-finite number: no setting has a use for one."""
    for field in msgspec.structs.fields(section):
        value = getattr(section, field.name)
        if isinstance(value, msgspec.Struct):
            _check_numbers(value, f"{path}{field.name}.")
        elif (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and (not math.isfinite(value) or value < 0)
        ):
            raise ConfigError(f"{path}{field.name} must not be negative or infinite, got {value}")
