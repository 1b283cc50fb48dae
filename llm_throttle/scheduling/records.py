"""What the waiting room remembers of a ticket, a flow and a worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """Where a ticket is in its life (PROTOCOL §2; the diagram is in docs/protocol.md)."""

    WAITING = "waiting"
    PARKED = "parked"  # waiting, but its worker is silent: keeps its place, is not granted
    AWAY = "away"  # waiting, but its client has gone: keeps its place, is not granted
    GRANTED = "granted"
    REVOKING = "revoking"
    DRAINING = "draining"
    ENDED = "ended"  # a tombstone: late news of this ticket must not bring it back


IN_LINE = frozenset({State.WAITING, State.PARKED, State.AWAY})
IN_FLIGHT = frozenset({State.GRANTED, State.REVOKING, State.DRAINING})


@dataclass(slots=True)
class Ticket:
    """One request, from queue to release.

    ``seq`` is its owner's seq at its last change; ``order_*`` place it within its turn.
    ``due_at`` is the one instant at which something happens to it by itself: its deadline, the
    end of its hold, of its drain or of its tombstone; 0 = nothing will.
    """

    id: str
    state: State
    worker: str
    seq: int
    tier: str = ""
    flow: str = ""
    due_at: int = 0
    order_at: int = 0
    order_worker: str = ""
    order_seq: int = 0
    turn: int = 0
    lap: int = 0
    deadline_at: int = 0
    granted_at: int = 0
    is_confirmed: bool = False
    named_in: int = 0
    is_known: bool = False

    @property
    def order(self) -> tuple[int, str, int]:
        return (self.order_at, self.order_worker, self.order_seq)

    @property
    def key(self) -> tuple[int, int, int, str, int, str]:
        """Its place in the line of its tier."""
        return (self.turn, self.lap, *self.order, self.id)


@dataclass(slots=True)
class Flow:
    """One user's tickets over all tiers of the upstream: held, and in line by tier."""

    held: list[str] = field(default_factory=list)
    lines: dict[str, list[str]] = field(default_factory=dict)
    away: list[str] = field(default_factory=list)

    @property
    def depth(self) -> int:
        return sum(map(len, self.lines.values())) - len(self.away) + len(self.held)


@dataclass(slots=True)
class Worker:
    """One process. ``beat_seq`` and ``past_beat_seq`` are the seqs of its last two beats."""

    id: str
    beat_at: int
    label: str = ""
    seq: int = 0
    beat_seq: int = 0
    past_beat_seq: int = 0
    mismatches: int = 0
    is_suspect: bool = False
    is_dead: bool = False
    has_left: bool = False
    has_parked: bool = False  # it is back, and some of its tickets are parked still
