"""Reading ``quantization_config`` of a config.json, whichever library wrote it."""

from __future__ import annotations

from collections.abc import Callable

from millrace.registry.checkpoints.json_fields import JsonFields
from millrace.registry.checkpoints.quantization.compressed_tensors import read_compressed_tensors
from millrace.registry.checkpoints.quantization.float8 import read_float8
from millrace.registry.checkpoints.quantization.packed import read_awq, read_gptq
from millrace.registry.checkpoints.quantization.scheme import QuantizationConfig
from millrace.schemas.errors import CheckpointError

Reader = Callable[[JsonFields], QuantizationConfig]

_READERS: dict[str, Reader] = {
    "compressed-tensors": read_compressed_tensors,
    "fp8": read_float8,
    "awq": read_awq,
    "gptq": read_gptq,
}
_SUPPORTED = (
    "supported are compressed-tensors (int8, float8, and packed int4 and int8), fp8, awq (version "
    "gemm), and gptq (4 and 8 bits)"
)
_INSTEAD = {
    "bitsandbytes": "load the wide checkpoint and quantize it as it is loaded, by --quantization "
    "int8 or int4, or once by millrace quantize; "
}
# Older checkpoints of compressed-tensors have the second.
_FIELDS = ("quantization_config", "compression_config")


def read_quantization(fields: JsonFields) -> QuantizationConfig | None:
    """What the ``fields`` of a config.json say about quantized weights, None if nothing.

    Raises CheckpointError naming the file and the field for a method, a format or a number that the
    engine does not compute, with what it does.
    """
    for name in _FIELDS:
        if fields.get(name) is not None:
            section = fields.inside(name)
            return _reader_of(section)(section)
    return None


def _reader_of(fields: JsonFields) -> Reader:
    method = fields.string("quant_method", "")
    is_bitsandbytes = fields.get("load_in_4bit") or fields.get("load_in_8bit")
    if not method and is_bitsandbytes:
        method = "bitsandbytes"
    if not method:
        raise fields.bad("quant_method", f"the name of a method; {_SUPPORTED}")
    if method not in _READERS:
        raise CheckpointError(
            f"{fields.path}: weights quantized by {method} are not computed: "
            f"{_INSTEAD.get(method, '')}{_SUPPORTED}."
        )
    return _READERS[method]
