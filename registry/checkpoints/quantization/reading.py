"""Reader of ``quantization_config`` in a config.json, for all supported libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from millrace.registry.checkpoints.json_fields import JsonFields
from millrace.registry.checkpoints.quantization.packed import read_awq, read_float8, read_gptq
from millrace.registry.checkpoints.quantization.scheme import (
    InputRounding,
    Layout,
    QuantizationConfig,
    Rule,
    Scheme,
    read_targets,
)
from millrace.schemas.errors import CheckpointError


class _Format(NamedTuple):
    layout: Layout
    types: tuple[str, ...]
    bits: tuple[int, ...]


_FORMATS = {
    "int-quantized": _Format(Layout.PLAIN, ("int",), (8,)),
    "float-quantized": _Format(Layout.PLAIN, ("float",), (8,)),
    "naive-quantized": _Format(Layout.PLAIN, ("int", "float"), (8,)),
    "pack-quantized": _Format(Layout.PACKED, ("int",), (4, 8)),
}
_STRATEGIES = ("tensor", "channel", "group", "block")
# Keys are type, strategy, and whether the scale is computed from the inputs. A scale per batch is
# computed per token instead: an answer must not depend on the other requests (batch-invariant).
_ROUNDINGS = {
    ("int", "token", True): InputRounding.INT8_TOKEN,
    ("int", "tensor", True): InputRounding.INT8_TOKEN,
    ("int", "tensor", False): InputRounding.INT8_TENSOR,
    ("float", "token", True): InputRounding.FLOAT8_TOKEN,
    ("float", "tensor", True): InputRounding.FLOAT8_TOKEN,
    ("float", "tensor", False): InputRounding.FLOAT8_TENSOR,
    ("float", "group", True): InputRounding.FLOAT8_GROUP,
}
_ORDERS = ("weight", "static", "group", "dynamic")


def read_compressed_tensors(fields: JsonFields) -> QuantizationConfig:
    """Read a compressed-tensors config. Raises CheckpointError naming the unsupported field."""
    _refuse_sparsity(fields)
    groups = fields.mapping("config_groups")
    if not groups:
        raise fields.bad("config_groups", "an object with the scheme of each group of modules")
    each = fields.inside("config_groups")
    return QuantizationConfig(
        method="compressed-tensors",
        rules=tuple(_read_group(fields, each.inside(name)) for name in groups),
        ignored=read_targets(fields, "ignore"),
        has_cache_scales=fields.mapping("kv_cache_scheme") is not None,
    )


def _refuse_sparsity(fields: JsonFields) -> None:
    sparsity = fields.mapping("sparsity_config")
    if sparsity and sparsity.get("format") != "dense":
        raise fields.bad("sparsity_config", "absent, or of format dense")
    for name in ("transform_config", "moe_sparsity_config"):
        if fields.mapping(name):
            raise fields.bad(name, "absent")


def _read_group(whole: JsonFields, group: JsonFields) -> Rule:
    targets = read_targets(group, "targets")
    if not targets:
        raise group.bad("targets", "a list of modules")
    if group.mapping("output_activations") is not None:
        raise group.bad("output_activations", "absent: outputs are not quantized")
    if group.mapping("weights") is None:
        if group.mapping("input_activations") is not None:
            raise group.bad("weights", "an object beside input_activations")
        return Rule(targets=targets, scheme=None)
    stored = _read_format(whole, group)
    weights = group.inside("weights")
    scheme = _read_weights(weights, stored)
    if group.mapping("input_activations") is None:
        return Rule(targets=targets, scheme=scheme)
    inputs = _read_inputs(group.inside("input_activations"), scheme)
    if scheme.bits != 8:
        raise weights.bad("num_bits", "8 beside input_activations")
    return Rule(targets=targets, scheme=msgspec.structs.replace(scheme, inputs=inputs))


def _read_format(whole: JsonFields, group: JsonFields) -> _Format:
    fields = whole if group.get("format") is None else group
    name = fields.string("format", "")
    if name not in _FORMATS:
        raise fields.bad("format", f"one of {', '.join(_FORMATS)}")
    return _FORMATS[name]


def _read_weights(fields: JsonFields, stored: _Format) -> Scheme:
    number = fields.string("type", "int")
    if number not in stored.types:
        raise fields.bad("type", f"{' or '.join(stored.types)} in this format")
    bits = fields.positive_int("num_bits", 8)
    if bits not in stored.bits:
        raise fields.bad("num_bits", f"{' or '.join(map(str, stored.bits))} in this format")
    if fields.get("dynamic") not in (None, False):
        raise fields.bad("dynamic", "false")
    if fields.get("actorder") not in (None, False, *_ORDERS):
        raise fields.bad("actorder", f"null or one of {', '.join(_ORDERS)}")
    strategy = _strategy(fields)
    if strategy not in _STRATEGIES:
        raise fields.bad("strategy", f"one of {', '.join(_STRATEGIES)}")
    block_outputs, group_inputs = 1, None
    if strategy == "group":
        group_inputs = fields.positive_int("group_size")
    elif strategy == "block":
        block_outputs, group_inputs = fields.positive_pair("block_structure")
    is_symmetric = fields.boolean("symmetric", default=True)
    if not is_symmetric and (number == "float" or strategy in ("tensor", "block")):
        raise fields.bad("symmetric", "true, except for integers with a scale per channel or group")
    return Scheme(
        layout=stored.layout,
        bits=bits,
        is_float=number == "float",
        group_inputs=group_inputs,
        block_outputs=block_outputs,
        has_zeros=not is_symmetric,
    )


def _strategy(fields: JsonFields) -> str:
    """Return the strategy; if it is absent, ``group_size`` decides (-1: channel)."""
    size = fields.get("group_size")
    default = "tensor" if size is None else "channel" if size == -1 else "group"
    return fields.string("strategy", default)


def _read_inputs(fields: JsonFields, weights: Scheme) -> InputRounding:
    number = "float" if weights.is_float else "int"
    if fields.string("type", "int") != number:
        raise fields.bad("type", f"{number}, as the weights are")
    if fields.positive_int("num_bits", 8) != 8:
        raise fields.bad("num_bits", "8")
    if not fields.boolean("symmetric", default=True):
        raise fields.bad("symmetric", "true")
    is_dynamic = fields.boolean("dynamic", default=False)
    strategy = _strategy(fields)
    rounding = _ROUNDINGS.get((number, strategy, is_dynamic))
    if rounding is None:
        raise fields.bad(
            "strategy" if fields.get("strategy") is not None else "dynamic",
            "token (dynamic), tensor, or for floats group (dynamic)",
        )
    is_grouped = rounding is InputRounding.FLOAT8_GROUP
    if is_grouped and fields.positive_int("group_size") != weights.group_inputs:
        raise fields.bad("group_size", f"the weights' ({weights.group_inputs})")
    return rounding


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
    "bitsandbytes": "load the unquantized checkpoint and quantize it with --quantization int8 or "
    "int4, or once with millrace quantize; "
}
# Older checkpoints of compressed-tensors have the second name.
_FIELDS = ("quantization_config", "compression_config")


def read_quantization(fields: JsonFields) -> QuantizationConfig | None:
    """Return the quantization in the ``fields`` of a config.json; None if there is none.

    Raises:
        CheckpointError: the engine does not support the method, a format or a number. Names the
            file and the field, and what is supported.
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
            f"{fields.path}: weights quantized by {method} are not supported: "
            f"{_INSTEAD.get(method, '')}{_SUPPORTED}."
        )
    return _READERS[method]
