"""Greedy answers of a model to conversations, many at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoTokenizer, LlamaForCausalLM

Messages = list[dict[str, str]]
"""A conversation: each message has a `role` and a `content`."""

Answerer = Callable[[list[Messages]], list[str]]
"""Conversations in, the assistant's next messages out, in the same order."""

_BATCH_SIZE: Final[int] = 64
_MAX_NEW_TOKENS: Final[int] = 160


def load_answerer(folder: Path) -> Answerer:
    """The answerer of a saved model, loaded as any user of transformers would."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return make_answerer(model, AutoTokenizer.from_pretrained(folder))


def make_answerer(model: LlamaForCausalLM, tokenizer: Any) -> Answerer:
    """The answerer of a model and its transformers tokenizer."""
    model.eval()
    pad_id, end_id = tokenizer.pad_token_id, tokenizer.eos_token_id

    def prompt_ids(messages: Messages) -> list[int]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

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

    def answer(conversations: list[Messages]) -> list[str]:
        prompts = [prompt_ids(messages) for messages in conversations]
        # Prompts of like length share a batch; the answers go back in the order asked.
        order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]))
        answers = [""] * len(prompts)
        for start in range(0, len(order), _BATCH_SIZE):
            chosen = order[start : start + _BATCH_SIZE]
            for at, text in zip(chosen, answer_batch([prompts[at] for at in chosen]), strict=True):
                answers[at] = text
        return answers

    return answer
