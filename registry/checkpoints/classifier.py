"""Labels and activations of a checkpoint with a sequence-classification head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from millrace.registry.checkpoints.json_fields import JsonFields

# Number of labels that transformers assumes if config.json has none.
_USUAL_NUM_LABELS = 2
_MAX_LABELS = 100_000
_TORCH_PREFIX = "torch.nn.modules."
# Name of the activation of a cross-encoder in sentence-transformers.
_OLDER_ACTIVATION = "sbert_ce_default_activation_function"
# Former name of ``use_sep_token`` in vLLM; it takes precedence.
_OLDER_SEPARATOR = "use_pad_token"


class Activation(StrEnum):
    """Function from the logits of the labels to scores."""

    NONE = "none"
    SIGMOID = "sigmoid"  # of each logit
    SOFTMAX = "softmax"  # over all logits


_ACTIVATIONS = {
    "linear.Identity": Activation.NONE,
    "activation.Sigmoid": Activation.SIGMOID,
    "activation.Softmax": Activation.SOFTMAX,
}


class ClassifierHead(msgspec.Struct, frozen=True, kw_only=True):
    """Head of a sequence classifier; ``labels`` are in the order of the head's rows.

    ``class_activation`` is for classified texts, ``score_activation`` for scored pairs. A pair is
    joined by the tokenizer's pair template, or read as one text if ``joins_pairs``.
    """

    labels: tuple[str, ...]
    class_activation: Activation
    score_activation: Activation
    joins_pairs: bool = False

    @property
    def scores_pairs(self) -> bool:
        """True for a cross-encoder, whose only score is the relevance of one text to another."""
        return len(self.labels) == 1


def activated(logits: Sequence[float], activation: Activation) -> list[float]:
    """Return the activated logits of all labels."""
    match activation:
        case Activation.NONE:
            return list(logits)
        case Activation.SIGMOID:
            return [_sigmoid(value) for value in logits]
        case Activation.SOFTMAX:
            most = max(logits)
            powers = [math.exp(value - most) for value in logits]
            total = math.fsum(powers)
            return [power / total for power in powers]


def _sigmoid(value: float) -> float:
    # The exponent is negative, so the power does not overflow.
    if value >= 0:
        return 1 / (1 + math.exp(-value))
    power = math.exp(value)
    return power / (1 + power)


def read_classifier(fields: JsonFields) -> ClassifierHead:
    """Read the head from ``config.json`` as transformers and vLLM do.

    Raises:
        CheckpointError: labels are not numbered from 0, or an activation is not supported; names
            the field.
    """
    labels = _labels(fields)
    usual = Activation.SIGMOID if len(labels) == 1 else Activation.SOFTMAX
    separates = fields.boolean("use_sep_token", default=True)
    return ClassifierHead(
        labels=labels,
        class_activation=_class_activation(fields, usual),
        score_activation=_score_activation(fields, usual),
        joins_pairs=not fields.boolean(_OLDER_SEPARATOR, default=separates),
    )


def _labels(fields: JsonFields) -> tuple[str, ...]:
    named = fields.mapping("id2label")
    if named is None:
        num_labels = fields.positive_int("num_labels", _USUAL_NUM_LABELS)
        if num_labels > _MAX_LABELS:
            raise fields.bad("num_labels", f"at most {_MAX_LABELS}")
        return tuple(f"LABEL_{number}" for number in range(num_labels))
    found = [named.get(str(number)) for number in range(len(named))]
    labels = tuple(label for label in found if isinstance(label, str))
    if not labels or len(labels) < len(found):
        raise fields.bad("id2label", "an object of labels, numbered from 0")
    return labels


def _class_activation(fields: JsonFields, usual: Activation) -> Activation:
    match fields.string("problem_type", ""):
        case "regression":
            return Activation.NONE
        case "multi_label_classification":
            return Activation.SIGMOID
        case "" | "single_label_classification":
            return usual
    raise fields.bad("problem_type", "regression, or single_ or multi_label_classification")


def _score_activation(fields: JsonFields, usual: Activation) -> Activation:
    newer = fields.mapping("sentence_transformers") or {}
    at, name = "sentence_transformers", newer.get("activation_fn")
    if name is None:
        at, name = _OLDER_ACTIVATION, fields.get(_OLDER_ACTIVATION)
    if name is None:
        return usual
    found = _ACTIVATIONS.get(str(name).removeprefix(_TORCH_PREFIX))
    if found is None:
        names = ", ".join(_TORCH_PREFIX + known for known in _ACTIVATIONS)
        raise fields.bad(at, f"a supported activation ({names})")
    return found if found is Activation.NONE else usual
