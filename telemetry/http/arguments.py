"""Arguments of a request beside its SQL: parameters, settings, and the form of the answer.

The interface is ClickHouse's for a user with ``readonly = 2``. A client may send any setting; the
engine limits settings that cost memory, threads or time. Settings of inserts and of the transport,
which drivers send with each request, change no answer and are ignored.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import NoReturn
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Scope

from millrace.runtime.http.head import Headers
from millrace.telemetry.http.access import header_of
from millrace.telemetry.http.codings import Blocks, Coding, accepted_coding
from millrace.telemetry.store.reading import EscapedText, QueryError
from millrace.telemetry.store.sql_guard import READONLY

TIMEZONE = "session_timezone"
_ARRAY_OF_ROWS = "output_format_json_array_of_rows"
_CANNOT_PARSE_BOOL, _CANNOT_PARSE_NUMBER, _UNKNOWN_ROLE = 467, 72, 511
_INVALID_SESSION_TIMEOUT = 374
_BOOLEANS = {"0": False, "false": False, "1": True, "true": True}
_DEFAULT_SESSION_S, _MAX_SESSION_S = 60, 3_600
_PARAMETER_PREFIX = "param_"
_ANALYST = "analyst"
_ROLES_THAT_CHANGE_NOTHING = frozenset({"", "default", "all", "owner"})
# Arguments of the interface that are not settings of the engine.
_OF_INTERFACE = frozenset(
    {
        "client_protocol_version",
        "compress",
        "database",
        "decompress",
        "default_format",
        "enable_http_compression",
        "http_wait_end_of_query",
        "network_compression_method",
        "password",
        "query",
        "query_id",
        "quota_key",
        "role",
        "session_check",
        "session_id",
        "session_timeout",
        "user",
        "wait_end_of_query",
    }
)
# Each names a setting, or with an underscore at its end all settings with that prefix.
IGNORED_SETTINGS = (
    "add_http_cors_header",
    "allow_experimental_lightweight_delete",
    "allow_nondeterministic_mutations",
    "alter_sync",
    "async_insert",
    "async_insert_",
    "buffer_size",
    "cancel_http_readonly_queries_on_client_close",
    "date_time_input_format",
    "deduplicate_blocks_in_dependent_materialized_views",
    "distributed_ddl_",
    "http_headers_progress_interval_ms",
    "http_native_compression_disable_checksumming_on_decompress",
    "http_receive_timeout",
    "http_response_buffer_size",
    "http_send_timeout",
    "http_write_exception_in_output_format",
    "http_zlib_compression_level",
    "input_format_",
    "insert_",
    "lightweight_delete_mode",
    "lightweight_deletes_sync",
    "log_queries",
    "log_queries_",
    "log_query_",
    "materialized_views_ignore_errors",
    "max_insert_",
    "min_insert_",
    "mutations_sync",
    "network_zstd_compression_level",
    "optimize_on_insert",
    "parallel_view_processing",
    "profile",
    "replication_",
    "send_logs_level",
    "send_progress_in_http_headers",
    "stacktrace",
    "wait_for_async_insert",
    "wait_for_async_insert_timeout",
)
_IGNORED = frozenset(name for name in IGNORED_SETTINGS if not name.endswith("_"))
_IGNORED_PREFIXES = tuple(name for name in IGNORED_SETTINGS if name.endswith("_"))
# Settings that would let a statement write, with their harmless values.
_WRITING = {
    "allow_ddl": ("0", "false"),
    "allow_drop_detached": ("0", "false"),
    "enable_reads_from_query_cache": (),
    "enable_writes_to_query_cache": ("0", "false"),
    "query_cache_tag": (),
    "readonly": ("1", "2"),
    "use_query_cache": ("0", "false"),
}


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments in address and headers. ``protocol_version`` is the version of the format Native, 0
    for blocks as in files. ``accepted`` are the headers that may ask for a compressed answer. With
    ``waits``, a late error also sets the answer's status."""

    query: str
    query_id: str
    database: str
    output_format: str
    parameters: dict[str, str]
    settings: dict[str, str]
    protocol_version: int
    is_analyst: bool
    is_compressed: bool
    waits: bool
    session_id: str
    session_s: int
    must_have_session: bool
    accepted: Headers
    has_blocks: bool
    has_zstd_blocks: bool

    @property
    def is_array(self) -> bool:
        """True if lines of JSON are in one array."""
        return _BOOLEANS.get(self.settings.get(_ARRAY_OF_ROWS, "0").lower(), False)

    def coding(self) -> Coding:
        """Return the compression of the answer."""
        if self.has_blocks:
            return Blocks(with_zstd=self.has_zstd_blocks)
        return accepted_coding(self.accepted)


def given_in(query_string: bytes) -> dict[str, str]:
    """Parse the arguments of an address; the last of several with one name counts."""
    return dict(parse_qsl(query_string.decode("latin-1"), keep_blank_values=True))


def read_arguments(scope: Scope, given: Mapping[str, str]) -> Arguments:
    """Parse a request's arguments. Raises QueryError for invalid values, and for settings that
    would write."""
    output_format = header_of(scope, b"x-clickhouse-format") or given.get("default_format", "")
    return Arguments(
        query=given.get("query", ""),
        query_id=given.get("query_id")
        or header_of(scope, b"x-clickhouse-query-id")
        or str(uuid.uuid4()),
        database=header_of(scope, b"x-clickhouse-database") or given.get("database", ""),
        output_format=output_format or "TabSeparated",
        parameters=parameters_of(given),
        settings=settings_of(given),
        protocol_version=_number(given, "client_protocol_version", 0),
        is_analyst=is_analyst(given.get("role", "")),
        is_compressed=_is_set(given, "decompress"),
        waits=_is_set(given, "wait_end_of_query") or _is_set(given, "http_wait_end_of_query"),
        session_id=given.get("session_id", ""),
        session_s=_session_s(given),
        must_have_session=_is_set(given, "session_check"),
        accepted=scope["headers"] if _is_set(given, "enable_http_compression") else (),
        has_blocks=_is_set(given, "compress"),
        has_zstd_blocks=given.get("network_compression_method", "").upper() == "ZSTD",
    )


def settings_of(given: Mapping[str, str]) -> dict[str, str]:
    """Return the engine's settings. Raises QueryError for settings that would allow writing."""
    settings = {}
    for name, value in given.items():
        if name in _WRITING:
            if value.lower() not in _WRITING[name]:
                _refuse_setting(name)
        elif not (
            name in _OF_INTERFACE
            or name in _IGNORED
            or name.startswith(_PARAMETER_PREFIX)
            or name.startswith(_IGNORED_PREFIXES)
        ):
            settings[name] = value
    return settings


def is_analyst(role: str) -> bool:
    """Return whether a role is the analyst's, which cannot read some tables. Raises QueryError for
    unknown roles."""
    if role == _ANALYST:
        return True
    if role.lower() in _ROLES_THAT_CHANGE_NOTHING:
        return False
    raise QueryError.refusing(
        _UNKNOWN_ROLE,
        f"There is no role {role:.100}: leave the role out, or use {_ANALYST}. (UNKNOWN_ROLE)",
    )


def parameters_of(given: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of a statement, without their prefix."""
    return {
        name.removeprefix(_PARAMETER_PREFIX): EscapedText(value)
        for name, value in given.items()
        if name.startswith(_PARAMETER_PREFIX)
    }


def _is_set(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "0").lower()
    if text not in _BOOLEANS:
        raise QueryError.refusing(
            _CANNOT_PARSE_BOOL,
            f"Cannot parse {text!r:.60} as the boolean {name}: use 0 or 1. (CANNOT_PARSE_BOOL)",
        )
    return _BOOLEANS[text]


def _number(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not (text.isdecimal() and text.isascii() and len(text) <= 10):
        raise QueryError.refusing(
            _CANNOT_PARSE_NUMBER,
            f"Cannot parse {text!r:.60} as the number {name}. (CANNOT_PARSE_NUMBER)",
        )
    return int(text)


def _session_s(given: Mapping[str, str]) -> int:
    seconds = _number(given, "session_timeout", _DEFAULT_SESSION_S)
    if seconds > _MAX_SESSION_S:
        raise QueryError.refusing(
            _INVALID_SESSION_TIMEOUT,
            f"Session timeout '{seconds}' is larger than {_MAX_SESSION_S}. "
            "(INVALID_SESSION_TIMEOUT)",
        )
    return seconds


def _refuse_setting(name: str) -> NoReturn:
    raise QueryError.refusing(
        READONLY, f"Cannot modify '{name}' setting in readonly mode. (READONLY)"
    )
