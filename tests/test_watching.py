"""Watching positions: in batches, soon, and the latest of each."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from llm_throttle.alarms import TaskAlarm, ThreadAlarm
from llm_throttle.entries import Waiter
from llm_throttle.positions import Position
from llm_throttle.scheduling.commands import Positions
from llm_throttle.scheduling.decisions import Gone
from llm_throttle.scheduling.policy import TierPolicy
from llm_throttle.watching import Subscription, watch
from llm_throttle.worker import current

from .conftest import Room

TIER = TierPolicy("gold", cap=1, wait_budget_ms=60_000, queue_depth=10_000, depth_per_user=100)


def fill(count: int) -> list[str]:
    """One request that holds the slot and others that wait behind it."""
    roster = current().roster("sim")
    tickets = []
    for number in range(count + 1):
        answer: Any = Gone()
        while isinstance(answer, Gone):  # a beat may overtake it
            waiter = Waiter(f"{number:032x}", "gold", f"user:{number}")
            roster.enqueue(waiter, None)
            answer = waiter.answer.result(3)
        tickets.append(waiter.ticket)
    return tickets[1:]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, room: Room) -> list[Positions]:
    """The commands that the watch sends."""
    room(1, TIER)
    seen: list[Positions] = []
    roster = current().roster("sim")
    ask = roster.ask

    def note(command: Any) -> Any:
        if isinstance(command, Positions):
            seen.append(command)
        return ask(command)

    monkeypatch.setattr(roster, "ask", note)
    return seen


def news_of(subscription: Subscription, alarm: ThreadAlarm) -> Position:
    give_up_at = time.monotonic() + 3
    while time.monotonic() < give_up_at:
        alarm.wait(0.5)
        for each in subscription.take():
            assert isinstance(each, Position)
            return each
    raise AssertionError("no news came")


def test_a_thread_is_told_at_once_and_when_it_moves(asked: list[Positions]) -> None:
    roster = current().roster("sim")
    tickets = fill(2)
    alarm = ThreadAlarm()
    started_at = time.monotonic()
    subscription = watch(roster).subscribe(alarm, ticket=tickets[1])
    news = news_of(subscription, alarm)
    assert (news.position, news.ahead, news.upstream, news.flow) == (2, 1, "sim", "user:2")
    assert time.monotonic() - started_at < 0.5
    roster.release(f"{0:032x}", is_abnormal=False)
    assert news_of(subscription, alarm).position == 1
    subscription.close()


async def test_many_watchers_cost_one_command_a_round(asked: list[Positions]) -> None:
    roster = current().roster("sim")
    subscriptions = []
    for ticket in await asyncio.to_thread(fill, 100):
        subscriptions.append(watch(roster).subscribe(TaskAlarm(), ticket=ticket))
    await asyncio.sleep(0.3)
    asked.clear()
    for _ in range(4):
        held = next(iter(roster.held))
        roster.release(held, is_abnormal=False)
        await asyncio.sleep(0.5)
    assert 3 <= len(asked) <= 6
    assert all(len(command.tickets) >= 90 for command in asked)
    for subscription in subscriptions:
        subscription.close()


async def test_nobody_is_told_more_than_twice_a_second(asked: list[Positions]) -> None:
    roster = current().roster("sim")
    tickets = await asyncio.to_thread(fill, 60)
    subscription = watch(roster).subscribe(TaskAlarm(), ticket=tickets[-1])
    times = []
    end = time.monotonic() + 3
    while time.monotonic() < end:
        roster.release(next(iter(roster.held)), is_abnormal=False)
        await asyncio.sleep(0.05)
        times += [time.monotonic() for _ in subscription.take()]
    subscription.close()
    assert len(times) >= 4
    assert all(later - first > 0.9 for first, later in zip(times, times[2:], strict=False))


async def test_looks_are_rarer_while_nothing_moves(asked: list[Positions]) -> None:
    roster = current().roster("sim")
    [ticket] = await asyncio.to_thread(fill, 1)
    subscription = watch(roster).subscribe(TaskAlarm(), ticket=ticket)
    await asyncio.sleep(1.1)
    asked.clear()
    await asyncio.sleep(2.2)
    assert 1 <= len(asked) <= 3
    subscription.close()


async def test_what_moves_during_a_look_does_not_wait_for_the_end_of_a_lull(
    asked: list[Positions], monkeypatch: pytest.MonkeyPatch
) -> None:
    roster = current().roster("sim")
    [ticket] = await asyncio.to_thread(fill, 1)
    subscription = watch(roster).subscribe(TaskAlarm(), ticket=ticket)
    await asyncio.sleep(1.1)
    ask = roster.ask

    def ask_while_it_moves(command: Any) -> Any:
        roster.on_move()
        return ask(command)

    monkeypatch.setattr(roster, "ask", ask_while_it_moves)
    asked.clear()
    await asyncio.sleep(2.3)
    assert len(asked) >= 4
    subscription.close()


async def test_who_was_left_out_of_a_look_does_not_wait_for_the_end_of_a_lull(
    asked: list[Positions],
) -> None:
    """The first look for a newcomer, when the others' is due: the next one is for all."""
    roster = current().roster("sim")
    first, second = await asyncio.to_thread(fill, 2)
    subscriptions = [watch(roster).subscribe(TaskAlarm(), ticket=first)]
    await asyncio.sleep(1.1)
    asked.clear()
    while not asked:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.7)
    asked.clear()
    subscriptions.append(watch(roster).subscribe(TaskAlarm(), ticket=second))
    await asyncio.sleep(0.8)
    looks = [set(command.tickets) for command in asked]
    assert looks == [{second}, {first}, {first, second}]
    for subscription in subscriptions:
        subscription.close()


async def test_a_slow_subscriber_gets_the_last_state_and_no_backlog(asked: list[Positions]) -> None:
    roster = current().roster("sim")
    tickets = await asyncio.to_thread(fill, 6)
    subscription = watch(roster).subscribe(TaskAlarm(), ticket=tickets[-1])
    for _ in range(4):
        await asyncio.sleep(0.6)
        roster.release(next(iter(roster.held)), is_abnormal=False)
    await asyncio.sleep(1.3)
    [news] = subscription.take()
    assert isinstance(news, Position) and news.position == 2
    subscription.close()


def test_the_thread_ends_with_the_last_subscriber(asked: list[Positions]) -> None:
    [ticket] = fill(1)
    alarm = ThreadAlarm()
    subscription = watch(current().roster("sim")).subscribe(alarm, ticket=ticket)
    news_of(subscription, alarm)
    del subscription  # dropping it is enough
    give_up_at = time.monotonic() + 3
    while any(t.name == "llm-throttle-positions" for t in threading.enumerate()):
        assert time.monotonic() < give_up_at
        time.sleep(0.05)
