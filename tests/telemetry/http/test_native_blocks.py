"""The format Native for clients that name their version of the protocol."""

from __future__ import annotations

import random
import struct

import pytest

from millrace.telemetry.http.cityhash import checksum
from millrace.telemetry.http.native_blocks import NativeBlocks
from millrace.telemetry.store.reading import QueryError, Question
from millrace.telemetry.store.store import Store
from tests.telemetry.stores import streaming

_BLOCK_INFO = b"\x01\x00\x02\xff\xff\xff\xff\x00"
_VALUES = (
    "toUInt8(number)", "toInt16(number)", "toUInt32(number)", "toInt64(number)",
    "toInt128(number)", "toUInt256(number)", "toFloat32(number)", "toFloat64(number)",
    "toBFloat16(number)", "number % 2 = 0", "toBool(number % 2)", "toString(number)",
    "repeat('long', number)", "toFixedString('abc', 3)", "toDecimal32(number, 2)",
    "toDecimal64(number, 2)", "toDecimal128(number, 12)", "toDecimal256(number, 12)",
    "toUUID('61f0c404-5cb3-11e7-907b-a6006ad3dba0')", "toIPv4('1.2.3.4')", "toIPv6('::1')",
    "toDate('2026-01-01') + number", "toDate32('2026-01-01')", "toDateTime(number, 'Asia/Tokyo')",
    "toDateTime64(number, 6, 'UTC')", "toIntervalDay(number)", "NULL",
    "CAST(number % 2 + 1 AS Enum8('a, (b' = 1, 'it\\'s' = 2))",
    "if(number % 3 = 0, NULL, toString(number))", "toLowCardinality(toString(number % 300))",
    "toLowCardinality(if(number % 3 = 0, NULL, toString(number % 5)))",
    "range(number % 5)", "arrayMap(x -> range(x), range(number % 4))",
    "arrayMap(x -> toLowCardinality(toString(x)), range(number % 3))",
    "arrayResize(emptyArrayString(), 0)", "map('a', number, 'b', 2)",
    "CAST(map('k', [1, NULL]) AS Map(LowCardinality(String), Array(Nullable(Float64))))",
    "CAST((number, 'x') AS Tuple(a UInt64, `b c` String))", "(1, ('x', [number]))",
    "CAST([(1, 'x')] AS Nested(a UInt8, b String))", "CAST((1.5, 2.5) AS Point)",
    "CAST([[(1.0, 2.0)]] AS Polygon)", "CAST(number AS SimpleAggregateFunction(sum, UInt64))",
    "CAST('12:34:56' AS Time)",
)  # fmt: skip
_STATE = "quantilesTDigestState(0.5)(number)"


async def native(store: Store, sql: str) -> bytes:
    async with streaming(store).stream(Question(sql=sql, output_format="Native")) as answer:
        return b"".join([chunk async for chunk in answer])


async def test_columns_of_all_types_pass_in_pieces_of_any_size(store: Store) -> None:
    columns = ", ".join(f"{value} AS c{number}" for number, value in enumerate(_VALUES))
    data = await native(
        store, f"SELECT {columns} FROM numbers(700) SETTINGS enable_time_time64_type = 1"
    )
    whole = NativeBlocks(54460).feed(data)
    num_blocks = whole.count(_BLOCK_INFO)
    assert num_blocks >= 1
    assert len(whole) == len(data) + num_blocks * (len(_BLOCK_INFO) + len(_VALUES))
    assert whole.startswith(_BLOCK_INFO)
    older = NativeBlocks(54405).feed(data)
    assert older.replace(_BLOCK_INFO, b"") == data
    pieces = random.Random(7)
    blocks, at, passed = NativeBlocks(54460), 0, b""
    while at < len(data):
        size = pieces.choice((1, 2, 7, 500, 40_000))
        passed += blocks.feed(data[at : at + size])
        at += size
    assert passed == whole


async def test_each_type_passes_alone(store: Store) -> None:
    """A length that is read wrong would put the next block's information in a wrong place."""
    for value in _VALUES:
        sql = f"SELECT {value} AS c FROM numbers(5) SETTINGS enable_time_time64_type = 1"
        data = await native(store, sql)
        passed = NativeBlocks(54460).feed(data + data)
        one, rest = passed[: len(passed) // 2], passed[len(passed) // 2 :]
        assert one == rest, value
        assert one.startswith(_BLOCK_INFO), value
        assert len(one) == len(data) + len(_BLOCK_INFO) + 1, value


async def test_large_answers_pass(store: Store) -> None:
    data = await native(store, "SELECT number, repeat('x', 300) AS t FROM numbers(200000)")
    passed = NativeBlocks(54460).feed(data)
    num_blocks = passed.count(_BLOCK_INFO)
    assert len(passed) == len(data) + num_blocks * (len(_BLOCK_INFO) + 2)


@pytest.mark.parametrize("value", [_STATE, "CAST('{}' AS JSON)", "CAST(1 AS Variant(UInt8))"])
async def test_a_type_of_unknown_length_is_refused_by_name(store: Store, value: str) -> None:
    data = await native(store, f"SELECT count(), {value} AS state FROM numbers(5) GROUP BY ALL")
    with pytest.raises(QueryError, match="Column state of type") as raised:
        NativeBlocks(54405).feed(data)
    assert (raised.value.number, "toString" in raised.value.message) == (48, True)


@pytest.mark.parametrize(
    ("size", "low", "high"),
    [
        (0, 0x3DF09DFC64C09A2B, 0x3CB540C392E51E29),
        (1, 0x5A03AB4F802B3F6C, 0x58A88A3C8A31E91A),
        (2, 0x918858F791EC9FE1, 0xD7AFA5B660874287),
        (5, 0xD44D5AF0F0F98BE2, 0x5E4106A34F7318B0),
        (12, 0x0166AE15C9F23727, 0x1698E7E085BDEC6B),
        (16, 0x5B3D7F0CDDFB5FFF, 0x62462215D4622918),
        (17, 0x754FFB2EA791F2B2, 0x410DAA308F1FDAF6),
        (100, 0x2C743F489697950A, 0x128AE8D62E49102B),
        (127, 0xFDDBA12CE69A9C40, 0xC6549DE745D42379),
        (128, 0xE56E5033E7A4460F, 0x7193F413B47F6BC7),
        (129, 0xFA8B404893C9CB1A, 0xF9E130B5965A4C49),
        (255, 0x9206DB2D865C9E41, 0xD7FA4B28497C6A6F),
        (300, 0x9E2283B5CD0CB26B, 0x33B52548F5812406),
        (699, 0xB6186360A803AACF, 0xB0FF8395787F675D),
    ],
)
def test_the_checksum_of_blocks_is_that_of_other_programs(size: int, low: int, high: int) -> None:
    """Values of go-faster/city 1.0.1, which clickhouse-go checks its blocks with."""
    data = bytes((i * i * 7 + size) & 255 for i in range(size))
    assert struct.unpack("<2Q", checksum(data)) == (low, high)
