"""What several processes are given to run."""

from __future__ import annotations

import pytest

from tests.scheduling import refuse_namesakes


def test_tests_of_one_id_are_refused(request: pytest.FixtureRequest) -> None:
    refuse_namesakes([request.node])
    with pytest.raises(pytest.UsageError, match="test_tests_of_one_id_are_refused"):
        refuse_namesakes([request.node, request.node])
