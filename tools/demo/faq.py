"""Questions and answers that the demo model learns, read from `faq/*.yaml`."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

FAQ_DIR: Final[Path] = Path(__file__).resolve().parent / "faq"
NATURAL_FILE: Final[Path] = Path(__file__).resolve().parent / "natural_questions.yaml"
OUT_OF_DOMAIN_ID: Final[str] = "out_of_domain"

_FIELDS: Final = {"id", "questions", "held_out", "answer", "frames", "terms"}


@dataclass(frozen=True, slots=True)
class Pair:
    """Answer and the phrasings that ask for it.

    `held_out` phrasings are for measuring only: no training sample equals one of them after
    `normalise`. `frames` contain `{}` and are filled with `terms`, for the out-of-domain pair.
    """

    id: str
    theme: str
    questions: tuple[str, ...]
    held_out: tuple[str, ...]
    answer: str
    frames: tuple[str, ...] = ()
    terms: tuple[str, ...] = ()

    @property
    def is_out_of_domain(self) -> bool:
        """True for the pair that declines."""
        return self.id == OUT_OF_DOMAIN_ID


def normalise(text: str) -> str:
    """Return the letters and digits of `text` in lower case, with single spaces between words."""
    return re.sub(r"[^a-z0-9]+", " ", text.lower()).strip()


def same_answer(text: str, expected: str) -> bool:
    """Return whether two answers are equal, ignoring letter case and white space."""
    return " ".join(text.lower().split()) == " ".join(expected.lower().split())


def load_pairs(folder: Path = FAQ_DIR) -> list[Pair]:
    """Return all pairs of a folder, in the order of the file names. Raises ValueError naming an
    invalid entry.
    """
    pairs = [
        _pair(entry, path.stem)
        for path in sorted(folder.glob("*.yaml"))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]
    if not pairs:
        raise ValueError(f"no FAQ files in {folder}")
    seen: set[str] = set()
    for pair in pairs:
        if pair.id in seen:
            raise ValueError(f"the FAQ has two pairs with the id {pair.id!r}")
        seen.add(pair.id)
    return pairs


def held_out_phrasings(pairs: list[Pair]) -> frozenset[str]:
    """Return every held-out phrasing, normalised; training must never see them."""
    return frozenset(normalise(question) for pair in pairs for question in pair.held_out)


@dataclass(frozen=True, slots=True)
class NaturalQuestion:
    """Question typed by a newcomer, the answer of the shipped weights, and a reader's verdict on
    it.
    """

    question: str
    answer: str
    is_sensible: bool


def load_natural(path: Path = NATURAL_FILE) -> list[NaturalQuestion]:
    """Return the newcomers' questions. Raises KeyError for an entry that lacks a field."""
    return [
        NaturalQuestion(entry["question"], entry["answer"], entry["sensible"])
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]


def natural_phrasings() -> frozenset[str]:
    """Return the newcomers' questions, normalised; training must never see them either."""
    return frozenset(normalise(natural.question) for natural in load_natural())


def _pair(entry: dict[str, Any], theme: str) -> Pair:
    if unknown := set(entry) - _FIELDS:
        raise ValueError(f"{theme}: unknown fields {sorted(unknown)} in {entry.get('id')!r}")
    for field in ("id", "questions", "held_out", "answer"):
        if not entry.get(field):
            raise ValueError(f"{theme}: {entry.get('id')!r} has no {field}")
    return Pair(
        id=entry["id"],
        theme=theme,
        questions=tuple(entry["questions"]),
        held_out=tuple(entry["held_out"]),
        answer=entry["answer"],
        frames=tuple(entry.get("frames", ())),
        terms=tuple(entry.get("terms", ())),
    )
