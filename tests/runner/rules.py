"""The files that a changed file affects beside its importers: one table of globs.

The Python files that a target matches count as changed, too: test files, and modules that load the
changed file. ``EVERYTHING`` selects all tests.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

EVERYTHING: Final = "everything"

# These tests read the files of the repository as data: any change can affect them.
ALWAYS: Final = ("tests/suite/*", "tests/docs/*")

# The first pattern that matches a path counts. A `*` also matches slashes.
RULES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    # All of our code stands on these packages.
    ("schemas/*", (EVERYTHING,)),
    ("runtime/*", (EVERYTHING,)),
    # The environment of the tests.
    ("pyproject.toml", (EVERYTHING,)),
    ("constraints.txt", (EVERYTHING,)),
    ("tests/conftest.py", (EVERYTHING,)),
    # It orders the tests and chooses slow ones; it changes no result.
    ("tests/runner/measured.json", ()),
    # SQL, Lua, C++, style sheets, pages and data by the modules that load them.
    ("telemetry/columns/*", ("telemetry/store/declaration.py", "tests/deploy/*")),
    ("telemetry/migrations/*", ("telemetry/store/migrate.py", "tests/deploy/*")),
    ("telemetry/queries/*.sql", ("telemetry/http/answers.py", "tests/deploy/*")),
    ("bus/tenancy/*.lua", ("bus/tenancy/*.py",)),
    ("engine/kernels/native/*", ("engine/kernels/*.py",)),
    ("benchmarks/support/machine_rates.cpp", ("benchmarks/support/machine_rates.py",)),
    ("bench/report/*.css", ("bench/report/*.py",)),
    ("gateway/web/*", ("gateway/api/pages.py", "tests/telemetry/test_ops_*")),
    ("registry/models.yaml", ("registry/catalogue.py",)),
    ("registry/demo/*.py", ()),
    ("tools/demo/faq/*", ("tools/demo/faq.py",)),
    ("tools/demo/natural_questions.yaml", ("tools/demo/faq.py",)),
    ("tools/demo/phrasings.yaml", ("tools/demo/augment.py",)),
    ("registry/demo/*", ("registry/demo/*.py",)),
    ("benchmarks/results/*", ("tests/benchmarks/*",)),
    # Data of tests.
    ("tests/telemetry/store/*.tar.xz", ("tests/telemetry/store/*",)),
    ("tests/telemetry/http/drivers/*", ("tests/telemetry/http/test_real_drivers.py",)),
    ("tests/gateway/golden/*", ("tests/gateway/*",)),
    ("tests/gateway/agents/recorded/*", ("tests/gateway/agents/*",)),
    ("tests/clients/ai_sdk.mjs", ("tests/clients/test_agents.py",)),
    ("tests/clients/kafka/*", ("tests/clients/test_kafka.py",)),
    ("tests/clients/generated/*", ("tests/clients/test_generated.py",)),
    ("tests/gateway/request/agents_requests.txt", ("tests/gateway/request/test_unheld_calls.py",)),
    ("tests/support/texts_of_page.js", ("tests/support/chromium.py",)),
    ("telemetry/kafka/apache/jars.sha256", ("telemetry/kafka/apache/jars.py",)),
    ("tests/e2e/jobs/serializers/*", ("tests/e2e/jobs/test_foreign_serializers.py",)),
    ("tests/bus/nats/sent/*", ("tests/bus/nats/test_publishers.py",)),
    (
        "tests/telemetry/http/tools/*",
        (
            "tests/telemetry/http/tools/test_python_tools.py",
            "tests/telemetry/http/tools/test_recorded_tools.py",
        ),
    ),
    ("tests/clients/publishers/*", ("tests/e2e/test_publishers.py",)),
    ("tests/clients/asyncapi/*", ("tests/clients/test_asyncapi_generators.py",)),
    ("tests/docs/banned_words.txt", ()),
    # Documents that tests hold to the code, and files that run the system elsewhere.
    (
        "docs/examples/*",
        ("tests/e2e/api/*", "tests/e2e/test_walk.py", "tests/gateway/api/test_browser_client.py"),
    ),
    (
        "docs/openapi.json",
        (
            "tests/clients/test_generated.py",
            "tests/gateway/test_openapi.py",
            "tests/gateway/api/test_fuzz_http.py",
        ),
    ),
    (
        "docs/asyncapi.json",
        (
            "tests/bus/test_asyncapi.py",
            "tests/clients/test_asyncapi_generators.py",
            "tests/gateway/test_openapi.py",
        ),
    ),
    ("docs/websocket.schema.json", ("tests/gateway/test_openapi.py",)),
    ("docs/bench-report.schema.json", ("tests/cli/bench/test_bench.py",)),
    ("docs/first-request.md", ("tests/e2e/api/test_examples.py",)),
    ("docs/agents.md", ("tests/clients/agents_page.py",)),
    ("docs/tables.md", ("tests/telemetry/queries/test_analytics_page.py",)),
    (
        "docs/analytics*.md",
        (
            "tests/telemetry/queries/*_page.py",
            "tests/telemetry/http/tools/test_python_tools.py",
            "tests/tools/demo/test_faq.py",
        ),
    ),
    ("docs/cost.md", ("tests/telemetry/queries/*_page.py", "tests/tools/demo/test_faq.py")),
    ("docs/*", ("tests/deploy/*", "tests/tools/demo/test_faq.py")),
    ("deploy/engines/*", ("tests/e2e/engines/test_llamacpp.py", "tests/deploy/*")),
    ("deploy/nats/*", ("tests/bus/nats/*", "tests/deploy/*")),
    ("deploy/*", ("tests/deploy/*",)),
    ("docker-compose.yml", ("tests/deploy/*",)),
    ("README.md", ("tests/deploy/test_wheel.py", "tests/e2e/api/test_examples.py")),
    ("*.md", ()),
    ("LICENSE", ()),
    ("zensical.toml", ()),
    ("Makefile", ("tests/suite/test_setup.py",)),
    (".*", ()),
)


def targets(path: str) -> tuple[str, ...] | None:
    """Return the table's targets for a changed path, relative to the repository; None for a path
    that the table lacks."""
    for pattern, found in RULES:
        if fnmatchcase(path, pattern):
            return found
    return None
