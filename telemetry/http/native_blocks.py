"""Blocks of the format Native for clients with a ``client_protocol_version``.

The engine writes Native as for files: without the information of a block, and without the byte in
each column that marks a custom serialization. Both are inserted as the blocks pass.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Generator
from typing import Literal, NamedTuple

from millrace.telemetry.store.reading import QueryError

# No overflowed totals (field 1), no aggregation bucket (field 2), end of the fields.
_BLOCK_INFO = bytes((1, 0, 2, 0xFF, 0xFF, 0xFF, 0xFF, 0))
_CUSTOM_SERIALIZATION = 54454
_NOT_IMPLEMENTED = 48
_FIXED_BYTES = {
    "Bool": 1, "Int8": 1, "UInt8": 1, "Enum8": 1, "Nothing": 1,
    "Int16": 2, "UInt16": 2, "Enum16": 2, "Date": 2, "BFloat16": 2,
    "Int32": 4, "UInt32": 4, "Float32": 4, "Date32": 4, "DateTime": 4, "IPv4": 4, "Decimal32": 4,
    "Time": 4,
    "Int64": 8, "UInt64": 8, "Float64": 8, "DateTime64": 8, "Time64": 8, "Decimal64": 8,
    "Int128": 16, "UInt128": 16, "UUID": 16, "IPv6": 16, "Decimal128": 16,
    "Int256": 32, "UInt256": 32, "Decimal256": 32,
}  # fmt: skip
_POINT = "Tuple(Float64, Float64)"
_ALIASES = {
    "Point": _POINT,
    "Ring": f"Array({_POINT})",
    "LineString": f"Array({_POINT})",
    "MultiPoint": f"Array({_POINT})",
    "Polygon": f"Array(Array({_POINT}))",
    "MultiLineString": f"Array(Array({_POINT}))",
    "MultiPolygon": f"Array(Array(Array({_POINT})))",
}
# Largest precision of a Decimal of 4, 8, 16 and 32 bytes.
_DECIMALS = ((9, 4), (18, 8), (38, 16), (76, 32))
_NAMED_ELEMENT = re.compile(r"^(?:`(?:[^`\\]|\\.)*`|[A-Za-z_]\w*)\s+(?=[A-Za-z])")
_SIGN = re.compile(r"'(?:[^'\\]|\\.)*'|`(?:[^`\\]|\\.)*`|[(),]")

_Steps = Generator[None, None, None]


class NativeBlocks:
    """Converter of an answer in pieces of any size; it holds back at most the start of a value."""

    def __init__(self, version: int) -> None:
        self._has_custom_byte = version >= _CUSTOM_SERIALIZATION
        self._data = bytearray()
        self._at = 0
        self._output = bytearray()
        self._steps = self._blocks()

    def feed(self, data: bytes) -> bytes:
        """Return the output so far. Raises QueryError for a column of an unsupported type."""
        self._data += data
        next(self._steps)
        self._pass()
        output = bytes(self._output)
        self._output.clear()
        return output

    def _pass(self) -> None:
        self._output += memoryview(self._data)[: self._at]
        del self._data[: self._at]
        self._at = 0

    def _insert(self, data: bytes) -> None:
        self._pass()
        self._output += data

    def _blocks(self) -> _Steps:
        while True:
            yield from self._need(1)
            self._insert(_BLOCK_INFO)
            num_columns = yield from self._varint()
            num_rows = yield from self._varint()
            for _ in range(num_columns):
                name = yield from self._text()
                kind = yield from self._text()
                layout = _layout(kind)
                if layout.kind == "opaque":
                    raise _refuse(name, kind)
                if self._has_custom_byte:
                    self._insert(b"\0")
                if num_rows:
                    yield from self._skip(8 * layout.num_prefixes)
                    yield from self._column(layout, num_rows)

    def _need(self, num_bytes: int) -> _Steps:
        while len(self._data) - self._at < num_bytes:
            yield

    def _skip(self, num_bytes: int) -> _Steps:
        while num_bytes:
            step = min(num_bytes, len(self._data) - self._at)
            self._at += step
            num_bytes -= step
            if num_bytes:
                yield

    def _varint(self) -> Generator[None, None, int]:
        value = shift = 0
        while True:
            yield from self._need(1)
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def _text(self) -> Generator[None, None, str]:
        size = yield from self._varint()
        yield from self._need(size)
        text = bytes(self._data[self._at : self._at + size])
        self._at += size
        return text.decode(errors="replace")

    def _word(self) -> Generator[None, None, int]:
        yield from self._need(8)
        self._at += 8
        return int.from_bytes(self._data[self._at - 8 : self._at], "little")

    def _column(self, layout: _Layout, num_rows: int) -> _Steps:
        if not num_rows:
            return
        if layout.kind == "fixed":
            yield from self._skip(layout.num_bytes * num_rows)
        elif layout.kind == "string":
            yield from self._strings(num_rows)
        elif layout.kind == "tuple":
            for element in layout.elements:
                yield from self._column(element, num_rows)
        elif layout.kind == "nullable":
            yield from self._skip(num_rows)
            yield from self._column(layout.elements[0], num_rows)
        elif layout.kind == "array":
            yield from self._skip(8 * (num_rows - 1))
            num_items = yield from self._word()
            yield from self._column(layout.elements[0], num_items)
        else:
            index_kind = (yield from self._word()) & 0xFF
            num_keys = yield from self._word()
            yield from self._column(layout.elements[0], num_keys)
            num_indexes = yield from self._word()
            yield from self._skip(num_indexes << index_kind)

    def _strings(self, num_rows: int) -> _Steps:
        data = self._data
        while num_rows:
            at, end = self._at, len(data)
            while num_rows and at < end and data[at] < 0x80:
                behind = at + 1 + data[at]
                if behind > end:
                    break
                at = behind
                num_rows -= 1
            self._at = at
            if num_rows:
                size = yield from self._varint()
                yield from self._skip(size)
                num_rows -= 1


class _Layout(NamedTuple):
    """Layout of a type's values in a column. ``num_prefixes`` counts the words of 8 bytes before
    the column, one for each LowCardinality."""

    kind: Literal["fixed", "string", "tuple", "nullable", "array", "keys", "opaque"]
    num_bytes: int = 0
    elements: tuple[_Layout, ...] = ()
    num_prefixes: int = 0


_OPAQUE = _Layout("opaque")


def _of(kind: Literal["tuple", "nullable", "array"], *elements: _Layout) -> _Layout:
    if not elements or _OPAQUE in elements:
        return _OPAQUE
    return _Layout(kind, 0, elements, sum(each.num_prefixes for each in elements))


@functools.lru_cache(maxsize=512)
def _layout(kind: str) -> _Layout:
    name, _, inner = kind.partition("(")
    arguments = _arguments(inner.removesuffix(")")) if inner else []
    if name in _FIXED_BYTES:
        return _Layout("fixed", _FIXED_BYTES[name])
    if name.startswith("Interval"):
        return _Layout("fixed", 8)
    if name == "String":
        return _Layout("string")
    if name == "FixedString":
        return _Layout("fixed", int(arguments[0]))
    if name == "Decimal":
        precision = int(arguments[0])
        return _Layout("fixed", next(size for most, size in _DECIMALS if precision <= most))
    if name in _ALIASES:
        return _layout(_ALIASES[name])
    if name == "Nullable":
        return _of("nullable", _layout(arguments[0]))
    if name == "Array":
        return _of("array", _layout(arguments[0]))
    if name == "Map":
        return _of("array", _of("tuple", *map(_layout, arguments)))
    if name in {"Tuple", "Nested"}:
        elements = [_layout(_NAMED_ELEMENT.sub("", each, count=1)) for each in arguments]
        return _of("tuple", *elements) if name == "Tuple" else _of("array", _of("tuple", *elements))
    if name == "SimpleAggregateFunction":
        return _layout(arguments[-1])
    if name == "LowCardinality":
        keys = _layout(arguments[0])
        return _Layout("keys", 0, keys.elements if keys.kind == "nullable" else (keys,), 1)
    return _OPAQUE


def _arguments(text: str) -> list[str]:
    """Split the arguments of a type at commas outside of brackets and quotes."""
    arguments, depth, start = [], 0, 0
    for match in _SIGN.finditer(text):
        sign = match.group()
        if sign == "(":
            depth += 1
        elif sign == ")":
            depth -= 1
        elif sign == "," and not depth:
            arguments.append(text[start : match.start()].strip())
            start = match.end()
    return [*arguments, text[start:].strip()]


def _refuse(name: str, kind: str) -> QueryError:
    return QueryError.refusing(
        _NOT_IMPLEMENTED,
        f"Column {name:.100} of type {kind:.100} cannot be sent in the format Native with "
        "client_protocol_version. Merge a state of an aggregate function with -Merge or "
        "finalizeAggregation, and cast other types with toString. (NOT_IMPLEMENTED)",
    )
