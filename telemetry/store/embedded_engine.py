"""The embedded engine's one user, and what the engine lets it touch: its own database.

An engine in this process could read every file and reach every address that the process can. It
starts with a user of its own instead, who has no source beside the tables: no ``file``, ``url``,
``s3``, ``remote``, ``mysql``, ``sqlite`` and so on, as table function, engine, or in DESCRIBE. That
holds for whoever asks, the writing connection too. The grants do not cover two things that the
embedded engine does outside them, the function ``file`` and INTO OUTFILE: see ``sql_guard``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from xml.sax.saxutils import escape

import chdb

from millrace.runtime.imports import without
from millrace.telemetry.store.reading import quote

# What its Arrow tables are made with, of which nothing here is: a sixth of a second of a start.
with without("pyarrow"):
    import chdb.state

# At rest the engine would look at its memory twenty times a second, and for each table every ten
# seconds at what might be merged, which an insert has it do at once.
_CONFIG = """<clickhouse>
  <user_directories><users_xml><path>users.xml</path></users_xml></user_directories>
  <memory_worker_period_ms>1000</memory_worker_period_ms>
  <background_processing_pool_thread_sleep_seconds>60</background_processing_pool_thread_sleep_seconds>
  <background_processing_pool_task_sleep_seconds_when_no_work_min>60</background_processing_pool_task_sleep_seconds_when_no_work_min>
</clickhouse>
"""
# The engine has each connection be "default", with no password: the password is the door's.
_USERS = """<clickhouse>
  <profiles><default/></profiles>
  <quotas><default/></quotas>
  <users>
    <default>
      <password/>
      <networks><ip>::/0</ip></networks>
      <profile>default</profile>
      <quota>default</quota>
      <grants>
{grants}
      </grants>
    </default>
  </users>
</clickhouse>
"""
_OWN = (
    "SHOW, SELECT, INSERT, ALTER, CREATE DATABASE, CREATE TABLE, CREATE VIEW, DROP, TRUNCATE, "
    "OPTIMIZE"
)
# One of each kind of source that a user has unless somebody took it away.
_SOURCES = ("FILE", "URL", "S3", "REMOTE", "MYSQL", "SQLITE")


class OpenEngineError(RuntimeError):
    """The engine of this process was started without its restrictions."""


@contextmanager
def engine_options(*databases: str) -> Iterator[dict[str, str]]:
    """chDB's options for an engine whose queries reach these databases and nothing else. The
    engine reads them as it starts: while it runs, they change nothing."""
    with tempfile.TemporaryDirectory(prefix="millrace-engine-") as directory:
        grants = [f"GRANT {_OWN} ON {quote(name)}.*" for name in databases]
        # Clients begin in "default" or "system", and ask for names.
        grants.append("GRANT SHOW DATABASES ON *.*")
        lines = "\n".join(f"        <query>{escape(grant)}</query>" for grant in grants)
        (Path(directory) / "users.xml").write_text(_USERS.format(grants=lines))
        config = Path(directory) / "config.xml"
        config.write_text(_CONFIG)
        yield {"config-file": str(config)}


def connect(path: str, *databases: str) -> Any:
    """A connection to the store at ``path``. Raises RuntimeError for a store that another process
    has, OpenEngineError where this process had an engine without restrictions before."""
    with engine_options(*databases) as options:
        # The engine knows its path by the resolved spelling, as clickhouse_connect opens it.
        connection = chdb.connect(  # type: ignore[no-untyped-call]
            f"{os.path.realpath(path)}?{urlencode(options)}"
        )
    try:
        _require_closed(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_again(path: str) -> Any:
    """A further connection to the engine that a ``connect`` of this process holds open."""
    return chdb.connect(os.path.realpath(path))  # type: ignore[no-untyped-call]


def _require_closed(connection: Any) -> None:
    for source in _SOURCES:
        for access in ("READ", "WRITE"):
            if connection.query(f"CHECK GRANT {access} ON {source}", "TSV").bytes().strip() != b"0":
                raise OpenEngineError(
                    f"the embedded engine of this process may {access.lower()} {source}: it was "
                    "opened before without its restrictions"
                )
