"""Between tiers: caps, reservations, and stride scheduling with its two safeguards."""

import itertools

import pytest

from llm_throttle.scheduling import shares
from llm_throttle.scheduling.decisions import Granted, Queued
from llm_throttle.scheduling.policy import Policy

from .room import Room, policy, tier


def fill(room: Room, slug: str, count: int, *, prefix: str | None = None) -> list[str]:
    """Ask for ``count`` users of their own."""
    tickets = [f"{prefix or slug}-{index:04}-" for index in range(count)]
    room.ask_all(tickets, slug)
    return tickets


def served(tickets: list[str]) -> list[str]:
    return [ticket.split("-")[0] for ticket in tickets]


def longest_run_over(slug: str, order: list[str]) -> int:
    """The most grants in a row that went to others."""
    longest = run = 0
    for name in order:
        run = 0 if name == slug else run + 1
        longest = max(longest, run)
    return longest


def longest_run_of(slug: str, order: list[str]) -> int:
    runs = (list(run) for name, run in itertools.groupby(order) if name == slug)
    return max(map(len, runs))


# Who may take a slot


def test_a_tier_never_holds_more_than_its_cap():
    room = Room(policy(tier("free", cap=2), capacity=5))
    assert isinstance(room.ask("a1"), Granted)
    assert isinstance(room.ask("b1"), Granted)
    assert isinstance(room.ask("c1"), Queued)
    assert room.counts == (2, 1)


def test_a_tier_at_its_cap_does_not_block_others():
    room = Room(policy(tier("free", cap=1), tier("gold"), capacity=2))
    room.ask_all(["a1", "b1"], "free")
    assert isinstance(room.ask("g1", "gold"), Granted)


def test_a_reservation_keeps_slots_from_others():
    room = Room(policy(tier("free"), tier("gold", reserved=2), capacity=3))
    assert isinstance(room.ask("a1"), Granted)
    assert isinstance(room.ask("b1"), Queued)
    assert isinstance(room.ask("g1", "gold"), Granted)
    assert isinstance(room.ask("g2", "gold"), Granted)


def test_a_used_reservation_keeps_nothing_more():
    room = Room(policy(tier("free"), tier("gold", reserved=1), capacity=3))
    room.ask("g1", "gold")
    assert isinstance(room.ask("a1"), Granted)
    assert isinstance(room.ask("b1"), Granted)


def test_a_tier_below_its_reservation_ignores_the_others_reservations():
    rules = policy(tier("bronze", reserved=2), tier("gold", reserved=2), capacity=4)
    room = Room(rules)
    assert isinstance(room.ask("b1", "bronze"), Granted)
    assert isinstance(room.ask("b2", "bronze"), Granted)
    assert isinstance(room.ask("b3", "bronze"), Queued)


def test_reservations_above_the_capacity_do_not_block_each_other():
    rules = policy(tier("bronze", reserved=3), tier("gold", reserved=3), capacity=4)
    room = Room(rules)
    for ticket, slug in [("b1", "bronze"), ("b2", "bronze"), ("b3", "bronze"), ("g1", "gold")]:
        assert isinstance(room.ask(ticket, slug), Granted)
    assert isinstance(room.ask("g2", "gold"), Queued)
    assert room.release("b1") == ["g2"]


def test_a_freed_reserved_slot_waits_for_its_tier():
    room = Room(policy(tier("free"), tier("gold", reserved=1), capacity=2))
    room.ask("g1", "gold")
    room.ask_all(["a1", "b1"])
    assert room.release("g1") == []
    assert isinstance(room.ask("g2", "gold"), Granted)


# Whose turn it is


def test_at_first_the_heaviest_tier_goes_first_and_ties_go_by_slug():
    rules = policy(tier("own"), tier("z", weight=5), tier("y", weight=5), tier("a"))
    room = Room(rules)
    room.ask("own1", "own")
    for slug in ("a", "z", "y"):
        room.ask(f"{slug}1", slug)
    assert room.serve_all() == ["y1", "z1", "a1"]


def test_slugs_are_compared_by_their_bytes():
    rules = policy(tier("own"), tier("é"), tier("z"), tier("Z"))
    room = Room(rules)
    room.ask("own1", "own")
    for slug in ("é", "z", "Z"):
        room.ask(slug, slug)
    assert room.serve_all() == ["Z", "z", "é"]


def test_weights_decide_how_often_a_tier_is_served():
    room = Room(policy(tier("a", weight=3), tier("b", weight=1)))
    room.ask("first", "a")
    fill(room, "a", 30)
    fill(room, "b", 10)
    assert served(room.serve_all())[:12].count("b") == 3


def test_idleness_banks_no_credit():
    room = Room(policy(tier("a"), tier("b"), tier("c")))
    room.ask("first", "a")
    fill(room, "a", 60)
    fill(room, "c", 60)
    for _ in range(40):
        room.release(next(iter(room.held)))
    fill(room, "b", 20)
    assert longest_run_of("b", served(room.serve_all())[:40]) == 1


def test_blockage_banks_no_credit():
    blocked, free = tier("b", cap=0), tier("b")
    room = Room(policy(tier("a"), free, tier("c")))
    room.ask("first", "a")
    for slug in "abc":
        fill(room, slug, 60)
    room.edit(policy(tier("a"), blocked, tier("c"), version=2))
    for _ in range(40):
        room.release(next(iter(room.held)))
    room.edit(policy(tier("a"), free, tier("c"), version=3))
    assert longest_run_of("b", served(room.serve_all())[:40]) == 1


def test_slots_that_nobody_else_wanted_are_no_debt():
    room = Room(policy(tier("a"), tier("b")))
    room.ask("first", "a")
    for index in range(500):
        room.ask(f"x{index}", "a", flow=f"x{index}")
        room.release(next(iter(room.held)))
    fill(room, "a", 20)
    fill(room, "b", 20)
    order = served(room.serve_all())
    assert longest_run_over("a", order) <= 2


def busy_reservation(grants: int, *, has_queue: bool = False) -> list[str]:
    """What two crowded tiers get beside a third one that uses its own slot without pause.

    It takes its slot from its queue, as the only one that may, or finds it free.
    """
    rules = policy(
        tier("hi", weight=10), tier("lo", weight=1), tier("own", cap=1, reserved=1), capacity=3
    )
    room = Room(rules)
    room.ask("own-0-", "own")
    fill(room, "hi", grants + 2)
    fill(room, "lo", grants)
    order = []
    for index in range(grants):
        if has_queue:
            room.ask(f"own-{index + 1}-", "own")
        room.release(f"own-{index}-")
        crowd = next(ticket for ticket in room.held if not ticket.startswith("own"))
        order += room.release(crowd)
        if not has_queue:
            assert isinstance(room.ask(f"own-{index + 1}-", "own"), Granted)
    return served(order)


@pytest.mark.parametrize("has_queue", [False, True])
def test_a_busy_reservation_starves_nobody(has_queue):
    bound = policy(tier("hi", weight=10), tier("lo"), tier("own")).starvation_bound("lo")
    assert longest_run_over("lo", busy_reservation(120, has_queue=has_queue)) <= bound


@pytest.mark.parametrize("has_queue", [False, True])
def test_a_busy_reservation_does_not_bend_the_shares_of_others(has_queue):
    assert abs(busy_reservation(220, has_queue=has_queue).count("lo") - 20) <= 2


def test_of_two_overdue_tiers_the_one_from_further_back_goes_first():
    """Each time the second pair may compete, the grants of the first have lifted both again."""
    weights = {"a": 1, "b": 1, "hi": 9, "lo": 1}
    versions = itertools.count(1)

    def rules(*able: str, capacity: int) -> Policy:
        tiers = [tier(slug, cap=2 * (slug in able), weight=weights[slug]) for slug in weights]
        return policy(*tiers, capacity=capacity, version=next(versions))

    room = Room(rules(*weights, capacity=4))
    for slug in weights:
        room.ask(f"{slug}-first-", slug)
        fill(room, slug, 60)

    def compete(*slugs: str) -> str:
        """Let two tiers want the one slot that is free."""
        room.edit(rules(capacity=0))
        room.release(next(iter(room.held)))
        return served(room.edit(rules(*slugs, capacity=4)))[0]

    order = []
    for _ in range(30):
        compete("a", "b")
        compete("a", "b")
        order.append(compete("hi", "lo"))
    assert longest_run_over("lo", order) <= rules(capacity=1).starvation_bound("lo")


def test_a_raised_weight_counts_at_once():
    room = Room(policy(tier("a", weight=100), tier("b", weight=1)))
    room.ask("first", "a")
    for slug in "ab":
        fill(room, slug, 150)
    while not room.granted[-1].startswith("b"):
        room.release(next(iter(room.held)))
    room.edit(policy(tier("a", weight=100), tier("b", weight=100), version=2))
    assert longest_run_over("b", served(room.serve_all())[:20]) <= 2


# Large numbers


@pytest.mark.parametrize("passed", [0, shares.REBASE_AT - shares.SCALE * 3])
def test_moving_the_passes_back_changes_no_order(passed):
    rules = policy(tier("a", weight=7), tier("b", weight=3), tier("c"))
    room = Room(rules)
    room.scheduler.shares.passed = passed
    for state in room.scheduler.ledger.tiers.values():
        state.passed = passed
    room.ask("first", "c")
    for slug in "abc":
        fill(room, slug, 60)
    order = served(room.serve_all())
    passes = [state.passed for state in room.scheduler.ledger.tiers.values()]
    assert max(room.scheduler.shares.passed, *passes) < shares.REBASE_AT + shares.SCALE
    assert order[:110] == expected_order()


def expected_order() -> list[str]:
    """The same race in exact fractions: seven of ``a`` and three of ``b`` to one of ``c``."""
    from fractions import Fraction

    weights = {"a": 7, "b": 3, "c": 1}
    passed = {"a": Fraction(0), "b": Fraction(0), "c": Fraction(1)}
    left = dict.fromkeys(weights, 60)
    order = []
    while any(left.values()):
        able = [slug for slug in weights if left[slug]]
        slug = min(able, key=lambda slug: (passed[slug], -weights[slug], slug))
        passed[slug] += Fraction(1, weights[slug])
        left[slug] -= 1
        order.append(slug)
    return order[:110]
