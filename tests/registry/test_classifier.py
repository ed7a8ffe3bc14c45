"""Labels and activations, as config.json names them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millrace.registry.checkpoints.checkpoint import read_model_config, read_model_outline
from millrace.registry.checkpoints.classifier import Activation, ClassifierHead
from millrace.schemas.errors import CheckpointError
from tests.registry.test_checkpoint import write_config

_CLASSIFIER: dict[str, Any] = {"architectures": ["Qwen3ForSequenceClassification"]}
_TORCH = "torch.nn.modules."


def head_of(path: Path, **changes: Any) -> ClassifierHead:
    config = read_model_config(write_config(path, **(_CLASSIFIER | changes)))
    assert config.classifier is not None
    assert not config.has_head
    assert read_model_outline(path, any_architecture=True) == config
    return config.classifier


@pytest.mark.parametrize(
    ("changes", "labels"),
    [
        ({}, ("LABEL_0", "LABEL_1")),
        ({"num_labels": 1}, ("LABEL_0",)),
        ({"id2label": {"1": "bad", "0": "good"}}, ("good", "bad")),
        ({"id2label": {"0": "relevant"}, "num_labels": 1}, ("relevant",)),
    ],
)
def test_labels(tmp_path: Path, changes: dict[str, Any], labels: tuple[str, ...]) -> None:
    head = head_of(tmp_path, **changes)
    assert head.labels == labels
    assert head.scores_pairs == (len(labels) == 1)
    usual = Activation.SIGMOID if len(labels) == 1 else Activation.SOFTMAX
    assert (head.class_activation, head.score_activation) == (usual, usual)


@pytest.mark.parametrize(
    ("changes", "of_class", "of_score"),
    [
        ({"problem_type": "regression"}, "none", "sigmoid"),
        ({"problem_type": "single_label_classification"}, "sigmoid", "sigmoid"),
        ({"problem_type": "multi_label_classification", "num_labels": 3}, "sigmoid", "softmax"),
        (
            {"sbert_ce_default_activation_function": f"{_TORCH}linear.Identity"},
            *("sigmoid", "none"),
        ),
        (
            {"sentence_transformers": {"activation_fn": f"{_TORCH}activation.Sigmoid"}},
            *("sigmoid", "sigmoid"),
        ),
        (
            {
                "sentence_transformers": {"activation_fn": f"{_TORCH}linear.Identity"},
                "sbert_ce_default_activation_function": f"{_TORCH}activation.Sigmoid",
            },
            *("sigmoid", "none"),
        ),
    ],
)
def test_activations(tmp_path: Path, changes: dict[str, Any], of_class: str, of_score: str) -> None:
    head = head_of(tmp_path, **({"num_labels": 1} | changes))
    assert (head.class_activation, head.score_activation) == (of_class, of_score)


def test_how_pairs_are_read(tmp_path: Path) -> None:
    assert not head_of(tmp_path).joins_pairs
    assert not head_of(tmp_path, use_sep_token=True).joins_pairs
    assert head_of(tmp_path, use_sep_token=False).joins_pairs
    assert head_of(tmp_path, use_pad_token=False).joins_pairs
    assert not head_of(tmp_path, use_pad_token=True, use_sep_token=False).joins_pairs


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label"),
        ({"id2label": {}}, "id2label"),
        ({"id2label": {"0": 7}}, "id2label"),
        ({"num_labels": 0}, "num_labels"),
        ({"num_labels": 10**9}, "num_labels"),
        ({"problem_type": "ranking"}, "problem_type"),
        (
            {"sbert_ce_default_activation_function": f"{_TORCH}activation.Tanh"},
            "sbert_ce_default_activation_function",
        ),
        (
            {"sentence_transformers": {"activation_fn": "os.system"}},
            "sentence_transformers",
        ),
        ({"is_causal": False}, "is_causal"),
        ({"architectures": ["BertForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ],
)
def test_what_is_not_computed_is_named(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        read_model_config(write_config(tmp_path, **(_CLASSIFIER | changes)))
