"""Page of the records' fields with their columns.

``python -m millrace.telemetry.store.fields_page`` puts them into docs/kafka.md, below the heading
"Fields".

Everything is read from the records, their tables and the declarations, so a new field appears
automatically. A field without a column has its meaning in ``_WITHOUT_COLUMN``.
"""

from __future__ import annotations

import asyncio
import enum
import inspect
import re
import tempfile
import types
import typing
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec

from millrace.bus import subjects
from millrace.schemas.config import ClickHouseConfig
from millrace.schemas.records import Record, RequestRecord
from millrace.telemetry.store.declaration import INTERNAL, load_declaration
from millrace.telemetry.store.migrate import migrate
from millrace.telemetry.store.store import Store
from millrace.telemetry.store.tables import GENERATION_ROWS, Table, table_of

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kafka.md"
_HEADING = "\n## Fields\n"
_INTRODUCTION = """
Made by `python -m millrace.telemetry.store.fields_page` from the records, the tables and what
`telemetry/columns` declares. Where the meaning says when the column is NULL, the field is 0 or nil
then. `nil` is MessagePack's. A field without a default is in every record.
"""
_NAMES = {str: "text", int: "integer", float: "float", bool: "boolean", type(None): "nil"}
# Meanings of fields without a column, by "Record.field".
_WITHOUT_COLUMN: dict[str, str] = {
    "RequestRecord.lives": "The former name of `attempts`, written and read in this version only",
}
_FUNCTION = re.compile(r"\w+\((\w+)\)")


def with_fields(page: str, made: str) -> str:
    """Return the page with ``made`` below its heading of fields, which is its last one."""
    head, heading, _ = page.partition(_HEADING)
    if not heading:
        raise ValueError(f"the page has no heading {_HEADING.strip()!r}")
    return f"{head}{heading}{made}"


async def fields_page(store: Store) -> str:
    """Render the section as Markdown from an up-to-date store."""
    keys = await store.rows(
        "SELECT name, sorting_key FROM system.tables WHERE database = currentDatabase()"
    )
    sorting_keys = {str(name): str(key) for name, key in keys}
    kinds = typing.get_args(Record)
    sections = [_record_section(kind, sorting_keys) for kind in kinds]
    sections += [_nested_section(part) for part in _nested_of(kinds)]
    return "\n".join([_INTRODUCTION, *sections])


def columns_by_field(kind: type) -> dict[str, list[str]]:
    """Return the columns that each field feeds."""
    return {
        field.name: [column.name for column in _table(kind).columns if field.name in column.fields]
        for field in _fields(kind)
    }


def _table(kind: type) -> Table[Any]:
    """Return the table that has all fields of the kind."""
    return GENERATION_ROWS if kind is RequestRecord else table_of(_blank(kind))


def _blank(kind: type) -> Any:
    return kind(**{field.name: "" for field in _fields(kind) if field.required})


def _record_section(kind: type, sorting_keys: dict[str, str]) -> str:
    table = _table(kind)
    columns = columns_by_field(kind)
    topic = subjects.topic(subjects.record(_blank(kind)))
    config = kind.__struct_config__  # type: ignore[attr-defined]
    identity = ", ".join(f"`{name}`" for name in _identity(table, columns, sorting_keys))
    lines = [
        f"### {topic}",
        "",
        f'`type` is `"{config.tag}"`; table `{table.name}`. {load_declaration()[table.name].what}',
        f"Copies have the same {identity}.",
        "",
        "| field | type | default | column | meaning |",
        "|---|---|---|---|---|",
        *(_row(kind, field, table, columns[field.name]) for field in _fields(kind)),
    ]
    return "\n".join(lines) + "\n"


def _identity(
    table: Table[Any], columns: dict[str, list[str]], sorting_keys: dict[str, str]
) -> list[str]:
    """Return the fields that identify a row of the table."""
    names = _FUNCTION.sub(r"\1", sorting_keys[table.name]).split(", ")
    return [next(field for field, of in columns.items() if name in of) for name in names]


def _row(kind: type, field: msgspec.structs.FieldInfo, table: Table[Any], names: list[str]) -> str:
    declared = load_declaration()[table.name].columns
    column_types = {column.name: column.type for column in table.columns}
    shown = ", ".join(f"`{name}` `{column_types[name]}`" for name in names)
    meaning = " ".join(
        declared[name].comment.removeprefix(f"{INTERNAL} ") for name in names if name in declared
    )
    meaning = meaning or _WITHOUT_COLUMN[f"{kind.__name__}.{field.name}"]
    first = f"| `{field.name}` | {_type_name(field.type)} | {_default(field)} |"
    return f"{first} {shown or 'none'} | {meaning} |"


def _nested_section(part: type) -> str:
    config = part.__struct_config__  # type: ignore[attr-defined]
    left_out = " A field that has its default is left out." if config.omit_defaults else ""
    said = " ".join(inspect.getdoc(part).split()).replace("``", "`")  # type: ignore[union-attr]
    lines = [
        f"### {part.__name__}",
        "",
        f"{said}{left_out}",
        "",
        "| field | type | default |",
        "|---|---|---|",
        *(f"| `{one.name}` | {_type_name(one.type)} | {_default(one)} |" for one in _fields(part)),
    ]
    return "\n".join(lines) + "\n"


def _fields(kind: type) -> tuple[msgspec.structs.FieldInfo, ...]:
    return msgspec.structs.fields(kind)


def _nested_of(kinds: tuple[type, ...]) -> list[type]:
    """Return the structures within records, each once."""
    found: list[type] = []
    for kind in kinds:
        for field in _fields(kind):
            for part in _parts(field.type):
                if _is_struct(part) and part not in found:
                    found += [part, *(one for one in _nested_of((part,)) if one not in found)]
    return found


def _parts(of: Any) -> Iterator[Any]:
    yield of
    for part in typing.get_args(of):
        yield from _parts(part)


def _is_struct(of: Any) -> bool:
    return isinstance(of, type) and issubclass(of, msgspec.Struct)


def _type_name(of: Any) -> str:
    if isinstance(of, type) and issubclass(of, enum.Enum):
        return " or ".join(f"`{member.value}`" for member in of)
    if of is Decimal:
        return "text, a decimal number"
    if _is_struct(of):
        return f"map, see [{of.__name__}](#{of.__name__.lower()})"
    arguments = typing.get_args(of)
    origin = typing.get_origin(of)
    if origin is types.UnionType:
        return " or ".join(_type_name(one) for one in arguments)
    if origin is tuple:
        return f"array of {_type_name(arguments[0])}"
    if origin is dict:
        return f"map of {_type_name(arguments[0])} to {_type_name(arguments[1])}"
    return _NAMES[of]


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "none"
    default = field.default
    if default is msgspec.NODEFAULT:
        default = field.default_factory()
    if default is None:
        return "nil"
    if default in ("", (), {}) and not isinstance(default, int | float):
        return "empty"
    value = default.value if isinstance(default, enum.Enum) else default
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


async def _main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = await Store.open(ClickHouseConfig(path=folder))
        await migrate(store)
        made = await fields_page(store)
        await store.close()
    page = await asyncio.to_thread(PAGE.read_text, encoding="utf-8")
    await asyncio.to_thread(PAGE.write_text, with_fields(page, made), encoding="utf-8")


if __name__ == "__main__":
    asyncio.run(_main())
