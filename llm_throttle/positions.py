"""Where a waiter stands, as it is shown: told only when it changes, never back without a cause."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

from .scheduling.decisions import Place, Places


@dataclass(frozen=True, slots=True)
class Position:
    """What a waiter is shown: ``position`` 1 is next, ``eta`` from and to in whole seconds.

    ``ahead`` is the truth. ``position`` is its running minimum, because round-robin may let a
    newcomer pass; where it moves back, ``cause`` says why (``edit``, ``recovery``).
    """

    ticket: str
    upstream: str
    flow: str
    position: int
    ahead: int
    eta: tuple[int, int]
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Left:
    """A ticket that is no longer in line; ``was_seen``: it was when it was looked for before."""

    ticket: str
    upstream: str
    is_granted: bool
    was_seen: bool


News = Position | Left


@dataclass(slots=True)
class Look:
    """What one look found; ``recoveries`` counts those that have ended since the first look."""

    upstream: str
    version: int = 0
    is_recovering: bool = False
    recoveries: int = 0
    asked: set[str] = field(default_factory=set)
    places: dict[str, Place] = field(default_factory=dict)
    granted: set[str] = field(default_factory=set)
    by_flow: defaultdict[str, list[Place]] = field(default_factory=lambda: defaultdict(list))

    def add(self, answer: Places) -> None:
        self.version = answer.version
        self.is_recovering |= answer.is_recovering
        self.granted.update(answer.granted)
        for place in answer.places:
            if place.ticket not in self.places:
                self.places[place.ticket] = place
                self.by_flow[place.flow].append(place)


@dataclass(slots=True)
class Shown:
    """What a subscriber was told of one ticket last, and under which circumstances."""

    position: int
    version: int
    recoveries: int
    is_here: bool = True
    told: Position | None = None

    def update(self, place: Place, look: Look) -> Position | None:
        """What to tell now; None where nothing is new."""
        self.is_here = True
        cause = self._cause(look)
        position = place.ahead + 1
        is_back = position > self.position
        if not cause:
            position = min(position, self.position)
        self.position, self.version, self.recoveries = position, look.version, look.recoveries
        shown = (place.ticket, look.upstream, place.flow, position, place.ahead, _seconds(place))
        news = Position(*shown, cause if is_back else "")
        if self.told is not None and news == replace(self.told, cause=""):
            return None
        self.told = news
        return news

    def _cause(self, look: Look) -> str:
        if look.recoveries != self.recoveries:
            return "recovery"
        return "edit" if look.version != self.version else ""


def _seconds(place: Place) -> tuple[int, int]:
    """The range in whole seconds; rounded both ways alike, so that it stays as wide as it is."""
    return (place.low_ms + 500) // 1000, (place.high_ms + 500) // 1000
