"""What recent holds and grants say: only what is recent, only where there is enough."""

import pytest

from llm_throttle.scheduling.estimates import (
    BUCKET_MS,
    BUCKETS,
    DEFAULT_GAP_MS,
    HOLD_MEMORY_MS,
    MAX_HOLDS,
    MIN_GRANTS,
    MIN_HOLDS,
    REFRESH_MS,
    GrantRate,
    HoldTimes,
)


def holds(*durations: int, at: int = 1_000_000) -> HoldTimes:
    times = HoldTimes()
    for index, held_ms in enumerate(durations):
        times.record(at + index * REFRESH_MS, held_ms)
    return times


def test_percentiles_are_those_of_the_sorted_holds():
    times = holds(*range(200, 0, -10))
    assert (times.count, times.p10, times.p50, times.mean) == (20, 30, 110, 105)


def test_one_hold_is_all_percentiles():
    times = holds(70)
    assert (times.count, times.p10, times.p50, times.mean) == (1, 70, 70, 70)


def test_only_the_last_holds_are_remembered():
    times = holds(*[5_000] * 10, *[100] * MAX_HOLDS)
    assert (times.count, times.p50) == (MAX_HOLDS, 100)


def test_holds_from_long_ago_are_left_out():
    times = holds(*[5_000] * 10)
    times.record(1_000_000 + 9 * REFRESH_MS + HOLD_MEMORY_MS, 100)
    assert (times.count, times.p50) == (1, 100)


def test_a_few_holds_tell_nothing():
    times = holds(*[100] * (MIN_HOLDS - 1))
    assert not times.is_telling(times.refreshed_at)
    times.record(times.refreshed_at, 100)
    assert times.is_telling(times.refreshed_at)


def test_holds_tell_nothing_after_a_long_silence():
    times = holds(*[100] * MIN_HOLDS)
    assert times.is_telling(times.refreshed_at + HOLD_MEMORY_MS - 1)
    assert not times.is_telling(times.refreshed_at + HOLD_MEMORY_MS)


def test_sorting_is_not_done_for_every_hold():
    times = holds(*[100] * MIN_HOLDS)
    times.record(times.refreshed_at + REFRESH_MS - 1, 9_000)
    assert times.count == MIN_HOLDS
    times.record(times.refreshed_at + REFRESH_MS, 9_000)
    assert times.count == MIN_HOLDS + 2


def test_the_gap_is_the_mean_time_between_grants():
    rate = GrantRate()
    for index in range(20):
        rate.record(1_000_000 + index * 250)
    assert rate.gap_ms(1_005_000) == 250


def test_too_few_grants_have_the_default_gap():
    rate = GrantRate()
    for index in range(MIN_GRANTS - 1):
        rate.record(1_000_000 + index)
    assert rate.gap_ms(1_002_000) == DEFAULT_GAP_MS


def test_grants_at_one_instant_have_a_gap_all_the_same():
    rate = GrantRate()
    for _ in range(30):
        rate.record(1_000_000)
    assert rate.gap_ms(1_000_000) == 1


def test_grants_are_forgotten_after_a_minute():
    rate = GrantRate()
    for index in range(20):
        rate.record(1_000_000 + index)
    assert rate.gap_ms(1_000_000 + BUCKETS * BUCKET_MS) == DEFAULT_GAP_MS


@pytest.mark.parametrize("phase", [0, 1_000, 5_000, 9_000])
def test_the_gap_looks_back_over_what_is_still_counted(phase):
    rate = GrantRate()
    for now in range(1_000_000, 1_300_000 + phase, 1_000):
        rate.record(now)
    assert 980 <= rate.gap_ms(1_300_000 + phase) <= 1_000


def test_just_enough_grants_are_measured():
    rate = GrantRate()
    for index in range(MIN_GRANTS):
        rate.record(1_000_000 + index * 100)
    assert rate.gap_ms(1_000_500) == 100
