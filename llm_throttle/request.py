"""One request's way to a slot, as steps that say what they wait for.

Written once, as a generator; ``admission`` walks it blocking or suspended, ``waiting`` walks it
and tells where it stands. It does nothing but bookkeeping when it is interrupted, so that a
cancelled request has left the queue before its exception goes on.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from .entries import Waiter
from .exceptions import BackendDown, ForeignTicket, NestedAdmission, Refused
from .identity import Identity
from .lease import Lease
from .nesting import holds_here, note_taken
from .resources import give_back_connections
from .retry import retry_after
from .roster import Roster
from .scheduling import decisions
from .scheduling.commands import Positions
from .scheduling.decisions import Answer
from .signals import Event, granted, refused
from .worker import current

ATTEMPTS = 5
"""Times one request asks again because a beat overtook it or the store forgot it."""

LOOK_AGAIN_S = 0.25
"""Seconds between two looks for a ticket while the store recovers."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A step that waits for a future, for ``seconds`` at the longest (None = as it takes)."""

    future: Future[Answer]
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A step that may block: it reads the database."""

    work: Callable[[], object]


Steps = Generator[Wait | Block, Answer | None, Lease]


class Request:
    """One request's way to a slot.

    ``ticket`` is one to come back with, "" for a new one. ``is_known`` says that the client will
    be told its ticket, and ``has_told`` that it was: then its place is kept when it leaves.
    """

    def __init__(
        self,
        upstream: str,
        identity: Identity,
        wait: float | None = None,
        *,
        ticket: str = "",
        is_known: bool = False,
    ) -> None:
        self.upstream = upstream
        self.identity = identity
        self.waiter: Waiter | None = None
        self.has_told = False
        self._wait_ms = None if wait is None else max(0, int(wait * 1000))
        self._since = time.monotonic()
        self._is_known = is_known
        self._returns_with = ticket

    @property
    def ticket(self) -> str:
        return self.waiter.ticket if self.waiter else self._returns_with

    @property
    def waited(self) -> float:
        return time.monotonic() - self._since

    def steps(self) -> Steps:
        """Ask, wait, and come out with a lease, or raise ``Refused``."""
        self._check_nesting()
        worker = current()
        roster = worker.roster(self.upstream)
        for _ in range(ATTEMPTS):
            waiter = self._new_waiter()
            try:
                answer = yield from self._ask(roster, waiter)
                lease = self._use(roster, waiter, answer)
            except BaseException:
                roster.abandon(waiter, keep_place=self.has_told)
                raise
            if lease is not None:
                note_taken(lease)
                return lease
            if isinstance(answer, decisions.NeedPolicy):
                yield Block(lambda: worker.keeper.publish(self.upstream))
            elif self._returns_with:
                yield from self._look_for_ticket(roster)
        # Still no policy: the upstream is just being deleted.
        is_gone = isinstance(answer, decisions.NeedPolicy)
        raise self.refusal("unserviceable" if is_gone else "backend_down")

    def send_away(self) -> bool:
        """Refuse it ``queue_full`` while it waits; False where it was answered already."""
        waiter = self.waiter
        return waiter is not None and current().roster(self.upstream).refuse(waiter, "queue_full")

    def _check_nesting(self) -> None:
        """Never wait for a slot while holding one of the same upstream: all could do so at once."""
        if self._wait_ms != 0 and holds_here(self.upstream):
            raise NestedAdmission(
                f"This code holds a slot of {self.upstream!r} and asks for another, which can "
                "wait for ever. Use the lease it has, or ask with wait=0."
            )

    def _new_waiter(self) -> Waiter:
        ticket = self._returns_with or secrets.token_hex(16)
        self.waiter = Waiter(ticket, self.identity.tier, self.identity.flow, self._is_known)
        return self.waiter

    def _look_for_ticket(self, roster: Roster) -> Generator[Wait, Any, None]:
        """Find out why a ticket could not be taken over: try again, or go on with a new one.

        Raises ``ForeignTicket``.
        """
        while self._returns_with:
            answer = yield Wait(roster.ask(Positions((self._returns_with,))))
            assert isinstance(answer, decisions.Places)  # noqa: S101 - it has no other answer
            if answer.places:
                if answer.places[0].flow != self.identity.flow:
                    raise ForeignTicket(self.upstream)
                return
            if not answer.is_recovering:
                self._returns_with = ""
            else:  # its first worker may still bring it back
                yield Wait(Future(), LOOK_AGAIN_S)

    def _ask(self, roster: Roster, waiter: Waiter) -> Generator[Wait | Block, Any, Answer]:
        """Ask and, if queued, wait to the end of it."""
        left_ms = None
        if self._wait_ms is not None:
            left_ms = max(0, self._wait_ms - int(self.waited * 1000))
        if self._returns_with:
            roster.attach(waiter)
        else:
            roster.enqueue(waiter, left_ms)
        answer = yield Wait(waiter.answer)
        if not isinstance(answer, decisions.Queued):
            return answer  # type: ignore[no-any-return]  # what a generator is sent has no type
        yield Block(give_back_connections)
        outcome = yield Wait(waiter.outcome, max(0.0, waiter.deadline - time.monotonic()))
        if outcome is None:
            outcome = yield from self._give_up(roster, waiter)
        return outcome  # type: ignore[no-any-return]  # as above

    def _give_up(self, roster: Roster, waiter: Waiter) -> Generator[Wait, Any, Answer]:
        """Leave at the end of the budget, unless a grant was faster."""
        left = roster.leave(waiter, has_expired=True)
        if left is None:
            return decisions.Granted(waiter.ticket)
        if left is waiter.outcome:  # another request took the ticket over just now
            return (yield Wait(left))  # type: ignore[no-any-return]  # as above
        try:
            done = yield Wait(left)
        except BackendDown:
            done = None
        retry_ms = done.after_ms if isinstance(done, decisions.Done) else 0
        return decisions.Refused("wait_expired", retry_ms)

    def _use(self, roster: Roster, waiter: Waiter, answer: Answer) -> Lease | None:
        """A lease on what was granted; None where it has to be asked for again."""
        if isinstance(answer, decisions.Refused):
            raise self.refusal(answer.reason, answer.retry_ms)
        if not isinstance(answer, decisions.Granted):
            return None
        lease = Lease(roster, waiter.ticket, waiter.tier, self.waited)
        if not roster.start(waiter.ticket, lease):
            lease.release()
            return None
        granted.send_robust(Request, event=self._event())
        return lease

    def refusal(self, reason: str, retry_ms: int = 0) -> Refused:
        """What the caller is told, and the listeners."""
        if reason != "moved":
            refused.send_robust(Request, event=self._event(reason))
        return Refused(
            reason,
            upstream=self.upstream,
            tier=self.identity.tier,
            retry_after=retry_after(reason, retry_ms),
            ticket=self.ticket,
        )

    def refused_for(self, error: BackendDown) -> Refused:
        """The refusal that an unreachable store is to the caller."""
        refusal = self.refusal("backend_down")
        refusal.__cause__ = error
        return refusal

    def _event(self, reason: str = "") -> Event:
        waited_ms = int(self.waited * 1000)
        return Event(self.upstream, self.ticket, self.identity.tier, reason, waited_ms)
