"""The demo model: its data is well formed, its files are complete, and it answers its FAQ."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from millrace.registry.demo import MODEL_DIR
from millrace.schemas.engines import DRAFT_FOLDER
from tools.demo.answers import Answerer, load_answerer
from tools.demo.evaluate import (
    REQUIRED_ACCURACY,
    REQUIRED_SENSIBLE,
    ask_natural,
    measure,
    num_sensible,
)
from tools.demo.faq import (
    Pair,
    held_out_phrasings,
    load_natural,
    load_pairs,
    natural_phrasings,
    normalise,
    same_answer,
)
from tools.demo.samples import ANSWERS, CONTEXT_TOKENS, SampleMaker
from tools.demo.tokens import ASSISTANT, END, SPECIAL_TOKENS, USER, known_token_id
from tools.demo.train_draft import agreement

MODEL_FILES = (
    "README.md",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "training_runs.json",
)
DRAFT_FILES = ("README.md", "config.json", "model.safetensors")


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return load_pairs()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def chat_tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def answerer() -> Answerer:
    return load_answerer(MODEL_DIR)


class TestData:
    def test_there_are_enough_pairs_and_phrasings(self, pairs: list[Pair]) -> None:
        known = [pair for pair in pairs if not pair.is_out_of_domain]
        assert len(known) >= 300
        for pair in pairs:
            assert len({normalise(question) for question in pair.questions}) >= 4, pair.id
            assert pair.held_out, pair.id
            assert 4 <= len(pair.answer.split()) <= 90, pair.id

    def test_answers_differ(self, pairs: list[Pair]) -> None:
        assert len({normalise(pair.answer) for pair in pairs}) == len(pairs)

    def test_no_phrasing_belongs_to_two_pairs(self, pairs: list[Pair]) -> None:
        owner: dict[str, str] = {}
        for pair in pairs:
            for question in (*pair.questions, *pair.held_out):
                assert owner.setdefault(normalise(question), pair.id) == pair.id, question

    def test_no_held_out_phrasing_is_a_training_one(self, pairs: list[Pair]) -> None:
        trained = {normalise(question) for pair in pairs for question in pair.questions}
        assert not held_out_phrasings(pairs) & trained

    def test_no_rephrased_question_is_held_out(
        self, pairs: list[Pair], tokenizer: Tokenizer
    ) -> None:
        maker = SampleMaker(pairs, tokenizer, random.Random(7))
        held_out = held_out_phrasings(pairs) | natural_phrasings()
        drawn = [normalise(maker.question(pair)) for pair in pairs for _ in range(20)]
        assert all(drawn)
        assert not held_out & set(drawn)

    def test_a_bad_entry_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "bad.yaml").write_text("- id: a\n  questions: [b]\n  held_out: [c]\n")
        with pytest.raises(ValueError, match="'a' has no answer"):
            load_pairs(tmp_path)


class TestSamples:
    def test_conversations_fit_the_context_and_learn_answers_only(
        self, pairs: list[Pair], tokenizer: Tokenizer
    ) -> None:
        maker = SampleMaker(pairs, tokenizer, random.Random(1))
        maker.mix = replace(ANSWERS, share_form=0.0)
        stream = iter(maker)
        assistant, user = (known_token_id(tokenizer, mark) for mark in (ASSISTANT, USER))
        for _, sample in zip(range(300), stream, strict=False):
            assert len(sample.token_ids) == len(sample.is_learnt) <= CONTEXT_TOKENS
            for token_id, learnt in zip(sample.token_ids, sample.is_learnt, strict=True):
                assert not (learnt and token_id in (assistant, user))
            first = sample.token_ids.index(assistant)
            assert not any(sample.is_learnt[: first + 1])
            assert sample.is_learnt[first + 1]

    def test_some_answers_are_json_whose_brace_is_not_learnt(
        self, pairs: list[Pair], tokenizer: Tokenizer
    ) -> None:
        maker = SampleMaker(pairs, tokenizer, random.Random(1))
        maker.mix = replace(ANSWERS, share_form=1.0)
        assistant, end = (known_token_id(tokenizer, mark) for mark in (ASSISTANT, END))
        for _, sample in zip(range(200), iter(maker), strict=False):
            begin = sample.token_ids.index(assistant) + 1
            assert sample.token_ids[-1] == end
            text = tokenizer.decode(sample.token_ids[begin:-1])
            assert isinstance(json.loads(text), dict), text
            assert sample.is_learnt == [False] * (begin + 1) + [True] * (
                len(sample.token_ids) - begin - 1
            )

    def test_pairs_with_a_larger_share_are_drawn_more_and_cut_less(
        self, pairs: list[Pair], tokenizer: Tokenizer
    ) -> None:
        maker = SampleMaker(pairs, tokenizer, random.Random(1))
        maker.mix = replace(ANSWERS, share_single=1.0, share_cut=1.0, share_form=0.0)
        maker.draw_more_of({pair.id: 1000.0 if pair.id == "ttft" else 1.0 for pair in pairs})
        [answer] = [tokenizer.encode(pair.answer).ids for pair in pairs if pair.id == "ttft"]
        samples = [sample.token_ids for _, sample in zip(range(200), iter(maker), strict=False)]
        end = known_token_id(tokenizer, END)
        whole = [ids for ids in samples if ids[-len(answer) - 1 :] == [*answer, end]]
        assert len(whole) >= 80


class TestFiles:
    def test_the_folder_is_complete_and_small(self) -> None:
        assert {path.name for path in MODEL_DIR.iterdir()} == {*MODEL_FILES, DRAFT_FOLDER}
        assert (MODEL_DIR / "model.safetensors").stat().st_size <= 16 * 2**20
        assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 16 * 2**20

    def test_its_draft_is_small_and_says_what_it_says(
        self, pairs: list[Pair], tokenizer: Tokenizer, answerer: Answerer
    ) -> None:
        folder = MODEL_DIR / DRAFT_FOLDER
        assert {path.name for path in folder.iterdir()} == set(DRAFT_FILES)
        assert sum(path.stat().st_size for path in folder.iterdir()) <= 3_000_000
        target, draft = (
            LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
            for path in (MODEL_DIR, folder)
        )
        assert agreement(target, draft, pairs, tokenizer, answerer, max_questions=12) > 0.95

    def test_the_weights_are_bf16_and_match_the_config(self) -> None:
        config = json.loads((MODEL_DIR / "config.json").read_text())
        num_parameters = 0
        with safe_open(MODEL_DIR / "model.safetensors", framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - the file handle is not iterable
                piece = tensors.get_slice(name)
                assert piece.get_dtype() == "BF16", name
                size = 1
                for length in piece.get_shape():
                    size *= length
                num_parameters += size
            embedding = tensors.get_slice("model.embed_tokens.weight").get_shape()
        assert 4_000_000 <= num_parameters <= 8_000_000
        assert embedding == [config["vocab_size"], config["hidden_size"]]
        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["max_position_embeddings"] == CONTEXT_TOKENS
        assert config["tie_word_embeddings"] is True

    def test_the_card_says_what_it_is(self) -> None:
        card = (MODEL_DIR / "README.md").read_text()
        assert "demo of about 6 million parameters" in card
        assert "learnt a FAQ" in card
        assert "tools.demo.evaluate" in card


class TestTokenizer:
    @pytest.mark.parametrize(
        "text",
        [
            "What is TTFT?",
            "  two  spaces\tand\nlines ",
            "naïve café — 東京 🙂 \u0000",
            "`millrace up --model PATH`",
            "",
        ],
    )
    def test_any_text_survives_the_round_trip(self, tokenizer: Tokenizer, text: str) -> None:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text

    def test_the_vocabulary_is_about_4k_with_the_marks_in_it(self, tokenizer: Tokenizer) -> None:
        assert 3_500 <= tokenizer.get_vocab_size() <= 4_096
        for token in SPECIAL_TOKENS:
            assert tokenizer.encode(token).ids == [tokenizer.token_to_id(token)]

    def test_the_chat_template_renders_a_conversation(self, chat_tokenizer: Any) -> None:
        text = chat_tokenizer.apply_chat_template(
            [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello!"},
                {"role": "user", "content": " What is TTFT? "},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        assert text == (
            "<|bos|><|system|>Be short.<|end|><|user|>Hi<|end|><|assistant|>Hello!<|end|>"
            "<|user|>What is TTFT?<|end|><|assistant|>"
        )

    def test_an_unknown_role_is_refused(self, chat_tokenizer: Any) -> None:
        with pytest.raises(Exception, match="system, user and assistant, not wizard"):
            chat_tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)

    def test_the_end_mark_ends_generation(self, chat_tokenizer: Any) -> None:
        assert chat_tokenizer.eos_token == END
        config = json.loads((MODEL_DIR / "generation_config.json").read_text())
        assert config["eos_token_id"] == chat_tokenizer.eos_token_id


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


class TestAnswers:
    @pytest.mark.slow(reason="asks the demo model every held-out question")
    @pytest.mark.timeout(300)
    def test_held_out_phrasings_get_the_right_answer(
        self, pairs: list[Pair], answerer: Answerer
    ) -> None:
        report = measure(answerer, pairs)
        assert report.accuracy >= REQUIRED_ACCURACY, report.misses

    def test_newcomers_get_sensible_answers(self, answerer: Answerer) -> None:
        asked = ask_natural(answerer, load_natural())
        assert num_sensible(asked) >= REQUIRED_SENSIBLE * len(asked)

    @pytest.mark.slow(reason="asks the demo model every question of a newcomer, one at a time")
    @torch.inference_mode()
    def test_objects_that_a_grammar_began_are_closed(self, chat_tokenizer: Any) -> None:
        """A schema starts the answer with `{"answer": "`, and the grammar never forces its end."""
        model = LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)
        closed = []
        for natural in load_natural():
            prompt = chat_tokenizer.apply_chat_template(
                [{"role": "user", "content": natural.question}],
                tokenize=False,
                add_generation_prompt=True,
            )
            begun = '{"answer":"'
            ids = chat_tokenizer(prompt + begun, add_special_tokens=False, return_tensors="pt")
            out = model.generate(
                input_ids=ids["input_ids"], do_sample=False, max_new_tokens=64, pad_token_id=0
            )
            text = chat_tokenizer.decode(
                out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True
            )
            closed.append(_is_json(begun + text))
        assert sum(closed) >= 0.9 * len(closed)

    def test_the_last_question_of_a_conversation_is_answered(
        self, pairs: list[Pair], answerer: Answerer
    ) -> None:
        expected = {pair.id: pair.answer for pair in pairs}
        history: list[dict[str, str]] = []
        for question, pair_id in (
            ("Hello", "hello"),
            ("What is TTFT?", "ttft"),
            ("What is paged attention?", "paged_attention"),
            ("What happens when a worker dies?", "worker_dies"),
            ("How do I publish a job?", "publish"),
            ("What is the capital of France?", "out_of_domain"),
            ("What is the KV cache?", "kv_cache"),
            ("Thanks", "thanks"),
        ):
            history.append({"role": "user", "content": question})
            answer = answerer([history])[0]
            assert same_answer(answer, expected[pair_id]), question
            history.append({"role": "assistant", "content": answer})

    def test_a_system_prompt_does_not_disturb(self, pairs: list[Pair], answerer: Answerer) -> None:
        expected = {pair.id: pair.answer for pair in pairs}
        messages = [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": "What is continuous batching?"},
        ]
        assert same_answer(answerer([messages])[0], expected["continuous_batching"])
