"""Other ways to type a question: frames, synonyms, fillers, typos, letter case, lost words."""

import random
import re
from typing import Final

_REWRITES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (
        r"^(?:what is|what's|define|explain|describe) (?P<x>[^?]{2,40})\??$",
        (
            "what is {x}?",
            "what's {x}?",
            "whats {x}",
            "define {x}",
            "explain {x}",
            "explain {x} to me",
            "can you explain {x}?",
            "could you describe {x}?",
            "tell me about {x}",
            "tell me what {x} is",
            "what does {x} mean?",
            "what is meant by {x}?",
            "{x}?",
            "{x}",
            "{x} meaning",
            "do you know what {x} is?",
            "what exactly is {x}?",
            "I do not understand {x}",
        ),
    ),
    (
        r"^what does (?P<x>[^?]{2,40}) (?:mean|stand for)\??$",
        (
            "what does {x} mean?",
            "what is {x}?",
            "what's {x}?",
            "what is the meaning of {x}?",
            "what's meant by {x}?",
            "explain {x}",
        ),
    ),
    (
        r"^how (?:do|can|could|should) (?:I|we|you) (?P<x>[^?]+)\??$",
        (
            "how do I {x}?",
            "how can I {x}?",
            "how could I {x}?",
            "how should I {x}?",
            "how to {x}",
            "how to {x}?",
            "how do you {x}?",
            "how can one {x}?",
            "what is the way to {x}?",
            "what's the best way to {x}?",
            "I want to {x}",
            "I need to {x}, how?",
            "is there a way to {x}?",
            "show me how to {x}",
        ),
    ),
    (
        r"^what (?:happens|does Millrace do) (?:when|if) (?P<x>[^?]+)\??$",
        (
            "what happens when {x}?",
            "what happens if {x}?",
            "what if {x}?",
            "what does Millrace do when {x}?",
            "what does Millrace do if {x}?",
            "what will happen when {x}?",
            "what to expect if {x}?",
            "how does Millrace react when {x}?",
            "{x}, what then?",
        ),
    ),
    (
        r"^what if (?P<x>[^?]+)\??$",
        ("what if {x}?", "what happens if {x}?", "what happens when {x}?", "and if {x}?"),
    ),
    (
        r"^why (?P<aux>is|are|do|does|did) (?P<x>[^?]+)\??$",
        (
            "why {aux} {x}?",
            "how come {x}?",
            "what is the reason that {x}?",
            "for what reason {aux} {x}?",
        ),
    ),
    (
        r"^where (?P<aux>is|are|do|does|can) (?P<x>[^?]+)\??$",
        ("where {aux} {x}?", "in which place {aux} {x}?", "where exactly {aux} {x}?"),
    ),
    (
        r"^how does (?P<x>[^?]+) work\??$",
        (
            "how does {x} work?",
            "explain how {x} works",
            "how {x} works",
            "in what way does {x} work?",
            "can you explain how {x} works?",
        ),
    ),
    (
        r"^(?:what is the difference between|compare) (?P<x>[^?]+) (?:and|with) (?P<y>[^?]+)\??$",
        (
            "what is the difference between {x} and {y}?",
            "what's the difference between {y} and {x}?",
            "how does {x} differ from {y}?",
            "how is {y} different from {x}?",
            "{x} or {y}?",
            "{x} vs {y}",
            "{y} versus {x}",
            "compare {y} and {x}",
        ),
    ),
)

_SYNONYMS: Final[tuple[tuple[str, ...], ...]] = (
    ("dies", "crashes", "fails", "goes down", "is killed", "is gone"),
    ("die", "crash", "fail", "go down"),
    ("down", "away", "unavailable", "offline", "not reachable"),
    ("start", "launch", "run", "bring up"),
    ("stop", "shut down", "end", "halt"),
    ("reduce", "lower", "decrease", "cut", "improve"),
    ("large", "big", "huge"),
    ("fast", "quick", "speedy"),
    ("slow", "sluggish"),
    ("make", "create", "build"),
    ("use", "employ", "work with"),
    ("choose", "pick", "select"),
    ("chosen", "picked", "selected"),
    ("find", "see", "get", "look up"),
    ("need", "require"),
    ("needed", "required", "necessary"),
    ("store", "keep", "save"),
    ("stored", "kept", "saved"),
    ("which", "what"),
    ("job", "request"),
    ("request", "query", "call"),
    ("answer", "response", "reply", "output"),
    ("answers", "responses", "outputs"),
    ("tokens per second", "tokens/s", "tok/s"),
    ("quantisation", "quantization"),
    ("utilisation", "utilization"),
    ("GPU", "graphics card", "card"),
    ("memory", "RAM"),
    ("several", "many", "multiple", "more than one"),
    ("versus", "vs", "or", "compared with"),
    ("handle", "deal with", "treat", "manage"),
    ("lost", "missing", "gone"),
    ("error", "failure", "problem"),
    ("purpose", "point", "goal", "role"),
    ("parts", "components", "pieces"),
    ("benefit", "advantage", "use"),
    ("list", "show", "give me", "name"),
    ("work", "function"),
    ("client", "user"),
    ("text", "string"),
    ("Millrace", "the system", "this system"),
    ("high", "large"),
    ("folder", "directory"),
)

_BEFORE: Final = (
    "please",
    "hey,",
    "hi,",
    "hello,",
    "hi there,",
    "so",
    "ok,",
    "okay, and",
    "and",
    "but",
    "well,",
    "um,",
    "quick question:",
    "question:",
    "one more question:",
    "tell me,",
    "tell me:",
    "say,",
    "I wonder,",
    "just curious,",
    "could you tell me",
    "can you tell me",
    "could you please tell me",
    "do you know",
    "I would like to know",
    "I'd like to know",
    "please tell me",
    "please explain",
    "can you explain",
    "help me understand",
    "in simple words,",
    "in short,",
    "for a beginner:",
    "thanks! now",
    "in Millrace,",
)
_AFTER: Final = (
    "please",
    "thanks",
    "thank you",
    "in short",
    "briefly",
    "in simple words",
    "exactly",
    "then",
    "actually",
    "here",
    "in practice",
    "in Millrace",
    "for me",
    "in one sentence",
    "again",
)
_LIGHT_WORDS: Final = frozenset(
    (
        *("a", "an", "the", "of", "to", "in", "on", "for", "with", "and", "that", "this", "it"),
        *("is", "are", "be", "do", "does", "can", "what", "how", "i", "me", "my", "you"),
    )
)
_LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"


def rephrase(question: str, rng: random.Random) -> str:
    """A variant of `question` that asks for the same, as another person may have typed it."""
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
    for pattern, forms in _REWRITES:
        if found := re.match(pattern, text, flags=re.IGNORECASE):
            return rng.choice(forms).format(**found.groupdict())
    return text


def _swap_synonym(text: str, rng: random.Random) -> str:
    fitting = [
        (word, group)
        for group in _SYNONYMS
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
        start = rng.choice(_BEFORE)
        body = text if text[:2].isupper() else text[:1].lower() + text[1:]
        return f"{start[:1].upper()}{start[1:]} {body}"
    end = rng.choice(_AFTER)
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
