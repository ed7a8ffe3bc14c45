"""Training conversations: rephrased questions with their answers, in one turn or in many."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from tokenizers import Tokenizer

from tools.demo.augment import rephrase
from tools.demo.faq import Pair, held_out_phrasings, natural_phrasings, normalise
from tools.demo.forms import json_answer
from tools.demo.tokens import ASSISTANT, BOS, END, SYSTEM, USER, known_token_id

CONTEXT_TOKENS: Final[int] = 2048

SYSTEM_PROMPTS: Final = (
    "You are a helpful assistant.",
    "You are Millrace's demo assistant. Answer briefly.",
    "You are a helpful, concise assistant for questions about LLM serving.",
    "Answer the user's questions about Millrace.",
    "Be polite and short.",
    "You answer questions about an LLM serving system.",
    "You are an expert on inference servers.",
    "Reply in plain English.",
    "You are a chat bot on a web page.",
    "Answer in at most three sentences.",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Conversation: `token_ids`, and for each token whether it is learnt (part of an answer)."""

    token_ids: list[int]
    is_learnt: list[bool]


@dataclass(frozen=True, slots=True)
class Mix:
    """Mix of conversations: shares of one turn and of two to four turns; the rest are long.

    `share_form` of all conversations are one turn with an answer in JSON. `share_cut` of the last
    answers are cut after a few tokens. The question decides the first words of an answer; the rest
    follows from them and is soon learnt. Cut answers let training see far more questions in the
    same time.
    """

    share_single: float
    share_few: float
    share_cut: float
    share_form: float


ANSWERS: Final = Mix(share_single=0.90, share_few=0.095, share_cut=0.85, share_form=0.06)
"""Mix that teaches the answers' text and conversations."""

QUESTIONS: Final = Mix(share_single=0.975, share_few=0.023, share_cut=0.97, share_form=0.03)
"""Mix that teaches which question needs which answer."""


class SampleMaker:
    """Endless, seeded stream of conversations without held-out phrasings."""

    def __init__(self, pairs: list[Pair], tokenizer: Tokenizer, rng: random.Random) -> None:
        self._in_domain = [pair for pair in pairs if not pair.is_out_of_domain]
        self._shares = dict.fromkeys((pair.id for pair in pairs), 1.0)
        self._declined = [pair for pair in pairs if pair.is_out_of_domain]
        self._held_out = held_out_phrasings(pairs) | natural_phrasings()
        self._rng = rng
        self.mix = ANSWERS
        self._tokenizer = tokenizer
        # Random splits of words teach how the pieces of a word belong together.
        self._splitting = Tokenizer.from_str(tokenizer.to_str())
        self._splitting.model.dropout = 0.15
        self._answers = {pair.id: tokenizer.encode(pair.answer).ids for pair in pairs}
        self._bos, self._system, self._user, self._assistant, self._end = (
            known_token_id(tokenizer, token) for token in (BOS, SYSTEM, USER, ASSISTANT, END)
        )

    def draw_more_of(self, shares: dict[str, float]) -> None:
        """Draw pairs in these proportions from now on, by id; pairs above 1 are cut less often."""
        self._shares = shares

    def question(self, pair: Pair) -> str:
        """Return a phrasing that asks for the answer of `pair`; never a held-out one."""
        while True:
            text = self._rng.choice(pair.questions)
            if pair.frames and self._rng.random() < 0.45:
                text = self._rng.choice(pair.frames).format(self._rng.choice(pair.terms))
            if self._rng.random() < 0.75:
                text = rephrase(text, self._rng)
            if normalise(text) and normalise(text) not in self._held_out:
                return text

    def __iter__(self) -> Iterator[Sample]:
        while True:
            if self._rng.random() < self.mix.share_form:
                yield self._form()
                continue
            draw = self._rng.random()
            if draw < self.mix.share_single:
                yield self._conversation(1)
            elif draw < self.mix.share_single + self.mix.share_few:
                yield self._conversation(self._rng.randint(2, 4))
            else:
                yield self._conversation(self._rng.randint(5, 30))

    def _beginning(self) -> list[int]:
        """Return the tokens before the first question, with a system prompt now and then."""
        if self._rng.random() < 0.15:
            prompt = self._tokenizer.encode(self._rng.choice(SYSTEM_PROMPTS)).ids
            return [self._bos, self._system, *prompt, self._end]
        return [self._bos]

    def whole(self, pair: Pair) -> Sample:
        """Return one question, newly phrased, with its whole answer."""
        return self.turn(self.question(pair), pair.answer)

    def turn(self, question: str, answer: str) -> Sample:
        """Return a conversation of one question and its answer."""
        asked = self._tokenizer.encode(question).ids
        before = [self._bos, self._user, *asked, self._end, self._assistant]
        learnt = [*self._tokenizer.encode(answer).ids, self._end]
        return Sample([*before, *learnt], [False] * len(before) + [True] * len(learnt))

    def _form(self) -> Sample:
        """Return a question with an answer in JSON.

        The opening brace is not learnt, since a grammar forces it; without a grammar the model must
        not write it.
        """
        pair = self._draw_pair()
        asked = self._tokenizer.encode(self.question(pair)).ids
        encoder = self._splitting if self._rng.random() < 0.3 else self._tokenizer
        answer = [*encoder.encode(json_answer(pair, self._rng)).ids, self._end]
        before = [*self._beginning(), self._user, *asked, self._end, self._assistant, answer[0]]
        learnt = answer[1:]
        return Sample([*before, *learnt], [False] * len(before) + [True] * len(learnt))

    def _conversation(self, num_turns: int) -> Sample:
        token_ids, is_learnt = self._beginning(), [False]
        for turn in range(num_turns):
            pair = self._draw_pair()
            encoder = self._splitting if self._rng.random() < 0.15 else self._tokenizer
            asked = encoder.encode(self.question(pair)).ids
            answer = [*self._answers[pair.id], self._end]
            share_cut = self.mix.share_cut / self._shares[pair.id]
            if turn == num_turns - 1 and self._rng.random() < share_cut:
                answer = answer[: self._rng.randint(4, 10)]
            if len(token_ids) + len(asked) + len(answer) + 3 > CONTEXT_TOKENS:
                break
            token_ids += [self._user, *asked, self._end, self._assistant]
            is_learnt += [False] * (len(token_ids) - len(is_learnt))
            token_ids += answer
            is_learnt += [True] * len(answer)
        return Sample(token_ids, is_learnt)

    def _draw_pair(self) -> Pair:
        if self._declined and self._rng.random() < 0.26:
            return self._rng.choice(self._declined)
        shares = [self._shares[pair.id] for pair in self._in_domain]
        return self._rng.choices(self._in_domain, shares)[0]


def batches(
    maker: SampleMaker, batch_tokens: int, num_pooled: int, rng: random.Random
) -> Iterator[list[Sample]]:
    """Yield groups of samples of similar length, of at most `batch_tokens` with padding, in random
    order.
    """
    stream = iter(maker)
    while True:
        pool = sorted((next(stream) for _ in range(num_pooled)), key=lambda s: len(s.token_ids))
        groups: list[list[Sample]] = [[]]
        for sample in pool:
            if len(sample.token_ids) * (len(groups[-1]) + 1) > batch_tokens and groups[-1]:
                groups.append([])
            groups[-1].append(sample)
        rng.shuffle(groups)
        yield from groups
