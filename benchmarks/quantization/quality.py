"""What quantization costs in quality, by the demo model's exact answers to held-out questions.

    python -m benchmarks.quantization.quality KIND [--model PATH]

Prints one JSON object. The engine answers, with weights that are rounded while they are loaded.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benchmarks.quantization.kinds import KINDS, settings
from benchmarks.support.command import command_parser
from millrace.engine.threads.choice import configure_threads
from millrace.registry.demo import MODEL_DIR
from millrace.schemas.config import EngineConfig

if TYPE_CHECKING:
    from tools.demo.answers import Answerer, Messages

_MAX_NEW_TOKENS = 160


class QualityFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Of ``num_questions``, so many were answered exactly as the FAQ has it."""

    num_questions: int
    num_right: int

    @property
    def points(self) -> float:
        """Per cent."""
        return 100.0 * self.num_right / self.num_questions


def measure_quality(kind: str, path: Path) -> QualityFigures:
    """Asks every held-out phrasing."""
    from tools.demo.evaluate import measure
    from tools.demo.faq import load_pairs

    report = measure(_engine_answerer(kind, path), load_pairs())
    return QualityFigures(
        num_questions=report.num_in_domain + report.num_out_of_domain,
        num_right=report.num_in_domain_right + report.num_out_of_domain_right,
    )


def _engine_answerer(kind: str, path: Path) -> Answerer:
    from millrace.engine.step.engine import Engine
    from millrace.engine.types import EngineRequest
    from millrace.registry.tokenizers.tokenizer import Tokenizer
    from millrace.schemas.jobs import ChatMessage
    from millrace.schemas.sampling import SamplingParams

    engine = Engine.load(path, settings(kind))
    tokenizer = Tokenizer.load(path)
    greedy = SamplingParams(max_tokens=_MAX_NEW_TOKENS, temperature=0.0)

    def answer(conversations: list[Messages], _guesses: list[str] | None = None, /) -> list[str]:
        tokens: dict[str, list[int]] = {}
        for index, messages in enumerate(conversations):
            prompt = tokenizer.encode_chat(
                [ChatMessage(one["role"], one["content"]) for one in messages]
            )
            tokens[str(index)] = []
            engine.add(
                EngineRequest(
                    request_id=str(index),
                    prompt_token_ids=tuple(prompt),
                    sampling=greedy,
                    eos_token_ids=tokenizer.eos_token_ids,
                )
            )
        while engine.has_work:
            for output in engine.step():
                assert output.error is None, output.error
                tokens[output.request_id] += output.token_ids
        return [tokenizer.decode(ids) for ids in tokens.values()]

    return answer


def main() -> None:
    parser = command_parser("quantization.quality", __doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of the demo model")
    arguments = parser.parse_args()
    configure_threads(EngineConfig(), shared=False)
    measured = measure_quality(arguments.kind, arguments.model)
    print(msgspec.json.encode(measured).decode())


if __name__ == "__main__":
    main()
