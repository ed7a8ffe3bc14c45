"""Headers of GGUF files, whole and damaged."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFEndian, GGUFWriter
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.registry.catalogue import Catalogue, ModelEntry
from millrace.registry.gguf.gguf_file import read_gguf
from millrace.registry.served import ServedModel
from millrace.schemas.errors import CheckpointError
from tests.support.engine.gguf_made import TOKENS, write_metadata

_FUZZED = settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def written(path: Path, add: Callable[[GGUFWriter], None]) -> Path:
    writer = GGUFWriter(path, "tiny")
    add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_values_of_every_type(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_uint8("u8", 255)
        writer.add_int8("i8", -128)
        writer.add_uint16("u16", 65_535)
        writer.add_int16("i16", -32_768)
        writer.add_uint32("u32", 2**32 - 1)
        writer.add_int32("i32", -(2**31))
        writer.add_uint64("u64", 2**64 - 1)
        writer.add_int64("i64", -(2**63))
        writer.add_float32("f32", 0.5)
        writer.add_float64("f64", 0.1)
        writer.add_bool("yes", True)
        writer.add_bool("no", False)
        writer.add_string("text", "mill 水車")
        writer.add_array("texts", ["a", "", "ß"])
        writer.add_array("numbers", [1, -2, 3])
        writer.add_array("floats", [0.25, -0.5])
        writer.add_array("flags", [True, False])

    file = read_gguf(written(tmp_path / "x.gguf", add))
    assert file.metadata == {
        "general.architecture": "tiny",
        "u8": 255,
        "i8": -128,
        "u16": 65_535,
        "i16": -32_768,
        "u32": 2**32 - 1,
        "i32": -(2**31),
        "u64": 2**64 - 1,
        "i64": -(2**63),
        "f32": 0.5,
        "f64": 0.1,
        "yes": True,
        "no": False,
        "text": "mill 水車",
        "texts": ["a", "", "ß"],
        "numbers": [1, -2, 3],
        "floats": [0.25, -0.5],
        "flags": [True, False],
    }
    assert file.metadata["yes"] is True


def test_places_of_plain_and_quantized_tensors(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.add_custom_alignment(64)
        writer.add_tensor("a", np.zeros((3, 5), np.float32))
        blocks = np.zeros((4, 34), np.uint8)
        writer.add_tensor("b", blocks, raw_dtype=GGMLQuantizationType.Q8_0)

    tensors = read_gguf(written(tmp_path / "x.gguf", add)).tensors
    assert {name: (tensor.shape, tensor.kind_name) for name, tensor in tensors.items()} == {
        "a": ((5, 3), "F32"),
        "b": ((32, 4), "Q8_0"),
    }
    assert tensors["b"].num_bytes == 4 * 34
    assert tensors["b"].offset - tensors["a"].offset == 64
    assert tensors["a"].offset % 64 == 0


def header(*parts: bytes, version: int = 3, num_tensors: int = 0, num_keys: int = 1) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(parts)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


_STRING, _ARRAY, _U8 = 8, 9, 0


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "not a GGUF file"),
        (b"GGU", "not a GGUF file"),
        (b"PK\x03\x04 and more", "not a GGUF file"),
        (b"GGUF", "truncated"),
        (header(version=1), "version 1; supported are the versions 2 and 3"),
        (header(version=4), "version 4"),
        (header(text(b"k"), numbers(13)), "key 'k' has values of an unknown type 13"),
        (header(text(b"\xff")), "its metadata has text that is not UTF-8"),
        (header(text(b"k"), numbers(_STRING), text(b"\xff")), "key 'k' has text that is not UTF-8"),
        (header(text(b"k"), numbers(4)), "truncated or damaged: key 'k'"),
        (
            header(text(b"k"), numbers(_ARRAY, _ARRAY), struct.pack("<Q", 1)),
            "key 'k' has arrays within an array",
        ),
        (
            header(text(b"k"), numbers(_ARRAY, _STRING), struct.pack("<Q", 2**60)),
            "truncated or damaged: key 'k'",
        ),
        (
            header(text(b"k"), numbers(_ARRAY, _U8), struct.pack("<Q", 2**63)),
            "truncated or damaged: key 'k'",
        ),
        (
            header(*[text(b"k") + numbers(4, 7)] * 2, num_keys=2),
            "key 'k' is there twice",
        ),
        (
            header(text(b"general.alignment"), numbers(4, 0)),
            r"key general\.alignment must be a positive integer",
        ),
        (
            header(text(b"t"), numbers(5), num_keys=0, num_tensors=1),
            "tensor 't' has 5 dimensions",
        ),
    ],
)
def test_what_is_no_file_of_the_format_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_gguf(file)
    assert str(file) in caught.value.message


def test_a_file_for_other_machines_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "tiny", endianess=GGUFEndian.BIG)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="big-endian"):
        read_gguf(tmp_path / "x.gguf")


def test_a_file_that_is_not_there_or_no_file(tmp_path: Path) -> None:
    for path in (tmp_path / "x.gguf", tmp_path):
        with pytest.raises(CheckpointError, match="cannot be read"):
            read_gguf(path)


def test_more_metadata_than_any_model_has_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    data = header(text(b"k"), numbers(_ARRAY, _U8), struct.pack("<Q", 2**29))
    file.write_bytes(data)
    with file.open("r+b") as stream:
        stream.truncate(len(data) + 2**29)
    with pytest.raises(CheckpointError, match="goes beyond 268435456 bytes of metadata"):
        read_gguf(file)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    whole = write_metadata(tmp_path / "x.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    # The file ends with the padding of its last tensor, which nothing needs.
    weights = len(TOKENS) * 8 * 4
    header_bytes = whole.index(b"\x00\x00\x80\x3f" * 8)
    for num_bytes in range(0, header_bytes + weights, 7):
        cut.write_bytes(whole[:num_bytes])
        with pytest.raises(CheckpointError):
            read_gguf(cut)
    cut.write_bytes(whole[: header_bytes + weights])
    tensors = read_gguf(cut).tensors
    assert {name: one.shape for name, one in tensors.items()} == {
        "token_embd.weight": (8, len(TOKENS))
    }


_TEMPLATE = "{% for message in messages %}{{ bos_token }}{{ message.content }}{% endfor %}"


@_FUZZED
@given(
    flips=st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4),
    sentencepiece=st.booleans(),
)
def test_damage_is_a_checkpoint_error_or_harmless(
    tmp_path: Path, flips: list[tuple[int, int]], sentencepiece: bool
) -> None:
    file = tmp_path / "x.gguf"
    kind = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [-1.0] * len(TOKENS)}
    template = {"tokenizer.chat_template": _TEMPLATE}
    data = bytearray(write_metadata(file, template | (kind if sentencepiece else {})).read_bytes())
    for at, value in flips:
        data[at % len(data)] = value
    file.write_bytes(data)
    try:
        served = ServedModel.load(Catalogue({"x": ModelEntry(name="x", source=str(file))}), "x")
    except CheckpointError:
        return
    ids = served.tokenizer.encode("abc <s> mill")
    served.tokenizer.decode(ids)
