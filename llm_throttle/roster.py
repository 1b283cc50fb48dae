"""What one worker holds and waits for at one upstream: the authority on its own tickets.

Whatever the store and the news say ends up here under one lock, so that a ticket is either
waiting or held, and a beat tells the store exactly that (docs/protocol.md).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from .backends import Backend
from .dialogue import Dialogue, settle
from .entries import Hold, Waiter
from .scheduling import commands
from .scheduling.decisions import Answer, Done, Gone, Granted, Notice, Queued, Refused

if TYPE_CHECKING:
    from .lease import Lease

START_WITHIN_BEATS = 1.5
"""A grant is only used while the last acknowledged beat is younger than this many beats: a silent
worker's unconfirmed grants are passed on."""


Ending = commands.Cancel | commands.Release


class Roster(Dialogue):
    """The tickets of one worker at one upstream."""

    def __init__(
        self,
        upstream: str,
        worker: str,
        backend: Backend,
        tick_after: Callable[[Roster, float], None],
    ) -> None:
        super().__init__(upstream, worker, backend)
        self.waiting: dict[str, Waiter] = {}
        self.held: dict[str, Hold] = {}
        self.beat_sent_at = time.monotonic()
        """When the last beat that was acknowledged was sent."""
        self._beat_ms = backend.timing.beat_ms
        self._tick_after = tick_after
        self._unheard: dict[str, Ending] = {}
        self.on_move: Callable[[], None] = _nobody_listens
        """Called when something here moves the queue; must not block."""

    def __repr__(self) -> str:
        return f"<Roster {self.upstream}: {len(self.held)} held, {len(self.waiting)} waiting>"

    @property
    def is_empty(self) -> bool:
        return not (self.held or self.waiting)

    @property
    def beat_age(self) -> float:
        """Beats since the last acknowledged one was sent."""
        return (time.monotonic() - self.beat_sent_at) * 1000 / self._beat_ms

    # -- A request asks, waits, leaves --------------------------------------------------------

    def enqueue(self, waiter: Waiter, wait_ms: int | None) -> None:
        """Ask for a slot; ``waiter.answer`` will know."""
        command = commands.Enqueue(
            waiter.ticket, waiter.tier, waiter.flow, wait_ms, waiter.is_known
        )
        self._ask_for(waiter, command)

    def attach(self, waiter: Waiter) -> None:
        """Take over a ticket that waits, here or elsewhere; ``waiter.answer`` will know."""
        with self.lock:
            before = self.waiting.get(waiter.ticket)
            if before is None or before.flow == waiter.flow:
                self._ask_for(waiter, commands.Attach(waiter.ticket, waiter.flow))
            if before is not None:
                before.has_moved = before.flow == waiter.flow
        if before is not None and not before.has_moved:
            settle(waiter.answer, Gone((waiter.ticket,)))
        elif before is not None:
            settle(before.outcome, Refused("moved"))

    def _ask_for(self, waiter: Waiter, command: commands.Enqueue | commands.Attach) -> None:
        with self.lock:
            waiter.since = time.monotonic()
            self.waiting[waiter.ticket] = waiter
            waiter.seq, reply = self.say(command)
        reply.add_done_callback(lambda reply: self._hear_answer(waiter, reply))

    def _hear_answer(self, waiter: Waiter, reply: Future[Answer]) -> None:
        error = reply.exception()
        answer: Any = error or reply.result()
        with self.lock:
            is_mine = self.waiting.get(waiter.ticket) is waiter
            if waiter.is_granted:  # the news of it was faster
                answer = Granted(waiter.ticket)
            elif is_mine and isinstance(answer, Granted):
                self._move_to_held(waiter, is_confirmed=True)
            elif is_mine and isinstance(answer, Queued):
                waiter.is_queued = True
                waiter.deadline = time.monotonic() + answer.wait_ms / 1000
            elif is_mine:
                del self.waiting[waiter.ticket]
                if error is not None:  # it may have been heard all the same
                    keep_place = waiter.is_known
                    self._unheard[waiter.ticket] = commands.Cancel(waiter.ticket, keep_place)
        settle(waiter.answer, answer)

    def _move_to_held(self, waiter: Waiter, *, is_confirmed: bool) -> None:
        waiter.is_granted = True
        del self.waiting[waiter.ticket]
        self.held[waiter.ticket] = Hold(
            waiter.ticket, waiter.tier, waiter.flow, time.monotonic(), is_confirmed
        )

    def leave(self, waiter: Waiter, *, has_expired: bool = False) -> Future[Answer] | None:
        """Stop waiting. None where a grant was faster: then the slot is there to be used."""
        with self.lock:
            if waiter.has_moved:
                return waiter.outcome
            if waiter.ticket in self.held:
                return None
            self.waiting.pop(waiter.ticket, None)
            return self.finish(commands.Cancel(waiter.ticket, has_expired=has_expired))

    def abandon(self, waiter: Waiter, *, keep_place: bool = False) -> None:
        """Forget a request that will not use what it asked for, granted or not.

        ``keep_place``: its client may come back with the ticket within the grace.
        """
        with self.lock:
            if waiter.has_moved:
                return
            known = self.waiting.pop(waiter.ticket, None) or self.held.pop(waiter.ticket, None)
            if known is not None or not waiter.answer.done():
                self.finish(commands.Cancel(waiter.ticket, keep_place))

    # -- A slot is used and given back --------------------------------------------------------

    def start(self, ticket: str, lease: Lease) -> bool:
        """Let a lease use a granted slot; False where it may have been passed on already."""
        with self.lock:
            hold = self.held.get(ticket)
            if hold is None:
                return False
            if not hold.is_confirmed:
                if hold.is_doubtful or self.beat_age > START_WITHIN_BEATS:
                    return False
                self._confirm(hold)
            hold.lease = weakref.ref(lease)
            return True

    def _confirm(self, hold: Hold) -> None:
        reply = self.ask(commands.Confirm((hold.ticket,)))

        def heard(reply: Future[Answer]) -> None:
            if reply.exception() is not None:
                return
            if isinstance(reply.result(), Gone):
                self.lose(hold.ticket, "gone")
            else:
                hold.is_confirmed = True

        reply.add_done_callback(heard)

    def release(self, ticket: str, *, is_abnormal: bool) -> None:
        """Give a slot back. Never blocks and never fails; the beat sees to what gets lost."""
        with self.lock:
            if self.held.pop(ticket, None) is None:
                return
            reply = self.finish(commands.Release(ticket, is_abnormal))

        def heard(reply: Future[Answer]) -> None:
            done = None if reply.exception() else reply.result()
            if isinstance(done, Done) and done.after_ms:
                self.tick_after(done.after_ms / 1000)

        reply.add_done_callback(heard)

    def finish(self, command: Ending) -> Future[Answer]:
        """Say that a ticket has ended, again with the next beat where it was not heard."""
        reply = self.ask(command)
        self.on_move()

        def heard(reply: Future[Answer]) -> None:
            with self.lock:
                if reply.exception() is not None:
                    self._unheard[command.ticket] = command
                else:
                    self._unheard.pop(command.ticket, None)

        reply.add_done_callback(heard)
        return reply

    def take_unheard(self) -> list[Ending]:
        """The endings that the store has not heard, to be said again."""
        with self.lock:
            unheard, self._unheard = list(self._unheard.values()), {}
        return unheard

    def tick(self) -> None:
        """Let the store expire and dispatch what is due."""
        self.ask(commands.Tick())

    # -- News ---------------------------------------------------------------------------------

    def deliver(self, notice: Notice) -> None:
        """Take in what the store says of one of our tickets."""
        self.on_move()
        if notice.kind == "granted":
            self.hear_grant(notice.ticket)
        elif notice.kind == "revoked":
            self.lose(notice.ticket, "revoked")
        else:
            reason = "moved" if notice.kind == "moved" else notice.reason
            self.hear_end(notice.ticket, Refused(reason, notice.retry_ms))

    def hear_grant(self, ticket: str) -> None:
        """A slot was given to one who waits here."""
        with self.lock:
            waiter = self.waiting.get(ticket)
            if waiter is None:
                return
            if waiter.is_doubtful:
                self._ask_whether_granted(waiter)
                return
            self._move_to_held(waiter, is_confirmed=False)
        settle(waiter.outcome, Granted(ticket))

    def _ask_whether_granted(self, waiter: Waiter) -> None:
        """Use a grant only when the store confirms it: the news may be from before a silence."""
        reply = self.ask(commands.Confirm((waiter.ticket,)))

        def heard(reply: Future[Answer]) -> None:
            if reply.exception() is not None:
                return  # the next beats see to it
            if isinstance(reply.result(), Gone):
                self.hear_end(waiter.ticket, Gone((waiter.ticket,)))
                return
            with self.lock:
                if self.waiting.get(waiter.ticket) is not waiter:
                    return
                self._move_to_held(waiter, is_confirmed=True)
            settle(waiter.outcome, Granted(waiter.ticket))

        reply.add_done_callback(heard)

    def hear_end(self, ticket: str, outcome: Answer) -> None:
        """One who waits here waits no more."""
        with self.lock:
            waiter = self.waiting.pop(ticket, None)
            if waiter is not None and outcome == Refused("moved"):
                waiter.has_moved = True
        if waiter is not None:
            settle(waiter.outcome, outcome)

    def lose(self, ticket: str, reason: str) -> None:
        """End a call whose slot is wanted back or is somebody else's by now."""
        with self.lock:
            hold = self.held.get(ticket)
            if hold is not None and hold.lease is None:  # so that it does not even start
                del self.held[ticket]
                self.finish(commands.Release(ticket))
        lease = hold.lease() if hold and hold.lease else None
        if lease is not None:
            lease.end(reason)

    # -- All of them -------------------------------------------------------------------------

    def give_back_unused(self, seconds: float) -> None:
        """Give back grants that nobody took up within ``seconds``: their request has gone."""
        since = time.monotonic() - seconds
        with self.lock:
            unused = [h.ticket for h in self.held.values() if h.lease is None and h.since < since]
        for ticket in unused:
            self.release(ticket, is_abnormal=False)

    def leases(self) -> list[Lease]:
        """The leases in use."""
        with self.lock:
            found = [hold.lease() for hold in self.held.values() if hold.lease]
        return [lease for lease in found if lease is not None]

    def refuse(self, waiter: Waiter, reason: str) -> bool:
        """Send one away who waits here; False where it was answered already."""
        with self.lock:
            if self.waiting.get(waiter.ticket) is not waiter:
                return False
            self.abandon(waiter)
        settle(waiter.outcome, Refused(reason))
        return True

    def refuse_waiters(self, reason: str) -> None:
        """Send everybody away who waits here."""
        with self.lock:
            waiters = list(self.waiting.values())
            for waiter in waiters:
                self.abandon(waiter, keep_place=waiter.is_known)
        for waiter in waiters:
            settle(waiter.outcome, Refused(reason))

    def disown(self) -> None:
        """In a forked child: all this is the parent's."""
        super().disown()
        for lease in self.leases():
            lease.disown()
        self.held.clear()
        self.waiting.clear()

    def sign_off(self) -> None:
        """Tell the store that this worker leaves for good. Raises ``BackendDown``."""
        self.call(self.sign(), commands.SignOff())

    def tick_after(self, seconds: float) -> None:
        self._tick_after(self, seconds)


def _nobody_listens() -> None:
    pass
