"""Body of an answer: the engine's bytes in the encoding that the client asked for."""

from __future__ import annotations

import asyncio
import secrets
import string
import tempfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from millrace.telemetry.http.arguments import Arguments
from millrace.telemetry.http.native_blocks import NativeBlocks

_TAG_CHARS = 16
# Clients look for the exception block in the last 16 KiB.
_MAX_MESSAGE_BYTES = 15 * 1024
_MAX_IN_MEMORY_BYTES = 2 * 1024 * 1024
_MAX_HELD_BYTES = 64 * 1024 * 1024
_PIECE_BYTES = 256 * 1024
# Compressing less than this takes no longer than a switch to a thread.
_INLINE_BYTES = 8 * 1024
# One thread for all answers: checksums hold the interpreter's lock, and several threads would delay
# the event loop.
_CODER = ThreadPoolExecutor(1, thread_name_prefix="answer-coding")


def new_tag() -> str:
    """Return the value of ``X-ClickHouse-Exception-Tag``, so that data of an answer cannot imitate
    the exception block."""
    return "".join(secrets.choice(string.ascii_lowercase) for _ in range(_TAG_CHARS))


def exception_block(tag: str, message: str) -> bytes:
    """Return the block that ends a failed answer."""
    text = message.encode()[:_MAX_MESSAGE_BYTES].decode(errors="ignore").encode() + b"\n"
    mark = tag.encode()
    return b"\r\n__exception__\r\n%b\r\n%b%d %b\r\n__exception__\r\n" % (
        mark,
        text,
        len(text),
        mark,
    )


class AnswerBody:
    """Encoder of the engine's output into the sent bytes."""

    def __init__(self, arguments: Arguments, output_format: str) -> None:
        version = arguments.protocol_version
        self._native = NativeBlocks(version) if version and output_format == NATIVE else None
        self._coding = arguments.coding()
        self.content_encoding = self._coding.name
        self.tag = new_tag()

    async def piece(self, data: bytes) -> bytes:
        """Return the bytes to send for ``data``; they may be empty so far.

        Raises QueryError for data that the client's version of the protocol cannot read.
        """
        if self._native is not None:
            data = self._native.feed(data)
        if len(data) <= _INLINE_BYTES:
            return self._coding.encode(data) if data else b""
        return await asyncio.get_running_loop().run_in_executor(_CODER, self._coding.encode, data)

    def failed(self, message: str) -> bytes:
        """Return the end of an answer that failed after its beginning."""
        return self._coding.encode(exception_block(self.tag, message)) + self._coding.finish()

    def end(self) -> bytes:
        """Return the end of an answer."""
        return self._coding.finish()


async def held(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the chunks once the last one has arrived, so that an error comes before all of them. At
    most 64 MiB are held back."""
    file = tempfile.SpooledTemporaryFile(_MAX_IN_MEMORY_BYTES)  # noqa: SIM115 (closed behind it)
    try:
        async for chunk in chunks:
            file.write(chunk)
            if file.tell() > _MAX_HELD_BYTES:
                break
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return _released(file, chunks)


async def _released(
    file: tempfile.SpooledTemporaryFile[bytes], chunks: AsyncIterator[bytes]
) -> AsyncIterator[bytes]:
    with file:
        while piece := file.read(_PIECE_BYTES):
            yield piece
    async for chunk in chunks:
        yield chunk


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
    """Return the name of a format in ClickHouse's spelling; clients may use any case."""
    return _SPELLINGS.get(output_format.lower(), output_format)


def content_type(output_format: str, *, is_array: bool) -> str:
    """Return the media type of a format. ``is_array``: lines of JSON are in one array."""
    kind = CONTENT_TYPES.get(output_format, _OCTETS)
    return _JSON if is_array and kind == _LINES_OF_JSON else kind
