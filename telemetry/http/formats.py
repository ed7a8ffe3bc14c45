"""Output formats by their names, and the media type of each, as ClickHouse has them."""

from __future__ import annotations

NATIVE = "Native"
_OCTETS = "application/octet-stream"
_PLAIN = "text/plain; charset=UTF-8"
_TSV = "text/tab-separated-values; charset=UTF-8"
_CSV = "text/csv; charset=UTF-8; header="
_JSON = "application/json; charset=UTF-8"
_LINES_OF_JSON = "application/x-ndjson; charset=UTF-8"
_NAMES = {
    _OCTETS: (
        "Arrow ArrowStream Avro AvroConfluent BSONEachRow Buffers MsgPack MySQLWire Native Npy "
        "ODBCDriver2 ORC Parquet PostgreSQLWire Protobuf ProtobufList ProtobufSingle RowBinary "
        "RowBinaryWithNames RowBinaryWithNamesAndTypes"
    ),
    _PLAIN: (
        "CustomSeparated CustomSeparatedWithNames CustomSeparatedWithNamesAndTypes Hash HiveText "
        "JSONCompactEachRow JSONCompactEachRowWithNames JSONCompactEachRowWithNamesAndTypes "
        "JSONCompactStringsEachRow JSONCompactStringsEachRowWithNames "
        "JSONCompactStringsEachRowWithNamesAndTypes MD Markdown Null Pretty PrettyCompact "
        "PrettyCompactMonoBlock PrettyCompactNoEscapes PrettyCompactNoEscapesMonoBlock "
        "PrettyMonoBlock PrettyNoEscapes PrettyNoEscapesMonoBlock PrettySpace PrettySpaceMonoBlock "
        "PrettySpaceNoEscapes PrettySpaceNoEscapesMonoBlock RawBLOB SQLInsert Template Values "
        "Vertical"
    ),
    _TSV: (
        "LineAsString LineAsStringWithNames LineAsStringWithNamesAndTypes Raw RawWithNames "
        "RawWithNamesAndTypes TSKV TSV TSVRaw TSVRawWithNames TSVRawWithNamesAndTypes TSVWithNames "
        "TSVWithNamesAndTypes TabSeparated TabSeparatedRaw TabSeparatedRawWithNames "
        "TabSeparatedRawWithNamesAndTypes TabSeparatedWithNames TabSeparatedWithNamesAndTypes"
    ),
    f"{_CSV}absent": "CSV",
    f"{_CSV}present": "CSVWithNames CSVWithNamesAndTypes",
    _JSON: (
        "JSON JSONColumns JSONColumnsWithMetadata JSONCompact JSONCompactColumns "
        "JSONCompactEachRowWithProgress JSONCompactStrings JSONCompactStringsEachRowWithProgress "
        "JSONEachRowWithProgress JSONObjectEachRow JSONStrings JSONStringsEachRowWithProgress"
    ),
    _LINES_OF_JSON: (
        "JSONEachRow JSONL JSONLines JSONStringsEachRow NDJSON PrettyJSONEachRow PrettyJSONLines "
        "PrettyNDJSON"
    ),
    "application/geo+json; charset=UTF-8": "GeoJSON",
    "application/xml; charset=UTF-8": "XML",
    "image/png": "PNG",
    "text/plain; version=0.0.4; charset=UTF-8": "Prometheus",
}
CONTENT_TYPES = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_SPELLINGS = {name.lower(): name for name in CONTENT_TYPES}


def spelled(output_format: str) -> str:
    """The name as ClickHouse spells it; clients may use any case."""
    return _SPELLINGS.get(output_format.lower(), output_format)


def content_type(output_format: str, *, is_array: bool) -> str:
    """The media type of a format. ``is_array``: lines of JSON are in one array."""
    kind = CONTENT_TYPES.get(output_format, _OCTETS)
    return _JSON if is_array and kind == _LINES_OF_JSON else kind
