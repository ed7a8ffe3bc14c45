"""Jobs that other services publish without a model."""

from __future__ import annotations

import msgspec
import pytest

from millrace.bus.fleet.rollouts import RolloutDirectory
from millrace.bus.job_queue import LeasedJob, TenantQueue
from millrace.registry.requests.job_bodies import read_body
from millrace.registry.rollouts.versions import Versions
from millrace.registry.routing.router import ModelState, Route, Router
from millrace.scheduler.intake.model_choice import ModelChooser, VersionChooser, settle
from millrace.schemas.errors import ParameterError
from millrace.schemas.jobs import ChatMessage, Job, Tier
from millrace.schemas.pooling import Pooling
from tests.scheduler.world import FakeRunningRequests
from tests.support.manual_clock import ManualClock

HARD = "Prove that the wheel turns, step by step."
THERE = ModelState(num_workers=1)


class Models:
    """States of models, which a test may change."""

    def __init__(self) -> None:
        self.states = {"s": THERE, "l": THERE}

    def state_of(self, model: str, _tier: Tier, _tenant: str) -> ModelState:
        return self.states[model]


@pytest.fixture
def models() -> Models:
    return Models()


@pytest.fixture
def router(models: Models) -> ModelChooser:
    routes = Router({"auto": Route(small="s", large="l")})
    versions = VersionChooser(Versions(), RolloutDirectory(None, ManualClock()))
    return ModelChooser(routes, models.state_of, versions)


def _leased(job: Job) -> LeasedJob:
    return LeasedJob(
        job=job, lease="", num_deliveries=1, stream_sequence=1, tenant_queue=TenantQueue.of(job)
    )


def test_a_job_gets_a_model_and_says_what_it_asked_for(router: ModelChooser) -> None:
    job = router.choose(_leased(Job(request_id="r", model="auto", prompt=HARD)))
    assert (job.model, job.model_requested, job.route_reason) == ("l", "auto", "reason")
    messages = (ChatMessage("user", "hi"),)
    asked = Job(request_id="r", model="auto", messages=messages, model_requested="best")
    job = router.choose(_leased(asked))
    assert (job.model, job.model_requested, job.route_reason) == ("s", "best", "short")


def test_what_a_body_asks_counts(router: ModelChooser) -> None:
    body = msgspec.json.encode({"model": "auto", "messages": [{"role": "user", "content": HARD}]})
    job = Job(request_id="r", model="auto", body=body)
    chosen = router.choose(_leased(job), read_body(job))
    assert (chosen.model, chosen.route_reason, chosen.body) == ("l", "reason", body)
    ids = msgspec.json.encode({"model": "auto", "prompt": [1, 2]})
    job = Job(request_id="r", model="auto", body=ids)
    with pytest.raises(ParameterError):
        router.choose(_leased(job), read_body(job))


def test_a_job_with_a_model_is_left_as_it_is(router: ModelChooser) -> None:
    job = Job(request_id="r", model="l", prompt_token_ids=(1,))
    assert router.choose(_leased(job)) is job


@pytest.mark.parametrize(
    ("job", "param"),
    [
        (Job(request_id="r", model="auto", prompt_token_ids=(1,)), "prompt"),
        (Job(request_id="r", model="auto", prompt="x", pooling=Pooling.MEAN), "model"),
    ],
)
def test_what_only_one_model_can_do_is_refused(router: ModelChooser, job: Job, param: str) -> None:
    with pytest.raises(ParameterError) as caught:
        router.choose(_leased(job))
    assert caught.value.param == param


async def test_the_first_choice_holds_for_every_delivery(
    router: ModelChooser, models: Models
) -> None:
    job = Job(request_id="r", model="auto", prompt=HARD)
    index = FakeRunningRequests()
    first = await settle(index, router.choose(_leased(job)))
    models.states["l"] = ModelState()
    changed = router.choose(_leased(job))
    assert (changed.model, changed.route_reason) == ("s", "reason:absent")
    assert await settle(index, changed) == first
    other = _leased(Job(request_id="q", model="auto", prompt=HARD))
    assert await settle(index, router.choose(other)) == router.choose(other)
