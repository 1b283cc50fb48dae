"""Workers live, silent and dead, and what a beat makes agree."""

from llm_throttle.scheduling import commands
from llm_throttle.scheduling.decisions import Done, Gone, Granted, NeedPolicy, Queued
from llm_throttle.scheduling.recovery import Timing
from llm_throttle.scheduling.scheduler import MAX_PASSED_OVER
from llm_throttle.scheduling.workforce import SWEEP

from .room import Room, policy


def two_workers(**limits) -> Room:
    return Room(policy(**limits), workers=["w1", "w2"])


def state_of(room: Room, worker: str) -> str:
    found = [seen.state for seen in room.overview.workers if seen.worker == worker]
    return found[0] if found else "unknown"


def news(room: Room, kind: str) -> list[str]:
    return [notice.ticket for notice in room.notices if notice.kind == kind]


# What a beat brings


def test_a_grant_that_the_owner_did_not_hear_of_is_named_by_its_next_beat():
    room = two_workers()
    room.ask("a1", worker="w1")
    room.ask("b1", worker="w2")
    room.release("a1")
    assert room.beat("w2", held=[], waiting=1).granted == ("b1",)
    assert room.counts == (1, 0)


def test_a_named_grant_that_is_not_taken_is_passed_on():
    room = two_workers(drain_ms=0)
    room.ask("a1", worker="w1")
    room.ask("b1", worker="w2")
    room.now += 1
    room.ask("c1", worker="w1")
    room.release("a1")
    named = room.beat("w2", held=[], waiting=0)
    room.beat("w2", held=[], waiting=0, ack=named.number)
    assert news(room, "granted") == ["b1", "c1"]


def test_a_named_grant_stays_while_the_naming_answer_is_not_acknowledged():
    room = two_workers()
    room.ask("a1", worker="w1")
    room.ask("b1", worker="w2")
    room.release("a1")
    room.beat("w2", held=[], waiting=1)
    assert room.beat("w2", held=[], waiting=1, ack=0).granted == ("b1",)
    assert room.counts == (1, 0)


def test_a_beat_that_comes_twice_acknowledges_nothing():
    """The answer that named the grant was lost; the one to the repetition names nothing."""
    room = two_workers()
    room.ask("a1", worker="w1")
    room.ask("b1", worker="w2")
    room.release("a1")
    room.beat("w2", held=[], waiting=1)
    again = room.beat("w2", held=[], waiting=1, seq=room.seqs["w2"])
    assert again.number == 0
    assert room.beat("w2", held=[], waiting=1, ack=again.number).granted == ("b1",)


def test_a_confirmed_grant_that_is_no_longer_held_drains():
    room = two_workers(drain_ms=50)
    room.ask("a1", worker="w2")
    number = room.beat("w2", held=[]).number
    room.beat("w2", held=[], ack=number)
    assert room.counts == (1, 0)
    room.now += 50
    room.tick()
    assert room.counts == (0, 0)


def test_a_beat_confirms_what_it_lists():
    room = two_workers()
    room.ask("a1", worker="w1")
    room.ask("b1", worker="w2")
    room.release("a1")
    room.beat("w2", held=["b1"])
    room.wait(3_000, silent=["w2"])
    assert room.counts == (1, 0)


def test_a_beat_touches_no_ticket_that_changed_after_it():
    room = two_workers(capacity=2)
    room.beat("w2", seq=5)
    room.ask("a1", worker="w2", seq=8)
    late = room.beat("w2", held=[], seq=7)
    assert late.granted == ()
    room.beat("w2", held=["a1"], seq=9)
    assert room.counts == (1, 0)


def test_a_beat_does_not_bring_back_what_was_released_after_it():
    room = two_workers()
    room.ask("a1", worker="w2", seq=3)
    room.say(commands.Release("a1"), "w2", seq=6)
    assert room.beat("w2", held=["a1"], seq=5).gone == ()
    assert room.counts == (0, 0)


def test_a_worker_is_told_what_is_not_its_own():
    room = two_workers(capacity=2)
    room.ask("a1", worker="w1")
    assert room.beat("w2", held=["a1"]).gone == ("a1",)


def test_a_beat_lists_the_live_workers_and_the_policy():
    room = two_workers()
    answer = room.beat("w2")
    assert answer.workers == ("w1", "w2")
    assert (answer.version, answer.digest) == (1, room.scheduler.ledger.policy.digest)


def test_a_beat_lists_what_is_to_be_ended():
    room = two_workers()
    room.ask("a1")
    room.say(commands.Revoke("a1"), "")
    assert room.beat().revoked == ("a1",)


# The number of waiters differs


def ghost_waiter(room: Room) -> None:
    """The worker no longer knows of a request that the store lets wait."""
    room.ask("own1", worker="w1")
    room.ask("g1", worker="w2")
    del room.waiting["g1"]


def test_one_difference_is_only_noted():
    room = two_workers()
    ghost_waiter(room)
    assert not room.beat("w2").wants_waiting
    assert room.counts == (1, 1)


def test_two_differences_in_a_row_ask_for_the_full_list():
    room = two_workers()
    ghost_waiter(room)
    room.beat("w2")
    assert room.beat("w2").wants_waiting
    room.reassert([], "w2")
    assert room.counts == (1, 0)
    assert not room.beat("w2").wants_waiting


def test_an_agreement_between_two_differences_forgives_the_first():
    room = two_workers()
    ghost_waiter(room)
    room.beat("w2")
    room.beat("w2", waiting=1)
    assert not room.beat("w2").wants_waiting


def test_a_waiter_that_the_store_lost_is_put_back_at_its_place():
    room = two_workers()
    room.ask_all(["own1", "a1"], worker="w1")
    room.asked["x1"] = ("free", "x", "w2", room.now - 500, 2, False)
    assert room.reassert(["x1"], "w2") == Done()
    assert [room.ahead("x1"), room.ahead("a1")] == [0, 1]


def test_a_slice_speaks_only_for_its_range():
    room = two_workers()
    room.ask("own1", worker="w1")
    room.ask_all(["m1", "p1", "z1"], worker="w2")
    room.reassert([], "w2", after="n", upto="q", is_last=False)
    assert room.counts == (1, 2)
    assert room.cancel("p1") == Gone(("p1",))


def test_a_slice_does_not_end_what_was_asked_after_it():
    room = two_workers()
    room.ask("own1", worker="w1")
    room.ask("a1", worker="w2", seq=9)
    room.reassert([], "w2", seq=8)
    assert room.counts == (1, 1)


def test_a_slice_does_not_bring_back_a_client_that_left_after_it():
    room = two_workers()
    room.ask("own1", worker="w1")
    room.ask("a1", worker="w2", seq=3)
    room.say(commands.Cancel("a1", keep_place=True), "w2", seq=6)
    room.reassert(["a1"], "w2", seq=5)
    assert room.counts == (1, 0)


def test_a_reasserted_ticket_that_ended_is_gone():
    room = two_workers()
    room.ask("own1", worker="w1")
    room.ask("a1", worker="w2")
    room.cancel("a1")
    assert room.reassert(["a1"], "w2") == Gone(("a1",))


def test_a_reasserted_ticket_of_an_unknown_tier_is_gone():
    room = two_workers()
    room.asked["x1"] = ("no-such-tier", "x", "w2", room.now, 2, False)
    assert room.reassert(["x1"], "w2") == Gone(("x1",))


def test_waiters_are_not_lost_for_want_of_a_policy():
    room = Room(workers=["w1"])
    room.asked["x1"] = ("free", "x", "w1", room.now - 500, 2, False)
    room.beat()
    assert room.reassert(["x1"]) == NeedPolicy()
    room.edit(policy())
    assert room.reassert(["x1"]) == Done()


# Tombstones: late news must not bring a ticket back


def test_a_cancellation_may_overtake_its_own_request():
    room = two_workers()
    assert room.cancel("a1") == Gone(("a1",))
    assert room.ask("a1", seq=1) == Gone(("a1",))
    assert room.counts == (0, 0)


def test_a_request_that_a_beat_overtook_is_gone():
    room = two_workers()
    room.beat(seq=9)
    assert room.ask("a1", seq=8) == Gone(("a1",))
    assert isinstance(room.ask("a2", seq=10), Granted)


def test_a_second_release_frees_nothing():
    room = two_workers()
    room.ask_all(["a1", "b1", "c1"])
    assert room.release("a1") == ["b1"]
    assert room.say(commands.Release("a1")) == Gone(("a1",))
    assert room.counts == (1, 1)


def test_another_worker_cannot_release_or_cancel():
    room = two_workers()
    room.ask_all(["a1", "b1"], worker="w1")
    assert room.say(commands.Release("a1"), "w2") == Gone(("a1",))
    assert room.say(commands.Cancel("b1"), "w2") == Gone(("b1",))
    assert room.say(commands.Confirm(("a1",)), "w2") == Gone(("a1",))
    assert room.counts == (1, 1)


def test_a_tombstone_outlives_one_beat_of_its_owner_and_not_the_second():
    room = two_workers()
    room.cancel("a1")
    tickets = room.scheduler.ledger.tickets
    room.wait(1_000)
    assert "a1" in tickets
    room.wait(3_000)
    assert "a1" not in tickets


def test_the_tombstones_of_the_dead_are_not_kept():
    room = two_workers()
    room.ask("own1", worker="w1")
    for index in range(200):
        room.ask(f"a{index}", worker="w2", flow=f"f{index}")
    room.waiting.clear()
    room.wait(20_000, silent=["w2"])
    assert set(room.scheduler.ledger.tickets) == {"own1"}
    assert state_of(room, "w2") == "dead"


# Silent workers


def test_a_silent_workers_waiters_are_passed_over():
    room = two_workers()
    room.ask("own1", worker="w1")
    room.ask("a1", worker="w2")
    room.ask("b1", worker="w1")
    room.wait(3_000, silent=["w2"])
    assert room.release("own1") == ["b1"]
    assert state_of(room, "w2") == "suspect"


def test_a_worker_is_not_suspect_within_two_beats():
    room = two_workers()
    room.ask("own1", worker="w1")
    room.ask("a1", worker="w2")
    room.wait(2_000, silent=["w2"])
    assert room.release("own1") == ["a1"]


def test_a_beat_gives_parked_waiters_their_places_back():
    room = two_workers()
    room.ask("own1", worker="w1")
    room.ask_all(["a1", "a2"], worker="w2")
    room.now += 1
    room.ask_all(["b1", "b2"], worker="w1")
    room.wait(3_000, silent=["w2"])
    assert room.release("own1") == ["b1"]
    room.beat("w2")
    assert room.serve_all() == ["a1", "a2", "b2"]


def test_parking_is_bounded_per_verb_and_says_what_is_left():
    room = two_workers()
    room.ask("own1", worker="w1")
    for index in range(3 * MAX_PASSED_OVER):
        room.ask(f"a{index}-", worker="w2")
    room.now += 1
    room.ask("b1", worker="w1")
    room.wait(3_000, silent=["w2"])
    assert room.release("own1") == []
    assert room.reply.has_more
    ticks = 0
    while not room.tick():
        ticks += 1
    assert "b1" in room.held
    assert ticks <= 3


def test_unparking_is_done_in_slices():
    room = two_workers()
    room.ask("own1", worker="w1")
    room.ask_all([f"a{index}-" for index in range(70)], worker="w2")
    room.wait(3_000, silent=["w2"])
    room.release("own1")
    while room.reply.has_more:
        room.tick()
    room.beat("w2", waiting=70)
    assert room.reply.has_more
    queue = room.scheduler.ledger.tiers["free"].queue
    assert len(queue) == SWEEP - 1
    room.say(commands.Tick(), "w2")
    assert not room.reply.has_more
    assert len(queue) == 69


def test_a_silent_workers_unconfirmed_grant_is_passed_on():
    room = two_workers()
    room.ask("own1", worker="w1")
    room.ask("a1", worker="w2")
    room.now += 1
    room.ask("b1", worker="w1")
    assert room.release("own1") == ["a1"]
    room.wait(3_000, silent=["w2"])
    assert "b1" in room.held
    assert room.say(commands.Confirm(("a1",)), "w2") == Gone(("a1",))


def test_a_silent_workers_confirmed_grant_is_not():
    room = two_workers()
    room.ask("own1", worker="w1")
    room.ask_all(["a1", "b1"], worker="w2")
    room.release("own1")
    assert room.say(commands.Confirm(("a1",)), "w2") == Done()
    room.wait(3_000, silent=["w2"])
    assert "b1" not in room.held


# Dead workers


def test_a_dead_workers_leases_end():
    room = two_workers()
    room.ask("a1", worker="w2")
    room.ask("b1", worker="w1")
    room.wait(9_000, silent=["w2"])
    assert "b1" in room.waiting
    room.wait(1_000, silent=["w2"])
    assert "b1" in room.held
    assert state_of(room, "w2") == "dead"


def test_a_dead_workers_waiters_are_removed_or_may_come_back():
    room = two_workers()
    room.ask("own1", worker="w1")
    room.ask("a1", worker="w2")
    room.ask("k1", worker="w2", is_known=True)
    room.wait(11_000, silent=["w2"])
    assert room.counts == (1, 0)
    assert room.attach("a1", worker="w1") == Gone(("a1",))
    assert isinstance(room.attach("k1", worker="w1"), Queued)
    assert room.release("own1") == ["k1"]


def test_the_grace_of_a_dead_workers_waiters_began_with_its_last_beat():
    room = two_workers(grace_ms=12_000)
    room.ask("own1", worker="w1")
    room.ask("k1", worker="w2", is_known=True)
    room.wait(13_000, silent=["w2"])
    assert room.attach("k1", worker="w1") == Gone(("k1",))


def test_burying_is_done_in_slices():
    room = two_workers()
    room.ask("own1", worker="w1")
    room.ask_all([f"a{index}-" for index in range(200)], worker="w2")
    room.waiting.clear()
    room.wait(9_000, silent=["w2"])
    room.now += 1_000
    room.tick()
    assert room.reply.has_more
    assert 0 < room.counts[1] < 200
    while room.reply.has_more:
        room.tick()
    assert room.counts == (1, 0)


def test_many_dead_workers_are_buried_no_faster_than_one():
    dead = [f"dead{index}" for index in range(4)]
    room = Room(policy(), workers=["w1", *dead])
    room.ask("own1", worker="w1")
    for worker in dead:
        room.ask_all([f"{worker}-{index}-" for index in range(30)], worker=worker)
    room.waiting.clear()
    room.wait(9_000, silent=dead)
    room.now += 1_000
    room.tick()
    assert room.counts[1] >= 120 - 2 * SWEEP
    while room.reply.has_more:
        room.tick()
    assert room.counts == (1, 0)


def test_a_dead_worker_gets_nothing_until_it_beats():
    room = two_workers(capacity=2)
    room.wait(11_000, silent=["w2"])
    assert room.ask("a1", worker="w2") == Gone(("a1",))
    room.beat("w2")
    assert isinstance(room.ask("a2", worker="w2"), Granted)


def test_back_from_the_dead_its_calls_count_beside_those_let_in_meanwhile():
    room = two_workers()
    room.ask("a1", worker="w2")
    room.ask_all(["b1", "c1"], worker="w1")
    room.wait(11_000, silent=["w2"])
    assert "b1" in room.held
    answer = room.beat("w2", held=["a1"])
    assert answer.lost == ("a1",)
    assert room.counts == (2, 1)
    assert room.release("b1") == []
    room.held["a1"] = "w2"
    assert room.release("a1") == ["c1"]


def test_back_after_its_record_was_forgotten_its_calls_count_all_the_same():
    room = two_workers()
    room.ask("a1", worker="w2")
    room.wait(400_000, silent=["w2"])
    assert state_of(room, "w2") == "unknown"
    room.beat("w2", held=["a1"])
    assert room.counts == (1, 0)


def test_a_worker_that_speaks_is_not_forgotten_in_the_same_breath():
    room = two_workers(capacity=2)
    room.wait(12_000, silent=["w2"])
    room.now += 300_000
    assert room.ask("a1", worker="w2") == Gone(("a1",))


# Leaving


def test_what_a_leaving_worker_holds_is_handed_on():
    room = two_workers()
    room.ask_all(["a1", "a2"], worker="w2")
    room.ask("b1", worker="w1")
    assert room.grants(commands.SignOff(), "w2") == ["b1"]
    assert room.counts == (1, 0)


def test_late_news_of_a_worker_that_left_do_not_stop_the_service():
    """A store that does not know who speaks must think that it has forgotten something."""
    room = Room(policy(), workers=["w1", "w2"], timing=Timing())
    room.wait(4_000)
    room.say(commands.SignOff(), "w2", acked=4)
    room.say(commands.Release("a1"), "w2", acked=5)
    assert not room.overview.is_recovering
    assert isinstance(room.ask("b1", worker="w1"), Granted)


def test_a_late_beat_of_a_worker_that_left_brings_nothing_back():
    room = two_workers()
    room.ask("a1", worker="w2", seq=3)
    room.say(commands.SignOff(), "w2", seq=9)
    room.beat("w2", held=["a1"], seq=8)
    assert room.counts == (0, 0)
    assert state_of(room, "w2") == "left"


def test_a_worker_that_left_is_forgotten_after_a_while():
    room = two_workers()
    room.say(commands.SignOff(), "w2")
    room.workers.remove("w2")
    room.wait(11_000)
    assert state_of(room, "w2") == "unknown"


def test_a_worker_that_beats_again_has_not_left():
    room = two_workers()
    room.say(commands.SignOff(), "w2")
    room.beat("w2")
    assert isinstance(room.ask("a1", worker="w2"), Granted)
    room.wait(20_000)
    assert room.counts == (1, 0)


def test_nobody_waits_for_a_worker_that_has_left():
    """The last one to leave is no reason to think, later, that its calls may still run."""
    room = Room(policy(), timing=Timing(), workers=["w1"])
    room.wait(4_000)
    room.say(commands.SignOff())
    room.now += 60_000
    room.tick()
    assert not room.overview.is_recovering
