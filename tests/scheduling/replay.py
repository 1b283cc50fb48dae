"""A replay in simulated time: who comes when and takes how long, and what it is told meanwhile."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from llm_throttle.positions import _seconds
from llm_throttle.scheduling.commands import Positions
from llm_throttle.scheduling.decisions import Granted, Places, Refused
from llm_throttle.scheduling.policy import Policy

from .room import Room

PUSH_MS = 500


class Visit(NamedTuple):
    at: int
    tier: str
    user: str
    takes: int


class Told(NamedTuple):
    """One message to a waiter: when, and the range in seconds."""

    at: int
    low: int
    high: int


Hold = Callable[[random.Random], int]


def even(rng: random.Random) -> int:
    """Around 3 s, from half to half as much again."""
    return round(3_000 * rng.uniform(0.5, 1.5))


def mixed(rng: random.Random) -> int:
    """Short, middle and long calls, around 3 s on average."""
    return round(rng.choice([700, 2_000, 6_300]) * rng.uniform(0.8, 1.2))


def skewed(rng: random.Random) -> int:
    """Most are short, a few are very long; around 3 s on average."""
    return round(3_000 * rng.lognormvariate(-0.245, 0.7))


def stream(
    rng: random.Random, rules: Policy, hold: Hold, load: float, count: int, users: int = 10_000
) -> list[Visit]:
    """Visits at random instants, at ``load`` times what the capacity can serve."""
    rate = rules.capacity / 3_000 * load
    at, visits = 0.0, []
    for _ in range(count):
        at += rng.expovariate(rate)
        tier = rng.choice(rules.tiers).slug
        visits.append(Visit(round(at), tier, f"{tier}{rng.randrange(users)}-", hold(rng)))
    return visits


def crowds(rng: random.Random, rules: Policy, hold: Hold, size: int, count: int) -> list[Visit]:
    """Crowds within a second each, apart by a little more than it takes to serve one."""
    gap = round(size * 3_000 / rules.capacity * 1.2)
    visits = []
    for number in range(count):
        tier = rng.choice(rules.tiers).slug
        at = number // size * gap + rng.randrange(1_000)
        visits.append(Visit(at, tier, f"{tier}{number}-", hold(rng)))
    return sorted(visits)


@dataclass
class Replay:
    """Let visits meet a waiting room that beats every second and tells positions twice."""

    rules: Policy
    visits: list[Visit]
    granted_at: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    told: dict[str, list[Told]] = field(default_factory=dict)

    def run(self) -> Replay:
        self.room = Room(self.rules)
        self._start = self.room.now + 2_000
        self._heard = 0
        self._events = [(self._start + v.at, 0, index) for index, v in enumerate(self.visits)]
        heapq.heapify(self._events)
        heapq.heappush(self._events, (self.room.now + 1_000, 2, 0))
        heapq.heappush(self._events, (self.room.now + PUSH_MS, 3, 0))
        self._open = len(self.visits)
        while self._open:
            self.room.now, kind, index = heapq.heappop(self._events)
            (self._arrive, self._leave, self._beat, self._push)[kind](index)
            self._hear()
        return self

    def _arrive(self, index: int) -> None:
        visit = self.visits[index]
        answer = self.room.ask(f"{index:06d}", visit.tier, flow=visit.user)
        if isinstance(answer, Granted):
            self._let_in(f"{index:06d}")
        elif isinstance(answer, Refused):
            self._turn_away(f"{index:06d}", answer.reason)

    def _leave(self, index: int) -> None:
        self.room.release(f"{index:06d}")
        self._open -= 1

    def _beat(self, index: int) -> None:
        self.room.beat()
        heapq.heappush(self._events, (self.room.now + 1_000, 2, 0))

    def _push(self, index: int) -> None:
        """Tell every waiter where it stands, if that is new."""
        heapq.heappush(self._events, (self.room.now + PUSH_MS, 3, 0))
        answer = self.room.say(Positions(tuple(self.room.waiting)))
        assert isinstance(answer, Places)
        for place in answer.places:
            messages = self.told.setdefault(place.ticket, [])
            told = Told(self.room.now, *_seconds(place))
            if not messages or messages[-1][1:] != told[1:]:
                messages.append(told)

    def _hear(self) -> None:
        for notice in self.room.notices[self._heard :]:
            if notice.kind == "granted":
                self._let_in(notice.ticket)
            elif notice.kind == "refused":
                self._turn_away(notice.ticket, notice.reason)
        self._heard = len(self.room.notices)

    def _let_in(self, ticket: str) -> None:
        if ticket not in self.granted_at:
            self.granted_at[ticket] = self.room.now
            takes = self.visits[int(ticket)].takes
            heapq.heappush(self._events, (self.room.now + takes, 1, int(ticket)))

    def _turn_away(self, ticket: str, reason: str) -> None:
        self.refused[ticket] = reason
        self._open -= 1

    def judged(self) -> Iterator[tuple[Told, float]]:
        """Each message to those who were let in, and how many seconds it still was."""
        for ticket, messages in self.told.items():
            if ticket in self.granted_at:
                for told in messages:
                    yield told, (self.granted_at[ticket] - told.at) / 1_000
