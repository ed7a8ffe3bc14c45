"""The continuous batching of ``transformers``, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from benchmarks.peers.loads import Load
from benchmarks.support.figures import RequestTimes
from benchmarks.support.prompts import Prompt

# Its own default. A larger cache is slower without flash attention: 70 tokens/s with four times
# these, where this makes 80.
_PAGE_TOKENS = 256
_CACHE_TOKENS = 16_384
_NO_TOKEN = -1
_STALLED_S = 300.0


class ContinuousBatching:
    """Its manager on the CPU, kept for all loads. Blocks are shared between equal prefixes, as it
    does by default; without CUDA there are no graphs and no second stream."""

    def __init__(self, path: Path, streams: int) -> None:
        model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self._manager: Any = model.init_continuous_batching(
            generation_config=GenerationConfig(
                do_sample=False, eos_token_id=_NO_TOKEN, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=_PAGE_TOKENS,
                num_blocks=_CACHE_TOKENS // _PAGE_TOKENS,
                max_batch_tokens=512,
                max_requests_per_batch=streams,
            ),
        )

    def send(self, load: Load, prompts: Sequence[Prompt]) -> list[RequestTimes]:
        """Answer all prompts, ``load.streams`` at a time."""
        self._manager.start()
        try:
            return self._closed_loop(load, prompts)
        finally:
            self._manager.stop(block=True, timeout=30.0, keep_for_next_session=True)

    def _closed_loop(self, load: Load, prompts: Sequence[Prompt]) -> list[RequestTimes]:
        waiting = iter(prompts)
        sent_s: dict[str, float] = {}
        measured = []
        for _, prompt in zip(range(load.streams), waiting, strict=False):
            self._send_one(prompt, load, sent_s)
        while sent_s:
            output = self._manager.get_result(timeout=_STALLED_S)
            if output is None:
                raise RuntimeError("transformers' continuous batching has stopped")
            if not output.is_finished():
                continue
            if output.error is not None:
                raise RuntimeError(f"transformers failed on a request: {output.error}")
            measured.append(
                RequestTimes(
                    sent_s.pop(output.request_id),
                    tuple(output.timestamps),
                    len(output.generated_tokens),
                )
            )
            for prompt in waiting:
                self._send_one(prompt, load, sent_s)
                break
        return measured

    def _send_one(self, prompt: Prompt, load: Load, sent_s: dict[str, float]) -> None:
        now_s = time.perf_counter()
        request_id = self._manager.add_request(
            list(prompt), max_new_tokens=load.num_output_tokens, record_timestamps=True
        )
        sent_s[request_id] = now_s
