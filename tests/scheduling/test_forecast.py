"""Predictions and estimates: cautious refusals, honest times to come back, places and ETAs."""

import pytest

from llm_throttle.scheduling import commands
from llm_throttle.scheduling.decisions import Granted, Queued, Refused
from llm_throttle.scheduling.estimates import HOLD_MEMORY_MS, MIN_HOLDS
from llm_throttle.scheduling.forecast import (
    EDIT_QUIET_MS,
    OVERTAKING_PER_MILLE,
    RETURN_HORIZON_MS,
    SPREAD_PER_MILLE,
)

from .room import LONG, Room, policy, tier


def measured_room(*tiers, holds: int = MIN_HOLDS, held_ms: int = 1_000, **limits) -> Room:
    """One slot that is held, after so many calls of one second."""
    room = Room(policy(*(tiers or [tier()]), **limits))
    for index in range(holds):
        room.ask(f"past{index}")
        room.wait(held_ms)
        room.release(f"past{index}")
    room.ask("own1")
    return room


# Prediction


def test_a_wait_that_cannot_end_in_time_is_refused_at_once():
    room = measured_room()
    room.ask_all([f"a{index}-" for index in range(10)])
    assert room.ask("late1", wait_ms=9_999) == Refused("wait_too_long", room.reply.answer.retry_ms)
    assert isinstance(room.ask("late2", wait_ms=10_000), Queued)


def test_it_leaves_no_trace_in_the_queue():
    room = measured_room()
    room.ask_all([f"a{index}-" for index in range(10)])
    room.ask("late1", wait_ms=100)
    assert room.counts == (1, 10)
    assert "late1" not in room.scheduler.ledger.tickets
    assert "late" not in room.scheduler.ledger.flows


def test_a_few_holds_are_no_ground_to_refuse_on():
    room = measured_room(holds=MIN_HOLDS - 1)
    room.ask_all([f"a{index}-" for index in range(10)])
    assert isinstance(room.ask("late1", wait_ms=100), Queued)


def test_old_holds_are_no_ground_to_refuse_on():
    room = measured_room()
    room.wait(HOLD_MEMORY_MS)
    room.ask_all([f"a{index}-" for index in range(10)])
    assert isinstance(room.ask("late1", wait_ms=100), Queued)


def test_after_an_edit_nobody_is_refused_on_what_was_measured_before():
    room = measured_room()
    room.ask_all([f"a{index}-" for index in range(10)])
    room.edit(policy(version=2))
    room.wait(EDIT_QUIET_MS - 1)
    assert isinstance(room.ask("late1", wait_ms=100), Queued)
    room.wait(1)
    assert isinstance(room.ask("late2", wait_ms=100), Refused)


def test_those_who_will_have_given_up_by_then_are_not_counted():
    """Of twenty with two seconds left, two calls of a second each let only four be of account."""
    room = measured_room()
    room.edit(policy(version=2))
    room.ask_all([f"a{index}-" for index in range(20)], wait_ms=3_000)
    room.wait(1_000)
    assert isinstance(room.ask("late1", wait_ms=3_999), Refused)
    assert isinstance(room.ask("late2", wait_ms=4_000), Queued)


def test_a_look_at_the_end_of_the_line_stands_for_no_more_than_there_are():
    room = measured_room()
    room.edit(policy(version=2))
    for index in range(17):
        room.ask(f"a{index:02}-", wait_ms=1_500 if index in (2, 3) else None)
    room.wait(1_000)
    assert isinstance(room.ask("late1", wait_ms=14_999), Refused)
    assert isinstance(room.ask("late2", wait_ms=15_000), Queued)


def test_a_first_request_is_judged_by_its_place_and_not_by_the_queue():
    room = measured_room()
    room.ask_all([f"a{index}" for index in range(30)])
    assert isinstance(room.ask("b1", wait_ms=1_000), Queued)


def test_it_counts_the_slots_that_the_tier_can_use():
    rules = [tier("free", cap=4), tier("gold", reserved=5)]
    room = measured_room(*rules, capacity=7)
    room.ask_all([f"a{index}-" for index in range(9)])
    assert room.ahead("a8-") == 7
    assert isinstance(room.ask("late1", wait_ms=4_000), Queued)
    assert isinstance(room.ask("late2", wait_ms=3_999), Refused)


def test_a_free_slot_is_never_predicted_away():
    room = measured_room(capacity=2)
    assert isinstance(room.ask("a1", wait_ms=0), Granted)


# When to come back


def test_a_refused_crowd_is_sent_back_one_by_one():
    room = Room(policy(tier(queue_depth=0)))
    room.ask("own1")
    times = [room.ask(f"a{index}-").retry_ms for index in range(5)]
    assert times == [1_000, 2_000, 3_000, 4_000, 5_000]


def test_the_first_of_them_comes_when_those_who_wait_are_served():
    room = Room(policy(tier(queue_depth=3)))
    room.ask_all(["own1", "w1-", "w2-", "w3-"])
    assert room.ask("a1").retry_ms == 4_000


def test_time_that_passes_is_taken_off():
    room = Room(policy(tier(queue_depth=0)))
    room.ask("own1")
    room.ask_all(["a1-", "a2-", "a3-"])
    room.wait(2_000)
    assert room.ask("a4-").retry_ms == 2_000


def test_it_follows_the_measured_rate_of_the_tier():
    room = measured_room(tier("free", queue_depth=0))
    assert 900 <= room.ask("a1").retry_ms <= 1_000
    room = measured_room(tier("free", queue_depth=0), held_ms=200)
    assert 150 <= room.ask("a1").retry_ms <= 200


def test_each_tier_sends_back_its_own():
    room = Room(policy(tier("free", queue_depth=0), tier("gold", queue_depth=0)))
    room.ask("own1")
    room.ask_all([f"a{index}-" for index in range(9)], "free")
    assert room.ask("g1", "gold").retry_ms == 1_000


def test_a_flood_is_forgotten_within_the_longest_time_anybody_is_told():
    room = Room(policy(tier(queue_depth=0)))
    room.ask("own1")
    room.ask_all([f"a{index}-" for index in range(2_000)])
    assert room.ask("b1").retry_ms == RETURN_HORIZON_MS
    room.wait(RETURN_HORIZON_MS)
    assert room.ask("b2").retry_ms == 1_000


def test_a_user_at_its_own_limit_is_told_its_next_release():
    room = measured_room(tier(depth_per_user=1))
    room.wait(300)
    assert room.ask("own2") == Refused("user_depth", 700)
    room.wait(5_000)
    assert room.ask("own3") == Refused("user_depth", 1)


def test_of_several_calls_the_oldest_is_likely_to_end_first():
    room = measured_room(tier(depth_per_user=2), capacity=2)
    room.wait(300)
    room.ask("own2")
    room.wait(100)
    assert room.ask("own3") == Refused("user_depth", 600)


@pytest.mark.parametrize("holds", [0, MIN_HOLDS - 1])
def test_without_measured_holds_a_user_is_told_nothing(holds):
    room = measured_room(tier(depth_per_user=1), holds=holds)
    assert room.ask("own2") == Refused("user_depth", 0)


def test_a_user_whose_requests_all_wait_is_told_nothing():
    room = measured_room(tier(depth_per_user=1))
    room.ask("a1")
    assert room.ask("a2") == Refused("user_depth", 0)


def test_an_expired_waiter_is_sent_back_like_the_refused():
    room = Room(policy(tier(wait_budget_ms=2_000)))
    room.ask_all(["own1", "a1", "b1"])
    room.wait(2_000)
    room.tick()
    times = [notice.retry_ms for notice in room.notices if notice.kind == "refused"]
    assert times == [2_000, 3_000]


def test_paused_and_unserviceable_leave_the_time_to_the_settings():
    assert Room(policy(is_paused=True)).ask("a1") == Refused("paused", 0)
    assert Room(policy(capacity=0)).ask("a1") == Refused("unserviceable", 0)


# Places


def test_an_eta_is_a_range_around_the_measured_rate():
    room = measured_room()
    room.ask_all([f"a{index}-" for index in range(4)])
    place = room.place("a3-")
    assert place.ahead == 3
    middle = 4 * 1_000 * OVERTAKING_PER_MILLE // 1_000
    spread = middle * SPREAD_PER_MILLE // 1_000
    assert (place.low_ms, place.high_ms) == (middle - spread, middle + spread)


def test_an_eta_is_no_narrower_than_two_seconds():
    room = measured_room(held_ms=10)
    room.ask("a1")
    assert (room.place("a1").low_ms, room.place("a1").high_ms) == (0, 2_000)


def test_an_eta_does_not_reach_beyond_the_deadline():
    room = measured_room(tier(wait_budget_ms=10_000), held_ms=1_000)
    room.scheduler.forecast.edited_at = room.now  # no prediction
    room.ask_all([f"a{index}-" for index in range(40)])
    place = room.place("a39-")
    assert place.high_ms <= 10_000 and place.high_ms - place.low_ms <= place.high_ms // 2


def test_without_measured_holds_a_slot_a_second_is_assumed():
    room = Room(policy(capacity=4))
    room.ask_all([f"own{index}-" for index in range(4)])
    room.ask_all([f"a{index}-" for index in range(10)])
    place = room.place("a9-")
    assert place.low_ms < 10_000 < place.high_ms


def test_a_tier_that_was_removed_has_no_eta():
    room = measured_room(tier("free"), tier("gold"))
    room.ask("a1")
    room.scheduler.ledger.policy = policy(tier("gold"), version=2)
    placed = room.scheduler.forecast.places([room.scheduler.ledger.tickets["a1"]])
    assert (placed[0].low_ms, placed[0].high_ms) == (0, 0)


def test_an_eta_shrinks_with_the_place():
    room = measured_room()
    room.ask_all([f"a{index}-" for index in range(6)])
    highs = [room.place(f"a{index}-").high_ms for index in range(6)]
    assert highs == sorted(highs)


def test_places_are_asked_for_in_one_batch():
    room = measured_room()
    room.ask_all(["a1", "b1"])
    answer = room.say(commands.Positions(("b1", "a1")))
    assert [place.ahead for place in answer.places] == [1, 0]
    assert all(place.high_ms < LONG for place in answer.places)
