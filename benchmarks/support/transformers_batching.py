"""Continuous batching of ``transformers`` in this process."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.support.figures import RequestTimes
from benchmarks.support.prompts import Prompt

_NO_TOKEN = -1
_POLL_S = 0.2


def continuous_batching(
    model: Any, sampling: dict[str, Any], *, page_tokens: int | None, **options: int | None
) -> Any:
    """Make a manager that ends no answer before its length.

    ``options`` are those of its ContinuousBatchingConfig; None leaves one to it.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    # The option for the tokens of a page had another name before 5.18.
    fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    page = "page_size" if "page_size" in fields else "block_size"
    wanted = {**options, page: page_tokens}
    given = {name: value for name, value in wanted.items() if value is not None}
    return model.init_continuous_batching(
        generation_config=GenerationConfig(eos_token_id=_NO_TOKEN, pad_token_id=0, **sampling),
        continuous_batching_config=ContinuousBatchingConfig(**given),
    )


def answered(
    manager: Any, requests: Sequence[tuple[Prompt, int]], streams: int, limit_s: float
) -> list[RequestTimes]:
    """Answer prompts with the requested numbers of tokens, ``streams`` at a time.

    Returns the times of the requests answered within ``limit_s``. Raises RuntimeError if the
    manager stops or fails on a request.
    """
    waiting, sent_s = iter(requests), dict[str, float]()
    measured: list[RequestTimes] = []
    begin_s = time.perf_counter()

    def send_next() -> None:
        for prompt, num_tokens in waiting:
            now_s = time.perf_counter()
            request_id = manager.add_request(
                list(prompt), max_new_tokens=num_tokens, record_timestamps=True
            )
            sent_s[request_id] = now_s
            return

    for _ in range(streams):
        send_next()
    while sent_s and time.perf_counter() - begin_s < limit_s:
        output = manager.get_result(timeout=_POLL_S)
        if output is None:
            if not manager.is_running():
                raise RuntimeError("transformers' continuous batching has stopped")
        elif output.is_finished():
            if output.error is not None:
                raise RuntimeError(f"transformers failed on a request: {output.error}")
            sent = sent_s.pop(output.request_id)
            num_tokens = len(output.generated_tokens)
            measured.append(RequestTimes(sent, tuple(output.timestamps), num_tokens))
            send_next()
    return measured
