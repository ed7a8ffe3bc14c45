"""Resumed requests: after any number of tokens, the rest is the same as without the
interruption."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from millrace.engine.step.engine import Engine
from millrace.engine.types import EngineOutput, EngineRequest
from millrace.schemas.config import EngineConfig
from millrace.schemas.frames import TokenLogprob
from tests.engine.checkpoints import save_llama
from tests.engine.support import drain, prompt, request

_MAX_TOKENS = 24
_OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0},
    "cut": {"temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.8},
    "repetition": {"repetition_penalty": 1.4, "temperature": 0.9},
    "presence": {"presence_penalty": 1.5, "frequency_penalty": 0.5, "temperature": 0.7},
    "bias": {"logit_bias": {5: 6.0, 17: -100.0}, "temperature": 1.0},
    "min_tokens": {"min_tokens": 18, "eos_token_ids": tuple(range(0, 199, 2))},
    "logprobs": {"logprobs": 2, "temperature": 1.0},
    "bad_words": {"bad_words": tuple(f"w{n} w{n + 1}" for n in range(0, 190, 3))},
    "allowed": {"allowed_token_ids": tuple(range(20, 60)), "temperature": 1.2},
    "stop_token": {"stop_token_ids": tuple(range(150, 156)), "temperature": 1.5},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a small Llama with a word for each token."""
    path = tmp_path_factory.mktemp("words")
    save_llama(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(199)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.Metaspace()
    words.save(str(path / "tokenizer.json"))
    return path


def _requests() -> list[EngineRequest]:
    return [
        request(name, prompt(i, 10 + i), max_tokens=_MAX_TOKENS, seed=i, **options)
        for i, (name, options) in enumerate(_OPTIONS.items())
    ]


class _Made:
    """Outputs of an engine for each request."""

    def __init__(self, outputs: list[EngineOutput]) -> None:
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.logprobs: defaultdict[str, list[TokenLogprob]] = defaultdict(list)
        self.ends: dict[str, object] = {}
        for output in outputs:
            self.tokens[output.request_id] += output.token_ids
            self.logprobs[output.request_id] += output.logprobs
            if output.finished:
                self.ends[output.request_id] = output.finish_reason


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_request_goes_on_behind_any_of_its_tokens(checkpoint: Path, kernels: str) -> None:
    config = EngineConfig(num_blocks=256, device="cpu", kernels=kernels, max_num_sequences=64)
    engine = Engine.load(checkpoint, config)
    for item in _requests():
        engine.add(item)
    whole = _Made(drain(engine))
    assert len(whole.tokens["logprobs"]) == len(whole.logprobs["logprobs"]) == _MAX_TOKENS
    cuts: dict[str, tuple[str, int]] = {}
    for item in _requests():
        tokens = whole.tokens[item.request_id]
        for cut in range(1, len(tokens)):
            name = f"{item.request_id}/{cut}"
            cuts[name] = (item.request_id, cut)
            engine.add(
                msgspec.structs.replace(item, request_id=name, output_token_ids=tuple(tokens[:cut]))
            )
    rest = _Made(drain(engine))
    for name, (of, cut) in cuts.items():
        assert rest.tokens[name] == whole.tokens[of][cut:], name
        assert rest.ends[name] == whole.ends[of], name
        for one, other in zip(rest.logprobs[name], whole.logprobs[of][cut:], strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in one.top] == [token for token, _ in other.top]
