"""Who may take a free slot, and whose turn it is between tiers: stride scheduling.

C. A. Waldspurger and W. E. Weihl, "Stride Scheduling" (1995), with a lift that keeps idle and
blocked tiers from banking credit; docs/algorithm.md has the starvation bound.
"""

from __future__ import annotations

from .ledger import Ledger
from .policy import Policy, TierPolicy

SCALE = 2**32
"""One pass of weight 1. Weights up to 1000 divide it with an error below 1 in four million."""

REBASE_AT = 2**50
"""Passes are moved back towards 0 from here, far below 2^53 where doubles lose integers."""


class Shares:
    """The accounts of the tiers with each other. ``passed`` is that of the tier last served."""

    def __init__(self, ledger: Ledger) -> None:
        self.passed = 0
        self._ledger = ledger

    def next_tier(self, policy: Policy) -> TierPolicy | None:
        """The entitled tier with waiters that is served next."""
        best: tuple[int, int, int] | None = None
        for index, tier in enumerate(policy):
            state = self._ledger.tiers[tier.slug]
            if len(state.queue) and self.is_entitled(policy, tier):
                state.passed = max(state.passed, self.passed)
                rank = (state.passed, -tier.weight, index)
                best = rank if best is None else min(best, rank)
        return policy.tiers[best[2]] if best else None

    def is_entitled(self, policy: Policy, tier: TierPolicy) -> bool:
        """Whether a tier may take a free slot: below its cap, and not out of others' reserves."""
        tiers = self._ledger.tiers
        free = policy.capacity - self._ledger.in_flight
        held = tiers[tier.slug].in_flight
        if free < 1 or held >= tier.cap:
            return False
        return held < tier.reserved or free > sum(
            max(0, other.reserved - tiers[other.slug].in_flight)
            for other in policy
            if other.slug != tier.slug
        )

    def charge(self, tier: TierPolicy) -> None:
        """Book a grant: on the stride's account and in the measured rate."""
        state = self._ledger.tiers[tier.slug]
        self.passed = max(state.passed, self.passed)
        state.passed = self.passed + SCALE // tier.weight
        state.rate.record(self._ledger.now)
        if self.passed >= REBASE_AT:
            self._rebase()

    def _rebase(self) -> None:
        for state in self._ledger.tiers.values():
            state.passed = max(0, state.passed - self.passed)
        self.passed = 0
