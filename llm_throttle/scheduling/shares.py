"""Who may take a free slot, and whose turn it is between tiers: stride scheduling.

C. A. Waldspurger and W. E. Weihl, "Stride Scheduling" (1995), with a lift that keeps idle and
blocked tiers from banking credit. A tier is lifted when it is served, not before, so that of two
overdue tiers the one from further back goes first; and only grants that two tiers could have had
move the level to which it is lifted. Without either, a tier beside a busy reservation starves
(docs/algorithm.md has the bound and the numbers).
"""

from __future__ import annotations

from .ledger import Ledger
from .policy import Policy, TierPolicy

SCALE = 2**32
"""One pass of weight 1. Weights up to 1000 divide it with an error below 1 in four million."""

REBASE_AT = 2**50
"""Passes are moved back from here, far below 2^53 where doubles lose integers."""

REBASE_TO = 2**42
"""And to here: 1024 of the longest strides above 0, so that those behind keep their order."""


class Shares:
    """The accounts of the tiers with each other.

    ``passed`` is the level: the pass of the last tier that was served before others, before its
    increment. ``is_contested``: two tiers or more could have had the slot that is given next.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.passed = 0
        self.is_contested = False
        self._ledger = ledger

    def next_tier(self, policy: Policy) -> TierPolicy | None:
        """The entitled tier with waiters that is served next."""
        ranks = []
        for index, tier in enumerate(policy):
            state = self._ledger.tiers[tier.slug]
            if len(state.queue) and self.is_entitled(policy, tier):
                ranks.append((state.passed, -tier.weight, index))
        self.is_contested = len(ranks) > 1
        return policy.tiers[min(ranks)[2]] if ranks else None

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
        if self.is_contested:
            self.passed = max(state.passed, self.passed)
        state.passed = self.passed + SCALE // tier.weight
        state.rate.record(self._ledger.now)
        if self.passed >= REBASE_AT:
            self._rebase()

    def adapt(self, policy: Policy) -> None:
        """Let an edited weight count from now on: no tier is further ahead than one new stride."""
        for tier in policy:
            state = self._ledger.tier(tier.slug)
            state.passed = min(state.passed, self.passed + SCALE // tier.weight)

    def _rebase(self) -> None:
        moved = self.passed - REBASE_TO
        for state in self._ledger.tiers.values():
            state.passed = max(0, state.passed - moved)
        self.passed = REBASE_TO
