"""While the store may have forgotten, nothing new is granted: what starts and what ends it."""

import pytest

from llm_throttle.scheduling import commands
from llm_throttle.scheduling.commands import Call
from llm_throttle.scheduling.decisions import Done, Granted, Queued, Refused
from llm_throttle.scheduling.recovery import Timing
from llm_throttle.scheduling.scheduler import Scheduler

from .room import Room, policy, tier

DEFAULTS = Timing()


def new_room(workers=("w1", "w2"), **limits) -> Room:
    """An upstream that has just been seen for the first time."""
    return Room(policy(**limits), timing=DEFAULTS, workers=workers)


def calm_room(**kwargs) -> Room:
    room = new_room(**kwargs)
    room.wait(5_000)
    assert not room.overview.is_recovering
    return room


def forget(room: Room) -> None:
    """The store comes back empty."""
    room.scheduler = Scheduler("sim", room.scheduler.ledger.timing)


def is_recovering(room: Room) -> bool:
    return room.overview.is_recovering


# What starts it


def test_an_empty_store_may_have_forgotten_everything():
    assert is_recovering(new_room())


def test_a_worker_that_was_told_more_than_is_written_here_shows_it():
    room = calm_room()
    room.beat("w1", acked=room.seqs["w1"] + 5)
    assert is_recovering(room)


def test_a_worker_that_was_told_what_is_written_here_does_not():
    room = calm_room()
    room.beat("w1", acked=room.seqs["w1"])
    assert not is_recovering(room)


def test_another_server_process_shows_it():
    room = calm_room()
    room.say(commands.Tick(), server="run-1")
    assert not is_recovering(room)
    room.say(commands.Tick(), server="run-2")
    assert is_recovering(room)


def test_an_unknown_server_process_does_not():
    room = calm_room()
    room.say(commands.Tick(), server="run-1")
    room.say(commands.Tick(), server="")
    room.say(commands.Tick(), server="run-1")
    assert not is_recovering(room)


def test_a_silence_of_more_than_two_beats_shows_it():
    room = calm_room()
    room.now += 2_000
    room.tick()
    assert not is_recovering(room)
    room.now += 2_001
    room.tick()
    assert is_recovering(room)


def test_a_silence_shows_nothing_where_nobody_should_have_spoken():
    room = calm_room(workers=["w1"])
    room.say(commands.SignOff())
    room.now += 60_000
    room.tick()
    assert not is_recovering(room)


def test_a_clock_that_steps_back_shows_it_and_time_goes_on():
    room = calm_room()
    room.ask("own1")
    room.ask("a1", wait_ms=5_000)
    before = room.scheduler.ledger.now
    room.now -= 3_600_000
    room.tick()
    assert is_recovering(room)
    assert room.scheduler.ledger.now == before
    room.wait(6_000)
    assert "a1" not in room.waiting


def test_a_small_step_back_only_stops_the_clock():
    room = calm_room()
    before = room.scheduler.ledger.now
    room.now -= 900
    room.tick()
    assert not is_recovering(room)
    assert room.scheduler.ledger.now == before


def test_it_can_be_switched_off():
    room = Room(policy(), timing=Timing(recovery_ms=0))
    assert not is_recovering(room)
    assert isinstance(room.ask("a1"), Granted)


def test_memory_is_judged_before_anything_expires():
    """Two workers whose store stood still for a minute are not dead."""
    room = calm_room(capacity=2)
    room.ask("a1", worker="w1")
    room.ask("b1", worker="w2")
    room.now += 60_000
    room.tick()
    assert is_recovering(room)
    assert room.counts == (2, 0)
    room.wait(2_000)
    assert not is_recovering(room)
    assert room.counts == (2, 0)


def test_where_it_is_switched_off_a_silence_still_kills_nobody():
    room = Room(policy(capacity=2), workers=["w1", "w2"])
    room.ask("a1", worker="w1")
    room.ask("b1", worker="w2")
    room.now += 60_000
    room.tick()
    assert room.counts == (2, 0)


def test_the_dead_are_neither_missed_nor_waited_for():
    room = calm_room()
    room.wait(11_000, silent=["w2"])
    room.say(commands.Tick(), server="run-1")
    room.say(commands.Tick(), server="run-2")
    room.beat("w1")
    room.now += 1_500
    room.beat("w1")
    assert not is_recovering(room)
    room.wait(11_000, silent=["w2"])
    room.say(commands.SignOff(), "w1")
    room.now += 60_000
    room.tick()
    assert not is_recovering(room)


# While it lasts


def test_nothing_new_is_granted():
    room = new_room(capacity=5)
    assert isinstance(room.ask("a1"), Queued)
    assert room.counts == (0, 1)


def test_nothing_new_is_granted_by_a_release_either():
    room = calm_room()
    room.ask_all(["a1", "b1"])
    room.say(commands.Tick(), server="run-1")
    room.say(commands.Tick(), server="run-2")
    assert room.release("a1") == []


@pytest.mark.parametrize("wait_ms", [0, 1, 3_499])
def test_who_cannot_wait_for_the_earliest_end_is_refused(wait_ms):
    room = new_room()
    assert room.ask("a1", wait_ms=wait_ms) == Refused("recovering", 10_000)


def test_who_can_wait_for_the_earliest_end_waits():
    assert isinstance(new_room().ask("a1", wait_ms=3_500), Queued)


def test_who_does_not_wait_at_all_is_refused_to_the_last_moment():
    room = new_room()
    room.beat("w1", seen=["w1", "lost"])
    room.wait(5_000)
    assert room.ask("a1", wait_ms=0) == Refused("recovering", 5_000)


def test_the_bounds_of_the_queue_hold():
    room = Room(policy(tier("free", queue_depth=1), capacity=5), timing=DEFAULTS)
    room.ask("a1")
    assert room.ask("b1").reason == "tier_full"


def test_a_confirmation_of_an_unknown_grant_waits_for_the_beat():
    room = new_room()
    room.asked["a1"] = ("free", "a", "w1", room.now, 1, False)
    assert room.say(commands.Confirm(("a1",))) == Done()
    room.beat("w1", held=["a1"])
    assert room.counts == (1, 0)


def test_what_workers_hold_is_counted_again_be_there_room_or_not():
    room = calm_room(capacity=2)
    room.ask_all(["a1", "b1"], worker="w1")
    forget(room)
    room.edit(policy(capacity=1))
    room.wait(1_000)
    assert room.counts == (2, 0)
    room.ask("c1")
    room.wait(4_000)
    assert room.release("a1") == []
    assert room.release("b1") == ["c1"]


def test_what_is_rebuilt_may_be_released_twice_and_frees_one_slot():
    room = calm_room(capacity=2)
    room.ask_all(["a1", "b1"], worker="w1")
    forget(room)
    room.edit(policy(capacity=2))
    room.wait(1_000)
    room.release("a1")
    room.say(commands.Release("a1"))
    assert room.counts == (1, 0)


def test_what_was_released_to_an_empty_store_is_not_rebuilt_by_an_older_beat():
    room = calm_room()
    room.ask("a1", seq=90)
    forget(room)
    room.say(commands.Release("a1"), seq=95)
    room.beat("w1", held=["a1"], seq=94)
    assert room.counts == (0, 0)


def test_a_hold_rebuilt_before_the_policy_is_known_is_limited_once_it_is():
    room = calm_room(max_hold_ms=60_000)
    room.ask("a1")
    forget(room)
    room.beat("w1")
    room.edit(policy(max_hold_ms=60_000))
    room.wait(1_000)
    room.wait(61_000)
    assert [notice.ticket for notice in room.notices if notice.kind == "revoked"] == ["a1"]


# What ends it


def test_the_window_ends_it_once_all_known_workers_have_spoken():
    room = calm_room()
    room.say(commands.Tick(), server="run-1")
    room.say(commands.Tick(), server="run-2")
    since = room.now
    room.beat("w1")
    room.now = since + 1_500
    room.beat("w1")
    assert is_recovering(room)
    room.beat("w2")
    assert not is_recovering(room)


def test_the_window_is_the_least_that_it_takes():
    room = calm_room()
    room.say(commands.Tick(), server="run-1")
    room.say(commands.Tick(), server="run-2")
    room.beat("w1")
    room.beat("w2")
    room.now += 1_499
    room.tick()
    assert is_recovering(room)
    room.now += 1
    room.tick()
    assert not is_recovering(room)


def test_where_nobody_is_known_it_takes_as_long_as_a_worker_may_need_to_speak():
    room = new_room()
    room.wait(3_499)
    room.tick()
    assert is_recovering(room)
    room.now += 1
    room.tick()
    assert not is_recovering(room)


def test_who_another_worker_saw_last_is_waited_for():
    room = new_room(workers=["w1"])
    room.beat("w1", seen=["w1", "w2"])
    room.wait(4_000)
    assert is_recovering(room)
    room.beat("w2")
    assert not is_recovering(room)


def test_who_signs_off_is_not_waited_for():
    room = new_room(workers=["w1"])
    room.beat("w1", seen=["w1", "w2"])
    room.wait(4_000)
    room.say(commands.SignOff(), "w2")
    assert not is_recovering(room)


def test_a_ttl_ends_it_at_the_latest():
    room = new_room(workers=["w1"])
    room.beat("w1", seen=["w1", "w2"])
    room.wait(9_000)
    assert is_recovering(room)
    room.wait(1_000)
    assert not is_recovering(room)


def test_workers_that_know_more_do_not_start_it_anew_while_it_lasts():
    room = calm_room()
    forget(room)
    room.edit(policy())
    room.beat("w1", seen=["w1", "w2"], acked=room.seqs["w1"])
    room.now += 1_400
    room.beat("w2", seen=["w1", "w2"], acked=room.seqs["w2"])
    room.now += 100
    room.tick()
    assert not is_recovering(room)


def test_a_worker_has_spoken_when_its_last_waiter_is_told():
    room = calm_room()
    room.ask_all(["own1", "a1"])
    forget(room)
    room.edit(policy())
    for worker in ("w1", "w2"):
        answer = room.beat(worker, seen=["w1", "w2"])
        assert answer.wants_waiting == (worker == "w1")
    room.now += 1_500
    room.beat("w2")
    assert is_recovering(room)
    room.reassert(["a1"], is_last=False, upto="m")
    assert is_recovering(room)
    room.reassert([], after="m")
    assert not is_recovering(room)


def test_the_end_hands_out_the_slots():
    room = new_room(capacity=2)
    room.ask_all(["a1", "b1", "c1"])
    room.wait(4_000)
    assert list(room.held) == ["a1", "b1"]


def test_whoever_did_not_speak_until_the_end_is_dead_by_then():
    room = calm_room()
    room.ask("a1", worker="w2")
    room.ask("b1", worker="w1")
    room.say(commands.Tick(), server="run-1")
    room.say(commands.Tick(), server="run-2")
    room.wait(9_000, silent=["w2"])
    assert is_recovering(room)
    room.wait(1_000, silent=["w2"])
    room.tick()
    assert "b1" in room.held


def test_a_worker_not_heard_in_time_starts_it_anew():
    room = new_room(workers=["w1"])
    room.wait(5_000)
    room.beat("w2", acked=40)
    assert is_recovering(room)


# Order survives


def test_the_order_within_a_tier_survives_a_store_that_forgets():
    room = calm_room()
    room.ask("own1")
    for index in range(12):
        room.now += 50
        room.ask(f"a{index}-", flow=f"f{index}", worker="w1" if index % 3 else "w2")
    expected = sorted(room.waiting, key=room.ahead)
    forget(room)
    room.edit(policy())
    for worker in ("w2", "w1"):
        room.beat(worker, seen=["w1", "w2"])
        room.reassert([t for t, owner in room.waiting.items() if owner == worker], worker)
    room.wait(4_000)
    assert sorted(room.waiting, key=room.ahead) == expected
    assert room.serve_all() == expected


def test_ones_own_requests_keep_their_order_in_whatever_order_they_are_told():
    room = calm_room()
    room.ask("own1")
    for ticket in ("a3", "a1", "a2"):
        room.now += 10
        room.ask(ticket)
    forget(room)
    room.edit(policy())
    room.beat("w1", seen=["w1"])
    assert room.reassert(["a1", "a2", "a3"]) == Done()
    room.wait(4_000)
    assert room.serve_all() == ["a3", "a1", "a2"]


def test_users_still_take_turns_after_a_store_that_forgot():
    room = calm_room()
    room.ask_all(["own1", "a1", "a2", "a3"])
    room.now += 50
    room.ask("b1")
    forget(room)
    room.edit(policy())
    room.beat("w1", seen=["w1"])
    room.reassert(list(room.waiting))
    room.wait(4_000)
    assert room.serve_all() == ["a1", "b1", "a2", "a3"]


def test_a_new_scheduler_names_itself():
    scheduler = Scheduler("sim")
    assert repr(scheduler) == "<Scheduler sim: 0/? slots, 0 waiting>"
    scheduler.apply(Call(1), commands.SetPolicy(policy(capacity=3)))
    assert repr(scheduler) == "<Scheduler sim: 0/3 slots, 0 waiting>"
