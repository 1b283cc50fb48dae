"""The waiting room of one upstream: every rule of admission, in plain integers.

This is the specification, and it runs in production for a single process; ``scheduler.lua`` is
its twin in the store. Each verb first enters (judges the clock and the store's memory, expires
what is due, gives free slots away), then changes something, then gives free slots away again.
Nothing here reads a clock, rolls dice or waits; work per verb is bounded, and what is left over
is announced by ``has_more``.
"""

from __future__ import annotations

from collections.abc import Callable

from . import commands, decisions
from .commands import Call, Command
from .decisions import Answer, Done, Gone, Granted, NeedPolicy, Queued, Refused, Reply
from .forecast import Forecast
from .ledger import Ledger
from .policy import Policy, TierPolicy
from .records import IN_LINE, State, Ticket, Worker
from .recovery import Timing
from .shares import Shares
from .workforce import HOLDS_SLOT, SWEEP, Workforce

MAX_GRANTS = 64
"""Grants per verb, so that a large raise of a limit does not stall the store."""

MAX_PASSED_OVER = 32
"""Waiters at a head that one verb parks or refuses before it stops."""

MAX_HOLDERS = 256


class Scheduler:
    """The waiting room of one upstream.

    ``apply(call, command)`` is the only way in; ``call.now_ms`` is the only clock.
    """

    def __init__(self, slug: str = "", timing: Timing | None = None) -> None:
        self.slug = slug
        self.server = ""
        self.offset = 0
        self.is_new = True
        self.ledger = Ledger(timing or Timing())
        self.shares = Shares(self.ledger)
        self.forecast = Forecast(self.ledger)
        self.workforce = Workforce(self.ledger)

    def __repr__(self) -> str:
        ledger = self.ledger
        slots = f"{ledger.in_flight}/{ledger.policy.capacity if ledger.policy else '?'} slots"
        return f"<Scheduler {self.slug}: {slots}, {ledger.waiting} waiting>"

    @property
    def is_abandoned(self) -> bool:
        """Whether the upstream was deleted and nobody is left in its waiting room."""
        ledger = self.ledger
        is_retired = ledger.policy is not None and ledger.policy.is_retired
        return is_retired and not (ledger.in_flight or ledger.flows)

    def apply(self, call: Call, command: Command) -> Reply:
        """Carry out one command; answer it and report the news it caused."""
        ledger = self.ledger
        ledger.notices, ledger.has_more = [], False
        self._enter(call)
        verb: Callable[[Call, Command], Answer] = getattr(self, f"_{command.verb}")
        answer = verb(call, command)
        self._dispatch()
        if isinstance(answer, Queued) and ledger.tickets[answer.ticket].state is State.GRANTED:
            answer = Granted(answer.ticket)
        return Reply(answer, tuple(ledger.notices), ledger.has_more)

    # -- Entering: is the memory sound, and what has become due? ------------------------------

    def _enter(self, call: Call) -> None:
        has_forgotten = self._judge_memory(call)
        if has_forgotten:
            self.workforce.start_recovery()
        self.workforce.touch(call)
        self.workforce.end_recovery()
        self._expire()
        self.workforce.judge(call.worker)
        self._clear_removed_tiers()
        self._dispatch()

    def _judge_memory(self, call: Call) -> bool:
        """Set the clock; answer whether what is written may be missing or old."""
        ledger = self.ledger
        now = call.now_ms + self.offset
        has_forgotten = self.is_new
        self.is_new = False
        if now < ledger.now - ledger.timing.beat_ms:
            self.offset += ledger.now - now
            has_forgotten = True
        now = max(now, ledger.now)
        if now - ledger.now > ledger.timing.suspect_ms and self.workforce.expects_beats():
            has_forgotten = True
        known, self.server = self.server, call.server or self.server
        if known != self.server and known:
            has_forgotten = True
        ledger.now = now
        is_recovering = self.workforce.recovery is not None  # and trusts no record as it is
        return has_forgotten or (self.workforce.is_behind(call) and not is_recovering)

    def _expire(self) -> None:
        """End what is due: deadlines, holds, drains, graces, tombstones."""
        ledger = self.ledger
        due = ledger.timers.up_to((ledger.now, "~"), SWEEP)
        for _, id in due:
            ticket = ledger.tickets[id]
            if ticket.state in IN_LINE:
                self._refuse_waiter(ticket, "wait_expired")
            elif ticket.state is State.GRANTED:
                ledger.start_revoking(ticket)
            elif ticket.state is State.DRAINING:
                ledger.free(ticket)
            else:
                ledger.forget_or_keep(ticket)
        ledger.has_more |= len(due) == SWEEP

    def _clear_removed_tiers(self) -> None:
        """Give the waiters of deleted tiers their answer."""
        ledger = self.ledger
        if ledger.policy is None:
            return
        room = SWEEP
        for slug in sorted(set(ledger.tiers) - set(ledger.policy.by_slug), key=str.encode):
            tier = ledger.tiers[slug]
            for _ in range(min(len(tier.queue), room)):
                self._refuse_waiter(tier.queue[0], "unserviceable")
                room -= 1
            ledger.has_more |= len(tier.queue) > 0
            if not (tier.in_flight or tier.queue.in_line):
                del ledger.tiers[slug]

    def _refuse_waiter(self, ticket: Ticket, reason: str) -> None:
        """Take a waiter out of the line and tell its owner why."""
        is_away = ticket.state is State.AWAY
        self.ledger.leave_line(ticket)
        if not is_away:
            refusal = self.forecast.refuse(reason, ticket.tier)
            self.ledger.tell(ticket, "refused", reason, refusal.retry_ms)
        self.ledger.end(ticket)

    # -- Handing out slots --------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give every free slot to the waiter who is next, and only to those entitled."""
        ledger = self.ledger
        policy = ledger.policy
        if policy is None or policy.is_paused or self.workforce.recovery:
            return
        grants = passed_over = 0
        while tier := self.shares.next_tier(policy):
            if grants == MAX_GRANTS or passed_over == MAX_PASSED_OVER:
                ledger.has_more = True
                return
            ticket = ledger.tiers[tier.slug].queue[0]
            if ticket.deadline_at <= ledger.now:
                self._refuse_waiter(ticket, "wait_expired")
                passed_over += 1
            elif self.workforce.is_silent(ticket.worker):
                ledger.park(ticket)
                passed_over += 1
            else:
                self.shares.charge(tier)
                ledger.serve(ticket)
                ledger.tell(ticket, "granted")
                grants += 1

    # -- Asking and leaving -------------------------------------------------------------------

    def _enqueue(self, call: Call, command: commands.Enqueue) -> Answer:
        known = self.ledger.tickets.get(command.ticket)
        if known is not None:
            return self._repeat(call, known)
        if self.workforce.is_too_late(call):
            return Gone((command.ticket,))
        policy = self.ledger.policy
        if policy is None:
            return NeedPolicy()
        if refusal := self._refusal_at_the_door(policy, command):
            return refusal
        tier = policy.by_slug[command.tier]
        wait_ms = tier.wait_budget_ms
        if command.wait_ms is not None:
            wait_ms = min(wait_ms, max(0, command.wait_ms))
        ticket = self._new_ticket(call, command, wait_ms)
        if self._can_start(policy, tier):
            return self._start(tier, ticket)
        if refusal := self._refusal_to_queue(policy, tier, wait_ms):
            return refusal
        return self._queue(policy, tier, ticket, wait_ms)

    def _repeat(self, call: Call, ticket: Ticket) -> Answer:
        """Answer an enqueue that was heard before."""
        if ticket.worker == call.worker and ticket.state is State.GRANTED:
            return Granted(ticket.id)
        if ticket.worker == call.worker and ticket.state in IN_LINE:
            ahead = self.ledger.tiers[ticket.tier].queue.ahead(ticket)
            return Queued(ticket.id, ahead, max(0, ticket.deadline_at - self.ledger.now))
        return Gone((ticket.id,))

    def _refusal_at_the_door(self, policy: Policy, command: commands.Enqueue) -> Refused | None:
        if policy.is_paused:
            return Refused("paused")
        tier = policy.by_slug.get(command.tier)
        if tier is None or policy.usable_slots(tier.slug) == 0:
            return Refused("unserviceable")
        flow = self.ledger.flows.get(command.flow)
        if flow and flow.depth >= tier.depth_per_user:
            return Refused("user_depth", self.forecast.next_release(flow))
        return None

    def _new_ticket(self, call: Call, command: commands.Enqueue, wait_ms: int) -> Ticket:
        now = self.ledger.now
        return Ticket(
            command.ticket,
            State.WAITING,
            call.worker,
            call.seq,
            command.tier,
            command.flow,
            order_at=now,
            order_worker=call.worker,
            order_seq=call.seq,
            deadline_at=now + wait_ms,
            is_known=command.is_known,
        )

    def _can_start(self, policy: Policy, tier: TierPolicy) -> bool:
        """Whether a slot is free for this tier and no waiter is to have it before."""
        if self.workforce.recovery or self.shares.next_tier(policy):
            return False
        return self.shares.is_entitled(policy, tier)

    def _start(self, tier: TierPolicy, ticket: Ticket) -> Granted:
        """Grant at once. Its owner reads that in the answer, so nothing is left to confirm."""
        self.shares.charge(tier)
        self.ledger.hold(ticket, self.ledger.now)
        ticket.is_confirmed = True
        return Granted(ticket.id)

    def _refusal_to_queue(self, policy: Policy, tier: TierPolicy, wait_ms: int) -> Refused | None:
        ledger, recovery = self.ledger, self.workforce.recovery
        ends_before = recovery and ledger.now + wait_ms < recovery.earliest_end(ledger.timing)
        if recovery and (ends_before or wait_ms == 0):
            return Refused("recovering", recovery.latest_end(ledger.timing) - ledger.now)
        if wait_ms == 0:
            return self.forecast.refuse("wait_too_long", tier.slug)
        if ledger.tiers[tier.slug].waiting >= tier.queue_depth:
            return self.forecast.refuse("tier_full", tier.slug)
        if ledger.waiting >= policy.queue_depth:
            return self.forecast.refuse("queue_full", tier.slug)
        return None

    def _queue(self, policy: Policy, tier: TierPolicy, ticket: Ticket, wait_ms: int) -> Answer:
        self.ledger.join_line(ticket)
        ahead = self.ledger.tiers[tier.slug].queue.ahead(ticket)
        is_measured = self.workforce.recovery is None
        if is_measured and self.forecast.would_miss(policy, tier, ahead, wait_ms):
            self.ledger.leave_line(ticket)
            self.ledger.drop(ticket)
            return self.forecast.refuse("wait_too_long", tier.slug)
        return Queued(ticket.id, ahead, wait_ms)

    def _confirm(self, call: Call, command: commands.Confirm) -> Answer:
        gone = []
        for id in command.tickets:
            ticket = self.ledger.tickets.get(id)
            if ticket is None:
                if not self.workforce.recovery:  # in recovery, the next beat rebuilds it
                    gone.append(id)
            elif self.workforce.is_held(call, ticket):
                ticket.is_confirmed = True
            else:
                gone.append(id)
        return Gone(tuple(gone)) if gone else Done()

    def _release(self, call: Call, command: commands.Release) -> Answer:
        ledger = self.ledger
        ticket = ledger.tickets.get(command.ticket)
        if ticket is None:
            ledger.bar(command.ticket, call.worker, call.seq)
        elif ticket.worker == call.worker and ticket.state in HOLDS_SLOT:
            ticket.seq = call.seq
            ledger.holds.record(ledger.now, ledger.now - ticket.granted_at)
            return Done(ledger.give_back(ticket, drain=command.is_abnormal))
        return Gone((command.ticket,))

    def _cancel(self, call: Call, command: commands.Cancel) -> Answer:
        ledger = self.ledger
        ticket = ledger.tickets.get(command.ticket)
        if ticket is None:
            ledger.bar(command.ticket, call.worker, call.seq)
            return Gone((command.ticket,))
        if ticket.worker != call.worker or ticket.state not in (*IN_LINE, *HOLDS_SLOT):
            return Gone((command.ticket,))
        ticket.seq = call.seq
        if ticket.state in HOLDS_SLOT:
            ledger.give_back(ticket, drain=False)
        elif not (command.keep_place and self._keep_place(ticket)):
            ledger.leave_line(ticket)
            ledger.end(ticket)
        if command.has_expired:
            return Done(self.forecast.refuse("wait_expired", ticket.tier).retry_ms)
        return Done()

    def _keep_place(self, ticket: Ticket) -> bool:
        """Keep this place, and no longer the one that its user left before."""
        ledger = self.ledger
        for id in ledger.flows[ticket.flow].away[:]:
            if id != ticket.id:
                ledger.leave_line(ledger.tickets[id])
                ledger.end(ledger.tickets[id])
        return ledger.send_away(ticket, ledger.now)

    def _attach(self, call: Call, command: commands.Attach) -> Answer:
        ledger = self.ledger
        ticket = ledger.tickets.get(command.ticket)
        if ticket is None or ticket.state not in IN_LINE or ticket.flow != command.flow:
            return Gone((command.ticket,))
        if self.workforce.is_too_late(call):
            return Gone((command.ticket,))
        if ticket.state is State.AWAY and (refusal := self._refusal_to_return(ticket)):
            return refusal
        if ticket.worker != call.worker and ticket.state is not State.AWAY:
            ledger.tell(ticket, "moved")
        ledger.disown(ticket)
        ticket.worker, ticket.seq = call.worker, call.seq
        ledger.make_ready(ticket)
        ahead = ledger.tiers[ticket.tier].queue.ahead(ticket)
        return Queued(ticket.id, ahead, max(0, ticket.deadline_at - ledger.now))

    def _refusal_to_return(self, ticket: Ticket) -> Refused | None:
        """An away ticket counts again once it is back, so there must be room for it."""
        ledger = self.ledger
        tier = ledger.policy.by_slug.get(ticket.tier) if ledger.policy else None
        flow = ledger.flows[ticket.flow]
        if tier and flow.depth >= tier.depth_per_user:
            return Refused("user_depth", self.forecast.next_release(flow))
        return None

    def _revoke(self, call: Call, command: commands.Revoke) -> Answer:
        ticket = self.ledger.tickets.get(command.ticket)
        if ticket is None or ticket.state not in HOLDS_SLOT:
            return Gone((command.ticket,))
        self.ledger.start_revoking(ticket)
        if command.force:
            self.ledger.free(ticket)
        return Done()

    # -- What workers say of themselves -------------------------------------------------------

    def _beat(self, call: Call, command: commands.Beat) -> Answer:
        return self.workforce.beat(call, command)

    def _reassert(self, call: Call, command: commands.Reassert) -> Answer:
        if self.ledger.policy is None:
            return NeedPolicy()
        gone = self.workforce.reassert(call, command)
        return Gone(gone) if gone else Done()

    def _sign_off(self, call: Call, command: commands.SignOff) -> Answer:
        self.workforce.sign_off(call)
        return Done()

    # -- Looking and editing ------------------------------------------------------------------

    def _positions(self, call: Call, command: commands.Positions) -> Answer:
        ledger = self.ledger
        ids = [*command.tickets]
        for id in command.flows:
            ids += self._of_flow(id)
        found = [ledger.tickets[id] for id in dict.fromkeys(ids) if id in ledger.tickets]
        recovery = self.workforce.recovery
        delay_ms = max(0, recovery.earliest_end(ledger.timing) - ledger.now) if recovery else 0
        return decisions.Places(
            self.forecast.places([t for t in found if t.state in IN_LINE], delay_ms),
            tuple(ticket.id for ticket in found if ticket.state in HOLDS_SLOT),
            ledger.policy.version if ledger.policy else 0,
            recovery is not None,
        )

    def _of_flow(self, id: str) -> list[str]:
        """A flow's tickets: in line, tier by tier, then those that hold a slot."""
        flow = self.ledger.flows.get(id)
        if flow is None:
            return []
        slugs = sorted(flow.lines, key=str.encode)
        return [id for slug in slugs for id in flow.lines[slug]] + flow.held

    def _tick(self, call: Call, command: commands.Tick) -> Answer:
        return Done()

    def _set_policy(self, call: Call, command: commands.SetPolicy) -> Answer:
        ledger, policy = self.ledger, command.policy
        if ledger.policy is None or policy.version > ledger.policy.version:
            ledger.policy = policy
            self.forecast.edited_at = ledger.now
            self.shares.adapt(policy)
            self._clear_removed_tiers()
        in_force = ledger.policy
        is_current = (in_force.version, in_force.digest) == (policy.version, policy.digest)
        return decisions.PolicyStamp(in_force.version, in_force.digest, is_current)

    def _snapshot(self, call: Call, command: commands.Snapshot) -> Answer:
        ledger, policy = self.ledger, self.ledger.policy
        tiers = sorted(ledger.tiers.items(), key=lambda item: item[0].encode())
        workers = [worker for _, worker in sorted(ledger.workers.items())]
        held = [ticket for worker in workers for ticket in ledger.owned_by(worker.id, "g")]
        return decisions.Overview(
            capacity=policy.capacity if policy else 0,
            version=policy.version if policy else 0,
            digest=policy.digest if policy else "",
            in_flight=ledger.in_flight,
            waiting=ledger.waiting,
            is_recovering=self.workforce.recovery is not None,
            tiers=tuple(decisions.TierCount(s, t.in_flight, t.waiting) for s, t in tiers),
            holders=tuple(map(self._holder, held[:MAX_HOLDERS])),
            workers=tuple(map(self._worker_count, workers)),
        )

    def _holder(self, ticket: Ticket) -> decisions.Holder:
        held_ms = self.ledger.now - ticket.granted_at
        return decisions.Holder(
            ticket.id, ticket.tier, ticket.flow, ticket.worker, str(ticket.state), held_ms
        )

    def _worker_count(self, worker: Worker) -> decisions.WorkerCount:
        return decisions.WorkerCount(
            worker.id,
            worker.label,
            self._state_of(worker),
            self.ledger.now - worker.beat_at,
            self.ledger.count_owned(worker.id, "g"),
            self.ledger.count_owned(worker.id, "wp"),
        )

    def _state_of(self, worker: Worker) -> str:
        if worker.has_left:
            return "left"
        return "dead" if worker.is_dead else "suspect" if worker.is_suspect else "live"
