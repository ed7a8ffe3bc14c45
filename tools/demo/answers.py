"""Greedy answers of a model to conversations, in batches."""

from pathlib import Path
from typing import Any, Final, Protocol

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

Messages = list[dict[str, str]]
"""Conversation: each message has a `role` and a `content`."""


class Answerer(Protocol):
    """Function from conversations to the assistant's next messages, in the same order.

    With `guesses`, one for each conversation, the answers are the same. They come sooner where a
    guess is right, since one pass over the guess confirms it.
    """

    def __call__(
        self, conversations: list[Messages], guesses: list[str] | None = None, /
    ) -> list[str]: ...


_BATCH_SIZE: Final[int] = 64
_MAX_NEW_TOKENS: Final[int] = 160


def load_answerer(folder: Path) -> Answerer:
    """Return the answerer of a saved model, loaded as any user of transformers would."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return make_answerer(model, AutoTokenizer.from_pretrained(folder))


def make_answerer(model: LlamaForCausalLM, tokenizer: Any) -> Answerer:
    """Return the answerer of a model and its transformers tokenizer."""
    model.eval()
    pad_id, end_id = tokenizer.pad_token_id, tokenizer.eos_token_id

    def ids_of(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def prompt_ids(messages: Messages) -> list[int]:
        return ids_of(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        )

    @torch.inference_mode()
    def are_greedy(prompts: list[list[int]], answers: list[list[int]]) -> list[bool]:
        """Return for each answer whether greedy decoding would produce it: each token is the
        likeliest after the prompt and the tokens before it.
        """
        rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        width = max(map(len, rows))
        # Padding comes last, and no token attends to later ones.
        token_ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows])
        likeliest = model(input_ids=token_ids.to(model.device)).logits.argmax(-1).tolist()
        return [
            len(answer) <= _MAX_NEW_TOKENS
            and said[len(prompt) - 1 : len(prompt) + len(answer) - 1] == answer
            for prompt, answer, said in zip(prompts, answers, likeliest, strict=True)
        ]

    @torch.inference_mode()
    def answer_batch(prompts: list[list[int]]) -> list[str]:
        width = max(map(len, prompts))
        token_ids = torch.tensor([[pad_id] * (width - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        out = model.generate(
            input_ids=token_ids.to(model.device),
            attention_mask=mask.to(model.device),
            do_sample=False,
            max_new_tokens=_MAX_NEW_TOKENS,
            eos_token_id=end_id,
            pad_token_id=pad_id,
        )
        return [str(tokenizer.decode(row[width:], skip_special_tokens=True)) for row in out]

    def answer(conversations: list[Messages], guesses: list[str] | None = None) -> list[str]:
        prompts = [prompt_ids(messages) for messages in conversations]
        answers: dict[int, str] = {}
        guessed = [[*ids_of(guess), end_id] for guess in guesses or ()]
        for chosen in _alike([len(prompts[at]) + len(ids) for at, ids in enumerate(guessed)]):
            right = are_greedy([prompts[at] for at in chosen], [guessed[at] for at in chosen])
            for at, is_right in zip(chosen, right, strict=True):
                if is_right:
                    answers[at] = str(tokenizer.decode(guessed[at], skip_special_tokens=True))
        left = [at for at in range(len(prompts)) if at not in answers]
        for group in _alike([len(prompts[at]) for at in left]):
            chosen = [left[at] for at in group]
            texts = answer_batch([prompts[at] for at in chosen])
            answers.update(zip(chosen, texts, strict=True))
        return [answers[at] for at in range(len(prompts))]

    return answer


def _alike(lengths: list[int]) -> list[list[int]]:
    """Return batches of row numbers with similar lengths."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return [order[start : start + _BATCH_SIZE] for start in range(0, len(order), _BATCH_SIZE)]
