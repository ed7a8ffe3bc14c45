"""Matrix products of Triton's interpreter, made to take bfloat16."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@contextlib.contextmanager
def bfloat16_products() -> Iterator[None]:
    """Multiply bfloat16 as numbers. The interpreter's own ``tl.dot`` multiplies the integers whose
    bits are the same."""
    own = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, left: Any, right: Any, *others: Any) -> Any:
        return own(builder, _widened(left), _widened(right), *others)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield


def _widened(operand: Any) -> Any:
    if operand.dtype.scalar is not tl.bfloat16 or operand.data.dtype != np.uint16:
        return operand
    values = (operand.data.astype(np.uint32) << 16).view(np.float32)
    return interpreter.TensorHandle(values, tl.float32)


@contextlib.contextmanager
def rows_by_themselves() -> Iterator[None]:
    """Multiply so that a row of a product does not depend on where in its tile it is, as it does
    not on a GPU. Those of the libraries for CPUs go through different instructions at the edges."""

    def create_dot(builder: Any, left: Any, right: Any, total: Any, *others: Any) -> Any:
        products = np.einsum("ik,kn->in", _widened(left).data, _widened(right).data)
        return interpreter.TensorHandle(products + total.data, total.dtype.scalar)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", create_dot):
        yield
