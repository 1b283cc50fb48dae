"""What is wrong with the reservations of all tiers at one upstream taken together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from django.core.exceptions import ValidationError
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from .tier import Tier

if TYPE_CHECKING:
    from .tier_limit import TierLimit

_RESERVED_TOGETHER = _(
    "The reservations add up to %(total)s slots (%(parts)s), more than the capacity of "
    "%(capacity)s. Lower some, or raise the capacity."
)
_NEVER_SERVED = ngettext_lazy(
    "Tier %(tiers)s could never be served: it reserves nothing, and the reservations of the "
    "others (%(parts)s) fill the capacity of %(capacity)s. Lower one of them, or reserve at "
    "least 1 slot for it.",
    "Tiers %(tiers)s could never be served: they reserve nothing, and the reservations of the "
    "others (%(parts)s) fill the capacity of %(capacity)s. Lower one of them, or reserve at "
    "least 1 slot for each.",
    "number",
)


def errors_together(capacity: int | None, limits: Iterable[TierLimit]) -> list[ValidationError]:
    """What is wrong with the limits of all tiers of one upstream taken together.

    A tier without a row counts as one that reserves nothing.
    """
    if not capacity:
        return []
    reserving = {
        limit.tier_id: limit
        for limit in limits
        if limit.tier_id is not None and isinstance(limit.reserved, int) and limit.reserved > 0
    }
    total = sum(limit.reserved for limit in reserving.values())
    params = {
        "total": total,
        "capacity": capacity,
        "parts": ", ".join(f"{limit.tier} {limit.reserved}" for limit in reserving.values()),
    }
    if total > capacity:
        return [ValidationError(_RESERVED_TOGETHER, code="reserved_together", params=params)]
    unserved = [f"“{tier}”" for tier in Tier.objects.all() if tier.pk not in reserving]
    if total < capacity or not unserved:
        return []
    params |= {"tiers": ", ".join(unserved), "number": len(unserved)}
    return [ValidationError(_NEVER_SERVED, code="never_served", params=params)]
