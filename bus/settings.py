"""Configuration from one TOML or YAML file and ``MILLRACE_*`` variables, checked before use."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from schemas.config import Config
from schemas.errors import ConfigError

PREFIX = "MILLRACE_"
FILE_VARIABLE = "MILLRACE_CONFIG"


def load_config(path: str | None, env: Mapping[str, str]) -> Config:
    """The configuration in the file at ``path``, overridden by variables.

    ``MILLRACE_NATS__URL`` sets ``nats.url``; a list is comma separated. Without a path the file
    that ``MILLRACE_CONFIG`` names is read, if any. Raises ConfigError, naming what is wrong.
    """
    path = path or env.get(FILE_VARIABLE) or None
    tree: dict[str, Any] = {} if path is None else _read(Path(path))
    try:
        msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from error
    for name in sorted(env):
        if name.startswith(PREFIX) and name != FILE_VARIABLE:
            _set_from_variable(tree, name, env[name])
    try:
        config = msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        # Each variable fits its type; together they may still not make sense.
        raise ConfigError(f"the {PREFIX}* variables: {error}") from error
    _check_numbers(config, "")
    return config


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
            tree = yaml.safe_load(text)
        else:
            raise ConfigError(f"{path}: a configuration file ends in .toml, .yaml or .yml")
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
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
        fields = {field.name: field.type for field in msgspec.structs.fields(section)}
        here = ".".join(keys[:depth]) or "the configuration"
        if key not in fields:
            raise ConfigError(f"{name}: {here} has no setting {key!r}; it has {', '.join(fields)}")
        kind = fields[key]
        is_section = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        is_last = depth == len(keys) - 1
        if is_section == is_last:
            what = "is a section" if is_section else "has nothing below it"
            raise ConfigError(f"{name}: {'.'.join(keys[: depth + 1])} {what}")
        if is_section:
            section = kind
            node = node.setdefault(key, {})
        else:
            node[key] = _parse(name, text, kind)


def _parse(name: str, text: str, kind: Any) -> Any:
    value: Any = text
    if kind == tuple[str, ...]:
        value = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return msgspec.to_builtins(msgspec.convert(value, kind, strict=False))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from error


def _check_numbers(section: msgspec.Struct, path: str) -> None:
    """No setting is meaningful as a negative or non-finite number."""
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
