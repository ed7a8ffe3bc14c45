"""Quantization scheme of a module's weight, its storage, and the modules that it applies to."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable

import msgspec

from millrace.registry.checkpoints.json_fields import JsonFields

_PATTERN = "re:"


def rank(target: str, module_name: str) -> int | None:
    """Return how closely a target matches a module.

    0 if ``target`` is the module's name, 1 if it is a pattern that matches the beginning of the
    name, 2 if it is the module's class; None if it does not match.
    """
    if target == module_name:
        return 0
    if target.startswith(_PATTERN):
        return 1 if re.match(target.removeprefix(_PATTERN), module_name) else None
    is_embedding = module_name.endswith("embed_tokens")
    return 2 if target == ("Embedding" if is_embedding else "Linear") else None


def read_targets(fields: JsonFields, name: str) -> tuple[str, ...]:
    """Return the targets in the list ``name``; empty if absent.

    Raises:
        CheckpointError: an element is not a string or not a valid pattern; names the field.
    """
    targets = fields.strings(name)
    for target in targets:
        pattern = target.removeprefix(_PATTERN)
        if pattern != target and not is_pattern(pattern):
            raise fields.bad(name, f"names and regular expressions ({target} is not)")
    return targets


def read_modules(fields: JsonFields, *names: str) -> tuple[str, ...]:
    """Return the lists ``names`` as targets.

    An element stands for whole components of a module's name, as ``lm_head``, ``mlp.gate`` or
    ``model.layers.0``, unless it is a pattern already.
    """
    listed: Iterable[str] = (name for field in names for name in read_targets(fields, field))
    return tuple(
        name if name.startswith(_PATTERN) else pattern(rf"(.*\.)?{re.escape(name)}(\.|$)")
        for name in listed
    )


def pattern(regular_expression: str) -> str:
    """Return the target for names that begin with ``regular_expression``."""
    return _PATTERN + regular_expression


def is_pattern(regular_expression: str) -> bool:
    """Return whether the text is a valid regular expression."""
    try:
        re.compile(regular_expression)
    except re.error:
        return False
    return True


class Layout(enum.Enum):
    """Layout of the tensors of a quantized module, whose weight is [num_outputs, num_inputs].

    - ``PLAIN``: ``weight`` of int8 or float8 and ``weight_scale``, by compressed-tensors and fp8.
    - ``PACKED``: ``weight_packed``, int32 along the inputs, by compressed-tensors.
    - ``AWQ``: ``qweight``, int32 along the outputs.
    - ``GPTQ`` and ``GPTQ_V2``: ``qweight``, int32 along the inputs; the first stores zero points
      minus one.
    """

    PLAIN = "plain"
    PACKED = "packed"
    AWQ = "awq"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"


class InputRounding(enum.Enum):
    """Type that a module's inputs are rounded to; see ``Activations`` of the engine."""

    WIDE = "wide"
    INT8_TOKEN = "int8_token"  # noqa: S105 (a token of text)
    INT8_TENSOR = "int8_tensor"
    FLOAT8_TOKEN = "float8_token"  # noqa: S105 (a token of text)
    FLOAT8_TENSOR = "float8_tensor"
    FLOAT8_GROUP = "float8_group"


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """Quantization scheme of a weight.

    ``group_inputs`` neighbouring inputs share a scale (None: all), and so do ``block_outputs``
    neighbouring outputs. Codes have ``bits`` bits, and are e4m3 floats if ``is_float``.
    """

    layout: Layout
    bits: int = 8
    is_float: bool = False
    group_inputs: int | None = None
    block_outputs: int = 1
    has_zeros: bool = False
    inputs: InputRounding = InputRounding.WIDE


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """Rule that the modules of ``targets`` are quantized by ``scheme``; None leaves them
    unquantized.

    A target is a module's name, its class (Linear or Embedding), or a pattern after ``re:`` that
    matches the beginning of its name.
    """

    targets: tuple[str, ...]
    scheme: Scheme | None


class QuantizationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Quantization of a checkpoint by ``method``.

    ``ignored`` targets are unquantized in spite of ``rules``. With ``has_cache_scales`` it was also
    made for a quantized KV cache.
    """

    method: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    has_cache_scales: bool = False

    def scheme_of(self, module_name: str) -> Scheme | None:
        """Return the scheme of a module by its name in the checkpoint, as
        ``model.layers.0.mlp.up_proj``.

        None if its weight is unquantized. A target by name takes precedence over a pattern, and a
        pattern over a class.
        """
        if any(rank(target, module_name) is not None for target in self.ignored):
            return None
        found = [
            (closeness, rule.scheme)
            for rule in self.rules
            for target in rule.targets
            if (closeness := rank(target, module_name)) is not None
        ]
        return min(found, key=lambda match: match[0])[1] if found else None
