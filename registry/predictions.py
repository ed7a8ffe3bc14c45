"""What a request predicts of its completion, in tokens."""

from __future__ import annotations

from millrace.registry.tokenizers.tokenizer import Tokenizer
from millrace.schemas.errors import ParameterError

# No token of a text has more characters, but for long runs of one.
_MOST_TOKEN_CHARACTERS = 32


def predicted_tokens(
    predicted: str | tuple[int, ...], tokenizer: Tokenizer, vocab_size: int, max_tokens: int
) -> tuple[int, ...]:
    """A prediction in text or token ids, and no more of it than there can be of the completion.
    Raises ParameterError for token ids that the model does not have."""
    if isinstance(predicted, str):
        text = predicted[: max_tokens * _MOST_TOKEN_CHARACTERS]
        predicted = tuple(tokenizer.encode(text, add_special_tokens=False)) if text else ()
    predicted = predicted[:max_tokens]
    if predicted and not 0 <= min(predicted) <= max(predicted) < vocab_size:
        raise ParameterError(
            "prediction", f"prediction has a token id that is not among the model's {vocab_size}."
        )
    return predicted
