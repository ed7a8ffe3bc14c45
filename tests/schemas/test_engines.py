"""Refusals of engines that are not our own, and the field that a refusal names."""

from __future__ import annotations

import pytest

from millrace.schemas.engines import EngineKind, check_supported
from millrace.schemas.errors import ParameterError
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import SamplingOptions


def test_an_engine_without_embeddings_names_the_model() -> None:
    """A request for an embedding need not set the pooling."""
    with pytest.raises(ParameterError) as refused:
        check_supported(SamplingOptions(), Pooling.LAST, EngineKind.OPENAI)
    assert refused.value.param == "model"
    assert refused.value.message == (
        "The openai engine of this model makes no embeddings, scores or labels; name a model of "
        "Millrace's own engine."
    )
    check_supported(SamplingOptions(), Pooling.LAST, EngineKind.REAL)
