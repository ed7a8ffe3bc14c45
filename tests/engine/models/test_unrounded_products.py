"""Products in float32, and logits that are as close as two tokens of a real model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from millrace.engine.kernels.gpu.kernel_set import choose_kernels
from millrace.engine.kernels.operations import Linear
from millrace.engine.models.linears import (
    DeviceLinear,
    PackedProjection,
    Projection,
    ReducedLinear,
    packed_quantized,
)
from millrace.engine.quantization.linear import DequantizedLinear, SplitLinear
from millrace.engine.quantization.rounding import quantize_at_load
from millrace.engine.step.engine import Engine
from millrace.schemas.config import EngineConfig
from tests.engine.checkpoints import save_model
from tests.engine.devices.cpu.test_fused_decoder import LLAMA
from tests.engine.kernels.compiled import compiled
from tests.engine.support import drain, prompt, request

_INPUTS, _OUTPUTS = 96, 5000


class _Doubled:
    """Collectives of two ranks with equal parts."""

    rank, size = 0, 2

    def all_reduce(self, rows: torch.Tensor) -> None:
        rows.mul_(2)


def _quantized(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    quantize = quantize_at_load("int4").layers
    assert quantize is not None
    return packed_quantized(compiled(torch.bfloat16), quantize(weight), bias)


def _dequantized(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    quantize = quantize_at_load("int4").layers
    assert quantize is not None
    return DequantizedLinear(quantize(weight), bias, torch.bfloat16)


Make = Callable[[torch.Tensor, torch.Tensor | None], Linear]
_MAKERS: dict[str, Make] = {
    "oneDNN": Projection,
    "packed": lambda weight, bias: PackedProjection.of_wide(compiled(torch.bfloat16), weight, bias),
    "packed int4": _quantized,
    "widened int4": _dequantized,
    "of a device": partial(
        DeviceLinear, kernels=choose_kernels("reference", torch.device("cpu")), fixed=False
    ),
    "side by side": lambda weight, _: SplitLinear([Projection(weight, None)] * 2),
    "summed": lambda weight, bias: ReducedLinear(Projection(weight, bias), _Doubled()),
}


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def _values(linear: Linear) -> torch.Tensor:
    """Return the weight that a map multiplies with, from its products with unit rows."""
    return linear.unrounded(torch.eye(_INPUTS).bfloat16()).double()


@pytest.mark.parametrize("make", _MAKERS.values(), ids=_MAKERS)
def test_unrounded_products_are_float32(make: Make) -> None:
    torch.manual_seed(1)
    weight = torch.randn(_OUTPUTS, _INPUTS).bfloat16()
    linear = make(weight, None)
    rows = torch.randn(5, _INPUTS).bfloat16()
    exact = rows.double() @ _values(linear)
    product = linear.unrounded(rows)
    assert product.dtype is torch.float32
    # Rows that are rounded to int16 differ by 2e-5; bfloat16 would round the product by 2e-3.
    assert (product - exact).abs().max() < 1e-4 * exact.abs().max()
    torch.testing.assert_close(linear(rows), product.bfloat16(), atol=0.3, rtol=0.02)


@pytest.mark.parametrize("make", _MAKERS.values(), ids=_MAKERS)
def test_products_are_added_to_a_float32_total(make: Make) -> None:
    torch.manual_seed(2)
    linear = make(torch.randn(_OUTPUTS, _INPUTS).bfloat16(), None)
    rows = torch.randn(5, _INPUTS).bfloat16()
    product = linear.unrounded(rows)
    total = torch.randn_like(product)
    added = linear.plus(total.clone(), rows)
    assert added.dtype is torch.float32
    torch.testing.assert_close(added, total + product, atol=0.3, rtol=0.02)


@pytest.mark.parametrize("name", ["oneDNN", "packed", "of a device"])
def test_a_bias_is_added_to_the_sums(name: str) -> None:
    torch.manual_seed(3)
    weight, bias = torch.randn(_OUTPUTS, _INPUTS).bfloat16(), torch.randn(_OUTPUTS).bfloat16()
    rows = torch.randn(5, _INPUTS).bfloat16()
    exact = rows.double() @ weight.double().t() + bias.double()
    product = _MAKERS[name](weight, bias).unrounded(rows)
    assert (product - exact).abs().max() < 1e-5 * exact.abs().max()


_PROMPT = prompt(1, 20, LLAMA["vocab_size"])
_SECOND, _LIKELIEST = 20, 40


@pytest.fixture(scope="module")
def close_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint whose two likeliest tokens after the prompt are equal in bfloat16.

    Their logits are about 64, where numbers of bfloat16 are 0.25 or 0.5 apart. They differ by one
    last bit of one weight.
    """
    folder = tmp_path_factory.mktemp("checkpoint")
    model = save_model(folder, "Llama", **LLAMA)
    with torch.no_grad():
        hidden = model.model(torch.tensor([_PROMPT])).last_hidden_state[0, -1]
        head = model.lm_head.weight.zero_()
        head[_SECOND] = head[_LIKELIEST] = hidden.bfloat16().float()
        largest = int(hidden.abs().argmax())
        head[_LIKELIEST, largest] *= 1 + 2**-7
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kernels", ["native", "torch", "reference"])
def test_close_logits_do_not_become_equal(close_tokens: Path, kernels: str) -> None:
    settings = EngineConfig(device="cpu", dtype="bfloat16", kernels=kernels, num_blocks=16)
    engine = Engine.load(close_tokens, settings)
    for name, options in {"plain": {}, "reported": {"logprobs": 2}}.items():
        engine.add(request(name, _PROMPT, max_tokens=1, temperature=0.0, **options))
    outputs = {output.request_id: output for output in drain(engine) if output.token_ids}
    assert [output.token_ids for output in outputs.values()] == [(_LIKELIEST,)] * 2
    [reported] = outputs["reported"].logprobs or ()
    (first, first_logprob), (second, second_logprob) = reported.top
    assert (first, second) == (_LIKELIEST, _SECOND)
    assert 0 < first_logprob - second_logprob < 0.25
