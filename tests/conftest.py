"""What most tests need: a waiting room with a policy, over each backend."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis
from asgiref.sync import sync_to_async
from django.db import connections

from llm_throttle import worker
from llm_throttle.identity import Identity
from llm_throttle.scheduling.commands import SetPolicy
from llm_throttle.scheduling.policy import Policy, TierPolicy
from llm_throttle.signals import policy_edited

SETTINGS = {
    "BEAT": 0.2,
    "WORKER_TTL": 2.0,
    "RECOVERY_WINDOW": 0,
    "POLICY_MAX_AGE": 3600,
    "BREAKER_INTERVAL": 0.2,
}
"""Quick beats, so that what a beat repairs is seen soon; no recovery, as one test is one worker."""

GOLD = TierPolicy("gold", cap=2, reserved=1, weight=10, wait_budget_ms=30_000, queue_depth=20)
FREE = TierPolicy("free", cap=2, weight=1, wait_budget_ms=10_000, queue_depth=50)

Room = Callable[..., None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests in a browser a second try: on a busy machine a page is late now and then.

    No other test has one. An overrun or a lost slot is a race: seen once, it is a fault.
    """
    for item in items:
        if item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.fixture(params=["locmem", "redis"])
def backend(request: pytest.FixtureRequest, settings) -> Iterator[str]:
    """Run a test over both backends, each time from an empty store."""
    settings.LLM_THROTTLE = SETTINGS | {
        "CACHE": "default" if request.param == "redis" else "locmem"
    }
    if request.param == "redis":
        with redis.from_url(os.environ["REDIS_URL"]) as client:
            client.flushdb()
    worker.reset()
    yield request.param
    worker.reset()


@pytest.fixture
def room(backend: str) -> Room:
    """Set the policy of the upstream ``sim``."""
    versions = iter(range(1, 1000))

    def set_policy(capacity: int = 2, *tiers: TierPolicy, **limits: int) -> None:
        policy = Policy(next(versions), capacity, tiers or (GOLD, FREE), **limits)
        worker.current().call("sim", SetPolicy(policy))

    set_policy()
    return set_policy


@pytest.fixture
def flow_by_header(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow is in a header, so that no view reads the database."""

    def identify(caller: Any) -> Identity:
        return Identity(caller.request.headers.get("X-Flow", "user:9"), "gold")

    async def aidentify(caller: Any) -> Identity:
        return identify(caller)

    monkeypatch.setattr("llm_throttle.guards.aidentify", aidentify)
    monkeypatch.setattr("llm_throttle.guards.identify", identify)
    monkeypatch.setattr("llm_throttle.admission.identify", identify)


@pytest.fixture
def flow_by_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flow is in the socket's scope, so that no consumer reads the database."""

    async def aidentify(caller: Any) -> Identity:
        user = caller.scope.get("user")
        return Identity(f"user:{user.pk}" if user else "ip:1", "gold")

    monkeypatch.setattr("llm_throttle.consumers.aidentify", aidentify)


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, int]]:
    """The announced edits in order, (slug, deleted, version), with nobody else listening.

    The store may remember higher versions from other tests, and who publishes there would answer
    with an edit of its own.
    """
    heard: list[tuple[str, bool, int]] = []

    def hear(*, upstream: str, deleted: bool, version: int, **kwargs: object) -> None:
        heard.append((upstream, deleted, version))

    monkeypatch.setattr(policy_edited, "receivers", [])
    policy_edited.connect(hear, weak=False)
    return heard


@pytest.fixture
async def closing_connections() -> AsyncIterator[None]:
    """Close what async queries opened in their thread: PostgreSQL drops no database in use."""
    yield
    await sync_to_async(connections.close_all)()
