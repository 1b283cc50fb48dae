"""How fast a tier's line moves: the slots shared by weight, each kept as long as of late.

A fluid model of the stride: every tier with waiters has slots in proportion to its weight, no
more than its cap and no less than its reservation; when one line has been served to its end, the
others share its part. Newcomers are not foreseen. Thousandths of slots and of grants, so that
integers will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .policy import Policy

MILLI = 1_000

HORIZON_MS = 3_600_000
"""Nothing is foreseen beyond an hour, which also keeps all products below 2^53."""


@dataclass(frozen=True, slots=True)
class Leg:
    """From ``at_ms`` on, when ``served`` have been, the tier has ``slots``."""

    at_ms: int
    served: int
    slots: int


def legs(policy: Policy, slug: str, hold_ms: int, waiting: Mapping[str, int]) -> list[Leg]:
    """What lies before a tier whose own line does not end, given how many wait in the others."""
    left = {t.slug: waiting[t.slug] * MILLI for t in policy if t.slug != slug and waiting[t.slug]}
    at_ms = served = 0
    found = []
    while True:
        slots = split(policy, slug, left)
        found.append(Leg(at_ms, served, slots[slug]))
        if not left or at_ms >= HORIZON_MS:
            return found
        ends = {other: left[other] * hold_ms // slots[other] for other in left}
        step = min(HORIZON_MS, *ends.values())
        for other, end in ends.items():
            left[other] -= slots[other] * step // hold_ms
            if end == step:
                del left[other]
        at_ms += step
        served += slots[slug] * step // hold_ms


def when(path: list[Leg], hold_ms: int, need: int) -> int:
    """In how many ms the tier will have been granted ``need`` slots."""
    leg = next(leg for leg in reversed(path) if leg.served <= need * MILLI)
    return leg.at_ms + (need * MILLI - leg.served) * hold_ms // leg.slots


def split(policy: Policy, slug: str, left: Mapping[str, int]) -> dict[str, int]:
    """The slots of each tier that has waiters, this one included.

    Reservations go first, then caps, then what is left is shared by weight.
    """
    todo = [tier for tier in policy if tier.slug == slug or tier.slug in left]
    kept = sum(tier.reserved for tier in policy if tier not in todo)
    rest = (policy.capacity - kept) * MILLI
    slots: dict[str, int] = {}
    while todo:
        weights = sum(tier.weight for tier in todo)
        shares = {tier.slug: rest * tier.weight // weights for tier in todo}
        fixed = {t.slug: t.reserved * MILLI for t in todo if shares[t.slug] < t.reserved * MILLI}
        fixed = fixed or {t.slug: t.cap * MILLI for t in todo if shares[t.slug] > t.cap * MILLI}
        for other, share in (fixed or shares).items():
            slots[other] = max(1, share)
            rest = max(0, rest - slots[other])
        todo = [tier for tier in todo if tier.slug not in slots]
    return slots
