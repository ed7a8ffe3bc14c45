"""Linear layers of a device with products of adapters added."""

from __future__ import annotations

from collections.abc import Callable

import torch

from millrace.engine.adapters.slots import Product
from millrace.engine.kernels.operations import Linear
from millrace.engine.models.decoder import DecoderWeights, LayerWeights
from millrace.engine.models.linears import ReducedLinear
from millrace.engine.models.mlp import GatedMLP

# Adds the adapters' products of the first argument's rows to the second argument's rows.
AddAdapters = Callable[[torch.Tensor, torch.Tensor], None]


class AdaptedLinear(Linear):
    """Sum of ``linear`` and the adapters' product; rows without an adapter get ``linear`` alone."""

    def __init__(self, linear: Linear, add: AddAdapters) -> None:
        self.size = linear.size
        self._linear = linear
        self._add = add

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [num_rows, num_inputs] to [num_rows, num_outputs]."""
        out = self._linear(rows)
        self._add(rows, out)
        return out

    def unrounded(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply to float32 [num_rows, num_outputs]."""
        out = self._linear.unrounded(rows)
        self._add(rows, out)
        return out

    def plus(self, total: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return ``total`` [num_rows, num_outputs] plus the product; may overwrite ``total``."""
        total = self._linear.plus(total, rows)
        self._add(rows, total)
        return total


def adapted_weights(
    weights: DecoderWeights, adder: Callable[[int, Product], AddAdapters]
) -> DecoderWeights:
    """Return the weights with the function of ``adder`` for each layer and product.

    In a sum over ranks, adapters are added to this rank's part. Experts have no adapters.
    """

    def adapted(layer: int, product: Product, linear: Linear) -> AdaptedLinear | ReducedLinear:
        if isinstance(linear, ReducedLinear):
            own = AdaptedLinear(linear.linear, adder(layer, product))
            return ReducedLinear(own, linear.collectives)
        return AdaptedLinear(linear, adder(layer, product))

    def layer_of(number: int, layer: LayerWeights) -> LayerWeights:
        mlp = layer.mlp
        if isinstance(mlp, GatedMLP):
            mlp = GatedMLP(
                adapted(number, Product.GATE_UP, mlp.gate_up),
                adapted(number, Product.DOWN, mlp.down),
            )
        return layer._replace(
            qkv=adapted(number, Product.QKV, layer.qkv),
            output=adapted(number, Product.OUTPUT, layer.output),
            mlp=mlp,
        )

    layers = tuple(layer_of(number, layer) for number, layer in enumerate(weights.layers))
    return weights._replace(layers=layers)
