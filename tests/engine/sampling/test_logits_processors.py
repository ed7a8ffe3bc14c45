"""Logits processors: penalties, biases and forbidden tokens, applied to a row before the draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from millrace.engine.sampling.bad_words import BadWords
from millrace.engine.sampling.logits_processors import (
    LogitsProcessorBatch,
    RowLogitsProcessor,
)
from millrace.engine.sampling.sampler import NoTokenAllowedError, Sampler
from millrace.engine.types import NonFiniteLogitsError
from millrace.registry.tokenizers.token_bytes import token_bytes
from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import MillraceError, ParameterError
from millrace.schemas.sampling import Grammar, GrammarKind, SamplingParams
from tests.engine.sampling.sampling_reference import processed
from tests.engine.sampling.sampling_rows import VOCAB_SIZE, Row, random_logits, row, sample
from tests.support.engine.tokenizers_made import byte_level

TOKENS = st.integers(0, VOCAB_SIZE - 1)


def after(rows: list[Row], logits: torch.Tensor, bad: BadWords | None = None) -> torch.Tensor:
    """Return the logits as the rows edit them."""
    changed = logits.clone()
    batch = LogitsProcessorBatch(logits.shape[1])
    for index, sequence in enumerate(rows):
        RowLogitsProcessor(sequence, bad, logits.shape[1]).add_to(batch, index, sequence)
    batch.apply_(changed)
    return changed


@st.composite
def processed_rows(draw: st.DrawFn) -> tuple[Row, SamplingParams, list[int], list[int], list[int]]:
    prompt = draw(st.lists(TOKENS, min_size=1, max_size=40))
    output = draw(st.lists(TOKENS, max_size=40))
    stops = draw(st.lists(TOKENS, max_size=3))
    params: dict[str, Any] = {
        "repetition_penalty": draw(st.just(1.0) | st.floats(0.1, 5.0)),
        "presence_penalty": draw(st.just(0.0) | st.floats(-2, 2)),
        "frequency_penalty": draw(st.just(0.0) | st.floats(-2, 2)),
        "logit_bias": draw(st.dictionaries(TOKENS, st.floats(-100, 100), max_size=10)),
        "min_tokens": draw(st.integers(0, 60)),
    }
    sequence = row(prompt=prompt, output=output, eos=stops, **params)
    return sequence, SamplingParams(**params), prompt, output, stops


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(processed_rows(), min_size=1, max_size=5),
    bad=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=4),
    seed=st.integers(0, 1000),
)
def test_processed_logits_follow_the_definitions(
    rows: list[tuple[Row, SamplingParams, list[int], list[int], list[int]]],
    bad: list[tuple[int, ...]],
    seed: int,
) -> None:
    logits = random_logits(len(rows), seed)
    changed = after([made[0] for made in rows], logits, BadWords(bad))
    for index, (_, sampling, prompt, output, stops) in enumerate(rows):
        wanted = processed(logits[index].numpy(), sampling, prompt, output, stops, bad)
        np.testing.assert_allclose(changed[index].numpy(), wanted, rtol=1e-5, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(output=st.lists(TOKENS, max_size=150), cut=st.integers(0, 150))
def test_a_resumed_sequence_stands_where_an_undisturbed_one_does(
    output: list[int], cut: int
) -> None:
    params: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "min_tokens": 20,
    }
    logits = random_logits(1)
    resumed = row(prompt=(1, 2, 3), output=output, eos=(9,), **params)
    steady = row(prompt=(1, 2, 3), output=output[:cut], eos=(9,), **params)
    state = RowLogitsProcessor(steady, None, VOCAB_SIZE)
    for token in [*output[cut:], None]:
        changed = logits.clone()
        batch = LogitsProcessorBatch(VOCAB_SIZE)
        state.add_to(batch, 0, steady)
        batch.apply_(changed)
        if token is not None:
            steady.token_ids.append(token)
    assert torch.equal(changed, after([resumed], logits))


def test_processed_logits_are_those_of_transformers() -> None:
    prompt, output, eos = [5, 6, 6, 90], [17, 3, 17, 8], [2, 4]
    bad = [(7,), (8, 30), (17, 8, 31), (3, 8, 32), (90, 17, 33)]
    ids = torch.tensor([prompt + output])
    logits = random_logits(1)
    processors = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.7),
            SequenceBiasLogitsProcessor([[[12], 3.0], [[17], -4.0]]),
            NoBadWordsLogitsProcessor([list(tokens) for tokens in bad]),
            MinNewTokensLengthLogitsProcessor(len(prompt), 5, eos),
        ]
    )
    sequence = row(
        prompt=prompt,
        output=output,
        eos=eos,
        repetition_penalty=1.7,
        logit_bias={12: 3.0, 17: -4.0},
        min_tokens=5,
    )
    # The one difference: a bad word that began in the prompt may end.
    torch.testing.assert_close(
        after([sequence], logits, BadWords(bad)), processors(ids, logits.clone())
    )
    sequence.token_ids.append(50)
    assert after([sequence], logits)[0, 2] == logits[0, 2]


def tokenizer() -> Tokenizer:
    backend = byte_level()
    pieces = [backend.id_to_token(i) for i in range(backend.get_vocab_size())]
    return Tokenizer(backend, token_bytes({"type": "ByteLevel"}, pieces))


def test_bad_words_are_taken_with_and_without_a_space() -> None:
    encoder = tokenizer()
    sampler = Sampler(encoder.vocab_size, torch.device("cpu"), lambda: encoder)
    word = "zygote"
    for text in (word, " " + word):
        *prefix, last = encoder.encode(text, add_special_tokens=False)
        assert prefix
        logits = torch.zeros(1, encoder.vocab_size)
        logits[0, last] = 9.0
        for output, allowed in ((prefix, False), ([*prefix, 50], True)):
            sequence = row(output=output, temperature=0.0, bad_words=(word,))
            sampler.add(sequence)
            (token,) = sampler.sample([sequence], logits).outcomes
            assert (token == last) is allowed
            sequence.sampling_state = None
            assert sequence.sampling_state is None


def test_options_that_the_model_cannot_honour_are_refused_by_name() -> None:
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    for params, param in (
        ({"bad_words": ("x",)}, "bad_words"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
    ):
        with pytest.raises(ParameterError) as caught:
            sampler.add(row(**params))
        assert caught.value.param == param
    with_words = Sampler(10_000, torch.device("cpu"), tokenizer)
    with pytest.raises(ParameterError, match="valid Unicode") as caught:
        with_words.add(row(bad_words=("\ud800",)))
    assert caught.value.param == "bad_words"
    nothing = Sampler(2, torch.device("cpu"), tokenizer)
    with pytest.raises(ParameterError, match="no tokens in this model"):
        nothing.add(row(bad_words=("mill",)))


def packed(allowed: list[set[int] | None]) -> torch.Tensor:
    bits = np.ones((len(allowed), -(-VOCAB_SIZE // 32) * 32), dtype=np.uint8)
    for index, tokens in enumerate(allowed):
        if tokens is not None:
            bits[index] = 0
            bits[index, list(tokens)] = 1
    return torch.from_numpy(np.packbits(bits, axis=-1, bitorder="little").view(np.int32))


GRAMMAR = Grammar(kind=GrammarKind.REGEX, text="a")


def test_masks_allow_what_their_bits_say() -> None:
    logits = random_logits(4)
    masks = packed([{0, 31, 32, 149}, None, {77}, set()])
    rows = [row(seed=i, grammar=GRAMMAR, logprobs=0) for i in range(4)]
    rows[1] = row(seed=1, logprobs=0)
    rows[3] = row(seed=3, logprobs=0)
    drawn = sample(logits, rows, masks)
    assert drawn.token_ids[0] in {0, 31, 32, 149}
    assert drawn.token_ids[1:] == [
        sample(logits[1:2], rows[1:2]).token_ids[0],
        77,
        sample(logits[3:4], rows[3:4]).token_ids[0],
    ]
    # Its probability is the model's all the same.
    entry = drawn.logprobs[2]
    assert entry is not None
    assert entry.logprob == pytest.approx(float(logits[2].log_softmax(-1)[77]), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_any_token_left_ends_alone(temperature: float) -> None:
    logits = random_logits(5)
    logits[3, 20] = float("nan")
    rows = [row(seed=i, temperature=temperature, typical_p=0.9, logprobs=1) for i in range(5)]
    rows[1] = row(temperature=temperature, grammar=GRAMMAR, top_p=0.5, logprobs=1)
    rows[2] = row(eos=(5,), temperature=temperature, grammar=GRAMMAR, min_tokens=1)
    rows[3] = row(logit_bias={20: 1.0}, temperature=temperature)
    drawn = sample(logits, rows, packed([None, set(), {5}, None, None]))
    assert [type(error) for error in drawn.errors] == [
        type(None),
        NoTokenAllowedError,
        NoTokenAllowedError,
        NonFiniteLogitsError,
        type(None),
    ]
    assert [entry is None for entry in drawn.logprobs] == [False, True, True, True, False]
    for i in (0, 4):
        assert drawn.token_ids[i] == sample(logits[i : i + 1], [rows[i]]).token_ids[0]


def test_any_failure_in_a_row_ends_that_row_only(caplog: pytest.LogCaptureFixture) -> None:
    logits = random_logits(9)
    rows = [row(seed=i, temperature=i % 2, presence_penalty=1.0) for i in range(9)]
    sampler = Sampler(VOCAB_SIZE, logits.device)
    for sequence in rows:
        sampler.add(sequence)
    wanted = sampler.sample(rows, logits).outcomes
    rows[4].token_ids.append(10**9)
    rows[6].sampling_state = None
    outcomes = sampler.sample(rows, logits).outcomes
    failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, MillraceError)]
    assert failed == [4, 6]
    assert [outcomes[i] for i in range(9) if i not in failed] == [
        wanted[i] for i in range(9) if i not in failed
    ]
    assert len(caplog.records) == 2
