"""Small random checkpoints, written by transformers, and transformers' results for them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def save_model(
    path: Path,
    family: str,
    *,
    max_shard_size: str = "1GB",
    nan_token: int | None = None,
    stored_dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Any:
    """Save a random checkpoint of a family ("Llama", "Qwen3", …) in ``path``; return transformers'
    model of it, in float32. The embedding of ``nan_token`` is not finite."""
    model = _make(f"{family}ForCausalLM", family, changes)
    if nan_token is not None:
        with torch.no_grad():
            model.get_input_embeddings().weight[nan_token] = torch.nan
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(stored_dtype))
    # Another model is cast: casting this one's frequencies there and back would not restore them.
    stored = model if stored_dtype is model.dtype else copy.deepcopy(model).to(stored_dtype)
    stored.save_pretrained(path, max_shard_size=max_shard_size)
    return model


def save_base_model(path: Path, family: str, **changes: Any) -> Any:
    """Save a checkpoint without a language-model head, as embedding models are; its tensors' names
    lack the prefix "model."."""
    model = _make(f"{family}Model", family, changes)
    model.save_pretrained(path)
    return model


def save_classifier(path: Path, family: str, num_labels: int, **changes: Any) -> Any:
    """Save a checkpoint with a head for labels in place of the language model's."""
    model = _make(
        f"{family}ForSequenceClassification", family, {"num_labels": num_labels} | changes
    )
    model.save_pretrained(path)
    return model


def save_config(path: Path, family: str, **changes: Any) -> None:
    """Save the configuration of such a checkpoint without its weights."""
    config = _config(family, changes)
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(path)


def save_llama(path: Path, **changes: Any) -> Any:
    """Save a random Llama in ``path``; return the transformers model."""
    return save_model(path, "Llama", **changes)


def _config(family: str, changes: dict[str, Any]) -> Any:
    return getattr(transformers, f"{family}Config")(**(SMALL | changes))


def _make(class_name: str, family: str, changes: dict[str, Any]) -> Any:
    config = _config(family, changes)
    # The plain loop over experts: the grouped kernel asks for sizes that small models lack.
    config._experts_implementation = "eager"
    model = getattr(transformers, class_name)(config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            # Far enough from the usual tiny initial weights that positions, norms and biases all
            # show in the logits, and that no two tokens are nearly as likely.
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.3 if parameter.dim() == 1 else 2.0 / parameter.shape[-1] ** 0.5
            parameter.copy_(noise * scale + (1.0 if parameter.dim() == 1 else 0.0))
    return model.eval()


def reference_logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    """Return transformers' logits for every position: [num_tokens, vocab_size]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def cached_logits(model: Any, token_ids: list[int], num_prompt_tokens: int) -> torch.Tensor:
    """Return transformers' logits after the prompt and after each later token, decoded one by one:
    [num_tokens - num_prompt_tokens + 1, vocab_size]."""
    with torch.inference_mode():
        out = model(torch.tensor([token_ids[:num_prompt_tokens]]), use_cache=True)
        rows = [out.logits[0, -1]]
        for token in token_ids[num_prompt_tokens:]:
            out = model(torch.tensor([[token]]), past_key_values=out.past_key_values)
            rows.append(out.logits[0, -1])
    return torch.stack(rows)


def reference_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the greedy continuation by a run of the whole sequence for every token."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(reference_logits(model, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]
