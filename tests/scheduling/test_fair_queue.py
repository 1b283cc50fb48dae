"""Within a tier: round-robin over flows by turns and laps, in the order of each user's own."""

from llm_throttle.scheduling.decisions import Done, Queued

from .room import Room, policy, tier


def busy_room(**kwargs) -> Room:
    """One slot, and somebody else holds it."""
    room = Room(policy(), **kwargs)
    room.ask("own1")
    return room


def test_a_first_request_passes_another_users_crowd():
    room = busy_room()
    room.ask_all(["a1", "a2", "a3"])
    assert room.ask("b1") == Queued("b1", 1, 10**9)
    assert room.serve_all() == ["a1", "b1", "a2", "a3"]


def test_users_take_turns():
    room = busy_room()
    room.ask_all(["a1", "a2", "a3", "b1", "b2", "c1"])
    assert room.serve_all() == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_a_first_request_passes_the_second_ones_of_the_same_turn():
    room = busy_room()
    room.ask_all(["a1", "a2", "b1"])
    room.release("own1")
    room.ask("c1")
    assert room.serve_all() == ["b1", "c1", "a2"]


def test_newcomers_cannot_hold_back_a_turn_that_has_begun():
    room = busy_room()
    room.ask_all(["a1", "a2"])
    room.release("own1")
    for index in range(50):
        room.ask_all([f"n{index}-", f"m{index}-"])
        room.release(next(iter(room.held)))
        if "a2" in room.held:
            break
    assert room.granted.index("a2") <= 4


def test_a_served_user_without_other_requests_owes_nothing():
    room = busy_room()
    room.ask_all(["a1", "b1", "b2", "b3"])
    assert room.release("own1") == ["a1"]
    room.ask("a2")
    assert room.serve_all() == ["b1", "a2", "b2", "b3"]


def test_a_user_who_cancels_owes_nothing():
    room = busy_room()
    room.ask_all(["a1", "a2", "a3", "b1", "b2"])
    room.cancel("a1")
    assert room.serve_all() == ["a2", "b1", "a3", "b2"]


def test_the_places_behind_a_cancelled_one_are_handed_up():
    room = busy_room()
    room.ask_all(["a1", "a2", "a3", "b1", "b2", "b3"])
    room.cancel("a2")
    assert [room.ahead(ticket) for ticket in ("a1", "b1", "a3", "b2", "b3")] == [0, 1, 2, 3, 4]


def test_asking_again_gains_no_place():
    """A second user who leaves and comes back stands behind those who came meanwhile."""
    room = busy_room()
    room.ask_all(["a1", "b1"])
    room.cancel("a1")
    room.ask("a2")
    assert room.serve_all() == ["b1", "a2"]


def test_cancelling_and_asking_again_never_gives_two_slots_in_one_turn():
    room = busy_room()
    room.ask_all([f"u{chr(97 + i)}1" for i in range(6)])
    room.ask("g0")
    served = []
    for index in range(1, 40):
        served += room.release(next(iter(room.held)))
        if f"g{index - 1}" in room.waiting:
            room.cancel(f"g{index - 1}")
        room.ask(f"g{index}")
        user = served[-1].rstrip("0123456789")
        if user != "g":
            room.ask(f"{user}{index + 10}")
    gamer = sum(ticket.startswith("g") for ticket in served)
    others = [sum(t.startswith(f"u{chr(97 + i)}") for t in served) for i in range(6)]
    assert gamer <= min(others) + 1


def test_ones_own_requests_keep_their_order():
    room = busy_room()
    room.ask_all(["a1", "b1", "a2", "c1", "a3", "b2"])
    room.cancel("b1")
    order = [ticket for ticket in room.serve_all() if ticket.startswith("a")]
    assert order == ["a1", "a2", "a3"]


def test_a_user_of_two_tiers_stands_in_two_lines():
    room = Room(policy(tier("free"), tier("gold")))
    room.ask("own1")
    room.ask("a1", "free")
    room.ask("a2", "gold")
    assert (room.ahead("a1"), room.ahead("a2")) == (0, 0)


def test_a_place_is_the_number_that_goes_before():
    room = busy_room()
    room.ask_all(["a1", "a2", "b1", "c1", "b2"])
    order = sorted(room.waiting, key=room.ahead)
    assert [room.ahead(ticket) for ticket in order] == [0, 1, 2, 3, 4]
    assert room.serve_all() == order


# Those who cannot be served keep their places, until their user is served


def test_an_away_ticket_is_passed_over_and_finds_its_place_again():
    room = busy_room()
    room.ask_all(["a1", "b1", "c1"])
    assert room.cancel("a1", keep_place=True) == Done()
    assert room.ahead("b1") == 0
    assert room.release("own1") == ["b1"]
    assert room.attach("a1") == Queued("a1", 0, 10**9)
    assert room.serve_all() == ["a1", "c1"]


def test_a_user_back_after_many_turns_gets_one_slot_at_once_and_no_more():
    """The worker of eight waiters was silent while others took forty turns."""
    room = Room(policy(), workers=["w1", "w2"])
    room.ask("own1")
    room.ask_all([f"a{index}" for index in range(8)], worker="w2")
    room.ask_all([f"c{index}" for index in range(60)])
    room.wait(4_000, silent=["w2"])
    for _ in range(40):
        room.release(next(iter(room.held)))
    assert not any(ticket.startswith("a") for ticket in room.granted)
    room.beat("w2")
    room.ask_all(["b1", "d1"])
    order = room.serve_all()
    assert order[0] == "a0"
    assert set(order[1:4]) >= {"b1", "d1"}
    assert [ticket for ticket in order if ticket[0] == "a"] == [f"a{i}" for i in range(8)]
    assert max(order.index(f"a{i + 1}") - order.index(f"a{i}") for i in range(7)) <= 5
    assert min(order.index(f"a{i + 1}") - order.index(f"a{i}") for i in range(7)) >= 2


def test_a_user_served_meanwhile_stands_in_the_next_turn_when_back():
    room = busy_room()
    room.ask_all(["a1", "a2", "b1"])
    room.cancel("a1", keep_place=True)
    room.release("own1")
    assert room.release("b1") == ["a2"]
    room.ask("c1")
    room.attach("a1")
    assert room.serve_all() == ["c1", "a1"]


def test_the_example_in_the_documentation_is_true():
    def line() -> list[tuple[str, int, int]]:
        tickets = [room.scheduler.ledger.tickets[id] for id in sorted(room.waiting, key=room.ahead)]
        return [(ticket.id, ticket.turn, ticket.lap + 1) for ticket in tickets]

    room = busy_room()
    room.ask_all(["A1", "A2", "A3"])
    assert line() == [("A1", 1, 1), ("A2", 2, 2), ("A3", 3, 2)]
    room.ask("B1")
    assert line() == [("A1", 1, 1), ("B1", 1, 1), ("A2", 2, 2), ("A3", 3, 2)]
    room.release("own1")
    room.ask_all(["C1", "C2"])
    assert line() == [("B1", 1, 1), ("C1", 2, 1), ("A2", 2, 2), ("A3", 3, 2), ("C2", 3, 2)]
    room.cancel("A2")
    assert line() == [("B1", 1, 1), ("C1", 2, 1), ("A3", 2, 2), ("C2", 3, 2)]
