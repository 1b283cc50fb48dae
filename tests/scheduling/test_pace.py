"""The fluid model: who has how many slots, and how long a place in line takes."""

import pytest

from llm_throttle.scheduling.pace import HORIZON_MS, legs, split, when

from .room import policy, tier


def test_slots_are_shared_by_weight():
    rules = policy(tier("a", weight=3), tier("b", weight=1), capacity=8)
    assert split(rules, "a", {"b": 1}) == {"a": 6_000, "b": 2_000}


def test_a_tier_alone_has_them_all_up_to_its_cap():
    rules = policy(tier("a", cap=5), tier("b"), capacity=8)
    assert split(rules, "a", {}) == {"a": 5_000}
    assert split(rules, "b", {}) == {"b": 8_000}


def test_what_a_cap_leaves_goes_to_the_others():
    rules = policy(tier("a", cap=2, weight=100), tier("b"), tier("c"), capacity=8)
    assert split(rules, "a", {"b": 1, "c": 1}) == {"a": 2_000, "b": 3_000, "c": 3_000}


def test_a_reservation_is_kept_also_for_who_has_no_waiters():
    rules = policy(tier("a", reserved=3, weight=1), tier("b", weight=99), capacity=8)
    assert split(rules, "b", {}) == {"b": 5_000}
    assert split(rules, "b", {"a": 1}) == {"a": 3_000, "b": 5_000}


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_limits_that_do_not_fit_still_give_an_answer(capacity):
    rules = policy(tier("a", cap=0), tier("b", reserved=9), capacity=capacity)
    assert all(slots >= 1 for slots in split(rules, "a", {"b": 1}).values())


def test_the_pace_changes_when_another_line_ends():
    rules = policy(tier("a", weight=3), tier("b"), capacity=4)
    path = legs(rules, "b", 1_000, {"a": 6, "b": 99})
    assert when(path, 1_000, 1) == 1_000  # one slot in four
    assert when(path, 1_000, 2) == 2_000  # a's six are served by now
    assert when(path, 1_000, 6) == 3_000  # four at once


def test_nothing_is_foreseen_beyond_the_horizon():
    rules = policy(tier("a", weight=1000), tier("b"), capacity=1)
    path = legs(rules, "b", HORIZON_MS, {"a": 1_000, "b": 1})
    assert len(path) == 2
    assert when(path, HORIZON_MS, 1) > HORIZON_MS


def test_more_places_take_longer():
    rules = policy(tier("a"), tier("b", weight=7), tier("c", cap=1), capacity=5)
    path = legs(rules, "a", 1_300, {"a": 50, "b": 9, "c": 4})
    times = [when(path, 1_300, need) for need in range(1, 50)]
    assert times == sorted(times)
