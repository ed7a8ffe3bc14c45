"""Meanings of the analytics store's tables and columns: ``telemetry/columns/*.toml``.

A file declares the table of its name. Comments in the store, the views and the page of tables are
made of it. Migrations make tables and columns without their meaning.
"""

from __future__ import annotations

import functools
import tomllib
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, TypeVar

import msgspec

from millrace.schemas.tenants import LIMITS

_T = TypeVar("_T")

# Columns with the same meaning in several tables.
_COMMON = "common"
# Columns with a fixed set of values, and the meaning of each value.
_VALUES = "values"
# Views over several tables.
_VIEWS = "views"
INTERNAL = "Internal:"
VIEW_SUFFIX = "_once"
PERCENTILES = (50, 90, 95, 99)
PERCENTILE_TYPE = "Nullable(Float64)"


class DeclaredColumn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Column: its meaning in whole sentences (``what``), the ``unit`` of a number, the meaning of
    ``null`` or, for text, of ``empty``, and the set in ``values.toml`` of its ``values``.

    An ``internal`` column is for Millrace itself and is in no view. A column with ``percentiles``
    holds states that this function merges: the view has their percentiles instead. ``whole`` is the
    value for the view's rows from another table, which lacks the column.
    """

    what: str
    unit: str = ""
    null: str = ""
    empty: str = ""
    values: str = ""
    internal: bool = False
    percentiles: str = ""
    whole: str = ""

    @property
    def comment(self) -> str:
        parts = [f"{INTERNAL} {self.what}" if self.internal else self.what]
        if self.unit:
            parts.append(f"Unit: {self.unit}.")
        if self.null:
            parts.append(f"NULL: {self.null}.")
        if self.empty:
            parts.append("Never empty." if self.empty == "never" else f"Empty: {self.empty}.")
        if self.percentiles:
            levels = ", ".join(f"{level / 100:g}" for level in PERCENTILES)
            parts.append(f"A state of a t-digest: merge it with {self.percentiles}({levels}).")
        if self.values:
            meanings = load_values()[self.values].items()
            said = "; ".join(f"{value} ({meaning})" for value, meaning in meanings)
            parts.append(f"Values: {said}.")
        return " ".join(parts)


class ViewColumn(msgspec.Struct, frozen=True, kw_only=True):
    """Column of a view: its comment, and its expression over the table's columns. An empty type
    means the type of the table's column of this name."""

    name: str
    comment: str
    expression: str
    type: str = ""


class DeclaredTable(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    rename={"view_name": "view"},
):
    """Table: the meaning of its row, and its columns by name. The view is named ``view_name`` if
    given. It also has the whole rows of the table ``whole_in``."""

    name: str
    what: str
    columns: dict[str, DeclaredColumn] = {}
    internal: bool = False
    view_name: str = ""
    whole_in: str = ""

    @property
    def comment(self) -> str:
        return f"{INTERNAL} {self.what}" if self.internal else self.what

    @property
    def view(self) -> str:
        """Name of the view that has each row once; empty for an internal table."""
        return self.view_name or ("" if self.internal else self.name + VIEW_SUFFIX)

    @property
    def view_comment(self) -> str:
        if self.view_name:
            return f"{self.what} Each row once."
        return f"{self.what} Each row once, as {self.name} FINAL has it."

    def view_columns(self, name: str) -> list[ViewColumn]:
        """Return the view's expression for the table's column ``name``."""
        column = self.columns.get(name)
        if column is None or column.internal:
            return []
        if column.percentiles:
            return [_percentile(name, column, level) for level in range(len(PERCENTILES))]
        return [ViewColumn(name=name, comment=column.comment, expression=name)]


class JointViewColumn(DeclaredColumn, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Column of a view over several tables, with its ClickHouse type."""

    type: str


class JointView(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """View over several tables: the meaning of its row, and its query. In the query ``{database}``
    stands for the name of the database."""

    what: str
    select: str
    columns: dict[str, JointViewColumn]


def _percentile(name: str, column: DeclaredColumn, level: int) -> ViewColumn:
    measure, _, unit = name.rpartition("_")
    state = f"finalizeAggregation({name})[{level + 1}]"
    said = msgspec.structs.replace(
        column,
        what=f"Percentile {PERCENTILES[level]} of the row's requests. {column.what}",
        null="no request of the row has one",
        percentiles="",
    )
    return ViewColumn(
        name=f"{measure}_p{PERCENTILES[level]}_{unit}",
        comment=said.comment,
        expression=f"if(isNaN({state}), NULL, {state})",
        type=PERCENTILE_TYPE,
    )


@functools.cache
def load_declaration() -> dict[str, DeclaredTable]:
    """Return all tables by name, including internal ones."""
    files = resources.files("millrace.telemetry").joinpath("columns").iterdir()
    declared = {file.name.removesuffix(".toml"): _read(file) for file in files}
    common = declared.pop(_COMMON)
    del declared[_VALUES], declared[_VIEWS]
    tables = {}
    for name, table in sorted(declared.items()):
        shared = {column: common[column] for column in table.pop("common", ())}
        table |= {"name": name, "columns": {**shared, **table.get("columns", {})}}
        tables[name] = msgspec.convert(table, DeclaredTable)
    return tables


def _read(file: Traversable) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _read_columns(name: str, kind: type[_T]) -> dict[str, _T]:
    file = resources.files("millrace.telemetry").joinpath("columns", f"{name}.toml")
    return {key: msgspec.convert(value, kind) for key, value in _read(file).items()}


@functools.cache
def load_joint_views() -> dict[str, JointView]:
    """Return the views over several tables by name."""
    return _read_columns(_VIEWS, JointView)


@functools.cache
def load_values() -> dict[str, dict[str, str]]:
    """Return the sets of values by name: each value with its meaning."""
    limits = {name: traits.meaning for name, traits in LIMITS.items()}
    return {**_read_columns(_VALUES, dict[str, str]), "limit": limits}
