"""Loads for the engine with and without proposed tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from enum import StrEnum
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from benchmarks.checkpoints import FIRST_TEXT_TOKEN, LLAMA_100M
from benchmarks.speculation.copier import text_from
from millrace.engine.types import EngineRequest
from millrace.registry.demo import MODEL_DIR
from millrace.schemas.sampling import Grammar, GrammarKind, SamplingParams
from tools.demo.faq import load_pairs
from tools.demo.samples import SampleMaker
from tools.demo.tokens import END, known_token_id

# Per cent of tokens that differ in an edited text, and in a prediction.
_EDITED, _WRONG = 4, 10
_MAX_TOKENS = 256


class Model(StrEnum):
    """Model of a load: the 100M copier, a 100M model of random weights, or the demo's."""

    COPIER = "copier"
    PLAIN = "plain"
    DEMO = "demo"


class Proposer(StrEnum):
    """Proposer of tokens.

    Draft and head agree in 80 of 100 tokens; ``OWN`` is the draft that comes with the model.
    """

    NGRAM = "ngram"
    DRAFT = "draft"
    EAGLE3 = "eagle3"
    OWN = "own"


class Load(NamedTuple):
    """Load of a run.

    ``requests`` are all sent at once. Loads with short answers have several times as many runs.
    ``goal`` is the required ratio of tokens a second with to without proposals.
    """

    name: str
    model: Model
    goal: float
    requests: Callable[[int], list[EngineRequest]]
    proposer: Proposer = Proposer.NGRAM
    times: int = 1


def _request(name: str, prompt: list[int], max_tokens: int, **more: Any) -> EngineRequest:
    prediction = more.pop("prediction", ())
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens} | more
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**sampling),
        prediction_token_ids=tuple(prediction),
    )


def _random_tokens(generator: random.Random, count: int) -> list[int]:
    return [generator.randrange(FIRST_TEXT_TOKEN, LLAMA_100M.vocab_size) for _ in range(count)]


def _with_others(generator: random.Random, text: list[int], percent: int) -> list[int]:
    return [
        token if generator.randrange(100) >= percent else _random_tokens(generator, 1)[0]
        for token in text
    ]


def _edited_text(run: int) -> list[EngineRequest]:
    """Return a request whose prompt has the expected text, except for some tokens."""
    generator = random.Random(run)
    (first,) = _random_tokens(generator, 1)
    text = _with_others(generator, text_from(first, _MAX_TOKENS), _EDITED)
    prompt = [*_random_tokens(generator, 40), *text, *_random_tokens(generator, 20), first]
    return [_request(f"edit{run}", prompt, _MAX_TOKENS)]


def _predicted(run: int) -> list[EngineRequest]:
    """Return a request with a mostly right prediction; the prompt has nothing of the text."""
    generator = random.Random(1_000 + run)
    prompt = _random_tokens(generator, 128)
    text = _with_others(generator, text_from(prompt[-1], _MAX_TOKENS), _WRONG)
    return [_request(f"predict{run}", prompt, _MAX_TOKENS, prediction=text)]


def _draftable(run: int) -> list[EngineRequest]:
    """Return a request whose text only a draft can predict."""
    generator = random.Random(4_000 + run)
    return [_request(f"draft{run}", _random_tokens(generator, 128), _MAX_TOKENS)]


_RECORD = {
    "type": "object",
    "properties": {
        "measurement_identifier": {"type": "integer", "minimum": 0, "maximum": 999},
        "measurement_location": {"enum": ["laboratory", "greenhouse", "workshop"]},
        "temperature_celsius": {"type": "integer", "minimum": 0, "maximum": 99},
        "instrument_calibrated": {"type": "boolean"},
    },
    "required": [
        *("measurement_identifier", "measurement_location"),
        *("temperature_celsius", "instrument_calibrated"),
    ],
    "additionalProperties": False,
}
_RECORDS = {"type": "array", "items": _RECORD, "minItems": 1, "maxItems": 1}


def _schema(run: int) -> list[EngineRequest]:
    """Return a request for a record of four long names, none of which is in the prompt."""
    generator = random.Random(2_000 + run)
    grammar = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(_RECORDS))
    prompt = _random_tokens(generator, 64)
    return [_request(f"schema{run}", prompt, 200, ignore_eos=False, grammar=grammar)]


def _unguessable(run: int) -> list[EngineRequest]:
    """Return requests for random tokens, drawn by a model without knowledge."""
    generator = random.Random(3_000 + run)
    return [
        _request(
            f"random{run}/{i}",
            _random_tokens(generator, 64),
            96,
            temperature=1.0,
            seed=run * 99 + i,
        )
        for i in range(32)
    ]


def _asked_of_the_demo(run: int) -> list[EngineRequest]:
    """Return a question held out of the demo's training."""
    pairs = load_pairs()
    tokenizer = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))
    generator = random.Random(5_000 + run)
    question = generator.choice([text for pair in pairs for text in pair.held_out])
    turn = SampleMaker(pairs, tokenizer, generator).turn(question, "")
    return [
        EngineRequest(
            request_id=f"demo{run}",
            prompt_token_ids=tuple(turn.token_ids[: turn.is_learnt.index(True)]),
            sampling=SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS),
            eos_token_ids=(known_token_id(tokenizer, END),),
        )
    ]


LOADS = (
    Load("a text with edits, 1 stream", Model.COPIER, 2.0, _edited_text),
    Load("a prediction that is 90 % right, 1 stream", Model.COPIER, 2.5, _predicted),
    Load("JSON Schema, 1 stream", Model.COPIER, 1.3, _schema),
    Load("a draft that agrees in 80 %, 1 stream", Model.COPIER, 1.6, _draftable, Proposer.DRAFT),
    Load("a head that agrees in 80 %, 1 stream", Model.COPIER, 1.6, _draftable, Proposer.EAGLE3),
    Load("text that cannot be guessed, 32 streams", Model.PLAIN, 0.98, _unguessable),
    Load("questions to the demo, 1 stream", Model.DEMO, 1.0, _asked_of_the_demo, Proposer.OWN, 10),
)
