"""Who gets how much, and who waits how long: scenarios and an oracle that shares no code."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_throttle.scheduling.policy import Policy, TierPolicy
from llm_throttle.scheduling.records import State
from llm_throttle.scheduling.shares import REBASE_AT, SCALE

from . import oracle, stampede
from .books import Auditor
from .room import LONG, Room, policy, tier

WEIGHTS = {"premium": 100, "pro": 10, "free": 3, "guest": 1}


# Between users


def grants_before(room: Room, ticket: str) -> Counter[str]:
    """Release slots until a ticket has one; who got how many before."""
    before: Counter[str] = Counter()
    while ticket in room.waiting:
        for granted in room.release(next(iter(room.held))):
            before[granted.rstrip("0123456789")] += granted != ticket
    return +before


def test_one_request_passes_a_hundred_of_another_user():
    room = Room(policy())
    room.ask_all(["own1"] + [f"a{index}" for index in range(100)])
    room.ask("b1")
    assert grants_before(room, "b1") == {"a": 1}


def test_one_request_waits_for_one_grant_per_active_user_at_most():
    room = Room(policy())
    heavy = ["a", "b", "c", "d", "e"]
    room.ask("own1")
    for user in heavy:
        room.ask_all([f"{user}{index}" for index in range(40)])
    for _ in range(23):
        room.release(next(iter(room.held)))
    for index, user in enumerate(["v", "w", "x", "y", "z"]):
        room.ask(f"{user}1")
        assert sum(grants_before(room, f"{user}1").values()) <= len(heavy) + index
        assert max(grants_before(room, f"{user}1").values(), default=0) <= 1


def test_newcomers_without_pause_do_not_starve_a_heavy_user():
    """A user of its own comes for every slot that is freed, before five that wait already.

    Between two grants of the heavy user, nobody who waited with it is served more than once, and
    of those who came later only as many as came before that turn began.
    """
    room = Room(policy())
    room.ask_all(["own1", "v1", "w1", "x1", "y1", "z1"] + [f"a{index}" for index in range(20)])
    gap, bound, served = 0, 12, 0
    for index in range(400):
        room.ask(f"newcomer-{index}-")
        (granted,) = room.release(next(iter(room.held)))
        gap += 1
        if granted.startswith("a"):
            assert gap <= bound
            gap, bound, served = 0, 2 * len(room.scheduler.ledger.flows), served + 1
    assert served == 20


@given(
    requests=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=60),
)
def test_users_are_served_in_ideal_rounds(requests):
    room = Room(policy())
    room.ask("own1")
    for index, user in enumerate(requests):
        room.now += 1
        room.ask(f"{user}{index}")
    served = [ticket.rstrip("0123456789") for ticket in room.serve_all()]
    assert served == list(oracle.turns(requests))


def is_only_one(room: Room, user: str) -> bool:
    """Whether a user has one request in line, waiting or away."""
    lines = room.scheduler.ledger.flows[user].lines
    return sum(map(len, lines.values())) == 1


@settings(deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**32))
def test_nobodys_first_request_waits_for_two_of_the_same_user(data, seed):
    """Whatever users do meanwhile: ask, leave, go away and come back, move to another worker.

    (A user's second request, beside one that is away, is not its first.)
    """
    rng = random.Random(seed)
    room = Room(policy(grace_ms=LONG, queue_depth=400), workers=["w1", "w2"])
    room.ask("own1")
    passed: dict[str, Counter[str]] = {}
    users = [chr(97 + index) for index in range(data.draw(st.integers(2, 9)))]
    for index in range(120):
        room.now += 1
        deed = rng.random()
        user = rng.choice(users)
        mine = [ticket for ticket in room.waiting if ticket.rstrip("0123456789") == user]
        if deed < 0.45:
            ticket = f"{user}{index}"
            room.ask(ticket, worker=rng.choice(room.workers))
            if ticket in room.waiting and is_only_one(room, user):
                passed[ticket] = Counter()
        elif deed < 0.55 and mine:
            ticket = rng.choice(mine)
            room.cancel(ticket, keep_place=rng.random() < 0.5)
            passed.pop(ticket, None)
        elif deed < 0.65:
            away = [t for t in room.scheduler.ledger.tickets.values() if t.state is State.AWAY]
            if away:
                room.attach(rng.choice(away).id, worker=rng.choice(room.workers))
        elif len(room.waiting) > 3:
            for granted in room.release(next(iter(room.held))):
                passed.pop(granted, None)
                for seen in passed.values():
                    seen[granted.rstrip("0123456789")] += 1
        for ticket, seen in passed.items():
            assert max(seen.values(), default=0) <= 1, (ticket, seen)


# Between tiers


def crowded_room(weights: dict[str, int], each: int, **limits: int) -> Room:
    room = Room(policy(*(tier(slug, weight=weight) for slug, weight in weights.items()), **limits))
    room.ask("own1", next(iter(weights)))
    for slug in weights:
        for index in range(each):
            room.ask(f"{slug}-{index}-", slug)
    return room


def saturated_grants(room: Room, grants: int) -> list[str]:
    """Serve so many, with a new request for each that is served."""
    order = []
    for index in range(grants):
        (ticket,) = room.release(next(iter(room.held)))
        order.append(ticket.split("-")[0])
        room.ask(f"{order[-1]}-again-{index}-", order[-1])
    return order


def longest_waits(order: list[str]) -> dict[str, int]:
    """The most grants in a row that went to others, for each tier."""
    longest: Counter[str] = Counter()
    last = dict.fromkeys(order, -1)
    for index, slug in enumerate(order):
        longest[slug] = max(longest[slug], index - last[slug] - 1)
        last[slug] = index
    return longest


@pytest.mark.parametrize("passed", [0, REBASE_AT - 40 * SCALE])
def test_crowded_tiers_are_served_by_their_weights(passed):
    """Also across the moving back of passes that have grown large."""
    room = crowded_room(WEIGHTS, 3)
    room.scheduler.shares.passed += passed
    for state in room.scheduler.ledger.tiers.values():
        state.passed += passed
    order = saturated_grants(room, 10_000)
    got = Counter(order)
    for slug, due in oracle.shares(WEIGHTS, 10_000).items():
        assert abs(got[slug] - due) <= max(2, due / 50)
    for slug, longest in longest_waits(order).items():
        assert longest <= room.scheduler.ledger.policy.starvation_bound(slug)


def test_weights_that_do_not_divide_the_scale_are_served_exactly_too():
    weights = {"a": 7, "b": 11, "c": 13, "d": 997}
    got = Counter(saturated_grants(crowded_room(weights, 3), 5_000))
    for slug, due in oracle.shares(weights, 5_000).items():
        assert abs(got[slug] - due) <= 2


def test_a_blocked_premium_tier_that_may_go_on_does_not_starve_the_lowest():
    """Premium is held at its cap for thousands of grants, then let go: no flood follows."""
    room = crowded_room(WEIGHTS, 300)
    bound = room.scheduler.ledger.policy.starvation_bound("guest")

    def edit(cap: int, version: int) -> None:
        tiers = [
            tier(slug, weight=weight, cap=cap if slug == "premium" else LONG)
            for slug, weight in WEIGHTS.items()
        ]
        room.edit(policy(*tiers, version=version))

    edit(0, 2)
    saturated_grants(room, 3_000)
    edit(LONG, 3)
    order = saturated_grants(room, 2_000)
    assert longest_waits(order)["guest"] <= bound
    got = Counter(order)
    for slug, due in oracle.shares(WEIGHTS, 2_000).items():
        assert abs(got[slug] - due) <= max(3, due / 50)


def test_a_tier_that_wakes_up_catches_up_on_nothing():
    room = crowded_room({"a": 1, "b": 1}, 300)
    room.scheduler.shares.adapt(room.scheduler.ledger.policy)
    for ticket in [t for t in room.waiting if t.startswith("b")]:
        room.cancel(ticket)
    room.ask("c", "a")
    for _ in range(200):
        room.release(next(iter(room.held)))
    room.ask_all([f"b-late-{index}-" for index in range(40)], "b")
    order = [ticket.split("-")[0] for ticket in room.serve_all()]
    assert abs(order[:60].count("b") - 30) <= 2


TIERS = st.builds(
    TierPolicy,
    slug=st.just(""),
    cap=st.integers(1, 8),
    reserved=st.sampled_from([0, 0, 0, 1, 2]),
    weight=st.sampled_from([1, 2, 3, 10, 100, 1000]),
    wait_budget_ms=st.just(LONG),
    depth_per_user=st.just(100),
)


@settings(deadline=None, max_examples=60)
@given(
    tiers=st.lists(TIERS, min_size=2, max_size=5),
    capacity=st.integers(1, 8),
    seed=st.integers(0, 2**32),
    is_near_rebase=st.booleans(),
)
def test_the_starvation_bound_holds_while_entitled(tiers, capacity, seed, is_near_rebase):
    """Random traffic under random caps and reservations, edited on the way.

    Grants are counted for the first waiter of each tier, at each grant for which that tier was
    entitled and another was served.
    """
    rng = random.Random(seed)
    named = [replace(one, slug=f"t{index}") for index, one in enumerate(tiers)]
    room = Room(Policy(1, capacity, tuple(named), max_hold_ms=0))
    if is_near_rebase:
        room.scheduler.shares.passed = REBASE_AT - 30 * SCALE
        for state in room.scheduler.ledger.tiers.values():
            state.passed = room.scheduler.shares.passed
    watch = StarvationWatch(room)
    active = [one.slug for one in named]
    for index in range(400):
        if index % 50 == 0:  # some tiers fall idle, others wake up
            active = rng.sample([one.slug for one in named], rng.randint(1, len(named)))
        if index % 150 == 149:
            named = [
                replace(one, cap=rng.randint(0, 8), weight=rng.choice([1, 3, 10, 100]))
                for one in named
            ]
            watch.passed_over.clear()
            room.edit(Policy(index, rng.randint(0, 8), tuple(named), max_hold_ms=0))
        deed = rng.random()
        if deed < 0.55:
            room.ask(f"u{index}-", rng.choice(active))
        elif room.held:
            room.release(rng.choice(list(room.held)))
    assert watch.grants == len(room.granted)


class StarvationWatch(Auditor):
    """Counts, for each tier with waiters, the grants that it could have had and others got."""

    def __init__(self, room: Room) -> None:
        super().__init__(room.scheduler)
        self.passed_over: Counter[str] = Counter()
        self.grants = 0

    def _audited_charge(self, tier: TierPolicy) -> None:
        rules = self.scheduler.ledger.policy
        waiting = {t.tier for t in self.tickets if t.state is State.WAITING}
        for other in rules:
            if other == tier or other.slug not in waiting:
                self.passed_over[other.slug] = 0
            elif self.is_entitled(rules, other):
                self.passed_over[other.slug] += 1
                assert self.passed_over[other.slug] <= rules.starvation_bound(other.slug)
        self.grants += 1
        self._charge(tier)


# The seeded stampede

SEEDS = 25


@pytest.fixture(scope="module")
def outcomes() -> dict[bool, list[stampede.Outcome]]:
    return {
        is_crowd_first: [
            stampede.run(stampede.visitors(seed, is_crowd_first=is_crowd_first))
            for seed in range(SEEDS)
        ]
        for is_crowd_first in (False, True)
    }


def each(outcomes):
    return [outcome for both in outcomes.values() for outcome in both]


def test_the_stampede_never_passes_the_capacity_and_leaves_nothing(outcomes):
    assert {(outcome.peak, outcome.left) for outcome in each(outcomes)} == {(30, (0, 0))}


def test_the_stampede_serves_all_who_pay_and_nearly_all_who_do_not(outcomes):
    for outcome in each(outcomes):
        assert outcome.granted("premium") == 20
        assert outcome.granted("pro") == 10
        assert outcome.granted("free") >= 95
        assert outcome.granted("guest") >= 22


def test_the_stampede_answers_everybody_within_the_wait_budget(outcomes):
    for outcome in each(outcomes):
        answered = sum(map(len, outcome.waits.values())) + outcome.refused.total()
        assert answered == sum(stampede.CROWD.values())
        assert outcome.late == 0


def test_the_stampede_refuses_guests_and_few_others(outcomes):
    for outcome in each(outcomes):
        assert {tier for tier, _ in outcome.refused} <= {"guest", "free"}


@pytest.mark.parametrize(("is_crowd_first", "bound"), [(False, 0.8), (True, 1.2)])
def test_premium_hardly_waits_in_the_stampede(outcomes, is_crowd_first, bound):
    longest = [max(outcome.waits["premium"]) for outcome in outcomes[is_crowd_first]]
    assert max(longest) <= bound * stampede.SERVICE_MS


@pytest.mark.parametrize("is_crowd_first", [False, True])
def test_the_stampede_goes_as_it_would_in_an_ideal_room(outcomes, is_crowd_first):
    tiers = {rules.slug: (rules.weight, rules.cap) for rules in stampede.SEEDED}
    real: dict[str, list[float]] = {slug: [] for slug in tiers}
    ideal: dict[str, list[float]] = {slug: [] for slug in tiers}
    for seed, outcome in enumerate(outcomes[is_crowd_first]):
        crowd = stampede.visitors(seed, is_crowd_first=is_crowd_first)
        waits = oracle.ideal_waits(crowd, 30, tiers)
        for slug in tiers:
            real[slug].append(statistics.mean(outcome.waits[slug]))
            ideal[slug].append(
                statistics.mean(w for v, w in waits.items() if v.tier == slug and w is not None)
            )
    for slug in tiers:
        slack = 0.1 * stampede.SERVICE_MS + 0.1 * statistics.mean(ideal[slug])
        assert abs(statistics.mean(real[slug]) - statistics.mean(ideal[slug])) <= slack
