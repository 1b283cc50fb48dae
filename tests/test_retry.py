"""``Retry-After``: its form over every view, and whether it is worth while to obey it. HTTP-01."""

from __future__ import annotations

import contextvars
import heapq
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from django.http import HttpResponse
from django.test import RequestFactory
from django.views import View
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView

from llm_throttle import admit, retry
from llm_throttle.identity import Identity
from llm_throttle.rest_framework import EventStreamRenderer
from llm_throttle.retry import retry_after
from llm_throttle.scheduling.decisions import Granted, Refused
from llm_throttle.scheduling.policy import TierPolicy
from llm_throttle.views import ThrottledChatMixin, throttled

from .conftest import Room as SetRoom
from .scheduling.room import Room
from .scheduling.stampede import SEEDED, SERVICE_MS

# The form


class Chat(ThrottledChatMixin, View):
    upstream = "sim"

    def get(self, request: Any) -> HttpResponse:
        raise AssertionError


class Rest(ThrottledChatMixin, APIView):
    upstream = "sim"
    renderer_classes = (*APIView.renderer_classes, EventStreamRenderer)

    def get(self, request: Any) -> Response:
        raise AssertionError


@throttled("sim")
def function(request: Any) -> HttpResponse:
    raise AssertionError


VIEWS = {"view": Chat.as_view(), "REST framework": Rest.as_view(), "function": function}

ESTIMATES = [0, 200, 999, 1000, 59_500, 600_000]
"""Milliseconds; 0 = nothing is known."""


@pytest.fixture
def full(room: SetRoom, settings: Any) -> Iterator[None]:
    """The only slot is taken, nobody may wait, everybody is gold."""
    settings.LLM_THROTTLE |= {
        "FLOW_RESOLVER": "tests.test_retry.flow",
        "TIER_RESOLVER": "tests.test_retry.tier",
    }
    room(1, TierPolicy("gold", cap=1, depth_per_user=1, queue_depth=0, wait_budget_ms=1000))
    holder = admit("sim", identity=Identity("ann", "gold"))
    context = contextvars.Context()
    context.run(holder.__enter__)
    yield
    context.run(holder.__exit__, None, None, None)


def flow(caller: Any) -> str:
    return str(caller.request.headers["X-Flow"])


def tier(caller: Any) -> str:
    return "gold"


@pytest.fixture(autouse=True)
def no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_throttle.identity._known", lambda slug, caller: slug)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize(
    ("who", "reason", "status"), [("ann", "user_depth", 429), ("bob", "tier_full", 429)]
)
@pytest.mark.parametrize("estimate", ESTIMATES)
def test_header_and_body_say_the_same_whole_number(
    name: str, who: str, reason: str, status: int, estimate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    guess = retry._estimate
    monkeypatch.setattr(retry, "_estimate", lambda reason, ms: guess(reason, estimate))
    make = APIRequestFactory() if name == "REST framework" else RequestFactory()
    response = VIEWS[name](make.get("/", headers={"X-Flow": who}))
    if hasattr(response, "render"):
        response.render()
    body = json.loads(response.content)
    assert (response.status_code, body["reason"], body["status"]) == (status, reason, status)
    header = response["Retry-After"]
    assert header.isascii()
    assert header.isdigit(), "neither a fraction nor a sign: clients read whole seconds or dates"
    assert 1 <= int(header) <= 60
    assert int(header) == body["retry_after"]
    assert int(header) >= min(estimate / 1000, 40)
    assert set(body) == {
        "type",
        "title",
        "status",
        "detail",
        "reason",
        "upstream",
        "tier",
        "retry_after",
    }


@pytest.mark.usefixtures("full")
def test_an_event_stream_is_told_in_its_one_event() -> None:
    request = APIRequestFactory().get("/", headers={"X-Flow": "ann", "Accept": "text/event-stream"})
    response = Rest.as_view()(request).render()
    assert response.status_code == 429
    kind, data, *_ = response.content.decode().split("\n")
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["retry_after"] == int(response["Retry-After"])


@pytest.mark.usefixtures("full")
def test_those_refused_together_are_not_sent_back_together() -> None:
    told = {
        VIEWS["view"](RequestFactory().get("/", headers={"X-Flow": f"u{n}"}))["Retry-After"]
        for n in range(40)
    }
    assert len(told) > 2


# Whether obeying it is worth while


@dataclass
class Herd:
    """Clients who are refused, come back once as they were told, and what became of them."""

    rng: random.Random
    room: Room = field(default_factory=lambda: Room(SEEDED))
    events: list[tuple[int, int, str]] = field(default_factory=list)
    tiers: dict[str, str] = field(default_factory=dict)
    returns: dict[str, int] = field(default_factory=dict)
    accepted: set[str] = field(default_factory=set)
    _heard: int = 0

    def come(self, within_ms: int, **crowd: int) -> Herd:
        start = self.room.now
        for slug, count in crowd.items():
            for number in range(count):
                client = f"{slug}-{number}-"
                self.tiers[client] = slug
                self._at(start + self.rng.randrange(within_ms), 0, client)
        for second in range(1, 300):
            self._at(start + second * 1000, 2, "")
        while self.events:
            self._next()
        return self

    def _at(self, when: int, kind: int, client: str) -> None:
        heapq.heappush(self.events, (when, kind, client))

    def _next(self) -> None:
        self.room.now, kind, ticket = heapq.heappop(self.events)
        started = []
        if kind == 0:
            answer = self.room.ask(ticket, self.tiers[ticket.removesuffix("again")])
            if isinstance(answer, Refused):
                self._refused(ticket, answer.reason, answer.retry_ms)
            elif isinstance(answer, Granted):
                started = [ticket]
        elif kind == 1:
            started = self.room.release(ticket)
        else:
            self.room.beat()
            started = [n.ticket for n in self.room.reply.notices if n.kind == "granted"]
        for notice in self.room.notices[self._heard :]:
            if notice.kind == "refused":
                self._refused(notice.ticket, notice.reason, notice.retry_ms)
        self._heard = len(self.room.notices)
        for ticket in started:
            if ticket.endswith("again"):
                self.accepted.add(ticket.removesuffix("again"))
            self._at(self.room.now + round(SERVICE_MS * self.rng.uniform(0.5, 1.5)), 1, ticket)

    def _refused(self, ticket: str, reason: str, retry_ms: int) -> None:
        if ticket.endswith("again"):
            return
        wait = retry_after(reason, retry_ms)
        assert wait is not None
        self.returns[ticket] = self.room.now + wait * 1000
        self._at(self.returns[ticket], 0, ticket + "again")

    @property
    def share_accepted(self) -> float:
        return len(self.accepted) / len(self.returns)

    def peak_over_mean(self, bucket_ms: int) -> float:
        """The fullest stretch of time of the second wave against its mean."""
        times = sorted(self.returns.values())
        buckets = Counter((time - times[0]) // bucket_ms for time in times)
        span = (times[-1] - times[0]) / bucket_ms + 1
        return max(buckets.values()) / (len(times) / span)


@pytest.fixture(params=range(5))
def rng(request: pytest.FixtureRequest) -> random.Random:
    random.seed(request.param)
    return random.Random(request.param)


@pytest.mark.parametrize(
    "crowd",
    [
        {"free": 100, "guest": 40, "premium": 20, "pro": 10},
        {"free": 300},
        {"free": 600},
        {"free": 400, "guest": 160, "premium": 80, "pro": 40},
    ],
    ids=["the stampede", "300 free", "600 free", "the stampede times four"],
)
def test_who_obeys_once_is_accepted(rng: random.Random, crowd: dict[str, int]) -> None:
    herd = Herd(rng).come(1000, **crowd)
    assert herd.returns
    assert herd.share_accepted >= 0.7


@pytest.mark.parametrize("has_measured", [False, True], ids=["at first", "once measured"])
@pytest.mark.parametrize(
    "crowd",
    [{"free": 300}, {"free": 400}, {"free": 600}, {"premium": 300}, {"free": 600, "premium": 100}],
    ids=["300 free", "400 free", "600 free", "300 premium", "600 free, 100 premium"],
)
def test_the_second_wave_is_flat(crowd: dict[str, int], has_measured: bool) -> None:
    """No peak above twice the mean, in stretches of five seconds and on average over ten herds.

    Of single seconds or herds chance alone makes some twice as full.
    """
    peaks = []
    for seed in range(10):
        random.seed(seed)
        herd = Herd(random.Random(seed))
        if has_measured:
            herd.come(5000, pro=60)
        herd.come(1000, **crowd)
        assert len(herd.returns) > 100
        peaks.append(herd.peak_over_mean(5000))
    assert round(sum(peaks) / len(peaks), 1) <= 2, peaks


def test_it_is_far_flatter_than_the_first(rng: random.Random) -> None:
    """Also of a herd that is four times what the slots can serve within a wait budget."""
    herd = Herd(rng).come(1000, free=400, guest=160, premium=80, pro=40)
    first_per_second = 680
    times = [time // 1000 for time in herd.returns.values()]
    assert max(Counter(times).values()) < first_per_second / 15
