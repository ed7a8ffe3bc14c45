"""Preparation of jobs for a model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from millrace.registry.catalogue import Catalogue, load_catalogue
from millrace.registry.served import ServedModel
from millrace.schemas.errors import (
    ConfigError,
    ContextLengthError,
    ModelNotFoundError,
    ParameterError,
)
from millrace.schemas.jobs import ChatMessage, Job, Tier
from millrace.schemas.pooling import Pooling
from millrace.schemas.sampling import Grammar, GrammarKind, SamplingParams
from millrace.schemas.tools import ToolCall, ToolDefinition
from tests.support.engine.checkpoints_made import (
    CONTEXT_WINDOW_TOKENS,
    write_catalogue,
    write_checkpoint,
)

EMBEDDINGS_LACK: dict[str, Any] = {
    "grammar": Grammar(kind=GrammarKind.JSON_OBJECT),
    "n": 2,
    "prompt_logprobs": 0,
    "stop": ("x",),
    "logit_bias": {3: 1.0},
    "temperature": 0.5,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    path = write_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    return ServedModel.load(load_catalogue("").with_model(str(path)), "tiny")


def job(sampling: SamplingParams | None = None, **fields: Any) -> Job:
    return Job(request_id="r", model="tiny", sampling=sampling or SamplingParams(), **fields)


def test_what_begins_an_answer_can_be_left_out(served: ServedModel) -> None:
    messages = (ChatMessage("user", "mill"),)
    ready = served.prepare(job(messages=messages, add_generation_prompt=False), random.Random(1))
    told = served.tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert ready.prompt_token_ids == tuple(told)
    assert ready.prompt_token_ids != tuple(served.tokenizer.encode_chat(messages))
    assert served.prepare(ready, random.Random(2)) == ready
    with pytest.raises(ParameterError) as refused:
        served.prepare(job(prompt="mill", add_generation_prompt=False), random.Random(1))
    assert refused.value.param == "add_generation_prompt"


def test_an_answer_goes_on_with_the_last_message(served: ServedModel) -> None:
    """The prompt is that of an answer with this text so far."""
    asked, said = ChatMessage("user", "mill"), ChatMessage("assistant", "race ")
    continued = job(messages=(asked, said), continue_final_message=True)
    ready = served.prepare(continued, random.Random(1))
    begun = served.tokenizer.encode_chat((asked,))
    assert ready.prompt_token_ids == (*begun, *served.tokenizer.encode("race ", False))
    assert not ready.continue_final_message
    assert served.prepare(ready, random.Random(2)) == ready


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "mill"},
        {"messages": (ChatMessage("user", "mill"),)},
        {
            "messages": (
                ChatMessage(
                    "assistant", "", tool_calls=(ToolCall(id="c", name="look", arguments="{}"),)
                ),
            )
        },
    ],
)
def test_what_cannot_be_continued(served: ServedModel, fields: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as refused:
        served.prepare(job(**fields, continue_final_message=True), random.Random(1))
    assert refused.value.param == "continue_final_message"


def test_load(served: ServedModel) -> None:
    assert served.entry.name == "tiny"
    assert served.context_window_tokens == CONTEXT_WINDOW_TOKENS
    assert served.eos_token_ids == (1,)
    with pytest.raises(ModelNotFoundError):
        ServedModel.load(load_catalogue(""), "tiny")


def test_a_prompt_is_tokenised_and_the_rest_filled_in(served: ServedModel) -> None:
    ready = served.prepare(job(prompt="mill wheel", user="ada"), random.Random(1))
    assert ready.prompt_token_ids == tuple(served.tokenizer.encode("mill wheel"))
    assert (ready.prompt, ready.messages, ready.user) == (None, None, "ada")
    assert ready.sampling.max_tokens == CONTEXT_WINDOW_TOKENS - len(ready.prompt_token_ids)
    assert ready.sampling.seed is not None
    again = served.prepare(job(prompt="mill wheel", user="ada"), random.Random(1))
    assert again == ready


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "mill wheel water stone"},
        {"prompt_token_ids": tuple(range(3, 20))},
        {"messages": (ChatMessage("user", "mill wheel water stone"),)},
        {"prompt": "mill wheel water stone", "pooling": Pooling.MEAN},
    ],
)
def test_a_prompt_is_truncated_to_its_end(served: ServedModel, fields: dict[str, Any]) -> None:
    whole = served.prepare(job(**fields), random.Random(1)).prompt_token_ids or ()
    kept = served.prepare(job(**fields, truncate_prompt_tokens=3), random.Random(1))
    assert kept.prompt_token_ids == whole[-3:]
    assert served.prepare(kept, random.Random(2)) == kept
    longer = served.prepare(job(**fields, truncate_prompt_tokens=-1), random.Random(1))
    assert longer.prompt_token_ids == whole


@pytest.mark.parametrize(("pooling", "room"), [(None, 5), (Pooling.MEAN, 0)])
def test_a_prompt_is_truncated_to_what_there_is_room_for(
    served: ServedModel, pooling: Pooling | None, room: int
) -> None:
    asked = job(
        None if pooling else SamplingParams(max_tokens=5),
        prompt="mill " * 1_000,
        pooling=pooling,
        truncate_prompt_tokens=-1,
    )
    ready = served.prepare(asked, random.Random(1))
    assert len(ready.prompt_token_ids or ()) == CONTEXT_WINDOW_TOKENS - room


@pytest.mark.parametrize("num_kept", [0, -2, CONTEXT_WINDOW_TOKENS + 1])
def test_what_a_prompt_cannot_be_truncated_to(served: ServedModel, num_kept: int) -> None:
    with pytest.raises(ParameterError) as refused:
        served.prepare(job(prompt="mill", truncate_prompt_tokens=num_kept), random.Random(1))
    assert refused.value.param == "truncate_prompt_tokens"


def test_messages(served: ServedModel) -> None:
    messages = (ChatMessage("user", "mill"),)
    ready = served.prepare(job(messages=messages), random.Random(1))
    assert ready.prompt_token_ids == tuple(served.tokenizer.encode_chat(messages))


def test_messages_in_the_template_of_a_request(tmp_path: Path) -> None:
    """The template also serves a model that has none; calls and thoughts are marked as the model
    does it."""
    path = write_checkpoint(tmp_path / "tiny")
    messages = (ChatMessage("user", "mill"),)
    asked = job(messages=messages)
    for file in (None, path / "tokenizer_config.json"):
        if file is not None:
            settings = json.loads(file.read_text())
            del settings["chat_template"]
            file.write_text(json.dumps(settings))
        served = ServedModel.load(load_catalogue("").with_model(str(path)), "tiny")
        own = served.with_chat_template("{{ eos_token }}{{ messages[0].content | upper }}")
        ready = own.prepare(asked, random.Random(1))
        assert served.tokenizer.decode(ready.prompt_token_ids or (), False) == "<|end|>MILL"
        assert (served.tool_format is None) == (file is not None)
        assert own.reasoning_format == served.reasoning_format
        with pytest.raises(
            ParameterError, match="chat_template of this request refuses"
        ) as refused:
            served.with_chat_template("{{ missing.x.y }}").prepare(asked, random.Random(1))
        assert refused.value.param == "messages"
    with pytest.raises(ParameterError, match="prompt instead of messages"):
        served.prepare(asked, random.Random(1))


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages",
        "{% bad %}",
        "x" * 65_537,
        "{{ " + "(" * 5_000 + "1" + ")" * 5_000,
        "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
        "{% if 1 %}" * 110 + "{% endif %}" * 110,
        "{% continue %}",
        "{{ " + "9" * 5_000 + " }}",
    ],
)
def test_what_is_no_template_of_a_request(served: ServedModel, source: str) -> None:
    with pytest.raises(ParameterError) as refused:
        served.with_chat_template(source)
    assert refused.value.param == "chat_template"
    assert refused.value.message.endswith(".")
    assert not refused.value.message.endswith("..")


def test_forbidden_operations_in_a_request_s_template_are_refused(served: ServedModel) -> None:
    """The template is refused for that reason, with a message."""
    for source in (
        "{{ 'a' * 10**15 }}",
        "{{ messages[0].content * 10**15 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% include 'x' %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ):
        given = served.with_chat_template(source)
        asked = job(messages=(ChatMessage("user", "mill"),))
        with pytest.raises(ParameterError, match=r"refuses these messages: \w") as refused:
            given.prepare(asked, random.Random(1))
        assert refused.value.param == "messages"


def test_tools_are_described_with_the_messages(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", max_position_embeddings=4_096)
    served = ServedModel.load(load_catalogue("").with_model(str(path)), "tiny")
    messages = (ChatMessage("user", "mill"),)
    tools = (ToolDefinition(name="grind", description="Grind some corn."),)
    ready = served.prepare(job(messages=messages, tools=tools), random.Random(1))
    assert ready.prompt_token_ids == tuple(served.tokenizer.encode_chat(messages, tools))
    assert ready.prompt_token_ids != tuple(served.tokenizer.encode_chat(messages))
    assert ready.tools == ()
    assert served.prepare(ready, random.Random(2)) == ready


def test_what_is_set_stays(served: ServedModel) -> None:
    asked = job(SamplingParams(max_tokens=5, seed=7), prompt_token_ids=(3, 4))
    ready = served.prepare(asked, random.Random(1))
    assert (ready.sampling.max_tokens, ready.sampling.seed) == (5, 7)
    assert SamplingParams.of(ready.sampling) == asked.sampling
    assert served.prepare(ready, random.Random(1)) == ready


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt_token_ids": ()}, "prompt_token_ids"),
        ({"messages": ()}, "messages"),
        ({"messages": (ChatMessage("wizard", "x"),)}, "messages"),
        ({"prompt_token_ids": (3, 10_000)}, "prompt_token_ids[1]"),
        ({"prompt_token_ids": (-1, 3)}, "prompt_token_ids[0]"),
        (
            {"prompt": "mill", "sampling": SamplingParams(stop_token_ids=(10_000,))},
            "stop_token_ids",
        ),
        ({"prompt": "mill", "sampling": SamplingParams(logit_bias={10_000: 1.0})}, "logit_bias"),
        (
            {"prompt": "mill", "sampling": SamplingParams(allowed_token_ids=(10_000,))},
            "allowed_token_ids",
        ),
        ({"prompt": "mill", "sampling": SamplingParams(n=2)}, "n"),
        ({"prompt": "mill", "tools": (ToolDefinition(name="f"),)}, "tools"),
        ({"prompt": "", "pooling": Pooling.LAST}, "prompt"),
        ({"prompt_token_ids": (10_000,), "pooling": Pooling.LAST}, "prompt_token_ids[0]"),
        ({"messages": (ChatMessage("user", "mill"),), "pooling": Pooling.LAST}, "messages"),
        *(
            (
                {
                    "prompt": "mill",
                    "pooling": Pooling.MEAN,
                    "sampling": SamplingParams(**{name: value}),
                },
                name,
            )
            for name, value in EMBEDDINGS_LACK.items()
        ),
        (
            {"prompt_token_ids": (3,) * 100, "sampling": SamplingParams(min_tokens=29)},
            "min_tokens",
        ),
    ],
)
def test_the_bad_field_is_named(served: ServedModel, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        served.prepare(job(**fields), random.Random(1))
    assert caught.value.param == param


def test_several_choices_are_for_those_who_need_no_frames(served: ServedModel) -> None:
    asked = job(SamplingParams(n=2, prompt_logprobs=1), prompt="mill")
    sampling = served.prepare(asked, random.Random(1), in_frames=False).sampling
    assert (sampling.n, sampling.prompt_logprobs) == (2, 1)


def test_prompt_logprobs_are_for_everybody(served: ServedModel) -> None:
    asked = job(SamplingParams(prompt_logprobs=1), prompt="mill")
    assert served.prepare(asked, random.Random(1)).sampling.prompt_logprobs == 1


def test_an_embedding_may_fill_the_window(served: ServedModel) -> None:
    full = (3,) * CONTEXT_WINDOW_TOKENS
    asked = job(prompt_token_ids=full, pooling=Pooling.LAST)
    ready = served.prepare(asked, random.Random(1))
    assert (ready.prompt_token_ids, ready.pooling) == (full, Pooling.LAST)
    assert ready.sampling.max_tokens == 1
    assert ready.sampling.seed is not None
    assert served.prepare(ready, random.Random(2)) == ready
    with pytest.raises(ContextLengthError):
        served.prepare(job(prompt_token_ids=(*full, 3), pooling=Pooling.LAST), random.Random(1))


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "fits"),
    [(128, None, False), (127, None, True), (100, 28, True), (100, 29, False), (500, 1, False)],
)
def test_the_context_window(
    served: ServedModel, num_prompt_tokens: int, max_tokens: int | None, fits: bool
) -> None:
    asked = job(SamplingParams(max_tokens=max_tokens), prompt_token_ids=(3,) * num_prompt_tokens)
    if fits:
        limit = served.prepare(asked, random.Random(1)).sampling.max_tokens
        assert limit == (max_tokens or CONTEXT_WINDOW_TOKENS - num_prompt_tokens)
        return
    with pytest.raises(ContextLengthError) as caught:
        served.prepare(asked, random.Random(1))
    assert caught.value.num_prompt_tokens == num_prompt_tokens
    assert str(CONTEXT_WINDOW_TOKENS) in caught.value.message
    assert str(num_prompt_tokens) in caught.value.message


def catalogue_with_window(path: Path, window_tokens: int) -> Catalogue:
    file = path / "models.yaml"
    file.write_text(f"models: {{tiny: {{source: ./tiny, context_window_tokens: {window_tokens}}}}}")
    return load_catalogue(str(file))


def test_the_catalogue_may_narrow_the_window(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny")
    assert ServedModel.load(catalogue_with_window(tmp_path, 64), "tiny").context_window_tokens == 64
    with pytest.raises(ConfigError, match=r"129.*128"):
        ServedModel.load(catalogue_with_window(tmp_path, 129), "tiny")


def test_scaled_rope_may_reach_further(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny", rope_scaling={"rope_type": "linear", "factor": 2.0})
    catalogue = catalogue_with_window(tmp_path, 256)
    assert ServedModel.load(catalogue, "tiny").context_window_tokens == 256
    (tmp_path / "models.yaml").write_text("models: {tiny: {source: ./tiny}}")
    catalogue = load_catalogue(str(tmp_path / "models.yaml"))
    assert ServedModel.load(catalogue, "tiny").context_window_tokens == 2 * CONTEXT_WINDOW_TOKENS
    with pytest.raises(ConfigError, match=r"257.*256"):
        ServedModel.load(catalogue_with_window(tmp_path, 257), "tiny")


def test_a_model_without_a_head_makes_embeddings_only(tmp_path: Path) -> None:
    catalogue = load_catalogue(str(write_catalogue(tmp_path, "tiny", "free")))
    file = tmp_path / "tiny" / "config.json"
    file.write_text(file.read_text().replace("LlamaForCausalLM", "LlamaModel"))
    served = ServedModel.load(catalogue, "tiny")
    with pytest.raises(ParameterError, match="embeddings only") as caught:
        served.prepare(job(prompt="mill"), random.Random(1))
    assert caught.value.param == "model"
    ready = served.prepare(job(prompt="mill", pooling=Pooling.MEAN), random.Random(1))
    assert ready.prompt_token_ids == tuple(served.tokenizer.encode("mill"))


@pytest.fixture(params=[1, 3])
def classifier(tmp_path: Path, request: pytest.FixtureRequest) -> ServedModel:
    """Return a cross-encoder, or a model that tells one of three labels."""
    write_checkpoint(
        tmp_path / "tiny",
        architectures=["LlamaForSequenceClassification"],
        num_labels=request.param,
    )
    return ServedModel.load(load_catalogue("").with_model(str(tmp_path / "tiny")), "tiny")


def test_a_pair_is_one_prompt(classifier: ServedModel) -> None:
    asked = job(prompt="mill", text_pair="wheel", pooling=Pooling.CLASSIFY)
    ready = classifier.prepare(asked, random.Random(1))
    encoded = classifier.tokenizer.encode_pair("mill", "wheel", max_tokens=CONTEXT_WINDOW_TOKENS)
    assert ready.prompt_token_ids == tuple(encoded)
    assert (ready.prompt, ready.text_pair, ready.pooling) == (None, None, Pooling.CLASSIFY)
    assert classifier.prepare(ready, random.Random(2)) == ready
    alone = classifier.prepare(
        job(prompt="mill", pooling=Pooling.CLASSIFY), random.Random(1)
    ).prompt_token_ids
    assert alone == tuple(classifier.tokenizer.encode("mill"))


@pytest.mark.parametrize("truncate", [6, -1])
def test_the_longer_text_of_a_pair_is_cut(classifier: ServedModel, truncate: int) -> None:
    texts: dict[str, Any] = {"prompt": "mill", "text_pair": "wheel " * 500}
    asked = job(**texts, pooling=Pooling.CLASSIFY, truncate_prompt_tokens=truncate)
    ready = classifier.prepare(asked, random.Random(1)).prompt_token_ids or ()
    assert len(ready) == (CONTEXT_WINDOW_TOKENS if truncate == -1 else truncate)
    begun = classifier.tokenizer.encode("mill", add_special_tokens=False)
    assert list(ready[: len(begun)]) == begun[: len(ready)]
    with pytest.raises(ContextLengthError):
        classifier.prepare(job(**texts, pooling=Pooling.CLASSIFY), random.Random(1))


def test_a_pair_may_be_read_as_one_text(tmp_path: Path) -> None:
    path = write_checkpoint(
        tmp_path / "tiny",
        architectures=["LlamaForSequenceClassification"],
        num_labels=1,
        use_sep_token=False,
    )
    served = ServedModel.load(load_catalogue("").with_model(str(path)), "tiny")
    asked = job(prompt="mill", text_pair=" wheel", pooling=Pooling.CLASSIFY)
    ready = served.prepare(asked, random.Random(1))
    assert ready.prompt_token_ids == tuple(served.tokenizer.encode("mill wheel"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "mill"}, "model"),
        ({"messages": (ChatMessage("user", "mill"),)}, "model"),
        ({"prompt": "mill", "pooling": Pooling.LAST}, "pooling"),
        ({"prompt": "mill", "pooling": Pooling.MEAN}, "pooling"),
        ({"prompt": "mill", "text_pair": "x", "pooling": Pooling.MEAN}, "text_pair"),
        ({"prompt": "mill", "text_pair": "x"}, "text_pair"),
        ({"prompt": "mill", "text_pair": "", "pooling": Pooling.CLASSIFY}, "text_pair"),
        ({"prompt_token_ids": (3,), "text_pair": "x", "pooling": Pooling.CLASSIFY}, "text_pair"),
    ],
)
def test_what_a_classifier_does_not_make(
    classifier: ServedModel, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ParameterError) as refused:
        classifier.prepare(job(**fields), random.Random(1))
    assert refused.value.param == param


def test_only_a_classifier_makes_labels(served: ServedModel, classifier: ServedModel) -> None:
    assert (served.task, classifier.task) == (
        "generate",
        "score" if classifier.classifier and classifier.classifier.scores_pairs else "classify",
    )
    with pytest.raises(ParameterError, match="classification head") as refused:
        served.prepare(job(prompt="mill", pooling=Pooling.CLASSIFY), random.Random(1))
    assert refused.value.param == "pooling"


@pytest.mark.parametrize(
    ("entry", "modules", "pooling", "normalize"),
    [
        ("", None, Pooling.MEAN, True),
        ("", [], Pooling.MEAN, False),
        ("", ["Pooling"], Pooling.LAST, False),
        ("", ["Pooling", "Normalize"], Pooling.LAST, True),
        (", pooling: mean", ["Pooling"], Pooling.MEAN, False),
    ],
)
def test_how_embeddings_are_made(
    tmp_path: Path, entry: str, modules: list[str] | None, pooling: Pooling, normalize: bool
) -> None:
    path = write_checkpoint(tmp_path / "tiny")
    if modules is not None:
        named = [{"type": f"models.{name}", "path": f"1_{name}"} for name in modules]
        (path / "modules.json").write_text(json.dumps(named))
    if modules and "Pooling" in modules:
        (path / "1_Pooling").mkdir()
        (path / "1_Pooling" / "config.json").write_text('{"pooling_mode_lasttoken": true}')
    file = tmp_path / "models.yaml"
    file.write_text(f"models: {{tiny: {{source: ./tiny{entry}}}}}")
    defaults = ServedModel.load(load_catalogue(str(file)), "tiny").embedding_defaults
    assert defaults == (pooling, normalize)


def test_a_tier_that_may_not_use_the_model(tmp_path: Path) -> None:
    catalogue = load_catalogue(str(write_catalogue(tmp_path, "tiny", "pro", "batch")))
    served = ServedModel.load(catalogue, "tiny")
    assert served.prepare(job(prompt="mill", tier=Tier.BATCH), random.Random(1)).prompt_token_ids
    with pytest.raises(ParameterError, match="tiers pro, batch, not for free") as caught:
        served.prepare(job(prompt="mill"), random.Random(1))
    assert caught.value.param == "service_tier"


def test_a_prediction_is_tokenised_once_as_far_as_the_completion_may_go(
    served: ServedModel,
) -> None:
    text = "the channel that leads a stream"
    whole = tuple(served.tokenizer.encode(text, add_special_tokens=False))
    assert len(whole) > 4
    for max_tokens in (4, 100):
        asked = job(SamplingParams(max_tokens=max_tokens), prompt="mill", prediction=text)
        ready = served.prepare(asked, random.Random(1))
        assert ready.prediction == whole[:max_tokens]
        assert served.prepare(ready, random.Random(2)) == ready
    assert served.prepare(job(prompt="mill"), random.Random(1)).prediction == ()


def test_a_prediction_that_cannot_be_is_refused(served: ServedModel) -> None:
    for asked in (
        job(prompt="mill", prediction=(3, served.vocab_size)),
        job(prompt="mill", prediction=(-1,)),
        job(prompt="mill", prediction="wheel", pooling=Pooling.MEAN),
    ):
        with pytest.raises(ParameterError) as raised:
            served.prepare(asked, random.Random(1))
        assert raised.value.param == "prediction"
