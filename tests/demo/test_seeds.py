from __future__ import annotations

import json
from io import StringIO

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser
from django.contrib.sessions.backends.db import SessionStore
from django.core.management import call_command

from demo_project.management.commands.seed import Command
from demo_project.seeds import TIERS, UPSTREAM, seed
from llm_throttle.identity import Caller, resolve_tier
from llm_throttle.models import Tier, TierLimit, Upstream

pytestmark = pytest.mark.django_db
User = get_user_model()


def numbers() -> dict[str, tuple[int | None, ...]]:
    return {
        limit.tier.slug: (
            limit.cap,
            limit.reserved,
            limit.weight,
            limit.wait_budget,
            limit.queue_depth,
            limit.depth_per_user,
        )
        for limit in TierLimit.objects.select_related("tier")
    }


def test_the_policy_is_the_documented_one() -> None:
    seed()
    upstream = Upstream.objects.get(slug=UPSTREAM)
    assert (upstream.capacity, upstream.queue_depth, upstream.max_hold) == (30, 400, 300)
    assert numbers() == {
        "premium": (30, 0, 100, 60, 100, 8),
        "pro": (20, 0, 10, 45, 100, 8),
        "free": (15, 0, 3, 12, 200, 8),
        "guest": (5, 0, 1, 8, 100, 2),
    }
    upstream.full_clean()
    for row in [*Tier.objects.all(), *TierLimit.objects.all()]:
        row.full_clean()


def test_the_accounts_are_in_their_tiers() -> None:
    seed(users=2)
    for name in ("premium", "pro", "free", "premium-1", "pro-2"):
        user = User.objects.get(username=name)
        assert user.check_password(name)
        assert resolve_tier(Caller(UPSTREAM, user=user)) == name.split("-")[0]
    assert User.objects.get(username="admin").is_superuser
    assert resolve_tier(Caller(UPSTREAM, user=AnonymousUser())) == "guest"


def test_seeding_again_adds_what_is_missing_and_keeps_an_operators_edits() -> None:
    seed(users=1)
    Upstream.objects.update(capacity=12)
    TierLimit.objects.filter(tier__slug="guest").update(cap=1)
    User.objects.get(username="pro").delete()
    seed(users=3)
    assert Upstream.objects.get().capacity == 12
    assert numbers()["guest"][0] == 1
    assert Tier.objects.count() == len(TIERS)
    assert User.objects.filter(username__startswith="pro").count() == 4


def test_caps_follow_a_small_capacity() -> None:
    seed(capacity=4)
    assert [cap for cap, *_ in numbers().values()] == [4, 4, 4, 4]
    for limit in TierLimit.objects.all():
        limit.full_clean()


def test_sessions_are_made_for_every_account_and_guest() -> None:
    output = StringIO()
    call_command(Command(stdout=output), users=1, sessions=2, stdout=output)
    sessions = json.loads(output.getvalue())
    assert {tier: len(keys) for tier, keys in sessions.items()} == {
        "premium": 2,
        "pro": 2,
        "free": 2,
        "admin": 1,
        "guest": 2,
    }
    stored = SessionStore(sessions["pro"][1]).load()
    assert User.objects.get(pk=stored["_auth_user_id"]).username == "pro-1"
    assert SessionStore(sessions["guest"][0]).load() == {}
