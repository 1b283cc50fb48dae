"""What the operator decided for one upstream: frozen, versioned, integers only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, Self

UNLIMITED = 2**31 - 1
"""Stands for "no bound of its own" in a queue depth: larger than any real queue, exact in Lua."""

DEFAULT_DEPTH_PER_USER = 8


@dataclass(frozen=True, slots=True)
class TierPolicy:
    """The limits of one tier at one upstream.

    ``wait_budget_ms`` is a duration in milliseconds; the rest are counts of slots or waiters.
    """

    slug: str
    cap: int
    reserved: int = 0
    weight: int = 1
    wait_budget_ms: int = 0
    queue_depth: int = UNLIMITED
    depth_per_user: int = DEFAULT_DEPTH_PER_USER


@dataclass(frozen=True)
class Policy:
    """The limits of one upstream and of its tiers.

    ``tiers`` is kept in the byte order of the slugs, which is also the order in which ties
    between equally entitled tiers are broken.
    """

    version: int
    capacity: int
    tiers: tuple[TierPolicy, ...] = ()
    queue_depth: int = UNLIMITED
    max_hold_ms: int = 300_000
    drain_ms: int = 50
    grace_ms: int = 15_000
    is_paused: bool = False

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.tiers, key=lambda tier: tier.slug.encode()))
        object.__setattr__(self, "tiers", ordered)

    def __iter__(self) -> Iterator[TierPolicy]:
        return iter(self.tiers)

    @property
    def is_retired(self) -> bool:
        """Whether this is what is left of a deleted upstream."""
        return self.capacity == 0 and not self.tiers

    @cached_property
    def by_slug(self) -> Mapping[str, TierPolicy]:
        return {tier.slug: tier for tier in self.tiers}

    def reserved_for_others(self, slug: str) -> int:
        """Slots that the other tiers' reservations keep from this one when all is idle."""
        return sum(tier.reserved for tier in self.tiers if tier.slug != slug)

    def usable_slots(self, slug: str) -> int:
        """The most slots this tier can ever hold at once, 0 where it can never be served."""
        tier = self.by_slug[slug]
        unreserved = self.capacity - self.reserved_for_others(slug)
        return max(0, min(tier.cap, self.capacity, max(unreserved, tier.reserved)))

    def guaranteed_slots(self, slug: str) -> int:
        """Slots this tier can count on however busy the others are.

        Its reservation, or what the other tiers' caps leave, whichever is more: the caps of the
        others say how much of the capacity they can ever take.
        """
        tier = self.by_slug[slug]
        others = sum(min(other.cap, self.capacity) for other in self.tiers if other.slug != slug)
        return max(0, min(tier.cap, max(tier.reserved, self.capacity - others)))

    def starvation_bound(self, slug: str) -> int:
        """Grants that go to others, at most, while this tier's first waiter is entitled."""
        weights = sum(tier.weight for tier in self.tiers)
        return -(-weights // self.by_slug[slug].weight) + len(self.tiers)

    @cached_property
    def digest(self) -> str:
        """A fingerprint of the content without its version, to notice edits that bypassed it."""
        content = self.as_dict()
        del content["version"]
        encoded = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
        return hashlib.blake2b(encoded, digest_size=8).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"tiers": [asdict(tier) for tier in self.tiers]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        known = {field.name for field in fields(cls)}
        tiers = tuple(TierPolicy(**tier) for tier in data["tiers"])
        return cls(**{name: data[name] for name in known & set(data)} | {"tiers": tiers})
