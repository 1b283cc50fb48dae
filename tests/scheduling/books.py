"""An auditor: recomputes every count and index of a scheduler from its tickets alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

from llm_throttle.scheduling.policy import Policy, TierPolicy
from llm_throttle.scheduling.records import State, Ticket
from llm_throttle.scheduling.scheduler import Scheduler

IN_LINE = {State.WAITING, State.PARKED, State.AWAY}
HELD = {State.GRANTED, State.REVOKING}
IN_FLIGHT = HELD | {State.DRAINING}
MARKS = {State.WAITING: "w", State.PARKED: "p", State.GRANTED: "g", State.REVOKING: "g"}


class Auditor:
    """Watches one scheduler: each grant at the instant it is made, the books after each verb."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.grants: list[str] = []
        """The tiers of all grants so far, in order."""
        self._charge = scheduler.shares.charge
        self._serve = scheduler.ledger.serve
        scheduler.shares.charge = self._audited_charge
        scheduler.ledger.serve = self._audited_serve

    @property
    def tickets(self) -> list[Ticket]:
        return list(self.scheduler.ledger.tickets.values())

    def in_flight(self, slug: str | None = None) -> int:
        return sum(t.state in IN_FLIGHT and slug in (None, t.tier) for t in self.tickets)

    def is_entitled(self, policy: Policy, tier: TierPolicy) -> bool:
        free = policy.capacity - self.in_flight()
        kept = sum(max(0, o.reserved - self.in_flight(o.slug)) for o in policy if o != tier)
        held = self.in_flight(tier.slug)
        return free > 0 and held < tier.cap and (held < tier.reserved or free > kept)

    def _audited_charge(self, tier: TierPolicy) -> None:
        policy = self.scheduler.ledger.policy
        assert policy is not None
        assert not policy.is_paused
        assert self.scheduler.workforce.recovery is None
        assert self.is_entitled(policy, tier), f"{tier.slug} was granted a slot out of turn"
        self.grants.append(tier.slug)
        self._charge(tier)

    def _audited_serve(self, ticket: Ticket) -> None:
        assert ticket.state is State.WAITING
        assert ticket.deadline_at > self.scheduler.ledger.now
        for other in self.tickets:
            if (other.flow, other.tier, other.state) == (ticket.flow, ticket.tier, State.WAITING):
                assert ticket.order <= other.order, "a user's own requests changed their order"
        self._serve(ticket)

    def check(self, *, has_more: bool) -> None:
        self.check_counts()
        self.check_flows()
        self.check_indexes()
        if not has_more:
            self.check_time()
            self.check_no_idle_slot()

    def check_counts(self) -> None:
        ledger = self.scheduler.ledger
        waiting, held = Counter[str](), Counter[str]()
        for ticket in self.tickets:
            waiting[ticket.tier] += ticket.state in (State.WAITING, State.PARKED)
            held[ticket.tier] += ticket.state in IN_FLIGHT
        for slug, tier in ledger.tiers.items():
            in_line = [t for t in self.tickets if t.tier == slug and t.state in IN_LINE]
            assert tier.waiting == waiting[slug]
            assert tier.in_flight == held[slug]
            assert tier.queue.in_line == len(in_line)
            ready = sorted(t.key for t in in_line if t.state is State.WAITING)
            assert list(tier.queue._ready) == ready
        assert ledger.in_flight == sum(held.values())
        assert ledger.waiting == sum(waiting.values())
        assert ledger.away == sum(t.state is State.AWAY for t in self.tickets)

    def check_flows(self) -> None:
        ledger = self.scheduler.ledger
        lines: dict[str, dict[str, list[Ticket]]] = defaultdict(lambda: defaultdict(list))
        held: dict[str, set[str]] = defaultdict(set)
        away: dict[str, set[str]] = defaultdict(set)
        for ticket in self.tickets:
            if ticket.state in IN_LINE:
                lines[ticket.flow][ticket.tier].append(ticket)
            if ticket.state in HELD:
                held[ticket.flow].add(ticket.id)
            if ticket.state is State.AWAY:
                away[ticket.flow].add(ticket.id)
        assert set(ledger.flows) == set(lines) | set(held)
        for name, flow in ledger.flows.items():
            assert set(flow.held) == held[name]
            assert set(flow.away) == away[name]
            assert len(flow.away) <= 1
            assert set(flow.lines) == set(lines[name])
            for slug, line in flow.lines.items():
                in_order = [ledger.tickets[id] for id in line]
                assert {t.id for t in in_order} == {t.id for t in lines[name][slug]}
                assert in_order == sorted(in_order, key=lambda t: t.order)
                turns = [t.turn for t in in_order]
                assert all(a < b for a, b in pairwise(turns))

    def check_indexes(self) -> None:
        ledger = self.scheduler.ledger
        timers = sorted((t.due_at, t.id) for t in self.tickets if t.due_at)
        assert list(ledger.timers) == timers
        owned = []
        for ticket in self.tickets:
            if ticket.state in MARKS:
                owned.append((ticket.worker, MARKS[ticket.state], ticket.id))
        assert list(ledger.owned) == sorted(owned)
        for worker, _, _ in owned:
            assert worker in ledger.workers

    def check_time(self) -> None:
        ledger = self.scheduler.ledger
        for ticket in self.tickets:
            if ticket.state in IN_LINE or ticket.state in (State.DRAINING, State.ENDED):
                assert ticket.due_at > ledger.now, f"{ticket} has outlived its time"

    def check_no_idle_slot(self) -> None:
        policy = self.scheduler.ledger.policy
        if policy is None or policy.is_paused or self.scheduler.workforce.recovery:
            return
        for tier in policy:
            if any(t.tier == tier.slug and t.state is State.WAITING for t in self.tickets):
                assert not self.is_entitled(policy, tier), f"a slot is idle, and {tier} waits"

    def check_empty(self) -> None:
        """Nothing is left of anybody."""
        ledger = self.scheduler.ledger
        assert not ledger.tickets
        assert not ledger.flows
        assert not ledger.workers
        assert len(ledger.timers) == len(ledger.owned) == 0
        assert (ledger.in_flight, ledger.waiting, ledger.away) == (0, 0, 0)
        for tier in ledger.tiers.values():
            assert (tier.in_flight, tier.waiting, tier.queue.in_line) == (0, 0, 0)
        assert set(ledger.tiers) <= set(ledger.policy.by_slug if ledger.policy else ())
