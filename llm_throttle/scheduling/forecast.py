"""Estimates for those who wait or are refused. Cautious, integer, in milliseconds."""

from __future__ import annotations

from . import pace
from .decisions import Place, Refused
from .estimates import DEFAULT_GAP_MS
from .ledger import Ledger
from .policy import Policy, TierPolicy
from .records import Flow, Ticket

EDIT_QUIET_MS = 1_000
"""For so long after an edit, measured holds say nothing about waits."""

SAMPLES = 16
"""Ranks looked at to find waiters that will give up before their turn."""

FEW_HOLDS = 5
"""Fewer say nothing; then a slot is taken to be free every ``DEFAULT_GAP_MS``."""

OVERTAKING_PER_MILLE = 1_075
"""Waits are a little longer than the places say, because newcomers of other users may pass."""

SPREAD_PER_MILLE = 295
"""How far an ETA reaches to both sides of its middle: holds of mixed lengths stay within it in
four of five cases (tests/scheduling/test_eta.py)."""

MIN_SPREAD_MS = 1_000

UNMEASURED_HOLD_MS = 1_000
"""What a call is taken to last, until calls are measured, by those who may come back later."""

RETURN_HORIZON_MS = 60_000
"""Nobody is told to come back later than this, so places in time beyond it are not taken."""


class Forecast:
    """What the recent past says about the next minute."""

    def __init__(self, ledger: Ledger) -> None:
        self.edited_at = 0
        self._ledger = ledger

    def refuse(self, reason: str, slug: str) -> Refused:
        """Refuse for want of room: send the crowd back one by one, a grant's gap apart."""
        ledger = self._ledger
        tier = ledger.tiers[slug]
        gap = max(tier.rate.gap_ms(ledger.now), self._least_gap_ms(slug))
        return_at = max(tier.return_at, ledger.now + tier.waiting * gap) + gap
        tier.return_at = min(return_at, ledger.now + RETURN_HORIZON_MS)
        return Refused(reason, tier.return_at - ledger.now)

    def _least_gap_ms(self, slug: str) -> int:
        """What lies between two grants when all slots that this tier may have are its own.

        The first second of a crowd, which fills the free slots at once, looks far faster.
        """
        policy, holds = self._ledger.policy, self._ledger.holds
        if policy is None or slug not in policy.by_slug:
            return 0
        hold_ms = holds.mean if holds.measured >= FEW_HOLDS else UNMEASURED_HOLD_MS
        return hold_ms // max(1, policy.usable_slots(slug))

    def next_release(self, flow: Flow) -> int:
        """When this flow's first slot is likely to be free, 0 where nothing is known."""
        ledger = self._ledger
        if not flow.held or not ledger.holds.is_telling(ledger.now):
            return 0
        oldest = min(ledger.tickets[id].granted_at for id in flow.held)
        return max(1, oldest + ledger.holds.p50 - ledger.now)

    def would_miss(self, policy: Policy, tier: TierPolicy, ahead: int, wait_ms: int) -> bool:
        """Whether even a cautious estimate puts the start after the deadline."""
        holds = self._ledger.holds
        now = self._ledger.now
        if not holds.is_telling(now) or now - self.edited_at < EDIT_QUIET_MS:
            return False
        slots = policy.usable_slots(tier.slug)
        if ahead // slots * holds.p10 <= wait_ms:
            return False
        return self._staying(tier.slug, ahead, slots) // slots * holds.p10 > wait_ms

    def _staying(self, slug: str, ahead: int, slots: int) -> int:
        """Those of the first ``ahead`` waiters who will not give up before their own start.

        Looked at in at most ``SAMPLES`` places, each standing for those behind it.
        """
        ledger = self._ledger
        queue = ledger.tiers[slug].queue
        step = -(-ahead // SAMPLES)
        staying = 0
        for rank in range(0, ahead, step):
            start_at = ledger.now + staying // slots * ledger.holds.p10
            if queue[rank].deadline_at >= start_at:
                staying += min(step, ahead - rank)
        return staying

    def places(self, tickets: list[Ticket], delay_ms: int = 0) -> tuple[Place, ...]:
        """Where waiters stand and how long it may take, from ``delay_ms`` on."""
        paths: dict[str, list[pace.Leg]] = {}
        return tuple(self._place(ticket, delay_ms, paths) for ticket in tickets)

    def _place(self, ticket: Ticket, delay_ms: int, paths: dict[str, list[pace.Leg]]) -> Place:
        ledger = self._ledger
        ahead = ledger.tiers[ticket.tier].queue.ahead(ticket)
        if ledger.policy is None or ticket.tier not in ledger.policy.by_slug:
            return Place(ticket.id, ticket.flow, ahead, 0, 0)
        hold_ms = self._hold_ms(ledger.policy)
        if ticket.tier not in paths:
            paths[ticket.tier] = self._path(ledger.policy, ticket.tier, hold_ms)
        middle = pace.when(paths[ticket.tier], hold_ms, ahead + 1) * OVERTAKING_PER_MILLE // 1_000
        left = max(0, ticket.deadline_at - ledger.now)
        middle = min(middle + delay_ms, left * 1_000 // (1_000 + SPREAD_PER_MILLE))
        spread = max(MIN_SPREAD_MS, middle * SPREAD_PER_MILLE // 1_000)
        low = max(0, middle - spread)
        return Place(ticket.id, ticket.flow, ahead, low, low + 2 * spread)

    def _hold_ms(self, policy: Policy) -> int:
        holds = self._ledger.holds
        if holds.measured < FEW_HOLDS:
            return max(1, policy.capacity * DEFAULT_GAP_MS)
        return max(1, holds.mean)

    def _path(self, policy: Policy, slug: str, hold_ms: int) -> list[pace.Leg]:
        tiers = self._ledger.tiers
        waiting = {tier.slug: len(tiers[tier.slug].queue) for tier in policy}
        return pace.legs(policy, slug, hold_ms, waiting)
