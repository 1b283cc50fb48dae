"""The seeded stampede in simulated time: 170 clients within a second, 30 slots."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import dataclass, field

from llm_throttle.scheduling.decisions import Granted, Refused
from llm_throttle.scheduling.policy import Policy, TierPolicy

from .oracle import Visitor
from .room import Room

SEEDED = Policy(
    1,
    30,
    (
        TierPolicy("premium", 30, 0, 100, 60_000, 100, 8),
        TierPolicy("pro", 20, 0, 10, 45_000, 100, 8),
        TierPolicy("free", 15, 0, 3, 12_000, 200, 8),
        TierPolicy("guest", 5, 0, 1, 8_000, 100, 2),
    ),
    queue_depth=400,
)
CROWD = {"free": 100, "guest": 40, "premium": 20, "pro": 10}
SERVICE_MS = 1_500


def visitors(seed: int, *, is_crowd_first: bool = False) -> list[Visitor]:
    """Everybody, uniformly over a second, in random order or the crowd before the others."""
    rng = random.Random(seed)
    tiers = [tier for tier, count in CROWD.items() for _ in range(count)]
    rng.shuffle(tiers)
    if is_crowd_first:
        tiers.sort(key=lambda tier: tier not in ("free", "guest"))
    times = sorted(rng.randrange(1_000) for _ in tiers)
    return [
        Visitor(
            at,
            tier,
            f"{tier}-{index}-",
            round(SERVICE_MS * rng.uniform(0.5, 1.5)),
            SEEDED.by_slug[tier].wait_budget_ms,
        )
        for index, (at, tier) in enumerate(zip(times, tiers, strict=True))
    ]


@dataclass
class Outcome:
    """Who was granted after how long, who was refused why, and the most calls at once."""

    waits: dict[str, list[int]] = field(default_factory=lambda: {tier: [] for tier in CROWD})
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    peak: int = 0
    left: tuple[int, int] = (0, 0)
    late: int = 0

    def granted(self, tier: str) -> int:
        return len(self.waits[tier])


def run(crowd: list[Visitor]) -> Outcome:
    """Let the crowd meet the scheduler; beats come every second, ticks with them."""
    room, outcome = Room(SEEDED), Outcome()
    start = room.now
    by_ticket = {visitor.user: visitor for visitor in crowd}
    events = [(start + visitor.at, 0, visitor.user) for visitor in crowd]
    events += [(start + second * 1_000, 2, "") for second in range(1, 120)]
    heapq.heapify(events)
    heard = 0
    while events:
        room.now, kind, ticket = heapq.heappop(events)
        if kind == 0:
            answer = room.ask(ticket, by_ticket[ticket].tier)
            if isinstance(answer, Refused):
                outcome.refused[by_ticket[ticket].tier, answer.reason] += 1
            started = [ticket] if isinstance(answer, Granted) else []
        elif kind == 1:
            started = room.release(ticket)
        else:
            room.beat()
            started = [note.ticket for note in room.reply.notices if note.kind == "granted"]
        for note in room.notices[heard:]:
            if note.kind == "refused":
                outcome.refused[by_ticket[note.ticket].tier, note.reason] += 1
        heard = len(room.notices)
        for ticket in started:
            visitor = by_ticket[ticket]
            wait = room.now - start - visitor.at
            outcome.waits[visitor.tier].append(wait)
            outcome.late += wait > visitor.patience
            heapq.heappush(events, (room.now + visitor.takes, 1, ticket))
        outcome.peak = max(outcome.peak, len(room.held))
    outcome.left = room.counts
    return outcome
