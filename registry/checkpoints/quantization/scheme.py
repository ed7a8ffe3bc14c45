"""How the weight of a module is quantized and stored, and which modules have such a weight."""

from __future__ import annotations

import enum

import msgspec

from millrace.registry.checkpoints.quantization.targets import rank


class Layout(enum.Enum):
    """The tensors of a quantized module, whose weight is [num_outputs, num_inputs].

    ``PLAIN``: ``weight`` of int8 or float8 and ``weight_scale``, by compressed-tensors and fp8.
    ``PACKED``: ``weight_packed``, int32 along the inputs, by compressed-tensors. ``AWQ``:
    ``qweight``, int32 along the outputs. ``GPTQ`` and ``GPTQ_V2``: ``qweight``, int32 along the
    inputs; the first has zero points stored minus one.
    """

    PLAIN = "plain"
    PACKED = "packed"
    AWQ = "awq"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"


class InputRounding(enum.Enum):
    """What a module's inputs are rounded to, see ``Activations`` of the engine."""

    WIDE = "wide"
    INT8_TOKEN = "int8_token"  # noqa: S105 (a token of text)
    INT8_TENSOR = "int8_tensor"
    FLOAT8_TOKEN = "float8_token"  # noqa: S105 (a token of text)
    FLOAT8_TENSOR = "float8_tensor"
    FLOAT8_GROUP = "float8_group"


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """``group_inputs`` neighbouring inputs share a scale, None is all of them; so do
    ``block_outputs`` neighbouring outputs. Codes are of ``bits``, e4m3 floats if ``is_float``."""

    layout: Layout
    bits: int = 8
    is_float: bool = False
    group_inputs: int | None = None
    block_outputs: int = 1
    has_zeros: bool = False
    inputs: InputRounding = InputRounding.WIDE


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """The modules of ``targets`` are quantized by ``scheme``; None leaves them wide.

    A target is a module's name, its class (Linear or Embedding), or behind ``re:`` a pattern that
    its name begins with.
    """

    targets: tuple[str, ...]
    scheme: Scheme | None


class QuantizationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What ``method`` did to a checkpoint. Targets ``ignored`` are wide whatever ``rules`` say.
    If ``has_cache_scales``, it was also made for a KV cache of fewer bits."""

    method: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    has_cache_scales: bool = False

    def scheme_of(self, module_name: str) -> Scheme | None:
        """The scheme of a module by its name in the checkpoint, as ``model.layers.0.mlp.up_proj``;
        None if its weight is wide. A target by name goes before a pattern, that before a class."""
        if any(rank(target, module_name) is not None for target in self.ignored):
            return None
        found = [
            (closeness, rule.scheme)
            for rule in self.rules
            for target in rule.targets
            if (closeness := rank(target, module_name)) is not None
        ]
        return min(found, key=lambda match: match[0])[1] if found else None
