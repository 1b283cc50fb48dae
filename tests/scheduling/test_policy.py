"""The frozen policy: shares that hold, bounds that are told to operators, its fingerprint."""

import pytest

from llm_throttle.scheduling.policy import Policy

from .room import policy, tier
from .stampede import SEEDED


def test_tiers_are_kept_in_the_byte_order_of_their_slugs():
    assert [tier.slug for tier in policy(tier("é"), tier("z"), tier("A"))] == ["A", "z", "é"]


def test_usable_slots_are_what_a_tier_can_ever_hold():
    rules = policy(tier("a", cap=5), tier("b", reserved=4), tier("c", cap=9), capacity=10)
    assert [rules.usable_slots(slug) for slug in "abc"] == [5, 10, 6]


def test_a_tier_has_at_least_its_reservation():
    rules = policy(tier("a", reserved=3), tier("b", reserved=3), tier("c"), capacity=4)
    assert [rules.usable_slots(slug) for slug in "abc"] == [3, 3, 0]


@pytest.mark.parametrize(("cap", "capacity"), [(0, 5), (5, 0)])
def test_nothing_is_usable_without_cap_or_capacity(cap, capacity):
    assert policy(tier("a", cap=cap), capacity=capacity).usable_slots("a") == 0


def test_what_the_caps_of_others_leave_is_guaranteed():
    """Caps of 15 and 5 leave the paying tiers together 10 of 30 slots, not 25."""
    paying = tier("paying", cap=30)
    rules = policy(paying, tier("free", cap=15), tier("guest", cap=5), capacity=30)
    assert rules.guaranteed_slots("paying") == 10


def test_a_reservation_is_guaranteed():
    rules = policy(tier("a", reserved=2), tier("b", cap=9), capacity=9)
    assert rules.guaranteed_slots("a") == 2


def test_the_starvation_bound_is_the_weights_over_the_own_and_the_tiers():
    bounds = {tier.slug: SEEDED.starvation_bound(tier.slug) for tier in SEEDED}
    assert bounds == {"premium": 6, "pro": 16, "free": 42, "guest": 118}


def test_the_fingerprint_is_that_of_the_content():
    assert policy(version=1).digest == policy(version=2).digest
    assert policy(capacity=1).digest != policy(capacity=2).digest
    assert policy(tier(weight=1)).digest != policy(tier(weight=2)).digest


def test_it_survives_the_way_through_json():
    assert Policy.from_dict(SEEDED.as_dict()) == SEEDED


def test_unknown_fields_of_a_newer_version_are_left_out():
    assert Policy.from_dict(SEEDED.as_dict() | {"novelty": 1}) == SEEDED


def test_a_deleted_upstream_has_neither_capacity_nor_tiers():
    assert Policy(2, 0).is_retired
    assert not policy(capacity=0).is_retired
