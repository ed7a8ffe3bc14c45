"""Evaluate the demo model on phrasings held out of training: `python -m tools.demo.evaluate`.

An answer is right if it is the expected text, ignoring letter case and white space. Exits with 1 if
fewer than 90 % are right, over all questions or over the out-of-domain ones. With `--natural` it
prints the answers to the newcomers' questions instead, and exits with 1 if a reader found fewer
than 34 of 40 sensible.
"""

import argparse
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from millrace.registry.demo import MODEL_DIR
from tools.demo.faq import NaturalQuestion, Pair, load_natural, load_pairs, same_answer

if TYPE_CHECKING:
    from tools.demo.answers import Answerer

REQUIRED_ACCURACY: Final[float] = 0.90
REQUIRED_SENSIBLE: Final[float] = 34 / 40


@dataclass(frozen=True, slots=True)
class Miss:
    """Held-out question with an unexpected answer."""

    id: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Report:
    """Numbers of held-out questions asked and answered right, and the misses."""

    num_in_domain: int
    num_in_domain_right: int
    num_out_of_domain: int
    num_out_of_domain_right: int
    misses: tuple[Miss, ...]

    @property
    def accuracy(self) -> float:
        """Share of right answers over all questions."""
        num_right = self.num_in_domain_right + self.num_out_of_domain_right
        return num_right / max(1, self.num_in_domain + self.num_out_of_domain)

    @property
    def in_domain_accuracy(self) -> float:
        """Share of right answers over the FAQ's questions."""
        return self.num_in_domain_right / max(1, self.num_in_domain)

    @property
    def out_of_domain_accuracy(self) -> float:
        """Share of out-of-domain questions that were declined."""
        return self.num_out_of_domain_right / max(1, self.num_out_of_domain)

    @property
    def is_good_enough(self) -> bool:
        """True if FAQ and out-of-domain questions both reach the required accuracy."""
        return min(self.in_domain_accuracy, self.out_of_domain_accuracy) >= REQUIRED_ACCURACY

    def summary(self) -> str:
        """Return the accuracy in one line for people."""
        return (
            f"held-out accuracy {self.accuracy:.1%}: "
            f"FAQ {self.num_in_domain_right}/{self.num_in_domain} ({self.in_domain_accuracy:.1%}), "
            f"out of domain {self.num_out_of_domain_right}/{self.num_out_of_domain} "
            f"({self.out_of_domain_accuracy:.1%})"
        )

    def as_json(self) -> str:
        """Return the figures and the misses as one JSON object."""
        return json.dumps(
            {
                "accuracy": self.accuracy,
                "in_domain": {"asked": self.num_in_domain, "right": self.num_in_domain_right},
                "out_of_domain": {
                    "asked": self.num_out_of_domain,
                    "right": self.num_out_of_domain_right,
                },
                "required": REQUIRED_ACCURACY,
                "misses": [
                    {"id": miss.id, "question": miss.question, "answer": miss.answer}
                    for miss in self.misses
                ],
            },
            indent=2,
        )


def measure(answer: "Answerer", pairs: list[Pair], max_questions: int | None = None) -> Report:
    """Ask the held-out phrasings, or a fixed sample of `max_questions` of them, and return the
    report.
    """
    asked = [(pair, question) for pair in pairs for question in pair.held_out]
    if max_questions is not None and max_questions < len(asked):
        asked = random.Random(0).sample(asked, max_questions)
    conversations = [[{"role": "user", "content": question}] for _, question in asked]
    answers = answer(conversations, [pair.answer for pair, _ in asked])
    results = [
        (pair, question, text, same_answer(text, pair.answer))
        for (pair, question), text in zip(asked, answers, strict=True)
    ]
    declined = [right for pair, _, _, right in results if pair.is_out_of_domain]
    known = [right for pair, _, _, right in results if not pair.is_out_of_domain]
    return Report(
        num_in_domain=len(known),
        num_in_domain_right=sum(known),
        num_out_of_domain=len(declined),
        num_out_of_domain_right=sum(declined),
        misses=tuple(
            Miss(pair.id, question, text) for pair, question, text, right in results if not right
        ),
    )


def ask_natural(
    answer: "Answerer", questions: list[NaturalQuestion]
) -> list[tuple[NaturalQuestion, str]]:
    """Return each of the newcomers' questions with the model's current answer."""
    conversations = [[{"role": "user", "content": natural.question}] for natural in questions]
    answers = answer(conversations, [natural.answer for natural in questions])
    return list(zip(questions, answers, strict=True))


def num_sensible(asked: list[tuple[NaturalQuestion, str]]) -> int:
    """Return how many answers a reader found sensible; a changed answer does not count."""
    return sum(natural.is_sensible and same_answer(text, natural.answer) for natural, text in asked)


def _verdict(natural: NaturalQuestion, text: str) -> str:
    if not same_answer(text, natural.answer):
        return "not judged yet"
    return "sensible" if natural.is_sensible else "wrong"


def main() -> int:
    """Run the command line and return the exit code."""
    from tools.demo.answers import load_answerer

    parser = argparse.ArgumentParser(prog="python -m tools.demo.evaluate", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="folder of the model")
    parser.add_argument("--json", action="store_true", help="print figures and misses as JSON")
    parser.add_argument("--natural", action="store_true", help="ask the newcomers' questions")
    options = parser.parse_args()
    if options.natural:
        asked = ask_natural(load_answerer(options.model), load_natural())
        for natural, text in asked:
            print(f"{natural.question}\n    [{_verdict(natural, text)}] {text}")
        print(f"sensible answers: {num_sensible(asked)} of {len(asked)}")
        return 0 if num_sensible(asked) >= REQUIRED_SENSIBLE * len(asked) else 1
    report = measure(load_answerer(options.model), load_pairs())
    print(report.as_json() if options.json else report.summary())
    return 0 if report.is_good_enough else 1


if __name__ == "__main__":
    sys.exit(main())
