"""Answers for the operations page: saved queries only, by name."""

from __future__ import annotations

import logging
import re
from importlib import resources

import msgspec

from schemas.control import TelemetryAnswer, TelemetryQuery
from telemetry.reading import QueryError, Reader

logger = logging.getLogger(__name__)

_PARAMETER = re.compile(r"\{(\w+):(\w+)\}")
_DEFAULT = re.compile(r"^-- param (\w+): .*\(default (\S+)\)$", re.MULTILINE)


class SavedQuery(msgspec.Struct, frozen=True, kw_only=True):
    """A file of ``telemetry/queries``: its SQL, its parameters' types and defaults."""

    name: str
    sql: str
    types: dict[str, str]
    defaults: dict[str, str]


def load_queries() -> dict[str, SavedQuery]:
    """The saved queries by name, which is the file's name without ``.sql``."""
    queries = {}
    for file in resources.files("telemetry").joinpath("queries").iterdir():
        if not file.name.endswith(".sql"):
            continue
        text = file.read_text(encoding="utf-8")
        name = file.name.removesuffix(".sql")
        queries[name] = SavedQuery(
            name=name,
            sql=text.strip().removesuffix(";"),
            types=dict(_PARAMETER.findall(text)),
            defaults=dict(_DEFAULT.findall(text)),
        )
    return queries


class Answers:
    """Runs a saved query and answers its rows as a JSON array of objects."""

    def __init__(self, reader: Reader, queries: dict[str, SavedQuery] | None = None) -> None:
        self._reader = reader
        self._queries = load_queries() if queries is None else queries

    async def answer(self, asked: TelemetryQuery) -> TelemetryAnswer:
        """Never raises: what is wrong is in ``error``."""
        query = self._queries.get(asked.name)
        if query is None:
            known = ", ".join(sorted(self._queries))
            return TelemetryAnswer(error=f"unknown query {asked.name!r}; there are {known}")
        unknown = sorted(asked.params.keys() - query.types.keys())
        if unknown:
            takes = ", ".join(sorted(query.types)) or "none"
            return TelemetryAnswer(error=f"{asked.name} has no parameter {unknown[0]!r}: {takes}")
        parameters = {**query.defaults, **asked.params}
        missing = sorted(query.types.keys() - parameters.keys())
        if missing:
            return TelemetryAnswer(error=f"{asked.name} needs the parameter {missing[0]!r}")
        try:
            lines = await self._reader.read(query.sql, parameters, "JSONEachRow")
        except QueryError as error:
            logger.info("a saved query failed", extra={"query": asked.name, "reason": str(error)})
            return TelemetryAnswer(error=error.message)
        return TelemetryAnswer(rows_json=b"[" + b",".join(lines.splitlines()) + b"]")
