"""Estimates put to the test: replays of 2,000 requests in simulated time."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import median

import pytest

from llm_throttle.scheduling.forecast import Forecast
from llm_throttle.scheduling.policy import Policy, TierPolicy

from .replay import Replay, Visit, crowds, even, mixed, skewed, stream
from .stampede import SEEDED

COUNT = 2_000
ONE = Policy(1, 30, (TierPolicy("free", 30, 0, 1, 60_000, depth_per_user=100),))
FOUR = Policy(
    1,
    30,
    tuple(
        TierPolicy(tier.slug, tier.cap, 0, tier.weight, 120_000, depth_per_user=100)
        for tier in SEEDED
    ),
)
PATIENT = replace(FOUR, tiers=tuple(replace(tier, wait_budget_ms=600_000) for tier in FOUR.tiers))
TEN = Policy(1, 10, (TierPolicy("free", 10, 0, 1, 120_000, depth_per_user=100),))


def assert_honest(replay: Replay, at_least: float) -> None:
    """Most messages are true, and they say something."""
    judged = list(replay.judged())
    true = sum(told.low <= wait <= told.high for told, wait in judged)
    width = median(
        (told.high - told.low) / max(2, 0.6 * (told.high + told.low) / 2) for told, _ in judged
    )
    assert len(judged) > COUNT
    assert width <= 1, f"{width:.2f} of what may be"
    assert true / len(judged) >= at_least, f"{true / len(judged):.3f} of {len(judged)}"


@pytest.mark.parametrize("hold", [even, mixed, skewed])
@pytest.mark.parametrize("rules", [ONE, FOUR, SEEDED], ids=["one tier", "four tiers", "seeded"])
def test_the_true_wait_lies_in_the_range_shown_while_many_come(hold, rules):
    rng = random.Random(7)
    assert_honest(Replay(rules, stream(rng, rules, hold, 1.05, COUNT)).run(), 0.8)


@pytest.mark.parametrize("hold", [even, mixed, skewed])
@pytest.mark.parametrize("rules", [ONE, SEEDED], ids=["one tier", "seeded"])
def test_the_true_wait_lies_in_the_range_shown_while_crowds_are_served(hold, rules):
    rng = random.Random(7)
    assert_honest(Replay(rules, crowds(rng, rules, hold, 400, COUNT)).run(), 0.8)


@pytest.mark.parametrize("hold", [even, mixed, skewed])
@pytest.mark.parametrize(
    "visits",
    [
        lambda hold: stream(random.Random(7), TEN, hold, 1.05, COUNT),
        lambda hold: crowds(random.Random(7), TEN, hold, 130, COUNT),
    ],
    ids=["many come", "crowds"],
)
def test_it_does_with_few_slots_too(visits, hold):
    assert_honest(Replay(TEN, visits(hold)).run(), 0.8)


@pytest.mark.parametrize("hold", [even, mixed, skewed])
def test_it_does_for_four_tiers_of_whom_nobody_gives_up(hold):
    visits = crowds(random.Random(7), PATIENT, hold, 400, COUNT)
    assert_honest(Replay(PATIENT, visits).run(), 0.8)


def test_very_few_slots_and_mixed_calls_leave_more_to_chance():
    """With five slots the sum of ten such calls varies by a quarter, whatever is known of them."""
    rules = replace(TEN, capacity=5, tiers=(replace(TEN.tiers[0], cap=5),))
    assert_honest(Replay(rules, stream(random.Random(2), rules, mixed, 1.05, COUNT)).run(), 0.7)


# Prediction


BURSTY = Policy(1, 10, (TierPolicy("free", 10, 0, 1, 12_000, depth_per_user=100),))


def warmed_up(rng: random.Random, crowd: int) -> list[Visit]:
    """Calls that are measured, then a crowd that comes at once."""
    before = [Visit(number * 300, "free", f"w{number}-", even(rng)) for number in range(40)]
    return before + [
        Visit(30_000 + rng.randrange(100), "free", f"c{number}-", even(rng))
        for number in range(crowd)
    ]


def without_prediction(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> Replay:
    with monkeypatch.context() as patch:
        patch.setattr(Forecast, "would_miss", lambda *args: False)
        return Replay(replay.rules, replay.visits).run()


def test_of_a_crowd_far_too_large_most_are_refused_at_once(monkeypatch):
    """10 times as many as there is time for: of those who would wait in vain, 4 in 5 need not."""
    crowd = 10 * 10 * 12_000 // 3_000
    replay = Replay(BURSTY, warmed_up(random.Random(7), crowd)).run()
    vain = without_prediction(replay, monkeypatch).refused
    assert len(vain) > crowd * 0.8
    early = [ticket for ticket in vain if replay.refused.get(ticket) == "wait_too_long"]
    assert len(early) >= 0.8 * len(vain)


@pytest.mark.parametrize("hold", [even, mixed, skewed])
@pytest.mark.parametrize("rules", [BURSTY, SEEDED], ids=["one tier", "seeded"])
def test_under_steady_overload_hardly_anybody_is_refused_who_would_have_been_served(
    hold, rules, monkeypatch
):
    replay = Replay(rules, stream(random.Random(7), rules, hold, 1.6, COUNT)).run()
    early = [ticket for ticket, why in replay.refused.items() if why == "wait_too_long"]
    served = without_prediction(replay, monkeypatch).granted_at
    assert len([ticket for ticket in early if ticket in served]) <= 0.01 * COUNT
