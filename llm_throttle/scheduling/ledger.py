"""What is written about one upstream: tickets, tiers, flows, and the steps of a ticket's life.

Every step keeps the counters and indexes true; none of them decides anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .decisions import Notice
from .estimates import GrantRate, HoldTimes
from .fair_queue import FairQueue
from .ordered import Ordered
from .policy import UNLIMITED, Policy
from .records import IN_LINE, Flow, State, Ticket, Worker
from .recovery import Timing

MAX_AWAY_UNBOUNDED = 100
"""Away tickets where the upstream's queue has no bound of its own."""

TOMBSTONE_BEATS = 2
"""A tombstone is looked at after so many beats, and goes at its owner's second beat past it."""


@dataclass(slots=True)
class Tier:
    """What one tier holds and who waits in it (parked ones included, away ones not)."""

    queue: FairQueue
    passed: int = 0
    in_flight: int = 0
    waiting: int = 0
    return_at: int = 0
    rate: GrantRate = field(default_factory=GrantRate)


class Ledger:
    """The books of one upstream."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing
        self.now = 0
        self.policy: Policy | None = None
        self.tickets: dict[str, Ticket] = {}
        self.tiers: dict[str, Tier] = {}
        self.flows: dict[str, Flow] = {}
        self.workers: dict[str, Worker] = {}
        self.timers = Ordered()
        self.owned = Ordered()
        self.holds = HoldTimes()
        self.in_flight = 0
        self.away = 0
        self.notices: list[Notice] = []
        self.has_more = False

    @property
    def waiting(self) -> int:
        return sum(tier.waiting for tier in self.tiers.values())

    # -- In line ------------------------------------------------------------------------------

    def join_line(self, ticket: Ticket) -> None:
        self.tickets[ticket.id] = ticket
        tier = self.tier(ticket.tier)
        line = self.flow(ticket.flow).lines.setdefault(ticket.tier, [])
        tier.queue.join(ticket, line)
        tier.waiting += 1
        self.set_timer(ticket, ticket.deadline_at)
        self.own(ticket)

    def leave_line(self, ticket: Ticket) -> None:
        flow, tier = self.flows[ticket.flow], self.tiers[ticket.tier]
        self.disown(ticket)
        tier.queue.leave(ticket, flow.lines[ticket.tier])
        if ticket.state is State.AWAY:
            flow.away.remove(ticket.id)
            self.away -= 1
        else:
            tier.waiting -= 1
        self._drop_line(flow, ticket)

    def serve(self, ticket: Ticket) -> None:
        """Take the ticket out of its line and let it hold a slot."""
        flow, tier = self.flows[ticket.flow], self.tiers[ticket.tier]
        self.disown(ticket)
        tier.queue.serve(ticket, flow.lines[ticket.tier])
        tier.waiting -= 1
        self._drop_line(flow, ticket)
        self.hold(ticket, self.now)

    def park(self, ticket: Ticket) -> None:
        """Let a silent worker's ticket keep its place without being granted."""
        self.tiers[ticket.tier].queue.pause(ticket)
        self.disown(ticket)
        ticket.state = State.PARKED
        self.own(ticket)

    def make_ready(self, ticket: Ticket) -> None:
        """Bring a parked or away ticket back to where it stood, or move it to another owner."""
        tier = self.tiers[ticket.tier]
        self.disown(ticket)
        if ticket.state is State.AWAY:
            self.flows[ticket.flow].away.remove(ticket.id)
            self.away -= 1
            tier.waiting += 1
        ticket.state = State.WAITING
        tier.queue.resume(ticket)
        self.set_timer(ticket, ticket.deadline_at)
        self.own(ticket)

    def send_away(self, ticket: Ticket, since: int) -> bool:
        """Keep the place of a client that may come back; False where that is not to be."""
        policy, flow = self.policy, self.flows[ticket.flow]
        if ticket.state is State.AWAY:
            return True
        if policy is None or ticket.tier not in policy.by_slug or not policy.grace_ms:
            return False
        bound = policy.queue_depth
        most = MAX_AWAY_UNBOUNDED if bound == UNLIMITED else bound // 4
        if flow.away or self.away >= most:
            return False
        self.disown(ticket)
        tier = self.tiers[ticket.tier]
        tier.queue.pause(ticket)
        tier.waiting -= 1
        ticket.state = State.AWAY
        flow.away.append(ticket.id)
        self.away += 1
        self.set_timer(ticket, min(ticket.deadline_at, since + policy.grace_ms))
        return True

    # -- In flight ----------------------------------------------------------------------------

    def hold(self, ticket: Ticket, granted_at: int) -> None:
        """Let a ticket hold a slot."""
        self.tickets[ticket.id] = ticket
        self.tier(ticket.tier).in_flight += 1
        self.in_flight += 1
        ticket.state = State.GRANTED
        ticket.granted_at = granted_at
        self.flow(ticket.flow).held.append(ticket.id)
        self.limit_hold(ticket)
        self.own(ticket)

    def limit_hold(self, ticket: Ticket) -> None:
        """Have the lease end when the longest hold is over, once a policy says how long."""
        if ticket.state is State.GRANTED:
            is_known = self.policy is not None and self.policy.max_hold_ms
            due_at = ticket.granted_at + self.policy.max_hold_ms if is_known else 0  # type: ignore[union-attr]  # is_known says it
            self.set_timer(ticket, due_at)

    def start_revoking(self, ticket: Ticket) -> None:
        """Tell the owner to end; the slot is free when it has, or is dead."""
        if ticket.state is State.GRANTED:
            ticket.state = State.REVOKING
            self.set_timer(ticket, 0)
        self.tell(ticket, "revoked")

    def give_back(self, ticket: Ticket, *, drain: bool) -> int:
        """End the lease; answer in how many ms the slot is free, 0 = it is."""
        drain_ms = self.policy.drain_ms if self.policy else 0
        if not (drain and drain_ms):
            self.free(ticket)
            return 0
        self.disown(ticket)
        self._unhold(ticket)
        ticket.state = State.DRAINING
        self.set_timer(ticket, self.now + drain_ms)
        return drain_ms

    def free(self, ticket: Ticket) -> None:
        """The slot is empty; the ticket ends."""
        if ticket.state is not State.DRAINING:
            self.disown(ticket)
            self._unhold(ticket)
        self.in_flight -= 1
        self.tiers[ticket.tier].in_flight -= 1
        self.end(ticket)

    def _unhold(self, ticket: Ticket) -> None:
        flow = self.flows[ticket.flow]
        flow.held.remove(ticket.id)
        self._drop_flow(ticket.flow, flow)

    # -- Ended --------------------------------------------------------------------------------

    def end(self, ticket: Ticket) -> None:
        """Leave a tombstone until no late news of this ticket can arrive."""
        ticket.state = State.ENDED
        worker = self.workers.get(ticket.worker)
        ticket.seq = max(ticket.seq, worker.seq if worker else 0)
        self.set_timer(ticket, self.now + TOMBSTONE_BEATS * self.timing.beat_ms)

    def bar(self, id: str, worker: str, seq: int) -> None:
        """Leave a tombstone for a ticket that ends before it was heard of."""
        ticket = self.tickets[id] = Ticket(id, State.ENDED, worker, seq)
        self.set_timer(ticket, self.now + TOMBSTONE_BEATS * self.timing.beat_ms)

    def forget_or_keep(self, tombstone: Ticket) -> None:
        """Forget a tombstone at its owner's second beat past it, or where its owner is dead."""
        worker = self.workers.get(tombstone.worker)
        if worker is None or worker.is_dead or worker.past_beat_seq >= tombstone.seq:
            self.drop(tombstone)
        else:
            self.set_timer(tombstone, self.now + self.timing.beat_ms)

    def drop(self, ticket: Ticket) -> None:
        self.set_timer(ticket, 0)
        del self.tickets[ticket.id]

    # -- Books and indexes --------------------------------------------------------------------

    def tell(self, ticket: Ticket, kind: str, reason: str = "", retry_ms: int = 0) -> None:
        """Leave news for the owner of a ticket."""
        self.notices.append(Notice(ticket.worker, kind, ticket.id, reason, retry_ms))

    def tier(self, slug: str) -> Tier:
        if slug not in self.tiers:
            self.tiers[slug] = Tier(FairQueue(self.tickets))
        return self.tiers[slug]

    def flow(self, id: str) -> Flow:
        return self.flows.setdefault(id, Flow())

    def set_timer(self, ticket: Ticket, due_at: int) -> None:
        """Set the one instant at which something happens to a ticket by itself; 0 = none."""
        if ticket.due_at:
            self.timers.remove((ticket.due_at, ticket.id))
        ticket.due_at = due_at
        if due_at:
            self.timers.add((due_at, ticket.id))

    def owned_by(
        self, worker: str, marks: str, limit: int = UNLIMITED, after: str = "", upto: str = "~"
    ) -> list[Ticket]:
        """A worker's first tickets, mark by mark, each in ticket order.

        Marks: ``g`` those that hold a slot, ``w`` those that wait, ``p`` those that are parked.
        """
        found: list[Ticket] = []
        for mark in marks:
            bounds = (worker, mark, after), (worker, mark, upto)
            items = self.owned.between(*bounds, limit - len(found))
            found += [self.tickets[id] for _, _, id in items]
        return found

    def count_owned(self, worker: str, marks: str) -> int:
        return sum(len(self.owned.starting((worker, mark))) for mark in marks)

    def own(self, ticket: Ticket) -> None:
        self.owned.add((ticket.worker, self._mark(ticket), ticket.id))

    def disown(self, ticket: Ticket) -> None:
        self.owned.remove((ticket.worker, self._mark(ticket), ticket.id))

    def _mark(self, ticket: Ticket) -> str:
        if ticket.state is State.PARKED:
            return "p"
        return "w" if ticket.state in IN_LINE else "g"

    def _drop_line(self, flow: Flow, ticket: Ticket) -> None:
        if not flow.lines[ticket.tier]:
            del flow.lines[ticket.tier]
        self._drop_flow(ticket.flow, flow)

    def _drop_flow(self, id: str, flow: Flow) -> None:
        if not (flow.held or flow.lines):
            del self.flows[id]
