"""User and grants of the embedded engine: access to its own database only.

An engine in this process could read every file and reach every address that the process can. So it
starts with its own user, which has no source but the tables: no ``file``, ``url``, ``s3``,
``remote``, ``mysql``, ``sqlite`` and so on, as table function, engine, or in DESCRIBE. This applies
to every connection, including the writing one. The grants do not cover two features of the embedded
engine, the function ``file`` and INTO OUTFILE: see ``sql_guard``.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from xml.sax.saxutils import escape

import chdb

from millrace.runtime.imports import without
from millrace.telemetry.store.reading import ReadLimits, quote
from millrace.telemetry.store.view_statements import ANALYSTS

# chDB would import pyarrow for Arrow tables, which are unused here. The import takes a sixth of a
# second of the start.
with without("pyarrow"):
    import chdb.state

# By default an idle engine would check its memory twenty times a second, and for each table every
# ten seconds look for merges, which an insert triggers at once. Its caches are bounded. It has no
# memory limit for a user: that count is reset only when no query of the user runs, and drifts. It
# keeps no idle threads, whose niceness ``query_watch`` may have raised for good.
_CONFIG = """<clickhouse>
  <user_directories><users_xml><path>users.xml</path></users_xml></user_directories>
  <memory_worker_correct_memory_tracker>1</memory_worker_correct_memory_tracker>
  <memory_worker_period_ms>1000</memory_worker_period_ms>
  <background_processing_pool_thread_sleep_seconds>60</background_processing_pool_thread_sleep_seconds>
  <background_processing_pool_task_sleep_seconds_when_no_work_min>60</background_processing_pool_task_sleep_seconds_when_no_work_min>
  <max_server_memory_usage>{max_server_memory_usage}</max_server_memory_usage>
  <max_thread_pool_free_size>0</max_thread_pool_free_size>
  <mark_cache_size>67108864</mark_cache_size>
  <primary_index_cache_size>67108864</primary_index_cache_size>
  <index_mark_cache_size>16777216</index_mark_cache_size>
  <query_condition_cache_size>8388608</query_condition_cache_size>
  <query_cache><max_size_in_bytes>1</max_size_in_bytes></query_cache>
</clickhouse>
"""
# The engine makes each connection the user "default" without a password; the HTTP interface checks
# passwords. Roles define the rights of a connection: it begins with all roles and may drop some for
# good.
_USERS = """<clickhouse>
  <profiles>
    <default>
{settings}
      <constraints>
{constraints}
      </constraints>
    </default>
  </profiles>
  <quotas><default/></quotas>
  <roles>
    <owner><grants>
{owner}
    </grants></owner>
    <analyst><grants>
{analyst}
    </grants></analyst>
    <view_maker><grants>
{view_maker}
    </grants></view_maker>
  </roles>
  <users>
    <default>
      <password/>
      <networks><ip>::/0</ip></networks>
      <profile>default</profile>
      <quota>default</quota>
      <grants>
        <query>GRANT SHOW DATABASES ON *.*</query>
        <query>GRANT owner</query>
        <query>GRANT analyst</query>
        <query>GRANT view_maker</query>
      </grants>
    </default>
  </users>
</clickhouse>
"""
_OWN = (
    "SHOW, SELECT, INSERT, ALTER, CREATE DATABASE, CREATE TABLE, CREATE VIEW, DROP, TRUNCATE, "
    "OPTIMIZE"
)
# Role of an analyst, without access to these tables.
ANALYST = "analyst"
PRIVATE_TABLES = ("transcripts", "transcripts_once")
# Role for making views of analysts, in addition to an analyst's. The engine requires rights to the
# tables when a view is renamed.
VIEW_MAKER = "view_maker"
_OF_VIEWS = (
    "CREATE VIEW, CREATE TABLE, DROP VIEW, DROP TABLE, INSERT, ALTER MODIFY COMMENT, "
    "ALTER COMMENT COLUMN"
)
# One of each kind of source that a user has by default.
_SOURCES = ("FILE", "URL", "S3", "REMOTE", "MYSQL", "SQLITE")
# Memory of the process besides users' queries, in bytes: Python, inserts, merges, caches.
_MEMORY_BESIDE_QUERIES = 768 * 1024 * 1024
# Settings that statements cannot change: they name files that the engine would read or write, or an
# address that it would contact, hold expressions that the guard does not see, switch the SQL
# dialect, show the engine's internals, or lift limits.
_CONSTANT = (
    "additional_result_filter",
    "additional_table_filters",
    "ai_function_allow_insecure_endpoint",
    "allow_introspection_functions",
    "allow_python_table_function",
    "dialect",
    "filter",
    "format_avro_schema_registry_url",
    "format_schema",
    "format_schema_message_name",
    "format_schema_source",
    "format_template_resultset",
    "format_template_row",
    "input_format_record_errors_file_path",
    "max_memory_usage_for_user",
    "max_temporary_data_on_disk_size_for_user",
    "memory_overcommit_ratio_denominator",
    "memory_overcommit_ratio_denominator_for_user",
    "memory_usage_overcommit_max_wait_microseconds",
    "order",
    "os_threads_nice_value_query",
    "output_format_schema",
    "parallel_replicas_custom_key",
    "polyglot_dialect",
    "promql_database",
    "promql_table",
    "rename_files_after_processing",
    "schema_inference_hints",
    "select",
    "send_logs_level",
    "sort",
    "use_query_cache",
)
_MIB = 1024 * 1024


class OpenEngineError(RuntimeError):
    """Error if the engine of this process was started without its restrictions."""


@contextmanager
def engine_options(*databases: str, limits: ReadLimits | None = None) -> Iterator[dict[str, str]]:
    """Yield chDB's options for an engine whose queries reach only these databases, within the
    limits.

    The engine reads them at its start; later changes have no effect.
    """
    limits = limits or ReadLimits()
    with tempfile.TemporaryDirectory(prefix="millrace-engine-") as directory:
        (Path(directory) / "users.xml").write_text(_users(databases, limits))
        config = Path(directory) / "config.xml"
        memory_bytes = limits.max_memory_of_all_bytes + _MEMORY_BESIDE_QUERIES
        config.write_text(_CONFIG.format(max_server_memory_usage=memory_bytes))
        yield {"config-file": str(config)}


def _users(databases: Sequence[str], limits: ReadLimits) -> str:
    settings = {
        "allow_introspection_functions": 0,
        "max_untracked_memory": _MIB,
        "memory_usage_overcommit_max_wait_microseconds": 1_000_000,
        "output_format_parallel_formatting": 0,
        "output_format_parquet_parallel_encoding": 0,
        "output_format_parquet_row_group_size_bytes": 16 * _MIB,
        "max_temporary_data_on_disk_size_for_user": 8 * 1024 * _MIB,
    }
    bounds = {
        "max_memory_usage": limits.max_memory_bytes,
        "max_execution_time": max(limits.max_execution_s, limits.max_query_s),
        "max_threads": limits.max_threads,
        "max_untracked_memory": _MIB,
        "max_bytes_before_external_group_by": limits.max_memory_bytes,
        "max_bytes_before_external_sort": limits.max_memory_bytes,
        "output_format_parquet_row_group_size_bytes": 64 * _MIB,
    }
    owner = [f"GRANT {_OWN} ON {quote(name)}.*" for name in databases]
    analyst = [f"GRANT SHOW, SELECT ON {quote(name)}.*" for name in databases]
    for role in (owner, analyst):
        role.append(f"GRANT SHOW, SELECT ON {ANALYSTS}.*")
        # For external tables: a connection makes them before it becomes read-only.
        role.append("GRANT CREATE TEMPORARY TABLE ON *.*")
    owner.append(f"GRANT CREATE DATABASE ON {ANALYSTS}.*")
    analyst += [
        f"REVOKE SHOW, SELECT ON {quote(name)}.{table}"
        for name in databases
        for table in PRIVATE_TABLES
    ]
    return _USERS.format(
        settings="\n".join(f"<{name}>{value}</{name}>" for name, value in settings.items()),
        constraints="\n".join(
            [f"<{name}><min>1</min><max>{most}</max></{name}>" for name, most in bounds.items()]
            + [f"<{name}><const/></{name}>" for name in _CONSTANT]
        ),
        owner="\n".join(f"<query>{escape(grant)}</query>" for grant in owner),
        analyst="\n".join(f"<query>{escape(grant)}</query>" for grant in analyst),
        view_maker=f"<query>GRANT {_OF_VIEWS} ON {ANALYSTS}.*</query>",
    )


def connect(path: str, *databases: str, limits: ReadLimits | None = None) -> Any:
    """Connect to the store at ``path``.

    Raises RuntimeError for a store that another process has, OpenEngineError if this process had an
    engine without restrictions before.
    """
    with engine_options(*databases, limits=limits) as options:
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


def connect_again(path: str, settings: Mapping[str, int | str] | None = None) -> Any:
    """Open a further connection to the engine that a ``connect`` of this process holds open. Values
    of settings are numbers or words."""
    options = "&".join(f"{name}={value}" for name, value in (settings or {}).items())
    real = os.path.realpath(path)
    return chdb.connect(f"{real}?{options}" if options else real)  # type: ignore[no-untyped-call]


def _require_closed(connection: Any) -> None:
    for source in _SOURCES:
        for access in ("READ", "WRITE"):
            if connection.query(f"CHECK GRANT {access} ON {source}", "TSV").bytes().strip() != b"0":
                raise OpenEngineError(
                    f"the embedded engine of this process may {access.lower()} {source}: it was "
                    "opened before without its restrictions"
                )
