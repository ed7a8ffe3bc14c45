"""Prefix index of all workers, against a dictionary of sets."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from millrace.scheduler.jobs.prompt_keys import PromptKeys, read_keys
from millrace.scheduler.placement.prefix_index import PrefixIndex
from millrace.schemas.control import PrefixReport
from millrace.schemas.jobs import Job
from millrace.schemas.pooling import Pooling
from millrace.schemas.prefix import extend_keys, root_key, salt_of
from millrace.schemas.sampling import SamplingParams
from tests.scheduler.integrity import check_integrity
from tests.scheduler.statuses import view

# Keys are hashes, and the index takes them to be.
KEYS = [random.Random(number).getrandbits(60) for number in range(30)]


def packed(keys: Iterable[int]) -> bytes:
    return b"".join(key.to_bytes(8, "little") for key in keys)


def report(
    number: int,
    added: Iterable[int] = (),
    removed: Iterable[int] = (),
    *,
    worker_id: str = "w",
    whole: bool = False,
) -> PrefixReport:
    return PrefixReport(
        worker_id=worker_id,
        model="m",
        number=number,
        whole=whole,
        added=packed(added),
        removed=packed(removed),
    )


def test_the_longest_prefix_counts_not_what_is_behind_a_hole() -> None:
    index = PrefixIndex(100)
    index.apply(report(1, [4, 3, 1], worker_id="a", whole=True))
    index.apply(report(1, [3, 2, 1], worker_id="b", whole=True))
    index.apply(report(1, [9, 2], worker_id="c", whole=True))
    assert index.match(["a", "b", "c", "unheard"], [1, 2, 3, 4]) == {"a": 1, "b": 3}
    assert index.match(["a"], [1, 2, 3, 4]) == {"a": 1}
    assert index.match(["a", "b", "c"], []) == {}
    assert index.match([], [1]) == {}


def test_a_worker_that_was_not_heard_in_full_has_nothing() -> None:
    index = PrefixIndex(100)
    index.apply(report(3, [1]))
    assert index.match(["w"], [1]) == {}, "what it had before is not known"
    index.apply(report(4, [2, 1], whole=True))
    assert index.match(["w"], [1, 2]) == {"w": 2}
    index.apply(report(6, [3]))
    assert index.match(["w"], [1, 2, 3]) == {}, "the fifth is missing"
    index.apply(report(7, [3]))
    assert index.match(["w"], [1, 2, 3]) == {}
    index.apply(report(8, [3, 1], whole=True))
    assert index.match(["w"], [1, 2, 3]) == {"w": 1}
    index.apply(report(8, [2]))
    index.apply(report(2, [2], whole=True))
    assert index.match(["w"], [1, 2, 3]) == {"w": 1}, "said before"


def test_a_worker_that_goes_takes_its_keys_along() -> None:
    index = PrefixIndex(100)
    for worker_id in ("a", "b", "c"):
        index.apply(report(1, [2, 1], worker_id=worker_id, whole=True))
    index.drop("b")
    index.drop("b")
    assert index.match(["a", "b", "c"], [1, 2]) == {"a": 2, "c": 2}
    index.drop("a")
    assert len(index) == 2
    index.apply(report(1, [5], worker_id="d", whole=True))
    assert index.match(["c", "d"], [5]) == {"d": 1}
    check_integrity(index)


def test_each_worker_is_left_its_share_of_what_it_used_last() -> None:
    index = PrefixIndex(8)
    index.apply(report(1, range(6, 0, -1), worker_id="a", whole=True))
    index.apply(report(1, range(16, 10, -1), worker_id="b", whole=True))
    check_integrity(index)
    assert len(index) == 8
    assert index.match(["a"], [6, 5, 4, 3]) == {"a": 4}
    assert index.match(["a"], [2]) == {}
    index.drop("b")
    index.apply(report(2, range(6, 0, -1), worker_id="a", whole=True))
    assert index.match(["a"], range(1, 7)) == {"a": 6}, "there is room again"


def test_a_report_that_cannot_be_read_is_no_report() -> None:
    index = PrefixIndex(8)
    index.apply(report(1, [1], whole=True))
    index.apply(PrefixReport(worker_id="w", model="m", number=2, added=b"123"))
    assert index.match(["w"], [1]) == {}
    check_integrity(index)


class AgainstSets(RuleBasedStateMachine):
    """Workers that report, lose reports and go, and an index with room for all of it."""

    workers = st.sampled_from(["a", "b", "c"])
    keys = st.lists(st.sampled_from(KEYS[:9]), max_size=6, unique=True)

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(1_000)
        self.cached: dict[str, set[int]] = {}
        self.number: dict[str, int] = {}
        self.last_heard: dict[str, int] = {}
        self.believed: dict[str, set[int]] = {}

    @rule(worker_id=workers, added=keys, removed=keys, whole=st.booleans(), lost=st.booleans())
    def tell(
        self, worker_id: str, added: list[int], removed: list[int], whole: bool, lost: bool
    ) -> None:
        cached = self.cached.setdefault(worker_id, set())
        cached -= set(removed)
        cached |= set(added)
        number = self.number[worker_id] = self.number.get(worker_id, 0) + 1
        if lost:
            return
        if whole:
            self.believed[worker_id] = set(cached)
            self.index.apply(report(number, cached, worker_id=worker_id, whole=True))
        else:
            if worker_id in self.believed and number == self.last_heard[worker_id] + 1:
                self.believed[worker_id] = set(cached)
            else:
                self.believed.pop(worker_id, None)
            gone = [key for key in removed if key not in added]
            self.index.apply(report(number, added, gone, worker_id=worker_id))
        self.last_heard[worker_id] = number

    @rule(worker_id=workers)
    def go(self, worker_id: str) -> None:
        """Another life of that name would have another id, and numbers of its own."""
        self.index.drop(worker_id)
        self.cached.pop(worker_id, None)
        self.number.pop(worker_id, None)
        self.believed.pop(worker_id, None)

    @rule(keys=st.lists(st.sampled_from(KEYS[:9]), max_size=6), asked=st.sets(workers))
    def ask(self, keys: list[int], asked: set[str]) -> None:
        expected: dict[str, int] = {}
        for worker_id in asked & self.believed.keys():
            num_blocks = 0
            for key in keys:
                if key not in self.believed[worker_id]:
                    break
                num_blocks += 1
            if num_blocks:
                expected[worker_id] = num_blocks
        assert self.index.match(sorted(asked), keys) == expected

    @invariant()
    def agrees(self) -> None:
        check_integrity(self.index)


AgainstSets.TestCase.settings = settings(max_examples=40, stateful_step_count=30)
TestAgainstSets = AgainstSets.TestCase


@settings(max_examples=50)
@given(
    st.integers(1, 12),
    st.lists(
        st.tuples(
            st.sampled_from("abcd"),
            st.booleans(),
            st.lists(st.sampled_from(KEYS), max_size=10, unique=True),
            st.lists(st.sampled_from(KEYS), max_size=4),
        ),
        max_size=20,
    ),
)
def test_the_index_is_bounded_and_never_wrong(
    max_keys: int, said: list[tuple[str, bool, list[int], list[int]]]
) -> None:
    index = PrefixIndex(max_keys)
    truth: dict[str, set[int]] = {}
    numbers: dict[str, int] = {}
    for worker_id, whole, added, removed in said:
        first = worker_id not in truth
        has = truth.setdefault(worker_id, set())
        added = [key for key in added if key not in removed]
        has -= set(removed)
        has |= set(added)
        numbers[worker_id] = numbers.get(worker_id, 0) + 1
        if whole or first:
            index.apply(report(numbers[worker_id], has, worker_id=worker_id, whole=True))
        else:
            index.apply(report(numbers[worker_id], added, removed, worker_id=worker_id))
        check_integrity(index)
        assert len(index) <= max_keys
        for key in KEYS:
            assert all(key in truth[one] for one in index.match(truth, [key]))


def test_a_long_life_of_changes_takes_no_more_memory_than_its_keys() -> None:
    index = PrefixIndex(10_000)
    index.apply(report(1, whole=True))
    for number in range(2, 2_000):
        index.apply(report(number, added=[number], removed=[number - 1]))
    assert len(index) == 1
    assert len(index._holders["w"].order) < 1_000
    check_integrity(index)


def job(token_ids: tuple[int, ...], **changes: object) -> Job:
    fields: dict[str, object] = {"request_id": "r", "model": "m", "prompt_token_ids": token_ids}
    return Job(**(fields | changes))  # type: ignore[arg-type]


def test_prompts_are_looked_for_as_workers_keep_them() -> None:
    index = PrefixIndex(100)
    tokens = tuple(range(64))
    for worker_id, size, salt in (("a", 16, ""), ("b", 32, ""), ("c", 16, "acme")):
        keys: list[bytes] = []
        extend_keys(keys, root_key(salt), tokens, num_blocks=64 // size, block_size_tokens=size)
        added = b"".join(key[:8] for key in keys)
        index.apply(PrefixReport(worker_id=worker_id, model="m", number=1, whole=True, added=added))
    workers = [
        view("a"),
        view("b", block_size_tokens=32),
        view("c", prefix_salted=True),
        view("d", prefix_salted=True),
    ]
    prompt = PromptKeys.of_job(job(tokens, tenant="acme"))
    # One token is left to compute, so the last block is none that can be used.
    assert index.cached_tokens(workers, prompt) == {"a": 48, "b": 32, "c": 48}
    longer = PromptKeys.of_job(job((*tokens, 7), tenant="other"))
    assert index.cached_tokens(workers, longer) == {"a": 64, "b": 64}
    assert index.cached_tokens(workers, PromptKeys.of_job(job((1,)))) == {}


@pytest.mark.parametrize(
    "changes",
    [{"pooling": Pooling.MEAN}, {"sampling": SamplingParams(prompt_logprobs=1)}],
)
def test_what_has_to_be_computed_whole_is_looked_for_nowhere(changes: dict[str, object]) -> None:
    prompt = PromptKeys.of_job(job(tuple(range(64)), **changes))
    assert prompt.of(16, salted=False) == []


@pytest.mark.parametrize("token_id", [-1, 1 << 32])
def test_ids_that_no_token_has_are_found_nowhere(token_id: int) -> None:
    prompt = PromptKeys.of_job(job((token_id,) * 40))
    assert prompt.of(16, salted=False) == []


@pytest.mark.parametrize("salted", [False, True])
def test_a_prompt_with_a_salt_is_looked_for_under_it(salted: bool) -> None:
    keys: list[bytes] = []
    salt = salt_of("t" if salted else "", "mine")
    extend_keys(keys, root_key(salt), range(64), num_blocks=3, block_size_tokens=16)
    reported = b"".join(key[:8] for key in keys)
    asked = job(tuple(range(64)), tenant="t", cache_salt="mine")
    assert PromptKeys.of_job(asked).of(16, salted=salted) == read_keys(reported)
    assert PromptKeys(range(64), "t").of(16, salted=salted) != read_keys(reported)


def test_keys_of_reports_and_of_prompts_are_the_same_numbers() -> None:
    keys: list[bytes] = []
    extend_keys(keys, root_key(""), range(64), num_blocks=3, block_size_tokens=16)
    reported = b"".join(key[:8] for key in keys)
    assert PromptKeys(range(64), "t").of(16, salted=False) == read_keys(reported)
