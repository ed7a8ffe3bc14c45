"""Numbered migrations: each runs once, in order, and running them again changes nothing."""

from __future__ import annotations

import re
from importlib import resources

import msgspec

from millrace.schemas.errors import MillraceError
from millrace.telemetry.store.store import PlainTable, Store

APPLIED = PlainTable("schema_migrations", ("number", "name"), ("UInt32", "String"))
_NAME = re.compile(r"(\d{4})_[a-z0-9_]+\.sql")


class MigrationError(MillraceError, code="migration_failed"):
    """The database is ahead of this version of Millrace, or a migration's file is misnamed."""


class Migration(msgspec.Struct, frozen=True, kw_only=True):
    """One file: its number, its name, its statements."""

    number: int
    name: str
    statements: tuple[str, ...]


def load_migrations() -> list[Migration]:
    """The migrations of this version, in order."""
    found = []
    for file in resources.files("telemetry").joinpath("migrations").iterdir():
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
    """The migrations of this version that a database lacks, which has those of these numbers.

    Raises MigrationError for a database that a newer version has migrated.
    """
    migrations = load_migrations()
    unknown = applied - {migration.number for migration in migrations}
    if unknown:
        raise MigrationError(
            f"the database {database} has migration {max(unknown)}, which this version does "
            "not know: run the version that made it, or a newer one"
        )
    return [migration for migration in migrations if migration.number not in applied]


async def migrate(store: Store) -> list[str]:
    """Bring the database up to date; the names of the migrations that ran.

    Raises MigrationError for a database that a newer version has migrated, StoreUnavailableError.
    """
    await store.command(
        "CREATE TABLE IF NOT EXISTS schema_migrations (number UInt32, name String, "
        "applied_at DateTime64(3, 'UTC') DEFAULT now64(3)) "
        "ENGINE = ReplacingMergeTree ORDER BY number"
    )
    applied = {int(row[0]) for row in await store.rows("SELECT number FROM schema_migrations")}
    ran = []
    for migration in lacking(applied, store.database):
        # Each statement is idempotent, so a migration that was cut short is simply run again.
        for statement in migration.statements:
            await store.command(statement)
        await store.insert(APPLIED, ([migration.number], [migration.name]), migration.name)
        ran.append(migration.name)
    return ran


def _statements(text: str) -> tuple[str, ...]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("--")]
    parts = "\n".join(lines).split(";")
    return tuple(part.strip() for part in parts if part.strip())
