"""Fixtures for the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.engine.triton_products import bfloat16_products
from tests.support.engine.triton_rounding import hardware_rounding


@pytest.fixture(autouse=True)
def _numbers() -> Iterator[None]:
    """Let the interpreter round and multiply as a GPU does."""
    with hardware_rounding(), bfloat16_products():
        yield


@pytest.fixture
def poisoned_outputs() -> Iterator[None]:
    """Fill fresh tensors with NaN, so that unwritten elements stay NaN."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
