"""Workers live, silent, dead; what a beat brings; recovery (PROTOCOL §1, §4, §5)."""

from __future__ import annotations

from dataclasses import replace

from .commands import Beat, Call, HeldTicket, Reassert, WaitingTicket
from .decisions import BeatReply
from .ledger import Ledger
from .records import IN_FLIGHT, IN_LINE, State, Ticket, Worker
from .recovery import Recovery

SWEEP = 64
"""Tickets ended or moved per verb: about 1 ms in the store."""

FORGET_AFTER = 30
"""A dead worker's record is kept for this many TTLs, so that it learns of it when it thaws."""

HOLDS_SLOT = (State.GRANTED, State.REVOKING)


class Workforce:
    """The workers of one upstream: who is alive, and whether they and the ledger agree."""

    def __init__(self, ledger: Ledger) -> None:
        self.recovery: Recovery | None = None
        self.judge_at = 0
        self._room = SWEEP  # dead workers' tickets that this verb may still end
        self._ledger = ledger

    # -- Memory -------------------------------------------------------------------------------

    def is_behind(self, call: Call) -> bool:
        """Whether this worker was told more than is written here."""
        worker = self._ledger.workers.get(call.worker)
        return call.acked > (worker.seq if worker else 0)

    def expects_beats(self) -> bool:
        return any(not (w.has_left or w.is_dead) for w in self._ledger.workers.values())

    def start_recovery(self) -> None:
        """Trust nothing but what the workers say; none of them is late before it could speak."""
        ledger = self._ledger
        live = [w for w in ledger.workers.values() if not (w.has_left or w.is_dead)]
        for worker in live:
            worker.beat_at = ledger.now
        if ledger.timing.recovery_ms:
            self.recovery = Recovery(ledger.now, awaited={worker.id for worker in live})

    def end_recovery(self) -> None:
        ledger = self._ledger
        if self.recovery and self.recovery.is_over(ledger.now, ledger.timing):
            self.recovery = None
            self.judge_at = 0

    # -- Life and death -----------------------------------------------------------------------

    def touch(self, call: Call) -> None:
        """Know the worker that speaks."""
        ledger = self._ledger
        if call.worker and call.worker not in ledger.workers:
            ledger.workers[call.worker] = Worker(call.worker, beat_at=ledger.now)
            self.judge_at = 0
        if call.worker:
            worker = ledger.workers[call.worker]
            worker.seq = max(worker.seq, call.seq)
            if worker.has_parked and not self.is_silent(worker.id):
                self._unpark(worker)

    def judge(self, speaker: str = "") -> None:
        """Notice silent and dead workers, at the instants at which one can become so.

        The worker that speaks is not forgotten now, however long it was silent.
        """
        ledger = self._ledger
        if self.recovery or ledger.now < self.judge_at:
            return
        self.judge_at = ledger.now + ledger.timing.suspect_ms
        self._room = SWEEP
        for _, worker in sorted(ledger.workers.items()):
            due_at = self._judge(worker, speaker)
            if due_at:
                self.judge_at = min(self.judge_at, due_at)

    def _judge(self, worker: Worker, speaker: str) -> int:
        """Judge one worker; answer when it has to be judged again, 0 = never."""
        ledger, timing = self._ledger, self._ledger.timing
        silent = ledger.now - worker.beat_at
        if worker.has_left or silent >= timing.worker_ttl_ms:
            worker.is_dead = True
            if self._bury(worker):
                return ledger.now
            ttls = 1 if worker.has_left else FORGET_AFTER
            forget_at = worker.beat_at + ttls * timing.worker_ttl_ms
            if ledger.now >= forget_at:
                if worker.id == speaker:
                    return ledger.now
                del ledger.workers[worker.id]
                return 0
            return forget_at
        if silent <= timing.suspect_ms:
            return worker.beat_at + timing.suspect_ms + 1
        if not worker.is_suspect:
            worker.is_suspect = True
            self._pass_on_unconfirmed(worker)
        return worker.beat_at + timing.worker_ttl_ms

    def _pass_on_unconfirmed(self, worker: Worker) -> None:
        for ticket in self._ledger.owned_by(worker.id, "g"):
            if ticket.state is State.GRANTED and not ticket.is_confirmed:
                self._ledger.free(ticket)

    def _bury(self, worker: Worker) -> bool:
        """End a dead worker's leases and waiters, a slice at a time; True while some are left."""
        ledger = self._ledger
        room = self._room
        tickets = ledger.owned_by(worker.id, "gwp", room + 1)
        for ticket in tickets[:room]:
            if ticket.state in IN_FLIGHT:
                ledger.free(ticket)
            elif not (ticket.is_known and ledger.send_away(ticket, worker.beat_at)):
                ledger.leave_line(ticket)
                ledger.end(ticket)
        self._room -= min(room, len(tickets))
        has_more = len(tickets) > room
        ledger.has_more |= has_more
        return has_more

    def is_silent(self, id: str) -> bool:
        """Whether a worker's waiters must not be granted now."""
        worker = self._ledger.workers[id]
        return worker.is_suspect or worker.is_dead

    def is_too_late(self, call: Call) -> bool:
        """Whether a request comes after its worker's death, or after a beat that knew better."""
        worker = self._ledger.workers[call.worker]
        return worker.is_dead or call.seq <= worker.beat_seq

    def sign_off(self, call: Call) -> None:
        """Let a worker leave; its record outlives it for a TTL, for what is still under way."""
        worker = self._ledger.workers[call.worker]
        worker.has_left = worker.is_dead = True
        worker.beat_at = self._ledger.now
        worker.past_beat_seq = worker.beat_seq = max(worker.beat_seq, call.seq)
        if self.recovery:
            self.recovery.heard.add(call.worker)
        self.judge_at = 0
        self.end_recovery()
        self.judge()

    # -- Beats: what the owner knows and what is written are made to agree --------------------

    def beat(self, call: Call, beat: Beat) -> BeatReply:
        ledger = self._ledger
        worker = ledger.workers[call.worker]
        if call.seq <= worker.beat_seq:
            return replace(self._reply(call), number=0)
        was_dead, worker.is_dead, worker.has_left = worker.is_dead, False, False
        worker.beat_at, worker.label = ledger.now, beat.label
        worker.past_beat_seq, worker.beat_seq = worker.beat_seq, call.seq
        self._unpark(worker)
        gone, lost = self._hear_of_held(call, beat, was_dead)
        granted = self._name_grants(call, beat)
        wants_waiting = self._wants_waiting(worker, beat)
        if self.recovery:
            self.recovery.expect(beat.seen)
            if beat.waiting == 0:
                self.recovery.heard.add(worker.id)
            self.end_recovery()
        return replace(
            self._reply(call),
            granted=granted,
            revoked=self._revoking(worker),
            gone=gone,
            lost=lost,
            wants_waiting=wants_waiting,
        )

    def _reply(self, call: Call) -> BeatReply:
        policy, workers = self._ledger.policy, self._ledger.workers
        return BeatReply(
            number=call.seq,
            workers=tuple(sorted(w.id for w in workers.values() if not w.is_dead)),
            version=policy.version if policy else 0,
            digest=policy.digest if policy else "",
        )

    def _unpark(self, worker: Worker) -> None:
        """Let a worker's tickets be granted again, a slice at a time: its ticks go on with it."""
        worker.is_suspect = False
        parked = self._ledger.owned_by(worker.id, "p", SWEEP + 1)
        for ticket in parked[:SWEEP]:
            self._ledger.make_ready(ticket)
        worker.has_parked = len(parked) > SWEEP
        self._ledger.has_more |= worker.has_parked

    def _hear_of_held(
        self, call: Call, beat: Beat, was_dead: bool
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Confirm or rebuild what the owner holds; answer what is not its, and what was lost."""
        gone, lost = [], []
        for item in beat.held:
            ticket = self._ledger.tickets.get(item.ticket)
            if ticket is None or (was_dead and ticket.state is State.ENDED):
                self._rebuild(call, item)
                if was_dead:
                    lost.append(item.ticket)
            elif self.is_held(call, ticket):
                ticket.is_confirmed = True
                if not ticket.due_at:
                    self._ledger.limit_hold(ticket)
            elif ticket.worker != call.worker or ticket.seq <= call.seq:
                gone.append(item.ticket)
        return tuple(gone), tuple(lost)

    def is_held(self, call: Call, ticket: Ticket) -> bool:
        """Whether a ticket that its owner holds is held here; one that waits here is made so."""
        if ticket.worker != call.worker:
            return False
        if ticket.state in IN_LINE:
            self._ledger.leave_line(ticket)
            self._ledger.hold(ticket, self._ledger.now)
        return ticket.state in HOLDS_SLOT

    def _rebuild(self, call: Call, item: HeldTicket) -> None:
        """Count a slot again that was forgotten, be there room or not: it is the truth."""
        ledger = self._ledger
        if item.ticket in ledger.tickets:
            ledger.drop(ledger.tickets[item.ticket])
        ticket = Ticket(item.ticket, State.GRANTED, call.worker, call.seq, item.tier, item.flow)
        ticket.is_confirmed = True
        ledger.hold(ticket, ledger.now - item.held_ms)

    def _name_grants(self, call: Call, beat: Beat) -> tuple[str, ...]:
        """Name grants the owner did not list; pass on those it was told of and does not hold."""
        listed = {item.ticket for item in beat.held}
        named = []
        for ticket in self._ledger.owned_by(call.worker, "g"):
            if ticket.id in listed or ticket.seq > call.seq:
                continue
            if ticket.named_in and beat.ack >= ticket.named_in:
                self._ledger.give_back(ticket, drain=ticket.is_confirmed)
            else:
                ticket.named_in = ticket.named_in or call.seq
                named.append(ticket.id)
        return tuple(named)

    def _revoking(self, worker: Worker) -> tuple[str, ...]:
        held = self._ledger.owned_by(worker.id, "g")
        return tuple(ticket.id for ticket in held if ticket.state is State.REVOKING)

    def _wants_waiting(self, worker: Worker, beat: Beat) -> bool:
        """Whether the full waiting list is needed: in recovery, or after two beats that differ."""
        if self.recovery:
            return beat.waiting > 0 and worker.id not in self.recovery.heard
        is_equal = self._ledger.count_owned(worker.id, "wp") == beat.waiting
        worker.mismatches = 0 if is_equal else worker.mismatches + 1
        return worker.mismatches >= 2

    def reassert(self, call: Call, command: Reassert) -> tuple[str, ...]:
        """Take a slice of a worker's waiting list as the truth; answer what it lost."""
        ledger = self._ledger
        gone = tuple(item.ticket for item in command.waiting if not self._is_back(call, item))
        listed = {item.ticket for item in command.waiting}
        room = len(listed) + SWEEP
        bounds = command.after, command.upto
        tickets = ledger.owned_by(call.worker, "wp", room + 1, *bounds)
        for ticket in tickets[:room]:
            if ticket.id not in listed and ticket.seq <= call.seq:
                ledger.leave_line(ticket)
                ledger.end(ticket)
        if command.is_last:
            if len(tickets) <= room:  # else the next beat asks again
                ledger.workers[call.worker].mismatches = 0
            if self.recovery:
                self.recovery.heard.add(call.worker)
                self.end_recovery()
        return gone

    def _is_back(self, call: Call, item: WaitingTicket) -> bool:
        """Put a waiting ticket back at its place where it was forgotten or sent away."""
        ledger = self._ledger
        ticket = ledger.tickets.get(item.ticket)
        if ticket is None:
            if ledger.policy is None or item.tier not in ledger.policy.by_slug:
                return False
            ledger.join_line(self._rebuilt_waiter(call, item))
            return True
        is_mine = ticket.worker == call.worker
        if is_mine and ticket.state is State.AWAY and ticket.seq <= call.seq:
            ledger.make_ready(ticket)
        return is_mine and ticket.state is not State.ENDED

    def _rebuilt_waiter(self, call: Call, item: WaitingTicket) -> Ticket:
        now = self._ledger.now
        return Ticket(
            item.ticket,
            State.WAITING,
            call.worker,
            item.seq,
            item.tier,
            item.flow,
            order_at=now - item.waited_ms,
            order_worker=call.worker,
            order_seq=item.seq,
            deadline_at=now + item.left_ms,
            is_known=item.is_known,
        )
