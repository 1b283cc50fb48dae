"""What one worker holds and waits for at one upstream: the authority on its own tickets.

Whatever the store and the news say ends up here under one lock, so that a ticket is either
waiting or held, and a beat tells the store exactly that (docs/protocol.md).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .backends import Backend, Stamp
from .scheduling import commands
from .scheduling.commands import Command
from .scheduling.decisions import (
    Answer,
    BeatReply,
    Done,
    Gone,
    Granted,
    Notice,
    Queued,
    Refused,
    Reply,
)

if TYPE_CHECKING:
    from .lease import Lease

START_WITHIN_BEATS = 1.5
"""A grant is only used while the last acknowledged beat is younger than this many beats ..."""

CONFIRM_WITHIN_BEATS = 2.0
"""... and its call is closed when the confirmation is still unanswered at this age, because a
silent worker's unconfirmed grants are passed on from then."""

REASSERT_SLICE = 128


def settle(future: Future[Any], result: Any) -> None:
    """Answer a future that its owner may have cancelled or answered meanwhile."""
    try:
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
    except InvalidStateError:
        pass


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


class Roster:
    """The tickets of one worker at one upstream."""

    def __init__(
        self,
        upstream: str,
        worker: str,
        backend: Backend,
        tick_after: Callable[[Roster, float], None],
    ) -> None:
        self.upstream = upstream
        self.waiting: dict[str, Waiter] = {}
        self.held: dict[str, Hold] = {}
        self._worker = worker
        self._backend = backend
        self._tick_after = tick_after
        self._lock = threading.RLock()
        self._seq = 0
        self._acked = 0
        self._beat_sent_at = time.monotonic()
        self._beat_ack = 0
        self._seen: tuple[str, ...] = ()
        self._unheard: dict[str, Command] = {}
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
        return (time.monotonic() - self._beat_sent_at) * 1000 / self._backend.timing.beat_ms

    # -- A request asks, waits, leaves --------------------------------------------------------

    def enqueue(self, waiter: Waiter, wait_ms: int | None) -> None:
        """Ask for a slot; ``waiter.answer`` will know."""
        command = commands.Enqueue(
            waiter.ticket, waiter.tier, waiter.flow, wait_ms, waiter.is_known
        )
        self._ask_for(waiter, command)

    def attach(self, waiter: Waiter) -> None:
        """Take over a ticket that waits, here or elsewhere; ``waiter.answer`` will know."""
        with self._lock:
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
        with self._lock:
            waiter.since = time.monotonic()
            self.waiting[waiter.ticket] = waiter
            waiter.seq, reply = self._send(command)
        reply.add_done_callback(lambda reply: self._hear_answer(waiter, reply))

    def _hear_answer(self, waiter: Waiter, reply: Future[Answer]) -> None:
        error = reply.exception()
        answer: Any = error or reply.result()
        with self._lock:
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
        with self._lock:
            if waiter.has_moved:
                return waiter.outcome
            if waiter.ticket in self.held:
                return None
            self.waiting.pop(waiter.ticket, None)
            return self._finish(commands.Cancel(waiter.ticket, has_expired=has_expired))

    def abandon(self, waiter: Waiter, *, keep_place: bool = False) -> None:
        """Forget a request that will not use what it asked for, granted or not.

        ``keep_place``: its client may come back with the ticket within the grace.
        """
        with self._lock:
            if waiter.has_moved:
                return
            known = self.waiting.pop(waiter.ticket, None) or self.held.pop(waiter.ticket, None)
            if known is not None or not waiter.answer.done():
                self._finish(commands.Cancel(waiter.ticket, keep_place))

    # -- A slot is used and given back --------------------------------------------------------

    def start(self, ticket: str, lease: Lease) -> bool:
        """Let a lease use a granted slot; False where it may have been passed on already."""
        with self._lock:
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
        _, reply = self._send(commands.Confirm((hold.ticket,)))

        def heard(reply: Future[Answer]) -> None:
            if reply.exception() is not None:
                return
            if isinstance(reply.result(), Gone):
                self._lose(hold.ticket, "gone")
            else:
                hold.is_confirmed = True

        reply.add_done_callback(heard)

    def release(self, ticket: str, *, is_abnormal: bool) -> None:
        """Give a slot back. Never blocks and never fails; the beat sees to what gets lost."""
        with self._lock:
            if self.held.pop(ticket, None) is None:
                return
            reply = self._finish(commands.Release(ticket, is_abnormal))

        def heard(reply: Future[Answer]) -> None:
            done = None if reply.exception() else reply.result()
            if isinstance(done, Done) and done.after_ms:
                self._tick_after(self, done.after_ms / 1000)

        reply.add_done_callback(heard)

    def _finish(self, command: commands.Cancel | commands.Release) -> Future[Answer]:
        """Say that a ticket has ended, again with the next beat where it was not heard."""
        _, reply = self._send(command)
        self.on_move()

        def heard(reply: Future[Answer]) -> None:
            with self._lock:
                if reply.exception() is not None:
                    self._unheard[command.ticket] = command
                else:
                    self._unheard.pop(command.ticket, None)

        reply.add_done_callback(heard)
        return reply

    def tick(self) -> None:
        """Let the store expire and dispatch what is due."""
        self._send(commands.Tick())

    # -- News ---------------------------------------------------------------------------------

    def deliver(self, notice: Notice) -> None:
        """Take in what the store says of one of our tickets."""
        self.on_move()
        if notice.kind == "granted":
            self._hear_grant(notice.ticket)
        elif notice.kind == "revoked":
            self._lose(notice.ticket, "revoked")
        else:
            reason = "moved" if notice.kind == "moved" else notice.reason
            self._hear_end(notice.ticket, Refused(reason, notice.retry_ms))

    def _hear_grant(self, ticket: str) -> None:
        with self._lock:
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
        _, reply = self._send(commands.Confirm((waiter.ticket,)))

        def heard(reply: Future[Answer]) -> None:
            if reply.exception() is not None:
                return  # the next beats see to it
            if isinstance(reply.result(), Gone):
                self._hear_end(waiter.ticket, Gone((waiter.ticket,)))
                return
            with self._lock:
                if self.waiting.get(waiter.ticket) is not waiter:
                    return
                self._move_to_held(waiter, is_confirmed=True)
            settle(waiter.outcome, Granted(waiter.ticket))

        reply.add_done_callback(heard)

    def _hear_end(self, ticket: str, outcome: Answer) -> None:
        with self._lock:
            waiter = self.waiting.pop(ticket, None)
            if waiter is not None and outcome == Refused("moved"):
                waiter.has_moved = True
        if waiter is not None:
            settle(waiter.outcome, outcome)

    def _lose(self, ticket: str, reason: str) -> None:
        """End a call whose slot is wanted back or is somebody else's by now."""
        with self._lock:
            hold = self.held.get(ticket)
            if hold is not None and hold.lease is None:  # so that it does not even start
                del self.held[ticket]
                self._finish(commands.Release(ticket))
        lease = hold.lease() if hold and hold.lease else None
        if lease is not None:
            lease.end(reason)

    # -- Beats --------------------------------------------------------------------------------

    def beat(self, label: str) -> BeatReply:
        """Tell the store what is true here and learn what is not known here.

        Raises ``BackendDown``.
        """
        sent_at = time.monotonic()
        with self._lock:
            stamp = self._stamp()
            held = dict(self.held)
            beat = commands.Beat(
                held=tuple(self._held_ticket(hold, sent_at) for hold in held.values()),
                waiting=sum(waiter.is_queued for waiter in self.waiting.values()),
                ack=self._beat_ack,
                seen=self._seen,
                label=label,
            )
        reply = self._backend.call(self.upstream, stamp, beat)
        answer = self._heard(stamp, reply)
        assert isinstance(answer, BeatReply)  # noqa: S101 - a beat has no other
        with self._lock:
            if self.beat_age > START_WITHIN_BEATS:
                self._doubt_news(held)
            self._beat_sent_at = sent_at
            self._beat_ack, self._seen = answer.number, answer.workers
            for ticket in held.keys() - {*answer.gone, *answer.lost, *answer.revoked}:
                held[ticket].is_confirmed = True
            unheard, self._unheard = list(self._unheard.values()), {}
        self._backend.know_workers(self.upstream, answer.workers)
        self._act_on(answer)
        for command in unheard:
            self._finish(command)  # type: ignore[arg-type]  # only such are kept
        return answer

    def _doubt_news(self, told: dict[str, Hold]) -> None:
        """After a silence, in which grants may have been passed on: news of them may be on its way.

        ``told`` are the slots that the beat named, which the store has judged.
        """
        for waiter in self.waiting.values():
            waiter.is_doubtful = True
        for ticket, hold in self.held.items():
            hold.is_doubtful = ticket not in told

    def _held_ticket(self, hold: Hold, now: float) -> commands.HeldTicket:
        held_ms = int((now - hold.since) * 1000)
        return commands.HeldTicket(hold.ticket, hold.tier, hold.flow, held_ms)

    def _act_on(self, answer: BeatReply) -> None:
        for ticket in answer.granted:
            self._hear_grant(ticket)
        for ticket in answer.revoked:
            self._lose(ticket, "revoked")
        for ticket in answer.gone:
            self._lose(ticket, "gone")
        for ticket in answer.lost:
            self._lose(ticket, "presumed_dead")
        if answer.wants_waiting:
            self._reassert()

    def _reassert(self) -> None:
        """Send the full waiting list, slice by slice in ticket order."""
        with self._lock:
            queued = sorted((t, w) for t, w in self.waiting.items() if w.is_queued)
        after = ""
        for last, part in _slices([waiter for _, waiter in queued], REASSERT_SLICE):
            upto = "~" if last else part[-1].ticket
            now = time.monotonic()
            items = tuple(self._waiting_ticket(waiter, now) for waiter in part)
            with self._lock:
                stamp = self._stamp()
            command = commands.Reassert(items, after, upto, last)
            answer = self._heard(stamp, self._backend.call(self.upstream, stamp, command))
            for ticket in answer.tickets if isinstance(answer, Gone) else ():
                self._hear_end(ticket, Gone((ticket,)))
            after = upto

    def _waiting_ticket(self, waiter: Waiter, now: float) -> commands.WaitingTicket:
        return commands.WaitingTicket(
            waiter.ticket,
            waiter.tier,
            waiter.flow,
            waited_ms=int((now - waiter.since) * 1000),
            left_ms=max(0, int((waiter.deadline - now) * 1000)),
            seq=waiter.seq,
            is_known=waiter.is_known,
        )

    def give_up_unconfirmed(self) -> None:
        """Close the calls whose slots a silent store may pass on."""
        if self.beat_age < CONFIRM_WITHIN_BEATS:
            return
        with self._lock:
            doubtful = [hold.ticket for hold in self.held.values() if not hold.is_confirmed]
        for ticket in doubtful:
            self._lose(ticket, "unconfirmed")

    def give_back_unused(self, seconds: float) -> None:
        """Give back grants that nobody took up within ``seconds``: their request has gone."""
        since = time.monotonic() - seconds
        with self._lock:
            unused = [h.ticket for h in self.held.values() if h.lease is None and h.since < since]
        for ticket in unused:
            self.release(ticket, is_abnormal=False)

    def leases(self) -> list[Lease]:
        """The leases in use."""
        with self._lock:
            found = [hold.lease() for hold in self.held.values() if hold.lease]
        return [lease for lease in found if lease is not None]

    def refuse(self, waiter: Waiter, reason: str) -> bool:
        """Send one away who waits here; False where it was answered already."""
        with self._lock:
            if self.waiting.get(waiter.ticket) is not waiter:
                return False
            self.abandon(waiter)
        settle(waiter.outcome, Refused(reason))
        return True

    def refuse_waiters(self, reason: str) -> None:
        """Send everybody away who waits here."""
        with self._lock:
            waiters = list(self.waiting.values())
            for waiter in waiters:
                self.abandon(waiter, keep_place=waiter.is_known)
        for waiter in waiters:
            settle(waiter.outcome, Refused(reason))

    def disown(self) -> None:
        """In a forked child: all this is the parent's. Some thread of it may hold the lock."""
        self._lock = threading.RLock()
        for lease in self.leases():
            lease.disown()
        self.held.clear()
        self.waiting.clear()

    def sign_off(self) -> None:
        """Tell the store that this worker leaves for good. Raises ``BackendDown``."""
        with self._lock:
            stamp = self._stamp()
        self._heard(stamp, self._backend.call(self.upstream, stamp, commands.SignOff()))

    # -- Speaking to the store ----------------------------------------------------------------

    def ask(self, command: Command) -> Future[Answer]:
        """Send any other command."""
        with self._lock:
            return self._send(command)[1]

    def _send(self, command: Command) -> tuple[int, Future[Answer]]:
        """Sign and send; called under the lock, so that the order of seqs is that of sending."""
        stamp = self._stamp()
        answer: Future[Answer] = Future()

        def heard(reply: Future[Reply]) -> None:
            error = reply.exception()
            settle(answer, error or self._heard(stamp, reply.result()))

        self._backend.submit(self.upstream, stamp, command).add_done_callback(heard)
        return stamp.seq, answer

    def _stamp(self) -> Stamp:
        self._seq += 1
        return Stamp(self._worker, self._seq, self._acked)

    def _heard(self, stamp: Stamp, reply: Reply) -> Answer:
        """Take in a reply: it was received, it brings news, it may leave work to do."""
        with self._lock:
            self._acked = max(self._acked, stamp.seq)
        for notice in reply.notices:
            if notice.worker == self._worker:
                self.deliver(notice)
        if reply.has_more:
            self._tick_after(self, 0)
        return reply.answer


def _nobody_listens() -> None:
    pass


def _slices(items: list[Waiter], size: int) -> Iterator[tuple[bool, list[Waiter]]]:
    for start in range(0, max(1, len(items)), size):
        yield start + size >= len(items), items[start : start + size]
