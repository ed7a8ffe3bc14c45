"""Reference page of all settings, made from the configuration and the texts below its fields.

``python -m millrace.runtime.settings_reference > docs/configuration.md`` writes it.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
import types
from collections.abc import Iterator
from decimal import Decimal
from enum import StrEnum
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

import msgspec

from millrace.runtime.settings import FILE_VARIABLE, PREFIX, is_section
from millrace.schemas.config import Config
from millrace.schemas.redaction import is_secret

_UNITS = (
    ("_tokens_per_s", "tokens a second"),
    ("_bytes_per_s", "bytes a second"),
    ("_bytes", "bytes"),
    ("_tokens", "tokens"),
    ("_ms", "milliseconds"),
    ("_ms_per_sequence", "milliseconds"),
    ("_ms_per_kv_token", "milliseconds"),
    ("_s", "seconds"),
)
_HEAD = f"""# Configuration

Every setting, made from `schemas/config/` by `python -m millrace.runtime.settings_reference`.

A process reads one YAML or TOML file (`--config` of `millrace up` and of the services, or the file
that `{FILE_VARIABLE}` names), then the variables, which win. The key `nats.url` is the key `url` of
the table `nats`, and the variable `{PREFIX}NATS__URL`. A variable with `_FILE` behind its name
(`{PREFIX}NATS__PASSWORD_FILE`) names a file that holds the value. A list in a variable is comma
separated, a table is in JSON. An unknown key, a wrong type, and a negative number stop the process
at its start, with the reason.

Variables that Kubernetes sets in a pod for a Service named `millrace` or `millrace-…`
(`{PREFIX}PORT=tcp://…`, `{PREFIX}SERVICE_HOST`, `{PREFIX}GATEWAY_PORT_8000_TCP_ADDR` …) are
ignored, by their names and the form of their values; where a setting has such a name, the variable
is the setting's.
"""


def text() -> str:
    """Return the page as it is checked in."""
    return "\n".join([_HEAD, *_section(Config, ())])


def field_texts(section: type[msgspec.Struct]) -> dict[str, str]:
    """Return the text below each field of a section, including its base classes."""
    texts: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, msgspec.Struct) and base is not msgspec.Struct:
            texts |= _own_texts(base)
    return texts


@cache
def _own_texts(section: type[msgspec.Struct]) -> dict[str, str]:
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
    for field, below in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match below:
                case ast.Expr(value=ast.Constant(value=str(said))):
                    texts[field.target.id] = _one_line(said)
    return texts


def _section(section: type[msgspec.Struct], path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield f"{'#' * min(len(path) + 1, 4)} {'.'.join(path)}\n"
        yield f"{_one_line(section.__doc__ or '')}\n"
    fields = msgspec.structs.fields(section)
    leaves = [field for field in fields if not is_section(field.type)]
    if leaves:
        yield "| Key and variable | Type | Default | Meaning |\n|---|---|---|---|"
        texts = field_texts(section)
        for field in leaves:
            yield _row((*path, field.name), field.type, _shown(field.default), texts[field.name])
        yield ""
    inner = [field for field in fields if is_section(field.type)]
    if len(inner) > 1 and len({field.type for field in inner}) == 1:
        yield from _alike(inner, path)
    else:
        for field in inner:
            yield from _section(field.type, (*path, field.name))


def _alike(sections: list[msgspec.structs.FieldInfo], path: tuple[str, ...]) -> Iterator[str]:
    """Yield one table for sections that differ only in their defaults, such as the tiers."""
    names = [section.name for section in sections]
    yield f"`TIER` is one of {', '.join(f'`{name}`' for name in names)}.\n"
    yield "| Key and variable | Type | Default | Meaning |\n|---|---|---|---|"
    texts = field_texts(sections[0].type)
    for field in msgspec.structs.fields(sections[0].type):
        defaults = [_shown(getattr(section.default, field.name)) for section in sections]
        default = defaults[0]
        if len(set(defaults)) > 1:
            default = "<br>".join(f"{n}: {shown}" for n, shown in zip(names, defaults, strict=True))
        yield _row((*path, "TIER", field.name), field.type, default, texts[field.name])
    yield ""


def _row(path: tuple[str, ...], kind: Any, default: str, said: str) -> str:
    key = ".".join(path)
    variable = PREFIX + "__".join(path).upper()
    unit = next((f" ({unit})" for suffix, unit in _UNITS if key.endswith(suffix)), "")
    return f"| `{key}`<br>`{variable}` | {_kind(kind)}{unit} | {default} | {said} |"


def _kind(kind: Any) -> str:
    if is_secret(kind):
        return "secret text"
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind) if choice) or "text"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return " or ".join(f"`{choice}`" for choice in kind)
    if get_origin(kind) in {Union, types.UnionType}:
        return " or ".join(map(_kind, get_args(kind)))
    names = {str: "text", bool: "true or false", int: "whole number", float: "number"}
    names |= {Decimal: "decimal", type(None): "none", tuple[str, ...]: "list of texts"}
    names[dict[str, Decimal]] = "table of decimals"
    return names[kind]


def _shown(default: Any) -> str:
    match default:
        case "" | ():
            return "empty"
        case None:
            return "none"
        case bool():
            return str(default).lower()
        case int() if default and default % 2**20 == 0:
            return f"{default} ({_binary(default)})"
        case int():
            return str(default)
        case float():
            return f"{default:.12f}".rstrip("0").rstrip(".")
        case _:
            return f"`{default}`"


def _binary(num_bytes: int) -> str:
    return f"{num_bytes // 2**30} GiB" if num_bytes % 2**30 == 0 else f"{num_bytes // 2**20} MiB"


def _one_line(said: str) -> str:
    """Return a docstring as a cell of a Markdown table."""
    return re.sub(r"\s+", " ", said.replace("``", "`").replace("|", r"\|")).strip()


if __name__ == "__main__":
    sys.stdout.write(text())
