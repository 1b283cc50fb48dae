"""The store is restarted empty, is away, or stands still, under full load."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from demo_project.load_client import Answer

from .load import sustained
from .rig import Diary, Rig, note

RIG = {"workers": 4, "users": 140}
BEAT, NOISE = 1.0, 0.3
PATIENT = {"wait_budget": 60, "queue_depth": 200}


@pytest.fixture(autouse=True)
async def thirty_slots(rig: Rig) -> None:
    async with rig.operator() as operator:
        await operator.edit(capacity=30, tiers={"premium": PATIENT})
    await rig.witness.reset()


async def test_a_restart_without_memory_loses_neither_limit_nor_order(rig: Rig) -> None:
    """30 held, 100 waiting at four workers, one user per client."""
    chance = random.Random(3)
    arrived: dict[str, float] = {}
    calls: list[asyncio.Task[Answer]] = []

    def come(number: int) -> None:
        takes = chance.uniform(5, 9) if number < 30 else chance.uniform(0.7, 2)
        calls.append(asyncio.create_task(rig.chat(number, worker=number, takes=takes)))
        arrived[f"client-{number}"] = time.monotonic()

    for number in range(30):
        come(number)
    await rig.witness.until_in_flight(30)
    for number in range(30, 130):
        come(number)
        await asyncio.sleep(0.025)  # they come over 2.5 seconds
    await rig.until_waiting(100)
    rig.store.kill()
    rig.store.start()
    returned_at = time.monotonic()
    answers = await asyncio.gather(*calls)
    diary = await rig.witness.diary()
    resumed = next(e.at for e in diary.all("begin") if e.at > returned_at) - returned_at
    note(f"resumed after {resumed:.2f} s, {worst_overtaking(diary, arrived):.2f} s out of order")
    assert all(answer.is_complete and answer.status == 200 for answer in answers)
    assert diary.peak <= 30
    assert (await rig.witness.stats())["refused_429"] == 0
    assert resumed < 3
    assert worst_overtaking(diary, arrived) < BEAT + NOISE
    await rig.empty_within(1)
    await rig.admits_at_once()


def worst_overtaking(diary: Diary, arrived: dict[str, float]) -> float:
    """By how much at most somebody came later than one whom it was served before.

    Those who begin within a moment of each other were let in by the same step.
    """
    began = [(entry.at, arrived[entry.who]) for entry in diary.all("begin") if entry.who in arrived]
    waited = [(at, came) for at, came in began if at - came > 0.3]
    pairs = (
        later - earlier
        for at, later in waited
        for then, earlier in waited
        if then > at + NOISE and later > earlier
    )
    return max(pairs, default=0.0)


@pytest.mark.parametrize("how", ["killed for 5 s", "frozen for 3 s", "frozen for 15 s"])
async def test_an_absence_is_survived(rig: Rig, how: str) -> None:
    """Running calls go on, newcomers hear no within a second or two, nothing passes the limit."""
    seconds = float(how.split()[2])
    async with sustained(rig, 90, range(4)) as crowd:
        await rig.witness.until_in_flight(30)
        await asyncio.sleep(1)
        before = len(crowd.answers)
        if how.startswith("killed"):
            rig.store.kill()
        else:
            rig.store.freeze()
        await asyncio.sleep(seconds)
        during = crowd.answers[before:]
        if how.startswith("killed"):
            rig.store.start()
        else:
            rig.store.thaw()
        returned_at = time.monotonic()
        await asyncio.sleep(6)
    diary = await rig.witness.diary()
    resumed = next(e.at for e in diary.all("begin") if e.at > returned_at) - returned_at
    full = diary.mean(returned_at + 4, returned_at + 6)
    by_second = [diary.mean(returned_at + n, returned_at + n + 1) for n in range(6)]
    slowest = max((a.elapsed for a in during if a.status == 503), default=0)
    note(f"{how}: resumed after {resumed:.2f} s, then {full:.1f}; peak {diary.peak}")
    note(f"in flight by the second {[round(m) for m in by_second]}; slowest no {slowest:.2f} s")
    assert diary.peak <= 30
    assert (await rig.witness.stats())["refused_429"] == 0
    assert resumed < 3
    assert full >= 0.8 * 30
    assert slowest < 4
    assert set(crowd.refused()) <= {"backend_down", "recovering"}
    # Whose grant the store could not confirm any more is stopped: it may be somebody else's.
    assert len(crowd.cut_off) <= 3, crowd.cut_off
    await rig.empty_within(1)
    await rig.admits_at_once()
