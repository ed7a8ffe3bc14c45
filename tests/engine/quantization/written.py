"""Quantized checkpoints in each format's own layout, and their wide weights."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor, ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
WIDE = "wide"


class Written(NamedTuple):
    """Tensors of a quantized module, named without the module, and the weight that they
    represent."""

    tensors: Tensors
    weight: torch.Tensor


Writer = Callable[[torch.Tensor], Written]


def rewrite(path: Path, writers: Mapping[str, Writer], config: dict[str, Any]) -> None:
    """Quantize a wide checkpoint in its place: each module by the first of ``writers`` whose
    pattern is in its name. The folder ``wide`` in it becomes the same checkpoint with wide
    weights."""
    stored = load_file(path / "model.safetensors")
    wide = dict(stored)
    for name in list(stored):
        module = name.removesuffix(".weight")
        write = next((own for part, own in writers.items() if re.search(part, module)), None)
        if write is None or stored[name].dim() != 2 or module == name:
            continue
        written = write(stored.pop(name))
        stored |= {
            f"{module}.{part}": tensor.contiguous() for part, tensor in written.tensors.items()
        }
        wide[name] = written.weight.contiguous()
    (path / WIDE).mkdir()
    fields = (path / "config.json").read_text()
    (path / WIDE / "config.json").write_text(fields)
    save_file(wide, path / WIDE / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    set_config(path, config)


def set_config(path: Path, config: dict[str, Any] | None) -> None:
    """Write ``quantization_config``."""
    fields = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(fields))


def wide_model(path: Path) -> Any:
    """Return transformers' model of the wide checkpoint that ``rewrite`` left in ``path``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path / WIDE, dtype=torch.float32)
    return model.eval()


def compressed(scheme: dict[str, Any]) -> Writer:
    """Return a writer by the library itself, with scales from the least and greatest weights."""
    whole = QuantizationScheme(targets=["Linear"], **scheme)
    assert whole.weights is not None
    assert whole.format is not None
    args, compressor = whole.weights, BaseCompressor.get_value_from_registry(whole.format)

    def write(weight: torch.Tensor) -> Written:
        lows, highs = _ranges(weight, args)
        scales, zeros = calculate_qparams(lows, highs, args)
        state = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
        if whole.input_activations is not None and not whole.input_activations.dynamic:
            state["input_scale"] = torch.tensor([4 / 127])
        tensors = compressor.compress(state, whole)
        return Written(tensors, compressor.decompress(dict(tensors), whole)["weight"])

    return write


def save_compressed(path: Path, model: Any, config: dict[str, Any]) -> None:
    """Quantize transformers' ``model`` in its place, save it compressed, and leave it as the
    library itself computes it: rounded weights, and inputs rounded as they come."""
    apply_quantization_config(model, QuantizationConfig(**config), show_progress=False)
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            args = module.quantization_scheme.weights
            scales, zeros = calculate_qparams(*_ranges(module.weight.data, args), args)
            module.weight_scale.data.copy_(scales)
            module.weight_zero_point.data.copy_(zeros)
            module.quantization_status = QuantizationStatus.FROZEN
    saved = copy.deepcopy(model)
    compressor = ModelCompressor.from_pretrained_model(saved)
    compressor.compress_model(saved)
    saved.save_pretrained(path)
    compressor.update_config(str(path))


def _ranges(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if args.strategy == "tensor":
        parts, dims = weight[None], (1, 2)
        lows, highs = parts.amin(dims), parts.amax(dims)
        return lows, highs
    rows, columns = 1, weight.shape[1]
    if args.strategy == "block":
        rows, columns = args.block_structure
    elif args.strategy == "group":
        columns = args.group_size
    parts = weight.view(weight.shape[0] // rows, rows, weight.shape[1] // columns, columns)
    return parts.amin((1, 3)), parts.amax((1, 3))


def float8(block: int | None, *, per_channel: bool = False, static: bool = False) -> Writer:
    """Return a writer of checkpoints of ``quant_method`` fp8."""

    def write(weight: torch.Tensor) -> Written:
        rows, columns = weight.shape
        scales = torch.empty_like(weight)
        height, width = (block, block) if block else (1 if per_channel else rows, columns)
        for top in range(0, rows, height):
            for left in range(0, columns, width):
                part = weight[top : top + height, left : left + width]
                scales[top : top + height, left : left + width] = part.abs().max() / 448
        codes = (weight / scales).to(torch.float8_e4m3fn)
        own = scales[::height, ::width]
        tensors = {"weight": codes}
        if block:
            tensors["weight_scale_inv"] = own
        else:
            tensors["weight_scale"] = own if per_channel else own.reshape(())
        if static:
            tensors["input_scale"] = torch.tensor(0.01)
        return Written(tensors, codes.float() * scales)

    return write


def _rounded(
    weight: torch.Tensor, groups: torch.Tensor, bits: int, *, sym: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return unsigned codes [num_inputs, num_outputs], zeros and scales [num_groups, num_outputs],
    and the weight that they represent; ``groups`` has the group of each input."""
    count = int(groups.max()) + 1
    most = 2**bits - 1
    scales = torch.empty(count, len(weight))
    zeros = torch.empty(count, len(weight))
    for group in range(count):
        own = weight[:, groups == group]
        if sym:
            scales[group] = own.abs().amax(1) * 2 / most
            zeros[group] = (most + 1) // 2
        else:
            low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
            scales[group] = (high - low) / most
            zeros[group] = (-low / scales[group]).round()
    scales = scales.half().float()
    codes = (weight.t() / scales[groups] + zeros[groups]).round().clamp(0, most)
    return codes, zeros, scales, ((codes - zeros[groups]) * scales[groups]).t()


def _packed(codes: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack unsigned codes along the last dimension into int32, the first in the lowest bits, or in
    the place that ``order`` gives it."""
    per_word = 32 // bits
    places = order or tuple(range(per_word))
    words = torch.zeros(codes.shape[0], codes.shape[1] // per_word, dtype=torch.int64)
    for place, column in enumerate(places):
        words |= codes[:, column::per_word].long() << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def awq(group_size: int) -> Writer:
    """Return a writer of checkpoints of AutoAWQ's version gemm."""

    def write(weight: torch.Tensor) -> Written:
        size = weight.shape[1] if group_size == -1 else group_size
        groups = torch.arange(weight.shape[1]) // size
        codes, zeros, scales, values = _rounded(weight, groups, 4, sym=False)
        tensors = {
            "qweight": _packed(codes, 4, AWQ_ORDER),
            "qzeros": _packed(zeros, 4, AWQ_ORDER),
            "scales": scales.half(),
        }
        return Written(tensors, values)

    return write


def gptq(
    bits: int, group_size: int, *, sym: bool = True, shuffled: bool = False, v2: bool = False
) -> Writer:
    """Return a writer of GPTQModel's checkpoints."""

    def write(weight: torch.Tensor) -> Written:
        inputs = weight.shape[1]
        groups = torch.arange(inputs) // (inputs if group_size == -1 else group_size)
        if shuffled:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(3))]
        codes, zeros, scales, values = _rounded(weight, groups, bits, sym=sym)
        packed_zeros = _packed(zeros, bits).long()
        if not v2:
            ones = sum(1 << place for place in range(0, 32, bits))
            packed_zeros = (packed_zeros - ones) & 0xFFFFFFFF
            packed_zeros = torch.where(packed_zeros >= 2**31, packed_zeros - 2**32, packed_zeros)
        tensors = {
            "qweight": _packed(codes.t(), bits).t(),
            "qzeros": packed_zeros.int(),
            "scales": scales.half(),
            "g_idx": groups.int(),
        }
        return Written(tensors, values)

    return write
