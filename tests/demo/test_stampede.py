from __future__ import annotations

from dataclasses import replace
from typing import Any

from demo_project.load_client import Outcome
from demo_project.stampede import Result, arrivals, figures, spread

COUNTS = {"premium": 2, "pro": 1, "free": 6, "guest": 3}
SESSIONS = {tier: [f"{tier}-{number}" for number in range(9)] for tier in COUNTS}
GRANTED = Outcome("premium", True, "", True, 120.0, 300.0, 1500.0)
REFUSED = Outcome("guest", False, "tier_full", True, 20.0, None, 20.0)


def result(**changes: Any) -> Result:
    good = Result(
        gate="llm-throttle",
        capacity=30,
        outcomes=[GRANTED, REFUSED],
        stats={"peak": 30, "refused_429": 0},
        service_ms=1500.0,
        left={"in_flight": 0, "waiting": 0},
    )
    return replace(good, **changes)


def test_a_seed_repeats_the_arrivals() -> None:
    first, again, other = (
        arrivals(SESSIONS, COUNTS, order="random", arrive=1.0, seed=seed) for seed in (1, 1, 2)
    )
    assert first == again != other
    assert len(first) == len({client.session for client in first}) == 12
    assert all(0 <= client.at <= 1 for client in first)
    assert first == sorted(first, key=lambda client: client.at)


def test_crowd_first_lets_free_and_guests_come_before_the_others() -> None:
    clients = arrivals(SESSIONS, COUNTS, order="crowd-first", arrive=1.0, seed=1)
    tiers = [client.tier for client in clients]
    assert set(tiers[:9]) == {"free", "guest"}
    assert set(tiers[9:]) == {"premium", "pro"}
    assert [client.at for client in clients] == sorted(client.at for client in clients)


def test_percentiles_are_values_that_were_measured() -> None:
    assert spread([]) == {"p50": None, "p95": None, "p99": None, "max": None}
    assert spread([5]) == {"p50": 5, "p95": 5, "p99": 5, "max": 5}
    assert spread(range(1, 101)) == {"p50": 50, "p95": 95, "p99": 99, "max": 100}


def test_the_figures_of_a_tier() -> None:
    broken = replace(GRANTED, is_answered=False, first_token_ms=None)
    found = figures([GRANTED, broken, REFUSED, REFUSED])
    assert found["offered"] == 4
    assert found["granted"] == 2
    assert found["broken"] == 1
    assert found["refused"] == {"tier_full": 2}
    assert found["wait_ms"]["max"] == 120
    assert found["refused_ms"]["max"] == 20
    assert found["ttft_ms"]["p99"] == 300


def test_a_good_run_has_no_problems() -> None:
    assert result().problems() == []
    assert "premium" in result().as_text()
    assert result().as_json()["tiers"]["guest"]["refused"] == {"tier_full": 1}


def test_what_must_not_happen_is_a_problem() -> None:
    lost = replace(GRANTED, is_answered=False)
    for bad in (
        result(stats={"peak": 31, "refused_429": 0}),
        result(stats={"peak": 30, "refused_429": 1}),
        result(outcomes=[lost]),
        result(left={"in_flight": 1, "waiting": 0}),
        result(left={"in_flight": 0, "waiting": 1}),
    ):
        assert len(bad.problems()) == 1
