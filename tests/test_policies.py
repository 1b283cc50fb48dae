"""Rows become a safe frozen policy; an edit is announced once, after its commit."""

from __future__ import annotations

import logging

import pytest
from django.contrib.auth.models import Group, User
from django.db import transaction
from django.db.models import F

from llm_throttle import policies
from llm_throttle.exceptions import UnknownUpstream
from llm_throttle.models import Tier, TierAssignment, TierLimit, Upstream
from llm_throttle.scheduling.policy import UNLIMITED, TierPolicy
from llm_throttle.signals import policy_edited

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("announced")]


def upstream(slug: str = "anthropic", capacity: int = 30, **fields) -> Upstream:
    return Upstream.objects.create(slug=slug, capacity=capacity, **fields)


def tier(slug: str, **fields) -> Tier:
    return Tier.objects.create(slug=slug, **fields)


def limit(upstream: Upstream, slug: str, **fields) -> TierLimit:
    row, _ = Tier.objects.get_or_create(slug=slug)
    return TierLimit.objects.create(upstream=upstream, tier=row, **fields)


def version(slug: str = "anthropic") -> int:
    return Upstream.objects.get(slug=slug).version


# Building


def test_every_number_of_the_rows_is_in_the_policy_in_milliseconds_and_slots():
    row = upstream(queue_depth=400, max_hold=120, drain=20, grace=0, is_paused=True)
    tier("free", is_default=True, is_anonymous=True)
    limit(
        row,
        "gold",
        cap=20,
        reserved=5,
        weight=100,
        wait_budget=60,
        queue_depth=50,
        depth_per_user=3,
    )
    policy = policies.load("anthropic")
    assert policy.version == version()
    assert (policy.capacity, policy.queue_depth, policy.is_paused) == (30, 400, True)
    assert (policy.max_hold_ms, policy.drain_ms, policy.grace_ms) == (120_000, 20, 0)
    assert policy.by_slug["gold"] == TierPolicy("gold", 20, 5, 100, 60_000, 50, 3)


def test_a_tier_without_a_row_gets_the_meaning_of_empty_cells():
    upstream()
    tier("free", is_default=True, is_anonymous=True)
    policy = policies.load("anthropic")
    assert policy.tiers == (
        TierPolicy("free", 30, reserved=0, weight=1, wait_budget_ms=0, queue_depth=UNLIMITED),
    )
    assert policy.tiers[0].depth_per_user == 8


def test_without_any_tier_the_whole_capacity_is_usable():
    upstream(capacity=7)
    policy = policies.load("anthropic")
    assert policy.tiers == (TierPolicy("default", 7, weight=1, wait_budget_ms=0, depth_per_user=8),)
    assert policy.usable_slots("default") == 7


@pytest.mark.parametrize("marks", [{}, {"is_default": True}, {"is_anonymous": True}])
def test_callers_without_a_tier_are_never_better_off_than_a_named_tier(marks):
    row = upstream()
    tier("guest", **marks)
    limit(row, "guest", cap=5, weight=2, wait_budget=8, depth_per_user=2)
    limit(row, "gold", cap=20, weight=100, wait_budget=60)
    policy = policies.load("anthropic")
    built_in = policy.by_slug["default"]
    for named in (policy.by_slug["guest"], policy.by_slug["gold"]):
        assert built_in.cap <= named.cap
        assert built_in.weight <= named.weight
        assert built_in.wait_budget_ms <= named.wait_budget_ms
        assert built_in.depth_per_user <= named.depth_per_user
        assert built_in.reserved == 0


def test_the_built_in_tier_is_left_out_where_nobody_can_land_in_it():
    upstream()
    tier("free", is_default=True)
    tier("guest", is_anonymous=True)
    assert set(policies.load("anthropic").by_slug) == {"free", "guest"}


def test_a_row_with_the_name_of_the_built_in_tier_takes_its_place():
    limit(upstream(), "default", cap=3)
    assert [t.cap for t in policies.load("anthropic")] == [3]


@pytest.mark.parametrize(
    ("field", "number", "expected"),
    [
        ("cap", None, 30),
        ("cap", 0, 0),
        ("cap", 1, 1),
        ("cap", 10**12, 30),
        ("cap", -4, 0),
        ("reserved", None, 0),
        ("reserved", 0, 0),
        ("reserved", 1, 1),
        ("reserved", 10**12, 30),
        ("reserved", -4, 0),
        ("weight", None, 1),
        ("weight", 0, 1),
        ("weight", 10**12, 1000),
        ("weight", -4, 1),
        ("wait_budget", None, 0),
        ("wait_budget", 0, 0),
        ("wait_budget", 1, 1000),
        ("wait_budget", 10**12, 86_400_000),
        ("wait_budget", -4, 0),
        ("queue_depth", None, UNLIMITED),
        ("queue_depth", 0, 0),
        ("queue_depth", 1, 1),
        ("queue_depth", 10**12, UNLIMITED),
        ("queue_depth", -4, 0),
        ("depth_per_user", None, 8),
        ("depth_per_user", 0, 1),
        ("depth_per_user", 1, 1),
        ("depth_per_user", 10**12, 100),
        ("depth_per_user", -4, 1),
    ],
)
def test_a_limit_that_came_in_past_the_validation_is_made_safe(field, number, expected):
    gold = tier("gold", is_default=True, is_anonymous=True)
    row = TierLimit(tier=gold, **{field: number})
    built = policies.build(Upstream(slug="u", capacity=30), [gold], [row]).by_slug["gold"]
    name = "wait_budget_ms" if field == "wait_budget" else field
    assert getattr(built, name) == expected


@pytest.mark.parametrize(
    ("field", "number", "expected"),
    [
        ("capacity", 0, 0),
        ("capacity", -4, 0),
        ("capacity", 10**12, 1_000_000),
        ("queue_depth", None, UNLIMITED),
        ("queue_depth", 0, 0),
        ("queue_depth", -4, 0),
        ("max_hold", 0, 1000),
        ("max_hold", 10**12, 86_400_000),
        ("drain", 9999, 500),
        ("drain", -1, 0),
        ("grace", -1, 0),
    ],
)
def test_an_upstream_that_came_in_past_the_validation_is_made_safe(field, number, expected):
    row = Upstream(**{"slug": "u", "capacity": 30, field: number})
    built = policies.build(row, [], [])
    name = {"max_hold": "max_hold_ms", "drain": "drain_ms", "grace": "grace_ms"}.get(field, field)
    assert getattr(built, name) == expected


def test_a_capacity_lowered_past_the_validation_takes_caps_and_reservations_with_it():
    row = upstream(capacity=30)
    limit(row, "gold", cap=25, reserved=15)
    limit(row, "pro", cap=20, reserved=10)
    limit(row, "free")
    Upstream.objects.update(capacity=10)
    policy = policies.load("anthropic")
    assert (policy.by_slug["gold"].cap, policy.by_slug["pro"].cap) == (10, 10)
    # Each reservation is within the new capacity, but not both: they keep their proportion.
    assert (policy.by_slug["gold"].reserved, policy.by_slug["pro"].reserved) == (5, 5)
    Upstream.objects.update(capacity=20)
    policy = policies.load("anthropic")
    assert (policy.by_slug["gold"].reserved, policy.by_slug["pro"].reserved) == (12, 8)
    assert sum(t.reserved for t in policy) <= 20


def test_a_deleted_upstream_lets_nobody_in_under_a_version_above_its_last():
    policy = policies.retired(8)
    assert (policy.version, policy.capacity, policy.tiers) == (8, 0, ())


# Reading


def test_an_unknown_upstream_is_named():
    with pytest.raises(UnknownUpstream, match="'nobody'"):
        policies.load("nobody")


def test_reading_costs_the_same_however_many_tiers_there_are(django_assert_num_queries):
    row = upstream()
    with django_assert_num_queries(4):
        policies.load("anthropic")
    for number in range(20):
        limit(row, f"t{number}")
    with django_assert_num_queries(4):
        policies.load("anthropic")


def test_an_edit_that_comes_between_the_queries_makes_it_read_again(monkeypatch):
    row = upstream()
    gold = limit(row, "gold", cap=5)
    plain, edits = policies._version, [6, 7]

    def edited_meanwhile(slug: str) -> int | None:
        if edits:
            gold.cap = edits.pop(0)
            gold.save()
        return plain(slug)

    monkeypatch.setattr(policies, "_version", edited_meanwhile)
    policy = policies.load("anthropic")
    assert (policy.version, policy.by_slug["gold"].cap) == (version(), 7)


async def test_async_callers_read_the_same_policy(closing_connections):
    await Upstream.objects.acreate(slug="anthropic", capacity=4)
    assert (await policies.aload("anthropic")).capacity == 4


# Announcing


def test_an_edit_is_announced_after_its_commit_and_not_before(announced):
    row = upstream()
    announced.clear()
    with transaction.atomic():
        row.capacity = 5
        row.save()
        assert announced == []
    assert announced == [("anthropic", False, version())]


def test_a_rolled_back_edit_is_not_announced_and_changes_no_version(announced):
    row = upstream()
    before, _ = version(), announced.clear()
    with pytest.raises(RuntimeError), transaction.atomic():
        row.capacity = 5
        row.save()
        raise RuntimeError
    assert (announced, version()) == ([], before)
    row.capacity = 6
    row.save()
    assert announced == [("anthropic", False, before + 1)]


def test_many_edits_in_one_transaction_are_announced_once(announced):
    row = upstream()
    announced.clear()
    with transaction.atomic():
        row.save()
        limit(row, "gold")
        limit(row, "pro").delete()
        row.save()
    assert announced == [("anthropic", False, version())]


def test_an_edit_survives_the_rollback_of_another_one_in_a_savepoint(announced):
    row = upstream()
    announced.clear()
    with transaction.atomic():
        with pytest.raises(RuntimeError), transaction.atomic():
            row.save()
            raise RuntimeError
        row.save()
    assert announced == [("anthropic", False, version())]

    announced.clear()
    with transaction.atomic():
        row.save()
        with pytest.raises(RuntimeError), transaction.atomic():
            row.save()
            raise RuntimeError
    assert announced == [("anthropic", False, version())]


@pytest.mark.parametrize(
    "edit",
    [
        lambda row: row.save(),
        lambda row: row.save(update_fields=["is_paused"]),
        lambda row: TierLimit.objects.get().save(),
        lambda row: TierLimit.objects.get().delete(),
        lambda row: TierLimit.objects.all().delete(),
        lambda row: Tier.objects.get().save(),
        lambda row: Tier.objects.get().delete(),
        lambda row: Tier.objects.create(slug="new"),
        lambda row: Tier.objects.get().groups.add(Group.objects.create(name="g")),
        lambda row: Tier.objects.get().groups.clear(),
        lambda row: Group.objects.create(name="h").llm_throttle_tiers.add(Tier.objects.get()),
        lambda row: TierAssignment.objects.create(user=_user(), tier=Tier.objects.get()),
    ],
)
def test_each_kind_of_edit_makes_one_announcement_with_a_higher_version(edit, announced):
    row = upstream()
    limit(row, "gold")
    before, _ = version(), announced.clear()
    edit(row)
    assert announced == [("anthropic", False, version())]
    assert version() > before


def _user() -> User:
    return User.objects.create_user("someone")


def test_an_edit_of_one_upstream_leaves_the_others_alone(announced):
    row = upstream()
    upstream("openai")
    gold = limit(row, "gold")
    before, _ = version("openai"), announced.clear()
    gold.cap = 3
    gold.save()
    row.save()
    assert {slug for slug, _, _ in announced} == {"anthropic"}
    assert version("openai") == before


def test_an_edit_of_a_tier_reaches_every_upstream(announced):
    upstream(), upstream("openai")
    announced.clear()
    tier("gold")
    assert sorted(announced) == [
        ("anthropic", False, version()),
        ("openai", False, version("openai")),
    ]


def test_a_stale_form_does_not_set_the_version_back():
    upstream()
    mine, yours = Upstream.objects.get(), Upstream.objects.get()
    seen = [version()]
    for row in (mine, yours, yours, mine):
        row.save()
        seen.append(version())
        assert row.version == seen[-1]
    assert seen == sorted(set(seen))


def test_a_deletion_is_announced_with_a_version_above_every_earlier_one(announced):
    row = upstream()
    limit(row, "gold")
    limit(row, "pro")
    row.save()
    last = max(version for _, _, version in announced)
    announced.clear()
    row.delete()
    ((slug, deleted, newest),) = announced
    assert (slug, deleted) == ("anthropic", True)
    assert newest > last


def test_a_deletion_from_the_list_page_is_announced_for_each_upstream(announced):
    upstream(), upstream("openai")
    announced.clear()
    Upstream.objects.all().delete()
    assert sorted((slug, deleted) for slug, deleted, _ in announced) == [
        ("anthropic", True),
        ("openai", True),
    ]


def test_a_rolled_back_deletion_is_not_announced(announced):
    row = upstream()
    announced.clear()
    with pytest.raises(RuntimeError), transaction.atomic():
        row.delete()
        raise RuntimeError
    assert announced == []
    assert policies.load("anthropic").capacity == 30


def test_a_slug_changed_past_the_validation_retires_the_old_one(announced):
    row = upstream()
    announced.clear()
    row.slug = "renamed"
    row.save()
    assert sorted(announced) == [
        ("anthropic", True, version("renamed") + 1),
        ("renamed", False, version("renamed")),
    ]


def test_a_listener_that_fails_does_not_fail_the_edit(announced, caplog):
    def broken(**kwargs: object) -> None:
        raise ConnectionError("the store is down")

    policy_edited.connect(broken)
    with caplog.at_level(logging.ERROR):
        row = upstream()
    assert announced[-1] == ("anthropic", False, row.version)
    assert "the store is down" in caplog.text


def test_an_edit_and_its_version_are_committed_together_or_not_at_all(announced, monkeypatch):
    row = upstream()
    announced.clear()

    def broken(*args: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(policies, "_bump", broken)
    row.capacity = 5
    with pytest.raises(RuntimeError):
        row.save()  # in autocommit mode: Django's own transaction ends before post_save
    assert (Upstream.objects.get().capacity, announced) == (30, [])


def test_an_announcement_that_fails_does_not_fail_the_edit(monkeypatch, caplog):
    def broken(**kwargs: object) -> None:
        raise RuntimeError("no signal")

    monkeypatch.setattr(policy_edited, "send_robust", broken)
    row = upstream()
    assert policies.load("anthropic").version == row.version
    assert "no signal" in caplog.text


def test_bump_gives_a_version_above_the_given_one_and_announces_it(announced):
    row = upstream()
    announced.clear()
    assert policies.bump("anthropic") == row.version + 1
    assert policies.bump("anthropic", above=500) == 501
    assert policies.bump("anthropic", above=7) == 502
    assert [version for _, _, version in announced] == [row.version + 1, 501, 502]
    with pytest.raises(UnknownUpstream):
        policies.bump("nobody")


def test_loading_a_fixture_keeps_its_version_and_is_announced(announced, tmp_path):
    from django.core.management import call_command

    upstream()
    Upstream.objects.update(version=F("version") + 40)
    dump = tmp_path / "dump.json"
    call_command("dumpdata", "llm_throttle", output=str(dump), verbosity=0)
    kept = version()
    Upstream.objects.all().delete()
    announced.clear()
    call_command("loaddata", str(dump), verbosity=0)
    assert announced == [("anthropic", False, kept + 1)]
