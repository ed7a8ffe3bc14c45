"""Statements about Millrace in the demo model's FAQ, against the documents and the code."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any, NamedTuple

import pytest

from millrace.cli.main import build_parser
from tests.support.repository import ROOT
from tools.demo.faq import Pair, load_natural, load_pairs, natural_phrasings, normalise

# Words by which an answer would say that something is not there.
_ABSENT = re.compile(
    r"\b(planned|not yet (?!form)|no .{1,40} yet|in (?:the )?future|later version|road ?map|"
    r"coming soon|to be added|unsupported|not supported|not available|not implemented)\b",
    re.IGNORECASE,
)


class Feature(NamedTuple):
    """Existing feature: its document, its words there, and its words in an answer of the FAQ."""

    document: str
    proof: str
    named: str


FEATURES = (
    Feature("docs/endpoints.md", r"\*\*Resume\.\*\*", r"`Last-Event-ID`"),
    Feature("docs/endpoints.md", r"\*\*Idempotency-Key\.\*\*", r"`Idempotency-Key`"),
    Feature("docs/autoscaling.md", r"--autoscale 1:4", r"`millrace up --autoscale MIN:MAX`"),
    Feature("docs/autoscaling.md", r"KEDA", r"KEDA"),
    Feature("docs/autoscaling.md", r"deploy/kubernetes|[Kk]ubernetes", r"`deploy/kubernetes`"),
    Feature("docs/batches.md", r"client\.batches\.create", r"`/v1/batches`"),
    Feature("docs/batches.md", r"client\.files\.create", r"`/v1/files`"),
    Feature("docs/responses.md", r"POST /v1/responses", r"`/v1/responses`"),
    Feature("docs/responses.md", r"## Conversations|Conversations", r"`/v1/conversations`"),
    Feature("docs/messages.md", r"/v1/messages", r"`/v1/messages`"),
    Feature("docs/sessions.md", r"session_id", r"`session_id`"),
    Feature("docs/tools.md", r"# Tools", r"`tools`"),
    Feature("docs/tools.md", r"server_tools", r"`server_tools`"),
    Feature("docs/thinking.md", r"thinking_token_budget", r"`thinking_token_budget`"),
    Feature("docs/beam-search.md", r"use_beam_search", r"`use_beam_search`"),
    Feature("docs/embeddings.md", r"POST /v1/embeddings", r"`/v1/embeddings`"),
    Feature("docs/embeddings.md", r"POST /v1/rerank", r"`/v1/rerank`"),
    Feature("docs/embeddings.md", r"POST /v1/score", r"`/v1/score`"),
    Feature("docs/embeddings.md", r"POST /classify", r"`/classify`"),
    Feature("docs/adapters.md", r"millrace up .*--adapter", r"`millrace up --adapter"),
    Feature("docs/adapters.md", r"## On a GPU", r"On a GPU set `worker\.engine\.max_adapters`"),
    Feature("docs/gguf.md", r"llama\.cpp", r"GGUF.*llama\.cpp"),
    Feature("docs/engines.md", r"--engine vllm", r"`millrace up --engine vllm"),
    Feature("docs/engines.md", r"SGLang", r"SGLang"),
    Feature("docs/simulated-engine.md", r"simulated", r"--engine simulated"),
    Feature("docs/tenants.md", r"millrace keys create", r"`millrace keys create"),
    Feature("docs/tenants.md", r"requests_per_minute", r"--requests-per-minute"),
    Feature("docs/tenants.md", r"monthly_budget", r"monthly budget"),
    Feature("docs/tenants.md", r"\b429\b", r"\b429\b.*`Retry-After`"),
    Feature("docs/tenants.md", r"GET /v1/limits", r"`?/v1/limits`"),
    Feature("docs/cost.md", r"device_cost", r"`device_cost`"),
    Feature("docs/cost.md", r"--invoice", r"`--invoice`"),
    Feature("docs/analytics.md", r"requests", r"`millrace sql"),
    Feature("docs/tracing.md", r"OpenTelemetry", r"OpenTelemetry"),
    Feature("docs/monitoring.md", r"Grafana", r"Grafana"),
    Feature("docs/security.md", r"# Security", r"`docs/security\.md`"),
    Feature("docs/connections.md", r"TLS", r"TLS"),
    Feature("docs/simulate.md", r"millrace simulate", r"`millrace simulate --trace"),
    Feature("docs/cli.md", r"millrace bench", r"`millrace bench"),
    Feature("docs/cli.md", r"millrace top", r"`millrace top`"),
    Feature("docs/cli.md", r"millrace migrate", r"`millrace migrate`"),
    Feature("docs/endpoints.md", r"storage_full|On a full disk", r"`storage_full`"),
    Feature("docs/structured-output.md", r"response_format", r"`response_format`"),
    Feature("docs/first-request.md", r"/static/millrace\.js", r"`/static/millrace\.js`"),
    Feature("docs/gpu.md", r"kv_cache_dtype: fp8", r"`kv_cache_dtype: fp8`"),
    Feature("docs/cli.md", r"--tensor-parallel 2", r"`millrace up .*--tensor-parallel 2`"),
    Feature("docs/parallelism.md", r"--pipeline-parallel 2", r"`--pipeline-parallel 2`"),
    Feature("docs/speculation.md", r"--speculation ngram", r"`millrace up --speculation ngram`"),
    Feature("docs/speculation.md", r"--speculation eagle3=", r"`eagle3=PATH`"),
    Feature("docs/kv-cache.md", r"--workers prefill:1,decode:2", r"--workers prefill:1,decode:2`"),
    Feature("docs/kv-cache.md", r"`worker\.engine\.disk_cache_path`", r"engine\.disk_cache_path`"),
    Feature("docs/kv-cache.md", r"millrace workers drain", r"`millrace workers drain"),
    Feature("docs/running.md", r"millrace models add", r"`millrace models add"),
    Feature("docs/running.md", r"millrace down", r"`millrace down`"),
    Feature("docs/running.md", r"millrace status", r"`millrace status`"),
    Feature("docs/rollouts.md", r"millrace models promote", r"`millrace models promote"),
    Feature("docs/routing.md", r'model: "auto"', r'`model: "auto"`'),
    Feature("docs/scheduling.md", r"priority", r"`priority`"),
)

# What does not exist, by the pair that says so and the words of the documents that do.
ABSENT = (
    ("gpu_support", "docs/gpu.md", r"No GPU was at hand for this version"),
    ("multi_gpu", "docs/parallelism.md", r"This has not run on GPUs"),
)


@pytest.fixture(scope="module")
def pairs() -> list[Pair]:
    return load_pairs()


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.named)
def test_the_faq_names_what_the_documents_have(feature: Feature, pairs: list[Pair]) -> None:
    text = (ROOT / feature.document).read_text(encoding="utf-8")
    assert re.search(feature.proof, text), f"{feature.document} says it no more"
    assert any(re.search(feature.named, pair.answer, re.DOTALL) for pair in pairs)


def test_no_answer_says_that_something_is_still_to_come(pairs: list[Pair]) -> None:
    assert _ABSENT.search("Automatic scaling is planned; today you choose")
    assert _ABSENT.search("There are no Kubernetes manifests yet.")
    doubtful = {pair.id: pair.answer for pair in pairs if _ABSENT.search(pair.answer)}
    # It speaks of unknown fields of a request.
    assert set(doubtful) == {"e400_param"}


@pytest.mark.parametrize(("pair_id", "document", "words"), ABSENT)
def test_what_is_called_absent_is_absent(
    pair_id: str, document: str, words: str, pairs: list[Pair]
) -> None:
    text = " ".join((ROOT / document).read_text(encoding="utf-8").split())
    assert re.search(words, text), f"{document} says it no more: has {pair_id} become wrong?"
    assert pair_id in {pair.id for pair in pairs}


def _spans(pairs: list[Pair]) -> list[tuple[str, str]]:
    """Return each piece of code in an answer with the pair's id."""
    return [(pair.id, code) for pair in pairs for code in re.findall(r"`([^`]+)`", pair.answer)]


def _options(parser: Any) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def test_commands_and_their_options_exist(pairs: list[Pair]) -> None:
    subparsers = build_parser()._subparsers
    assert subparsers is not None
    commands: dict[str, Any] = dict(subparsers._group_actions[0].choices or {})
    told = [
        (pair_id, shlex.split(code.replace("...", "x")))
        for pair_id, code in _spans(pairs)
        if code.startswith("millrace ")
    ]
    assert len(told) >= 30
    for pair_id, (_, name, *words) in told:
        assert name in commands, f"{pair_id}: millrace {name}"
        parser = commands[name]
        while (
            words
            and parser._subparsers
            and words[0] in parser._subparsers._group_actions[0].choices
        ):
            parser = parser._subparsers._group_actions[0].choices[words.pop(0)]
        options = {word.split("=")[0] for word in words if word.startswith("--")}
        options = {one for one in options if " " not in one}
        assert options <= _options(parser), f"{pair_id}: {options - _options(parser)}"
    [answer] = [pair.answer for pair in pairs if pair.id == "commands"]
    listed = {code.removeprefix("millrace ") for code in re.findall(r"`([^`]+)`", answer)}
    assert listed - {"--help"} == set(commands)


def test_endpoints_exist(pairs: list[Pair]) -> None:
    document = json.loads((ROOT / "docs" / "openapi.json").read_text())
    served = set(document["paths"]) | {"/", "/ops", "/v1/ws", "/static/millrace.js"}
    told = {
        (pair.id, path.rstrip("."))
        for pair in pairs
        for path in re.findall(r"(?<![\w/.}])(/[a-z][a-z0-9_./]*|/(?=`))", pair.answer)
    }
    told = {(pair_id, path) for pair_id, path in told if path != "/reply"}
    assert len(told) >= 25
    for pair_id, path in told:
        assert path in served, f"{pair_id}: {path}"


def test_documents_targets_and_settings_exist(pairs: list[Pair]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    settings = (ROOT / "docs" / "configuration.md").read_text()
    for pair_id, code in _spans(pairs):
        if re.fullmatch(r"(docs|deploy)/[\w./-]+", code):
            assert (ROOT / code).exists(), f"{pair_id}: {code}"
        elif match := re.match(r"make ([a-z-]+)", code):
            assert re.search(rf"^{match[1]}:", makefile, re.MULTILINE), f"{pair_id}: {code}"
        elif re.fullmatch(
            r"(worker|tracing|gateway|scheduler)(\.[a-z_]+)+", code
        ) and not code.endswith("yaml"):
            assert f"`{code}`" in settings, f"{pair_id}: {code}"


def test_newcomers_questions_are_no_training_data(pairs: list[Pair]) -> None:
    assert len(load_natural()) >= 40
    known = {normalise(text) for pair in pairs for text in (*pair.questions, *pair.held_out)}
    assert not natural_phrasings() & known
