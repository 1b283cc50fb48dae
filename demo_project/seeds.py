"""The demo's policy and accounts, as the documentation promises them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.hashers import make_password
from django.contrib.auth.models import Group
from django.db import transaction
from rest_framework.authtoken.models import Token

from llm_throttle.models import Tier, TierLimit, Upstream

UPSTREAM = "anthropic"
CAPACITY = 30


@dataclass(frozen=True, slots=True)
class TierSeed:
    slug: str
    cap: int
    reserved: int
    weight: int
    wait_budget: int  # seconds
    queue_depth: int
    depth_per_user: int
    signs_in: bool = True

    def limits(self, capacity: int) -> dict[str, Any]:
        return {
            "cap": min(self.cap, capacity),
            "reserved": self.reserved,
            "weight": self.weight,
            "wait_budget": self.wait_budget,
            "queue_depth": self.queue_depth,
            "depth_per_user": self.depth_per_user,
        }


TIERS = (
    TierSeed("premium", 30, 0, 100, 60, 100, 8),
    TierSeed("pro", 20, 0, 10, 45, 100, 8),
    TierSeed("free", 15, 0, 3, 12, 200, 8),
    TierSeed("guest", 5, 0, 1, 8, 100, 2, signs_in=False),
)
ACCOUNTS = tuple(tier.slug for tier in TIERS if tier.signs_in)


@transaction.atomic
def seed(*, capacity: int = CAPACITY, users: int = 0) -> None:
    """Create what is missing of the policy and the accounts; what is there stays as it is.

    An operator's edits survive the next start. *users* more accounts per tier are made for load:
    ``premium-1`` and so on.
    """
    seed_policy(capacity)
    for tier in ACCOUNTS:
        seed_accounts([tier, *(f"{tier}-{number + 1}" for number in range(users))], tier)
    seed_tokens(ACCOUNTS)
    seed_operator()


def seed_policy(capacity: int) -> None:
    upstream, _ = Upstream.objects.get_or_create(
        slug=UPSTREAM,
        defaults={
            "name": "Anthropic (simulated)",
            "capacity": capacity,
            "queue_depth": 400,
            "max_hold": 300,
        },
    )
    for row in TIERS:
        tier, created = Tier.objects.get_or_create(
            slug=row.slug,
            defaults={
                "name": row.slug.title(),
                "is_default": row.slug == "free",
                "is_anonymous": not row.signs_in,
            },
        )
        if created and row.signs_in:
            tier.groups.add(Group.objects.get_or_create(name=row.slug)[0])
        TierLimit.objects.get_or_create(
            upstream=upstream, tier=tier, defaults=row.limits(upstream.capacity)
        )


def seed_accounts(names: list[str], group: str) -> None:
    """Accounts whose password is their name, all members of *group*."""
    User = get_user_model()
    known = set(User.objects.filter(username__in=names).values_list("username", flat=True))
    new = [User(username=name, password=make_password(name)) for name in names if name not in known]
    User.objects.bulk_create(new)
    group_id = Group.objects.get_or_create(name=group)[0].pk
    Membership = User.groups.through
    Membership.objects.bulk_create(Membership(user_id=user.pk, group_id=group_id) for user in new)


def seed_tokens(names: Iterable[str]) -> None:
    """A token for the API that is as secret as the password: the account's name."""
    for user in get_user_model().objects.filter(username__in=list(names)):
        Token.objects.get_or_create(user=user, defaults={"key": user.get_username()})


def seed_operator() -> None:
    User = get_user_model()
    if not User.objects.filter(username="admin").exists():
        User.objects.create_superuser("admin", "", "admin")
