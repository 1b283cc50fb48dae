"""What stands in a roster: requests that wait, slots that are held."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .scheduling.commands import HeldTicket, WaitingTicket
from .scheduling.decisions import Answer

if TYPE_CHECKING:
    from .lease import Lease


@dataclass(eq=False, slots=True)
class Waiter:
    """A request between asking and being answered.

    ``answer`` is the store's first word, ``outcome`` the last: granted, refused, or gone.
    """

    ticket: str
    tier: str
    flow: str
    is_known: bool = False
    seq: int = 0
    since: float = 0.0
    deadline: float = 0.0
    is_queued: bool = False
    is_granted: bool = False
    has_moved: bool = False  # another request has its ticket now
    is_doubtful: bool = False  # this worker was silent while it waited
    answer: Future[Answer] = field(default_factory=Future)
    outcome: Future[Answer] = field(default_factory=Future)

    def as_told(self, now: float) -> WaitingTicket:
        """What the store is told of it at an instant."""
        return WaitingTicket(
            self.ticket,
            self.tier,
            self.flow,
            waited_ms=int((now - self.since) * 1000),
            left_ms=max(0, int((self.deadline - now) * 1000)),
            seq=self.seq,
            is_known=self.is_known,
        )


@dataclass(eq=False, slots=True)
class Hold:
    """A slot that this worker holds. The lease is known weakly: whoever uses it keeps it alive."""

    ticket: str
    tier: str
    flow: str
    since: float
    is_confirmed: bool
    is_doubtful: bool = False
    lease: weakref.ref[Lease] | None = None

    def as_told(self, now: float) -> HeldTicket:
        """What the store is told of it at an instant."""
        return HeldTicket(self.ticket, self.tier, self.flow, int((now - self.since) * 1000))
