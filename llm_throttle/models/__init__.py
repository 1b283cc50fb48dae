"""The rows that an operator edits: upstreams, tiers, the limits of a tier at an upstream.

Numbers are refused in three places, each for its own reason. Constraints refuse what makes no sense
whoever writes it. ``clean()`` refuses what makes sense alone but not with the other rows, in words
that name them. What still gets in (``QuerySet.update``, a restored backup) is made safe where the
policy is built (``policies.build``).
"""

from __future__ import annotations

from .fields import MAX_COUNT, MAX_SECONDS, VersionField
from .reservations import errors_together
from .rows import SLUG_MESSAGE
from .tier import IMPLICIT_TIER, Tier
from .tier_assignment import TierAssignment
from .tier_limit import EMPTY_CELLS, MAX_DEPTH_PER_USER, MAX_WEIGHT, TierLimit
from .upstream import MAX_DRAIN_MS, Upstream

__all__ = [
    "EMPTY_CELLS",
    "IMPLICIT_TIER",
    "MAX_COUNT",
    "MAX_DEPTH_PER_USER",
    "MAX_DRAIN_MS",
    "MAX_SECONDS",
    "MAX_WEIGHT",
    "SLUG_MESSAGE",
    "Tier",
    "TierAssignment",
    "TierLimit",
    "Upstream",
    "VersionField",
    "errors_together",
]
