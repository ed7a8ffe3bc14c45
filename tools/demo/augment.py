"""Variants of a question: frames, synonyms, fillers, typos, letter case, lost words."""

import random
import re
from pathlib import Path
from typing import Final

import yaml

_PHRASINGS: Final = yaml.safe_load(
    Path(__file__).with_name("phrasings.yaml").read_text(encoding="utf-8")
)
_LIGHT_WORDS: Final = frozenset(_PHRASINGS["light_words"])
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def rephrase(question: str, rng: random.Random) -> str:
    """Return a variant of `question` with the same meaning, as another person may have typed it."""
    text = question
    if rng.random() < 0.5:
        text = _rewrite(text, rng)
    if rng.random() < 0.35:
        text = _swap_synonym(text, rng)
    if rng.random() < 0.3:
        text = _lose_words(text, rng)
    if rng.random() < 0.3:
        text = _add_filler(text, rng)
    if rng.random() < 0.12:
        text = _mistype(text, rng)
    return _restyle(text, rng)


def _rewrite(text: str, rng: random.Random) -> str:
    for rewrite in _PHRASINGS["rewrites"]:
        if found := re.match(rewrite["pattern"], text, flags=re.IGNORECASE):
            return str(rng.choice(rewrite["forms"]).format(**found.groupdict()))
    return text


def _swap_synonym(text: str, rng: random.Random) -> str:
    fitting = [
        (word, group)
        for group in _PHRASINGS["synonyms"]
        for word in group
        if re.search(rf"\b{re.escape(word)}\b", text)
    ]
    if not fitting:
        return text
    word, group = rng.choice(fitting)
    other = rng.choice([candidate for candidate in group if candidate != word])
    return re.sub(rf"\b{re.escape(word)}\b", other, text, count=1)


def _lose_words(text: str, rng: random.Random) -> str:
    words = text.split()
    if len(words) < 4:
        return text
    kept = [
        word
        for word in words
        if rng.random() >= (0.25 if word.lower().strip("?,.") in _LIGHT_WORDS else 0.05)
    ]
    return " ".join(kept) if len(kept) >= 2 else text


def _add_filler(text: str, rng: random.Random) -> str:
    if rng.random() < 0.7:
        start = rng.choice(_PHRASINGS["before"])
        body = text if text[:2].isupper() else text[:1].lower() + text[1:]
        return f"{start[:1].upper()}{start[1:]} {body}"
    end = rng.choice(_PHRASINGS["after"])
    return f"{text[:-1]} {end}?" if text.endswith("?") else f"{text} {end}"


def _mistype(text: str, rng: random.Random) -> str:
    spots = [at for at in range(1, len(text) - 1) if text[at].isalpha() and text[at + 1].isalpha()]
    if len(spots) < 6:
        return text
    for at in sorted(
        rng.sample(spots, k=1 if len(text) < 30 else rng.choice((1, 2))), reverse=True
    ):
        kind = rng.randrange(4)
        if kind == 0:
            text = text[:at] + text[at + 1 :]
        elif kind == 1:
            text = text[:at] + text[at + 1] + text[at] + text[at + 2 :]
        elif kind == 2:
            text = text[:at] + text[at] + text[at:]
        else:
            text = text[:at] + rng.choice(_LETTERS) + text[at + 1 :]
    return text


def _restyle(text: str, rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.3:
        text = text.lower()
    elif draw < 0.31:
        text = text.upper()
    elif draw < 0.65:
        text = text[:1].upper() + text[1:]
    draw = rng.random()
    if draw < 0.3:
        text = text.rstrip("?.! ")
    elif draw < 0.36:
        text = text.rstrip("?.! ") + rng.choice(("??", " ?", ".", "...", "!"))
    elif draw < 0.45 and not text.endswith("?"):
        text += "?"
    return text
