"""Numbered migrations: each runs once, in order, and is idempotent.

A new store begins with the schema, which replaces the migrations 1 to 20 of earlier versions.
"""

from __future__ import annotations

import re
from importlib import resources

import msgspec

from millrace.schemas.errors import MillraceError
from millrace.telemetry.store.store import PlainTable, Store
from millrace.telemetry.store.views import declare

# Number of the schema, and of the last migration that it replaces.
SCHEMA = 20
APPLIED = PlainTable("schema_migrations", ("number", "name"), ("UInt32", "String"))
_LEDGER = """
CREATE TABLE IF NOT EXISTS schema_migrations
(
    number     UInt32 COMMENT 'The number of a migration that has run',
    name       String COMMENT 'The migration''s file',
    applied_at DateTime64(3, 'UTC') DEFAULT now64(3) COMMENT 'When it ran, UTC'
)
ENGINE = ReplacingMergeTree
ORDER BY number
COMMENT 'Which migrations have run.'
"""
_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")
# A semicolon within a line belongs to a column's comment.
_STATEMENT_END = re.compile(r";[ \t]*(?:\n|\Z)")


class MigrationError(MillraceError, code="migration_failed"):
    """Error if this version cannot migrate the database, or if a migration's file is misnamed."""


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """Migration file: its number, name and statements."""

    number: int
    name: str
    statements: tuple[str, ...]


def load_migrations() -> list[Migration]:
    """Return the migrations of this version, in order."""
    found = []
    for file in resources.files("millrace.telemetry").joinpath("migrations").iterdir():
        match = _NAME.fullmatch(file.name)
        if match is None:
            raise MigrationError(f"{file.name} is not named like 0001_what_it_does.sql")
        found.append(
            Migration(
                number=int(match[1]),
                name=file.name,
                statements=_statements(file.read_text(encoding="utf-8")),
            )
        )
    return sorted(found, key=lambda migration: migration.number)


def lacking(applied: set[int], database: str) -> list[Migration]:
    """Return the migrations of this version that are missing from the ``applied`` ones.

    Raises MigrationError for a database that a newer version has migrated, and for one with only
    some of the migrations that the schema replaces.
    """
    migrations = load_migrations()
    last = migrations[-1].number
    if max(applied, default=0) > last:
        raise MigrationError(
            f"the database {database} has migration {max(applied)}, which this version does "
            "not know: run the version that made it, or a newer one"
        )
    if applied and SCHEMA not in applied:
        raise MigrationError(
            f"the database {database} has migration {max(applied)} of an earlier version and lacks "
            f"others up to {SCHEMA}: run the earlier version that has migration {SCHEMA} on it "
            "once, or begin with an empty database, which is filled from what Kafka and the outbox "
            "still keep"
        )
    return [migration for migration in migrations if migration.number not in applied]


async def migrate(store: Store) -> list[str]:
    """Bring the database up to date: run missing migrations, then set comments and views to those
    in ``telemetry/columns``.

    Returns the migrations and changes. Raises MigrationError as ``lacking`` does, and
    StoreUnavailableError.
    """
    await store.command(_LEDGER)
    applied = {int(row[0]) for row in await store.rows("SELECT number FROM schema_migrations")}
    ran = []
    for migration in lacking(applied, store.database):
        # Each statement is idempotent, so an interrupted migration is simply run again.
        for statement in migration.statements:
            await store.command(statement)
        await store.insert(APPLIED, ([migration.number], [migration.name]), migration.name)
        ran.append(migration.name)
    return ran + await declare(store)


def _statements(text: str) -> tuple[str, ...]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("--")]
    parts = _STATEMENT_END.split("\n".join(lines))
    return tuple(part.strip() for part in parts if part.strip())
