"""The threads of a sync server: a bound on how many wait, and who makes room for whom."""

from __future__ import annotations

import contextvars
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from llm_throttle import admit, sync_waiters, worker
from llm_throttle.admission import snapshot
from llm_throttle.exceptions import Refused
from llm_throttle.identity import Identity
from llm_throttle.models import Tier, TierLimit, Upstream

from .conftest import SETTINGS
from .waiting_room import eventually, is_empty

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def full(settings: Any) -> Iterator[None]:
    """One slot, which is taken; two threads may wait."""
    settings.LLM_THROTTLE = SETTINGS | {"CACHE": "locmem", "SYNC_WAITERS": 2}
    upstream = Upstream.objects.create(slug="sim", capacity=1)
    for slug, weight in {"gold": 10, "free": 1}.items():
        tier = Tier.objects.create(slug=slug)
        TierLimit.objects.create(
            upstream=upstream, tier=tier, weight=weight, wait_budget=10, depth_per_user=10
        )
    worker.reset()
    holder = admit("sim", identity=Identity("holder", "gold"))
    context = contextvars.Context()
    context.run(holder.__enter__)
    yield
    context.run(holder.__exit__, None, None, None)
    assert eventually(is_empty)
    worker.reset()


class Caller(threading.Thread):
    def __init__(self, tier: str) -> None:
        super().__init__(daemon=True)
        self.tier = tier
        self.outcome = ""
        self.took = 0.0
        self.start()

    def run(self) -> None:
        started_at = time.monotonic()
        try:
            with admit("sim", identity=Identity(f"user:{self.name}", self.tier)):
                self.outcome = "served"
        except Refused as refusal:
            self.outcome = refusal.reason
        finally:
            self.took = time.monotonic() - started_at
            from django.db import connections

            connections.close_all()


def waiting(number: int) -> bool:
    return eventually(lambda: snapshot("sim").waiting == number)


def test_beyond_the_bound_who_is_not_heavier_is_refused_at_once() -> None:
    early = [Caller("free")]
    assert waiting(1)
    early.append(Caller("free"))
    assert waiting(2)
    late = Caller("free")
    late.join(3)
    assert late.outcome == "queue_full"
    assert late.took < 2
    assert [caller.outcome for caller in early] == ["", ""]
    assert snapshot("sim").waiting == 2


def test_the_last_of_the_lightest_makes_room_for_a_heavier_one() -> None:
    first, second = Caller("free"), None
    assert waiting(1)
    second = Caller("free")
    assert waiting(2)
    gold = Caller("gold")
    second.join(3)
    assert second.outcome == "queue_full"
    assert (first.outcome, gold.outcome) == ("", "")
    assert waiting(2)
    another = Caller("gold")
    first.join(3)
    assert first.outcome == "queue_full"
    third = Caller("gold")
    third.join(3)
    assert third.outcome == "queue_full", "nobody lighter is left"
    assert (gold.outcome, another.outcome) == ("", "")


def test_whoever_need_not_wait_is_not_counted(settings: Any) -> None:
    settings.LLM_THROTTLE |= {"SYNC_WAITERS": 0}
    upstream = Upstream.objects.get()
    upstream.capacity = 2
    upstream.save()
    caller = Caller("free")
    caller.join(3)
    assert caller.outcome == "served"


def test_a_place_is_free_again_when_its_waiter_has_gone(settings: Any) -> None:
    settings.LLM_THROTTLE |= {"SYNC_WAITERS": 1}
    TierLimit.objects.filter(tier__slug="free").update(wait_budget=1)
    Upstream.objects.get().save()
    for _ in range(2):
        caller = Caller("free")
        caller.join(4)
        assert caller.outcome == "wait_expired"


# How many there are


@pytest.fixture
def gunicorn(monkeypatch: pytest.MonkeyPatch, settings: Any) -> pytest.MonkeyPatch:
    settings.LLM_THROTTLE |= {"SYNC_WAITERS": None}
    monkeypatch.setitem(sys.modules, "gunicorn", sys)
    monkeypatch.delenv("GUNICORN_CMD_ARGS", raising=False)
    monkeypatch.setattr(sys, "argv", ["gunicorn"])
    return monkeypatch


@pytest.mark.parametrize(
    ("arguments", "most"),
    [
        (["--threads", "16"], 8),
        (["--threads=5"], 2),
        (["-k", "gthread", "--threads", "1"], 1),
        ([], None),
    ],
)
def test_half_of_gunicorns_threads_may_wait(
    gunicorn: pytest.MonkeyPatch, arguments: list[str], most: int | None
) -> None:
    gunicorn.setattr(sys, "argv", ["gunicorn", *arguments])
    assert sync_waiters.bound() == most


def test_gunicorns_variable_counts_too(gunicorn: pytest.MonkeyPatch) -> None:
    gunicorn.setenv("GUNICORN_CMD_ARGS", "-w 2 --threads 12")
    assert sync_waiters.bound() == 6


def test_without_gunicorn_only_the_setting_counts(settings: Any) -> None:
    assert sync_waiters.bound() == 2
    settings.LLM_THROTTLE |= {"SYNC_WAITERS": None}
    assert sync_waiters.bound() is None
