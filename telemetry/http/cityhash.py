"""CityHash128 of version 1.0.2, the checksum of ClickHouse's compressed blocks."""

from __future__ import annotations

import struct

_MASK = (1 << 64) - 1
_K0 = 0xC3A5C85C97CB3127
_K1 = 0xB492B66FBE98F273
_K2 = 0x9AE16A3B2F90404F
_K3 = 0xC949D7C7509E6557
_MUL = 0x9DDFEA08EB382D69
_BLOCK_BYTES = 128
_WORDS = struct.Struct("<8Q")


def checksum(data: bytes) -> bytes:
    """Return the 16 bytes before a compressed block: the lower half of the hash, then the upper
    half."""
    return struct.pack("<2Q", *_hash128(data))


def _hash128(data: bytes) -> tuple[int, int]:
    size = len(data)
    if size >= 16:
        return _with_seed(data[16:], _word(data, 0) ^ _K3, _word(data, 8))
    if size >= 8:
        return _with_seed(b"", _word(data, 0) ^ (size * _K0 & _MASK), _word(data, size - 8) ^ _K1)
    return _with_seed(data, _K0, _K1)


def _word(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 8], "little")


def _rotate(value: int, shift: int) -> int:
    return (value >> shift | value << (64 - shift)) & _MASK if shift else value


def _shift_mix(value: int) -> int:
    return value ^ value >> 47


def _mix(low: int, high: int) -> int:
    a = (low ^ high) * _MUL & _MASK
    b = (high ^ _shift_mix(a)) * _MUL & _MASK
    return _shift_mix(b) * _MUL & _MASK


def _short(data: bytes) -> int:
    """Return the 64-bit hash of at most 16 bytes."""
    size = len(data)
    if size > 8:
        last = _word(data, size - 8)
        return _mix(_word(data, 0), _rotate((last + size) & _MASK, size)) ^ last
    if size >= 4:
        first = int.from_bytes(data[:4], "little")
        return _mix((size + (first << 3)) & _MASK, int.from_bytes(data[-4:], "little"))
    if size:
        y = data[0] + (data[size >> 1] << 8)
        z = size + (data[-1] << 2)
        return _shift_mix((y * _K2 ^ z * _K3) & _MASK) * _K2 & _MASK
    return _K2


def _murmur(data: bytes, a: int, b: int) -> tuple[int, int]:
    size = len(data)
    if size <= 16:
        a = _shift_mix(a * _K1 & _MASK) * _K1 & _MASK
        c = (b * _K1 + _short(data)) & _MASK
        d = _shift_mix((a + (_word(data, 0) if size >= 8 else c)) & _MASK)
    else:
        c = _mix((_word(data, size - 8) + _K1) & _MASK, a)
        d = _mix((b + size) & _MASK, (c + _word(data, size - 16)) & _MASK)
        a = (a + d) & _MASK
        for at in range(0, size - 16, 16):
            a = (a ^ _shift_mix(_word(data, at) * _K1 & _MASK) * _K1) * _K1 & _MASK
            b ^= a
            c = (c ^ _shift_mix(_word(data, at + 8) * _K1 & _MASK) * _K1) * _K1 & _MASK
            d ^= c
    a, b = _mix(a, c), _mix(d, b)
    return a ^ b, _mix(b, a)


def _weak(words: tuple[int, ...], at: int, a: int, b: int) -> tuple[int, int]:
    """Return a weak hash of four words with two seeds."""
    w, x, y, z = words[at : at + 4]
    a += w
    b = _rotate((b + a + z) & _MASK, 21)
    c = a
    a += x + y
    b += _rotate(a & _MASK, 44)
    return (a + z) & _MASK, (b + c) & _MASK


def _with_seed(data: bytes, x: int, y: int) -> tuple[int, int]:
    size = len(data)
    if size < _BLOCK_BYTES:
        return _murmur(data, x, y)
    z = size * _K1 & _MASK
    v0 = (_rotate(y ^ _K1, 49) * _K1 + _word(data, 0)) & _MASK
    v1 = (_rotate(v0, 42) * _K1 + _word(data, 8)) & _MASK
    w0 = (_rotate((y + z) & _MASK, 35) * _K1 + x) & _MASK
    w1 = _rotate((x + _word(data, 88)) & _MASK, 53) * _K1 & _MASK
    whole = size - size % _BLOCK_BYTES
    mask, k1 = _MASK, _K1
    # Inlined: a call for each operation would triple the time of the loop.
    for s0, s1, s2, s3, s4, s5, s6, s7 in _WORDS.iter_unpack(memoryview(data)[:whole]):
        t = (x + y + v0 + s2) & mask
        x = ((t >> 37 | t << 27) & mask) * k1 & mask ^ w1
        t = (y + v1 + s6) & mask
        y = ((t >> 42 | t << 22) & mask) * k1 & mask ^ v0
        t = z ^ w0
        z = (t >> 33 | t << 31) & mask
        a = v1 * k1 + s0
        t = (x + w0 + a + s3) & mask
        b = t >> 21 | t << 43
        c = a
        a = (a + s1 + s2) & mask
        b += a >> 44 | a << 20
        v0 = (a + s3) & mask
        v1 = (b + c) & mask
        a = z + w1 + s4
        t = (y + a + s7) & mask
        b = t >> 21 | t << 43
        c = a
        a = (a + s5 + s6) & mask
        b += a >> 44 | a << 20
        w0 = (a + s7) & mask
        w1 = (b + c) & mask
        z, x = x, z
    return _tail(data, whole, (x, y, z), (v0, v1), (w0, w1))


def _tail(
    data: bytes,
    whole: int,
    state: tuple[int, int, int],
    v: tuple[int, int],
    w: tuple[int, int],
) -> tuple[int, int]:
    """Hash the bytes after the whole blocks, in pieces of 32 bytes."""
    x, y, z = state
    w0, w1 = w
    y = (y + _rotate(w0, 37) * _K0 + z) & _MASK
    x = (x + _rotate((v[0] + z) & _MASK, 49) * _K0) & _MASK
    rest = len(data) - whole
    for done in range(32, rest + 32, 32):
        at = len(data) - done
        words = struct.unpack_from("<4Q", data, at)
        y = (_rotate((y - x) & _MASK, 42) * _K0 + v[1]) & _MASK
        w0 = (w0 + words[2]) & _MASK
        x = (_rotate(x, 49) * _K0 + w0) & _MASK
        w0 = (w0 + v[0]) & _MASK
        v = _weak(words, 0, v[0], v[1])
    x = _mix(x, v[0])
    y = _mix(y, w0)
    return (
        (_mix((x + v[1]) & _MASK, w1) + y) & _MASK,
        _mix((x + w1) & _MASK, (y + v[1]) & _MASK),
    )
