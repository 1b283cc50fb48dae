"""What fair would be, worked out the slow and obvious way.

Shares no code with the scheduler and knows nothing of passes, strides, turns or laps: tiers take
slots in proportion to their weights because exact fractions of what each has had are compared,
and users take turns because rounds are written down one after the other.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction


def shares(weights: Mapping[str, int], grants: int) -> dict[str, Fraction]:
    """What each tier is due of so many grants while all of them always have waiters."""
    total = sum(weights.values())
    return {tier: Fraction(grants * weight, total) for tier, weight in weights.items()}


def turns(requests: Iterable[str]) -> Iterator[str]:
    """The users in the order in which they are served: one request of each per round.

    Within a round, who asked first for what is served in it comes first.
    """
    rounds: list[list[str]] = []
    for user in requests:
        for users in rounds:
            if user not in users:
                users.append(user)
                break
        else:
            rounds.append([user])
    return itertools.chain.from_iterable(rounds)


@dataclass(frozen=True)
class Visitor:
    """One request: when it comes, how long its call takes, how long it would wait (all in ms)."""

    at: int
    tier: str
    user: str
    takes: int
    patience: int


@dataclass
class Line:
    """One tier of the ideal waiting room."""

    weight: int
    cap: int
    held: int = 0
    had: Fraction = Fraction(0)
    ring: deque[deque[Visitor]] = field(default_factory=deque)

    def join(self, visitor: Visitor) -> None:
        for own in self.ring:
            if own[0].user == visitor.user:
                own.append(visitor)
                return
        self.ring.append(deque([visitor]))

    def give_up(self, now: int) -> None:
        kept = ([v for v in own if v.at + v.patience > now] for own in self.ring)
        self.ring = deque(deque(own) for own in kept if own)

    def take(self) -> Visitor:
        own = self.ring.popleft()
        visitor = own.popleft()
        if own:
            self.ring.append(own)
        return visitor


def ideal_waits(
    visitors: Sequence[Visitor], capacity: int, tiers: Mapping[str, tuple[int, int]]
) -> dict[Visitor, int | None]:
    """How long each visitor waits in an ideal room, None = longer than it would.

    ``tiers`` maps a name to (weight, cap). Every free slot goes to the tier that, for its weight,
    has had the least since it last had nobody waiting.
    """
    lines = {tier: Line(weight, cap) for tier, (weight, cap) in tiers.items()}
    waits: dict[Visitor, int | None] = dict.fromkeys(visitors)
    ends: list[tuple[int, int, str]] = []
    coming = deque(sorted(visitors, key=lambda visitor: visitor.at))
    while coming or ends:
        now = min([visitor.at for visitor in list(coming)[:1]] + [end[0] for end in ends[:1]])
        while ends and ends[0][0] <= now:
            lines[heapq.heappop(ends)[2]].held -= 1
        while coming and coming[0].at <= now:
            visitor = coming.popleft()
            line = lines[visitor.tier]
            if not line.ring:
                busy = [other.had for other in lines.values() if other.ring]
                line.had = max([line.had, *([min(busy)] if busy else [])])
            line.join(visitor)
        for line in lines.values():
            line.give_up(now)
        while sum(line.held for line in lines.values()) < capacity:
            able = [line for line in lines.values() if line.ring and line.held < line.cap]
            if not able:
                break
            line = min(able, key=lambda line: (line.had, -line.weight))
            visitor = line.take()
            line.held += 1
            line.had += Fraction(1, line.weight)
            waits[visitor] = now - visitor.at
            heapq.heappush(ends, (now + visitor.takes, id(visitor), visitor.tier))
    return waits
