"""What is shown of a position: only what changed, and never back without a cause."""

from __future__ import annotations

import pytest

from llm_throttle.positions import Look, Shown
from llm_throttle.scheduling.decisions import Place


def look(version: int = 1, recoveries: int = 0) -> Look:
    return Look("sim", version, recoveries=recoveries)


def place(ahead: int, low_ms: int = 1_500, high_ms: int = 2_500) -> Place:
    return Place("t", "user:1", ahead, low_ms, high_ms)


def test_the_shown_position_is_the_lowest_so_far_and_ahead_the_truth() -> None:
    shown = Shown(4, 1, 0)
    news = [shown.update(place(ahead), look()) for ahead in (3, 1, 2, 0)]
    assert [each and (each.position, each.ahead) for each in news] == [
        (4, 3),
        (2, 1),
        (2, 2),
        (1, 0),
    ]


@pytest.mark.parametrize(
    ("later", "cause"), [(look(version=2), "edit"), (look(recoveries=1), "recovery")]
)
def test_a_position_moves_back_for_a_cause_that_is_named_once(later: Look, cause: str) -> None:
    shown = Shown(2, 1, 0)
    shown.update(place(1), look())
    news = shown.update(place(5), later)
    assert news is not None and (news.position, news.cause) == (6, cause)
    assert shown.update(place(5), later) is None
    news = shown.update(place(7), later)
    assert news is not None and (news.position, news.ahead, news.cause) == (6, 7, "")


def test_only_changes_are_told() -> None:
    shown = Shown(2, 1, 0)
    assert shown.update(place(1), look()) is not None
    assert shown.update(place(1), look()) is None
    assert shown.update(place(1, high_ms=3_400), look()) is None
    assert shown.update(place(1, high_ms=3_500), look()) is not None


def test_an_eta_is_in_whole_seconds() -> None:
    news = Shown(1, 1, 0).update(place(0, 1_499, 4_500), look())
    assert news is not None and news.eta == (1, 5)
