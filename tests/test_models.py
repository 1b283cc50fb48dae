"""The rows: what is refused, where and in which words; what an empty cell means."""

from __future__ import annotations

import pytest
from django.core.exceptions import ValidationError
from django.db import DatabaseError, IntegrityError, transaction

from llm_throttle.models import Tier, TierLimit, Upstream

pytestmark = pytest.mark.django_db


def upstream(capacity: int = 30, **fields) -> Upstream:
    return Upstream.objects.create(slug="anthropic", capacity=capacity, **fields)


def limit(upstream: Upstream, tier: str, **fields) -> TierLimit:
    row, _ = Tier.objects.get_or_create(slug=tier, defaults={"name": tier.title()})
    return TierLimit(upstream=upstream, tier=row, **fields)


def saved(upstream: Upstream, tier: str, **fields) -> TierLimit:
    row = limit(upstream, tier, **fields)
    row.save()
    return row


def complaints(row) -> dict[str, list[str]]:
    with pytest.raises(ValidationError) as caught:
        row.full_clean()
    return caught.value.message_dict


# Slugs


@pytest.mark.parametrize("model", [Upstream, Tier])
@pytest.mark.parametrize("slug", ["two words", "a:b", "{a}", "café", "a/b", "a.b", "línea", "a\n"])
def test_a_slug_that_is_unsafe_as_a_key_is_refused_in_plain_words(model, slug):
    row = model(slug=slug, **({"capacity": 1} if model is Upstream else {}))
    assert "no spaces, colons, braces" in complaints(row)["slug"][0]


@pytest.mark.parametrize("slug", ["a", "gpt-5_mini", "X9", "a" * 50])
def test_a_plain_slug_is_accepted(slug):
    Upstream(slug=slug, capacity=1).full_clean()
    Tier(slug=slug).full_clean()


def test_a_slug_cannot_be_changed_once_it_is_saved():
    row = upstream()
    for known in (row, Upstream.objects.get()):
        known.slug = "other"
        assert "“anthropic” cannot be changed" in complaints(known)["slug"][0]
        assert "Create a new one, then delete this one" in complaints(known)["slug"][0]
    tier = Tier.objects.create(slug="gold")
    tier.slug = "silver"
    assert "“gold” cannot be changed" in complaints(tier)["slug"][0]


def test_no_tier_may_take_the_name_of_the_built_in_one():
    assert "built-in tier" in complaints(Tier(slug="default", is_default=True))["slug"][0]


# Names


def test_rows_are_called_by_their_name_or_else_their_slug():
    row = upstream(name="Claude")
    assert str(row) == "Claude"
    assert str(Tier(slug="gold")) == "gold"
    assert str(limit(row, "gold")) == "Claude · Gold"


# One default tier, one for guests


@pytest.mark.parametrize("mark", ["is_default", "is_anonymous"])
def test_a_second_tier_with_the_same_mark_is_refused_and_the_first_is_named(mark):
    Tier.objects.create(slug="free", name="Free", **{mark: True})
    assert "“Free” has this mark already" in complaints(Tier(slug="x", **{mark: True}))[mark][0]
    with pytest.raises(IntegrityError), transaction.atomic():
        Tier.objects.create(slug="y", **{mark: True})
    Tier.objects.get().full_clean()
    Tier.objects.create(slug="z")
    Tier.objects.create(slug="zz")


# Numbers


UPSTREAM_RANGES = {
    "capacity": (0, 1_000_000),
    "queue_depth": (0, 1_000_000),
    "max_hold": (1, 86_400),
    "drain": (0, 500),
    "grace": (0, 86_400),
}
LIMIT_RANGES = {
    "cap": (0, 1_000_000),
    "reserved": (0, 1_000_000),
    "weight": (1, 1000),
    "wait_budget": (0, 86_400),
    "queue_depth": (0, 1_000_000),
    "depth_per_user": (1, 100),
}


@pytest.mark.parametrize(("field", "ends"), UPSTREAM_RANGES.items())
def test_an_upstreams_numbers_stay_within_their_ranges_also_by_orm(field, ends):
    low, high = ends
    for number in (low - 1, high + 1, -1, 2**40):
        row = Upstream(**{"slug": "u", "capacity": 1, field: number})
        assert field in complaints(row)
        with pytest.raises(DatabaseError), transaction.atomic():
            row.save()
    for number in (low, high):
        row = Upstream(**{"slug": f"u{number}", "capacity": 1, field: number})
        row.full_clean()
        row.save()


@pytest.mark.parametrize(("field", "ends"), LIMIT_RANGES.items())
def test_a_limits_numbers_stay_within_their_ranges_also_by_orm(field, ends):
    low, high = ends
    row = upstream(1_000_000)
    for number in (low - 1, high + 1, -1, 2**40):
        assert field in complaints(limit(row, "gold", **{field: number}))
        with pytest.raises(DatabaseError), transaction.atomic():
            saved(row, "gold", **{field: number})
    for number in (low, high):
        saved(row, f"gold{number}", **{field: number})


@pytest.mark.parametrize("constraint", TierLimit._meta.constraints[1:] + Upstream._meta.constraints)
def test_every_constraint_says_what_it_wants(constraint):
    message = str(constraint.violation_error_message)
    assert "is violated" not in message
    assert message.endswith(".")


@pytest.mark.parametrize("given", ["full_clean", "save"])
def test_an_empty_cell_has_its_documented_meaning(given):
    cells = dict.fromkeys(LIMIT_RANGES)
    row = limit(upstream(), "gold", **cells)
    getattr(row, given)()
    row.save()
    row.refresh_from_db()
    assert (row.cap, row.reserved, row.weight) == (None, 0, 1)
    assert (row.wait_budget, row.queue_depth, row.depth_per_user) == (0, None, 8)


# Numbers that do not fit together


def test_a_cap_of_0_is_refused_since_the_tier_could_never_be_served():
    assert "“Gold” could never be served with a cap of 0" in str(
        complaints(limit(upstream(), "gold", cap=0))["cap"]
    )


def test_a_cap_above_the_capacity_is_refused_with_both_numbers():
    assert "“Gold” has a cap of 31, more than the capacity of 30" in str(
        complaints(limit(upstream(30), "gold", cap=31))["cap"]
    )
    limit(Upstream.objects.get(), "gold", cap=30).full_clean()


def test_a_reservation_above_the_cap_is_refused_by_form_and_by_orm():
    row = upstream()
    assert "“Gold” reserves 6 slots, more than its cap of 5" in str(
        complaints(limit(row, "gold", cap=5, reserved=6))["reserved"]
    )
    with pytest.raises(IntegrityError), transaction.atomic():
        saved(row, "gold", cap=5, reserved=6)
    limit(row, "gold", cap=5, reserved=5).full_clean()


def test_a_reservation_above_the_capacity_is_refused():
    assert "reserves 31 slots, more than the capacity of 30" in str(
        complaints(limit(upstream(30), "gold", reserved=31))["reserved"]
    )


def test_reservations_that_add_up_to_more_than_the_capacity_are_refused_tier_by_tier():
    row = upstream(30)
    saved(row, "gold", reserved=20)
    words = complaints(limit(row, "pro", reserved=11))["__all__"][0]
    assert words.startswith("The reservations add up to 31 slots (Gold 20, Pro 11), more than")
    limit(row, "pro", reserved=10).full_clean()


def test_an_edited_row_is_not_counted_twice():
    row = upstream(30)
    gold = saved(row, "gold", reserved=20)
    gold.reserved = 30
    gold.full_clean()


def test_reservations_that_leave_nothing_to_a_tier_without_one_are_refused():
    row = upstream(30)
    saved(row, "free")
    saved(row, "guest")
    words = complaints(limit(row, "gold", reserved=30))["__all__"][0]
    assert words.startswith("Tiers “Free”, “Guest” could never be served: they reserve nothing")
    assert "(Gold 30) fill the capacity of 30" in words


def test_a_tier_without_a_row_counts_as_one_that_reserves_nothing():
    Tier.objects.create(slug="free", name="Free")
    words = complaints(limit(upstream(30), "gold", reserved=30))["__all__"][0]
    assert words.startswith("Tier “Free” could never be served: it reserves nothing")


def test_a_new_tier_that_no_upstream_has_room_for_is_refused():
    saved(upstream(30), "gold", reserved=30)
    assert "reserve the whole capacity of the upstream “anthropic”" in str(
        complaints(Tier(slug="free"))["__all__"]
    )


def test_lowering_the_capacity_below_reservations_or_caps_is_refused():
    row = upstream(30)
    saved(row, "gold", reserved=20, cap=25)
    row.capacity = 22
    assert "“Gold” has a cap of 25, more than the capacity of 22" in str(complaints(row))
    row.capacity = 12
    assert "“Gold” reserves 20 slots, more than the capacity of 12" in str(complaints(row))


def test_a_capacity_of_0_shuts_the_upstream_and_leaves_the_tiers_alone():
    row = upstream(30)
    gold = saved(row, "gold", reserved=20, cap=25)
    row.capacity = 0
    row.full_clean()
    row.save()
    TierLimit.objects.get(pk=gold.pk).full_clean()


def test_a_capacity_of_1_is_enough_for_one_tier_and_one_reservation():
    row = upstream(1)
    limit(row, "gold", cap=1, reserved=1).full_clean()


def test_nonsense_from_code_is_a_validation_error_and_no_crash():
    row = upstream()
    assert "reserved" in complaints(limit(row, "gold", reserved="many", cap="x"))
    assert "capacity" in complaints(Upstream(slug="u", capacity="lots"))
    assert "upstream" in complaints(TierLimit())


def test_a_second_row_for_the_same_tier_is_refused():
    row = upstream()
    saved(row, "gold")
    assert "has limits for this tier already" in str(complaints(limit(row, "gold"))["__all__"])
