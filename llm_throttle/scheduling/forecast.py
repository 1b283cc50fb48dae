"""Estimates for those who wait or are refused. Cautious, integer, in milliseconds."""

from __future__ import annotations

from .decisions import Place, Refused
from .ledger import Ledger
from .policy import Policy, TierPolicy
from .records import Flow, Ticket

EDIT_QUIET_MS = 1_000
"""For so long after an edit, measured holds say nothing about waits."""

SAMPLES = 16
"""Ranks looked at to find waiters that will give up before their turn."""


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
        gap = tier.rate.gap_ms(ledger.now)
        return_at = max(tier.return_at, ledger.now + tier.waiting * gap) + gap
        tier.return_at = min(return_at, ledger.now + RETURN_HORIZON_MS)
        return Refused(reason, tier.return_at - ledger.now)

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

    def place(self, ticket: Ticket) -> Place:
        """Where a waiter stands and how long it may take."""
        ledger = self._ledger
        tier = ledger.tiers[ticket.tier]
        ahead = tier.queue.ahead(ticket)
        gap = tier.rate.gap_ms(ledger.now)
        low = ahead * gap * 7 // 10
        high = (ahead + 1) * gap * 13 // 10 + ledger.holds.p10
        return Place(ticket.id, ticket.flow, ahead, low, high)
