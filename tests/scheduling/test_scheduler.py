"""The verbs of the waiting room, one rule at a time."""

import pytest

from llm_throttle.scheduling import commands
from llm_throttle.scheduling.decisions import Done, Gone, Granted, NeedPolicy, Queued, Refused
from llm_throttle.scheduling.scheduler import MAX_GRANTS, MAX_HOLDERS
from llm_throttle.scheduling.workforce import SWEEP

from .room import LONG, Room, policy, tier


def reason(answer) -> str:
    assert isinstance(answer, Refused), answer
    return answer.reason


def refusals(room: Room) -> dict[str, str]:
    return {note.ticket: note.reason for note in room.notices if note.kind == "refused"}


def revoked(room: Room) -> list[str]:
    return [notice.ticket for notice in room.notices if notice.kind == "revoked"]


# Asking


def test_a_free_slot_is_granted_at_once():
    room = Room(policy())
    assert room.ask("a1") == Granted("a1")
    assert room.counts == (1, 0)


def test_without_a_free_slot_one_waits_for_the_tiers_budget():
    room = Room(policy(tier(wait_budget_ms=9_000)))
    room.ask("a1")
    assert room.ask("b1") == Queued("b1", 0, 9_000)


@pytest.mark.parametrize(("asked", "got"), [(None, 9_000), (4_000, 4_000), (99_000, 9_000)])
def test_a_caller_can_shorten_its_wait_and_not_lengthen_it(asked, got):
    room = Room(policy(tier(wait_budget_ms=9_000)))
    room.ask("a1")
    assert room.ask("b1", wait_ms=asked) == Queued("b1", 0, got)


def test_a_freed_slot_goes_to_the_next_waiter_in_the_same_step():
    room = Room(policy())
    room.ask_all(["a1", "b1", "c1"])
    assert room.release("a1") == ["b1"]
    assert room.counts == (1, 1)


def test_a_newcomer_does_not_pass_those_who_wait():
    room = Room(policy(tier("free", cap=1), tier("gold"), capacity=2))
    room.ask_all(["a1", "b1"], "free")
    room.edit(policy(tier("free", cap=2), tier("gold"), capacity=1, version=2))
    room.edit(policy(tier("free", cap=2), tier("gold"), capacity=3, version=3))
    assert "b1" in room.held
    assert isinstance(room.ask("c1", "free"), Queued)


def test_asking_twice_is_asking_once():
    room = Room(policy())
    room.ask("a1", seq=5)
    assert room.ask("a1", seq=5) == Granted("a1")
    room.ask("b1", seq=6)
    room.now += 1_000
    assert room.ask("b1", seq=6) == Queued("b1", 0, LONG - 1_000)
    assert room.counts == (1, 1)


def test_a_ticket_of_another_worker_cannot_be_asked_for():
    room = Room(policy(), workers=["w1", "w2"])
    room.ask("a1", worker="w1")
    assert room.ask("a1", worker="w2") == Gone(("a1",))


def test_without_a_policy_nobody_can_be_judged():
    room = Room()
    assert room.ask("a1") == NeedPolicy()
    room.cancel("b1")
    assert room.beat().version == 0


# Refusing: every reason, and the order of the checks


def test_paused_refuses_everybody():
    room = Room(policy(capacity=5, is_paused=True))
    assert room.ask("a1") == Refused("paused")


@pytest.mark.parametrize(
    "tiers",
    [
        [tier("free", cap=0)],
        [tier("gold")],
        [tier("free"), tier("gold", reserved=3)],
        [tier("free"), tier("gold", reserved=2), tier("pro", reserved=1)],
    ],
)
def test_a_tier_that_can_never_be_served_is_told_so_at_once(tiers):
    assert Room(policy(*tiers, capacity=3)).ask("a1", "free") == Refused("unserviceable")


def test_no_capacity_at_all_is_unserviceable():
    assert Room(policy(capacity=0)).ask("a1") == Refused("unserviceable")


def test_depth_per_user_counts_waiting_and_in_flight():
    room = Room(policy(tier(depth_per_user=2)))
    room.ask_all(["a1", "a2"])
    assert reason(room.ask("a3")) == "user_depth"
    assert isinstance(room.ask("b1"), Queued)


def test_depth_per_user_counts_over_all_tiers():
    room = Room(policy(tier("free", depth_per_user=2), tier("gold", depth_per_user=3), capacity=9))
    room.ask_all(["a1", "a2"], "gold")
    assert reason(room.ask("a3", "free")) == "user_depth"
    assert isinstance(room.ask("a3b", "gold", flow="a"), Granted)


def test_without_queueing_a_full_house_refuses_at_once():
    room = Room(policy(tier(wait_budget_ms=0)))
    assert isinstance(room.ask("a1"), Granted)
    assert reason(room.ask("b1")) == "wait_too_long"
    assert room.counts == (1, 0)


def test_a_caller_that_will_not_wait_is_refused_at_once():
    room = Room(policy())
    room.ask("a1")
    assert reason(room.ask("b1", wait_ms=0)) == "wait_too_long"


def test_a_full_tier_refuses():
    room = Room(policy(tier(queue_depth=1)))
    room.ask_all(["a1", "b1"])
    assert reason(room.ask("c1")) == "tier_full"


def test_a_full_queue_refuses_whatever_the_tier():
    room = Room(policy(tier("free"), tier("gold"), queue_depth=1))
    room.ask_all(["a1", "b1"], "free")
    assert reason(room.ask("g1", "gold")) == "queue_full"


def test_without_a_queue_free_slots_are_still_granted():
    room = Room(policy(tier(queue_depth=0), queue_depth=0, capacity=2))
    assert isinstance(room.ask("a1"), Granted)
    assert isinstance(room.ask("b1"), Granted)
    assert reason(room.ask("c1")) == "tier_full"


def test_the_checks_have_their_order():
    """Each step takes away the reason that the one before was refused for."""
    blocked = tier(cap=0, depth_per_user=1, wait_budget_ms=0, queue_depth=0)
    room = Room(policy(tier(depth_per_user=1), queue_depth=0))
    room.ask("a1")

    def told(rules, ticket="a2") -> str:
        room.edit(rules)
        return reason(room.ask(ticket))

    def rules(free, **limits):
        return policy(free, version=room.overview.version + 1, **{"queue_depth": 0} | limits)

    assert told(rules(blocked, is_paused=True)) == "paused"
    assert told(rules(blocked)) == "unserviceable"
    open_tier = tier(depth_per_user=1, wait_budget_ms=0, queue_depth=0)
    assert told(rules(open_tier)) == "user_depth"
    assert told(rules(open_tier), "b2") == "wait_too_long"
    assert told(rules(tier(queue_depth=0)), "b3") == "tier_full"
    assert told(rules(tier()), "b4") == "queue_full"
    room.edit(rules(tier(), queue_depth=1))
    assert isinstance(room.ask("b5"), Queued)


def test_a_refusal_leaves_no_trace():
    room = Room(policy(tier(queue_depth=0)))
    room.ask("a1")
    room.ask("b1")
    ledger = room.scheduler.ledger
    assert set(ledger.tickets) == {"a1"}
    assert set(ledger.flows) == {"a"}
    assert len(ledger.timers) == 0


# Waiting and its end


def test_a_waiter_is_refused_when_its_budget_is_over():
    room = Room(policy(tier(wait_budget_ms=5_000)))
    room.ask_all(["a1", "b1"])
    room.now += 4_999
    room.tick()
    assert "b1" in room.waiting
    room.now += 1
    room.tick()
    assert refusals(room) == {"b1": "wait_expired"}
    assert room.counts == (1, 0)


def test_a_waiter_whose_time_is_over_is_not_granted_a_slot_freed_too_late():
    room = Room(policy(tier(wait_budget_ms=5_000)))
    room.ask_all(["a1", "b1"])
    room.now += 5_000
    assert room.release("a1") == []
    assert refusals(room) == {"b1": "wait_expired"}


def test_many_waiters_expire_in_slices():
    room = Room(policy(tier(wait_budget_ms=5_000)))
    room.ask_all(["a1"] + [f"b{index}-" for index in range(2 * SWEEP)])
    room.now += 5_000
    room.tick()
    assert room.reply.has_more
    assert len(refusals(room)) == SWEEP
    room.tick()
    room.tick()
    assert not room.reply.has_more
    assert len(refusals(room)) == 2 * SWEEP


def test_one_that_left_frees_its_place():
    room = Room(policy(tier(depth_per_user=2, queue_depth=1)))
    room.ask_all(["a1", "a2"])
    assert room.cancel("a2") == Done()
    assert isinstance(room.ask("a3"), Queued)


def test_one_that_left_is_not_granted():
    room = Room(policy())
    room.ask_all(["a1", "b1", "c1"])
    room.cancel("b1")
    assert room.release("a1") == ["c1"]


def test_a_grant_that_comes_too_late_goes_to_the_next():
    """The slot was granted in the moment in which its waiter gave up."""
    room = Room(policy())
    room.ask_all(["a1", "b1", "c1"])
    assert room.release("a1") == ["b1"]
    room.cancel("b1")
    assert room.granted[-1] == "c1"


def test_giving_up_at_the_end_of_the_budget_says_when_to_come_back():
    room = Room(policy())
    room.ask_all(["a1", "b1"])
    answer = room.cancel("b1", has_expired=True)
    assert isinstance(answer, Done)
    assert answer.after_ms > 0


def test_leaving_twice_is_leaving_once():
    room = Room(policy())
    room.ask_all(["a1", "b1"])
    room.cancel("b1")
    assert room.cancel("b1") == Gone(("b1",))


# Away: the client may come back


def test_an_away_ticket_counts_neither_as_waiting_nor_for_its_user():
    room = Room(policy(tier(depth_per_user=2)))
    room.ask_all(["own1", "a1", "a2"])
    room.cancel("a1", keep_place=True)
    assert room.counts == (1, 1)
    assert isinstance(room.ask("a3"), Queued)


def test_an_away_ticket_is_not_granted():
    room = Room(policy())
    room.ask_all(["own1", "a1"])
    room.cancel("a1", keep_place=True)
    assert room.release("own1") == []


def test_an_away_ticket_ends_with_the_grace():
    room = Room(policy(grace_ms=15_000))
    room.ask_all(["own1", "a1"])
    room.cancel("a1", keep_place=True)
    room.wait(14_999)
    assert isinstance(room.attach("a1"), Queued)
    room.cancel("a1", keep_place=True)
    room.wait(15_000)
    room.tick()
    assert room.attach("a1") == Gone(("a1",))
    assert refusals(room) == {}


def test_the_deadline_of_an_away_ticket_keeps_running():
    room = Room(policy(tier(wait_budget_ms=5_000), grace_ms=15_000))
    room.ask_all(["own1", "a1"])
    room.cancel("a1", keep_place=True)
    room.wait(5_000)
    room.tick()
    assert room.attach("a1") == Gone(("a1",))


def test_back_in_time_the_old_deadline_holds():
    room = Room(policy(tier(wait_budget_ms=20_000), grace_ms=15_000))
    room.ask_all(["own1", "a1"])
    room.cancel("a1", keep_place=True)
    room.wait(10_000)
    assert room.attach("a1") == Queued("a1", 0, 10_000)
    room.wait(10_000)
    room.tick()
    assert refusals(room) == {"a1": "wait_expired"}


def test_a_user_keeps_one_place_at_most_and_it_is_the_last():
    room = Room(policy())
    room.ask_all(["own1", "a1", "b1", "a2"])
    for ticket in ("a1", "b1", "a2"):
        room.cancel(ticket, keep_place=True)
    assert [type(room.attach(t)) for t in ("a1", "b1", "a2")] == [Gone, Queued, Queued]


def test_going_away_twice_is_going_away_once():
    room = Room(policy())
    room.ask_all(["own1", "a1"])
    room.cancel("a1", keep_place=True)
    assert room.cancel("a1", keep_place=True) == Done()
    assert isinstance(room.attach("a1"), Queued)


def test_an_away_ticket_may_leave_for_good():
    room = Room(policy())
    room.ask_all(["own1", "a1"])
    room.cancel("a1", keep_place=True)
    assert room.cancel("a1") == Done()
    assert room.attach("a1") == Gone(("a1",))


def test_in_a_deleted_tier_no_place_is_kept():
    room = Room(policy(tier("free"), tier("gold")), workers=["w1", "w2"])
    room.ask("own1", "gold", worker="w1")
    room.ask("k1", "free", worker="w2", is_known=True)
    room.wait(3_000, silent=["w2"])
    room.release("own1")
    room.edit(policy(tier("gold"), version=2))
    room.wait(8_000, silent=["w2"])
    assert room.attach("k1", worker="w1") == Gone(("k1",))


def test_a_quarter_of_the_queue_may_be_away():
    room = Room(policy(queue_depth=8))
    room.ask_all(["own1", "a1", "b1", "c1"])
    for ticket in ("a1", "b1", "c1"):
        room.cancel(ticket, keep_place=True)
    assert [type(room.attach(t)) for t in ("a1", "b1", "c1")] == [Queued, Queued, Gone]


def test_without_grace_nothing_is_kept():
    room = Room(policy(grace_ms=0))
    room.ask_all(["own1", "a1"])
    room.cancel("a1", keep_place=True)
    assert room.attach("a1") == Gone(("a1",))


# Attaching


def test_a_waiting_ticket_moves_to_the_worker_that_asks_for_it():
    room = Room(policy(), workers=["w1", "w2"])
    room.ask_all(["own1", "a1"], worker="w1")
    assert isinstance(room.attach("a1", worker="w2"), Queued)
    assert [(n.worker, n.kind, n.ticket) for n in room.reply.notices] == [("w1", "moved", "a1")]
    room.release("own1")
    assert room.notices[-1].worker == "w2"


def test_the_old_worker_has_no_say_any_more():
    room = Room(policy(), workers=["w1", "w2"])
    room.ask_all(["own1", "a1"], worker="w1")
    room.attach("a1", worker="w2")
    assert room.say(commands.Cancel("a1"), "w1") == Gone(("a1",))
    assert room.counts == (1, 1)


def test_a_ticket_is_bound_to_its_user():
    room = Room(policy())
    room.ask_all(["own1", "a1"])
    assert room.attach("a1", flow="b") == Gone(("a1",))


def test_a_granted_ticket_cannot_be_attached():
    room = Room(policy(), workers=["w1", "w2"])
    room.ask("a1")
    assert room.attach("a1", worker="w2") == Gone(("a1",))


def test_an_unknown_ticket_cannot_be_attached():
    assert Room(policy()).attach("a1") == Gone(("a1",))


def test_coming_back_gives_no_second_allowance():
    room = Room(policy(tier(depth_per_user=1), grace_ms=60_000))
    room.ask_all(["own1", "a1"])
    room.cancel("a1", keep_place=True)
    room.ask("a2")
    assert reason(room.attach("a1")) == "user_depth"
    room.cancel("a2")
    assert isinstance(room.attach("a1"), Queued)


def test_a_parked_ticket_is_attached_at_its_place():
    room = Room(policy(), workers=["w1", "w2"])
    room.ask("own1", worker="w1")
    room.ask("a1", worker="w2")
    room.now += 1
    room.ask_all(["b1", "c1"], worker="w1")
    room.wait(3_000, silent=["w2"])
    room.release("own1")
    room.attach("a1", worker="w1")
    assert room.serve_all() == ["a1", "c1"]


def test_a_dead_worker_cannot_attach():
    room = Room(policy(), workers=["w1", "w2"])
    room.ask_all(["own1", "a1"], worker="w1")
    room.wait(11_000, silent=["w2"])
    assert room.attach("a1", worker="w2") == Gone(("a1",))
    assert room.release("own1") == ["a1"]


def test_an_attachment_that_a_beat_overtook_is_gone():
    room = Room(policy(), workers=["w1", "w2"])
    room.ask_all(["own1", "a1"], worker="w1")
    room.beat("w2", seq=9)
    assert room.say(commands.Attach("a1", "a"), "w2", seq=8) == Gone(("a1",))


# Ending a call


def test_a_normal_end_hands_the_slot_on_at_once():
    room = Room(policy(drain_ms=50))
    room.ask_all(["a1", "b1"])
    assert room.release("a1") == ["b1"]


def test_an_abnormal_end_hands_it_on_when_it_has_drained():
    room = Room(policy(drain_ms=50))
    room.ask_all(["a1", "b1"])
    assert room.release("a1", is_abnormal=True) == []
    assert room.reply.answer == Done(50)
    room.now += 49
    assert room.tick() == []
    room.now += 1
    assert room.tick() == ["b1"]


def test_without_a_drain_an_abnormal_end_is_like_any_other():
    room = Room(policy(drain_ms=0))
    room.ask_all(["a1", "b1"])
    assert room.release("a1", is_abnormal=True) == ["b1"]


def test_a_drained_slot_counts_in_the_cap_and_not_for_its_user():
    room = Room(policy(tier(cap=1, depth_per_user=1), tier("gold"), capacity=3, drain_ms=50))
    room.ask("a1")
    room.release("a1", is_abnormal=True)
    assert isinstance(room.ask("a2"), Queued)
    assert room.counts == (1, 1)
    room.now += 50
    assert room.tick() == ["a2"]


def test_a_grant_that_was_never_used_needs_no_drain():
    room = Room(policy(drain_ms=50))
    room.ask_all(["a1", "b1"])
    room.cancel("a1")
    assert room.granted[-1] == "b1"


def test_a_call_that_lasts_too_long_is_wanted_back_and_keeps_its_slot_until_it_ends():
    room = Room(policy(max_hold_ms=60_000))
    room.ask_all(["a1", "b1"])
    room.wait(59_999)
    assert revoked(room) == []
    room.now += 1
    room.tick()
    assert revoked(room) == ["a1"]
    assert room.counts == (1, 1)
    room.wait(60_000)
    assert revoked(room) == ["a1"]
    assert room.release("a1") == ["b1"]


def test_without_a_longest_hold_nothing_is_wanted_back():
    room = Room(policy(max_hold_ms=0))
    room.ask("a1")
    room.wait(900_000)
    assert revoked(room) == []


def test_an_operator_may_want_a_slot_back():
    room = Room(policy())
    room.ask_all(["a1", "b1"])
    assert room.say(commands.Revoke("a1"), "") == Done()
    assert revoked(room) == ["a1"]
    assert room.counts == (1, 1)


def test_an_operator_may_take_a_slot_at_once():
    room = Room(policy())
    room.ask_all(["a1", "b1"])
    assert room.grants(commands.Revoke("a1", force=True), "") == ["b1"]
    assert revoked(room) == ["a1"]
    assert room.say(commands.Release("a1")) == Gone(("a1",))
    assert room.counts == (1, 0)


def test_a_slot_wanted_back_may_still_be_taken_at_once():
    room = Room(policy())
    room.ask_all(["a1", "b1"])
    room.say(commands.Revoke("a1"), "")
    assert room.grants(commands.Revoke("a1", force=True), "") == ["b1"]


@pytest.mark.parametrize("ticket", ["b1", "unknown"])
def test_only_a_held_slot_can_be_wanted_back(ticket):
    room = Room(policy())
    room.ask_all(["a1", "b1"])
    assert room.say(commands.Revoke(ticket), "") == Gone((ticket,))


def test_a_confirmation_answers_which_are_gone():
    room = Room(policy(capacity=2))
    room.ask_all(["a1", "b1"])
    room.release("a1")
    assert room.say(commands.Confirm(("a1", "b1", "c1"))) == Gone(("a1", "c1"))


# Editing


def test_a_raised_limit_wakes_waiters_at_once():
    room = Room(policy())
    room.ask_all(["a1", "b1", "c1", "d1"])
    assert room.edit(policy(capacity=3, version=2)) == ["b1", "c1"]


def test_a_large_raise_is_handed_out_in_slices():
    room = Room(policy())
    room.ask_all([f"a{index}-" for index in range(3 * MAX_GRANTS)])
    assert len(room.edit(policy(capacity=1_000, version=2))) == MAX_GRANTS
    assert room.reply.has_more
    assert len(room.tick()) == 2 * MAX_GRANTS - 1
    assert room.tick() == []
    assert not room.reply.has_more


def test_a_lowered_limit_cuts_nobody_and_lets_nobody_in():
    room = Room(policy(capacity=5))
    room.ask_all([f"a{index}" for index in range(15)])
    room.edit(policy(capacity=2, version=2))
    assert room.counts == (5, 10)
    for _ in range(3):
        assert room.release(next(iter(room.held))) == []
    room.edit(policy(capacity=0, version=3))
    assert room.release(next(iter(room.held))) == []
    assert len(room.edit(policy(capacity=4, version=4))) == 3
    assert room.counts == (4, 7)


def test_a_lowered_cap_lets_nobody_in_until_holders_are_below_it():
    room = Room(policy(tier(cap=3), capacity=9))
    room.ask_all(["a1", "b1", "c1", "d1"])
    room.edit(policy(tier(cap=1), capacity=9, version=2))
    assert room.release("a1") == []
    assert room.release("b1") == []
    assert room.release("c1") == ["d1"]


def test_lowered_depths_send_nobody_away():
    room = Room(policy())
    room.ask_all(["a1", "a2", "a3"])
    lowered = policy(tier(depth_per_user=1, queue_depth=1), queue_depth=1, version=2)
    room.edit(lowered)
    assert room.counts == (1, 2)
    assert room.serve_all() == ["a2", "a3"]


def test_the_waiters_of_a_deleted_tier_are_told_so():
    room = Room(policy(tier("free"), tier("gold"), capacity=1))
    room.ask_all(["own1", "a1", "b1"], "free")
    room.ask("g1", "gold")
    room.edit(policy(tier("gold"), version=2))
    assert refusals(room) == {"a1": "unserviceable", "b1": "unserviceable"}
    assert room.counts == (1, 1)
    assert room.release("own1") == ["g1"]
    assert [count.tier for count in room.overview.tiers] == ["gold"]


def test_the_parked_and_away_waiters_of_a_deleted_tier_leave_nothing():
    room = Room(policy(tier("free"), tier("gold")), workers=["w1", "w2"])
    room.ask("own1", "gold", worker="w1")
    room.ask("a1", "free", worker="w2")
    room.ask("b1", "free", worker="w1")
    room.cancel("b1", keep_place=True)
    room.wait(3_000, silent=["w2"])
    room.release("own1")
    room.edit(policy(tier("gold"), version=2))
    room.beat("w2")
    room.wait(20_000)
    assert refusals(room) == {"a1": "unserviceable"}
    assert [count.tier for count in room.overview.tiers] == ["gold"]
    assert room.counts == (0, 0)


def test_a_deleted_tier_leaves_nothing_once_its_last_call_has_drained():
    room = Room(policy(tier("free"), tier("gold"), drain_ms=50))
    room.ask("a1", "free")
    room.edit(policy(tier("gold"), version=2))
    room.release("a1", is_abnormal=True)
    room.now += 50
    room.tick()
    assert [count.tier for count in room.overview.tiers] == ["gold"]


def test_a_pause_keeps_waiters_and_calls():
    room = Room(policy())
    room.ask_all(["a1", "b1"])
    room.edit(policy(is_paused=True, version=2))
    assert room.release("a1") == []
    assert room.edit(policy(version=3)) == ["b1"]


def test_waiters_expire_during_a_pause():
    room = Room(policy(tier(wait_budget_ms=5_000)))
    room.ask_all(["a1", "b1"])
    room.edit(policy(is_paused=True, version=2))
    room.wait(5_000)
    room.tick()
    assert refusals(room) == {"b1": "wait_expired"}


def test_the_higher_version_wins():
    room = Room(policy(version=5))
    stamp = room.say(commands.SetPolicy(policy(capacity=9, version=4)))
    assert (stamp.version, stamp.is_current) == (5, False)
    assert room.overview.capacity == 1
    assert room.say(commands.SetPolicy(policy(version=5))).is_current


def test_the_same_version_with_another_content_is_noticed():
    room = Room(policy(version=5))
    stamp = room.say(commands.SetPolicy(policy(capacity=9, version=5)))
    assert not stamp.is_current
    assert room.overview.capacity == 1


# Looking


def test_positions_are_told_for_those_in_line_only():
    room = Room(policy())
    room.ask_all(["a1", "b1", "c1"])
    answer = room.say(commands.Positions(("c1", "a1", "nobody", "b1")))
    assert [(place.ticket, place.ahead) for place in answer.places] == [("c1", 1), ("b1", 0)]


def test_positions_are_told_for_all_tickets_of_a_user():
    room = Room(policy(tier("free"), tier("gold"), capacity=1))
    room.ask_all(["a1", "a2", "b1", "a3"], "free")
    room.ask("a4", "gold")
    answer = room.say(commands.Positions(("b1",), flows=("a", "nobody")))
    assert [place.ticket for place in answer.places] == ["b1", "a2", "a3", "a4"]
    assert answer.granted == ("a1",)
    assert (answer.version, answer.is_recovering) == (1, False)


def test_a_ticket_asked_for_twice_is_told_once():
    room = Room(policy())
    room.ask_all(["a1", "a2"])
    answer = room.say(commands.Positions(("a2", "a2"), flows=("a", "a")))
    assert ([place.ticket for place in answer.places], answer.granted) == (["a2"], ("a1",))


def test_an_overview_counts_tiers_holders_and_workers():
    room = Room(policy(tier("free"), tier("gold"), capacity=2), workers=["w1", "w2"])
    room.ask_all(["a1", "b1"], worker="w2")
    room.ask("g1", "gold")
    room.now += 700
    overview = room.overview
    assert (overview.capacity, overview.in_flight, overview.waiting) == (2, 2, 1)
    assert [(t.tier, t.in_flight, t.waiting) for t in overview.tiers] == [
        ("free", 2, 0),
        ("gold", 0, 1),
    ]
    assert [(h.ticket, h.flow, h.worker, h.held_ms) for h in overview.holders] == [
        ("a1", "a", "w2", 700),
        ("b1", "b", "w2", 700),
    ]
    assert [(w.worker, w.in_flight, w.waiting) for w in overview.workers] == [
        ("w1", 0, 1),
        ("w2", 2, 0),
    ]


def test_a_long_list_of_holders_is_cut_off():
    room = Room(policy(capacity=300))
    room.ask_all([f"a{index}-" for index in range(MAX_HOLDERS + 9)])
    assert len(room.overview.holders) == MAX_HOLDERS
    assert room.overview.in_flight == MAX_HOLDERS + 9


def test_an_overview_before_any_policy_is_empty():
    overview = Room().overview
    assert (overview.capacity, overview.version, overview.tiers) == (0, 0, ())


def test_an_upstream_is_abandoned_when_it_was_deleted_and_all_have_left():
    room = Room(policy())
    room.ask("a1")
    assert not room.scheduler.is_abandoned
    room.edit(policy(version=2, capacity=0).from_dict({"version": 2, "capacity": 0, "tiers": []}))
    assert not room.scheduler.is_abandoned
    room.release("a1")
    assert room.scheduler.is_abandoned
