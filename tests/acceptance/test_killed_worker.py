"""One of four workers is killed under full load."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from llm_throttle.scheduling.decisions import Overview

from .load import sustained
from .rig import Rig, leave, note

RIG = {"workers": 4, "users": 100}
TTL, BEAT, NOISE = 10.0, 1.0, 0.5


@pytest.fixture(autouse=True)
def all_four(rig: Rig) -> None:
    if not rig.workers[2].is_running():
        rig.revive_worker(2)


async def test_the_others_go_on_and_its_slots_come_back(rig: Rig) -> None:
    async with sustained(rig, 90, range(4), takes=2.0) as crowd:
        await rig.witness.until_in_flight(30)
        await rig.until(lambda seen: held_by(rig, 2, seen) >= 6, 20)
        killed_at = time.monotonic()
        rig.kill_worker(2)
        await asyncio.sleep(TTL + BEAT + 4)
    diary = await rig.witness.diary()
    cut = [e for e in diary.all("end") if 0 <= e.at - killed_at < 2 and not e.was_served]
    live = 30 - len(cut)
    kept = diary.mean(killed_at + 3, killed_at + TTL - 2 * BEAT)
    after = [e.at for e in diary.all("begin") if e.at > killed_at and e.in_flight > live]
    back_after = after[0] - killed_at if after else math.inf
    full = diary.mean(killed_at + TTL + BEAT + 1, killed_at + TTL + BEAT + 4)
    note(f"held {len(cut)}, kept {kept / live:.3f}, back after {back_after:.2f} s, then {full:.1f}")
    stats = await rig.witness.stats()
    assert (stats["refused_429"], diary.peak) == (0, 30)
    assert cut, "the worker was to be killed while it held"
    assert kept >= 0.9 * live
    assert back_after <= TTL + BEAT + NOISE
    assert full >= 0.9 * 30
    assert not crowd.refused("wait_too_long")
    await rig.empty_within(1)
    await rig.admits_at_once()


def held_by(rig: Rig, worker: int, seen: Overview) -> int:
    """What the store counts for one of the workers."""
    label = f":{rig.workers[worker].process.pid}"
    return sum(count.in_flight for count in seen.workers if count.label.endswith(label))


async def test_waiters_of_a_dead_worker_hold_up_nobody(rig: Rig) -> None:
    """WAKE-01: five wait at worker 2 in front of five at worker 3; it dies, then a slot frees."""
    await rig.witness.reset()
    async with rig.operator() as operator:
        await operator.edit(capacity=1, every_tier={"cap": ""})
    holder = asyncio.create_task(rig.chat("hold-0", worker=0, takes=3))
    await rig.witness.until("begin", "client-hold-0")
    ends_at = (await rig.witness.diary()).at("begin", "client-hold-0") + 3
    lost = []
    for number in range(1, 6):
        lost.append(asyncio.create_task(rig.chat(number, worker=2)))
        await rig.until_waiting(number)
    behind = []
    for number in range(6, 11):
        behind.append(asyncio.create_task(rig.chat(number, worker=3, takes=0.1)))
        await rig.until_waiting(number)
    await asyncio.sleep(ends_at - 1 - time.monotonic())
    rig.kill_worker(2)
    await holder
    ended_at = time.monotonic()
    assert all(answer.is_complete for answer in await asyncio.gather(*behind))
    diary = await rig.witness.diary()
    waited = diary.at("begin", "client-6") - ended_at
    order = [entry.who for entry in diary.all("begin")]
    note(f"the first behind the dead ran {waited:.2f} s after the slot was free")
    assert order == ["client-hold-0", *(f"client-{number}" for number in range(6, 11))]
    assert waited < 2 * BEAT + NOISE
    await asyncio.gather(*lost)
    await rig.until(lambda overview: not overview.waiting, TTL + BEAT + NOISE)


async def test_a_killed_workers_slots_wait_for_nobody(rig: Rig) -> None:
    """LEASE-04: two holders and a waiter die with their worker; new requests come at once."""
    await rig.witness.reset()
    async with rig.operator() as operator:
        await operator.edit(capacity=2, every_tier={"cap": ""})
    dying = []
    for number in range(3):
        dying.append(asyncio.create_task(rig.chat(number, worker=2, takes=60)))
        await rig.until(lambda seen, n=number: seen.in_flight + seen.waiting == n + 1)
    killed_at = time.monotonic()
    rig.kill_worker(2)
    new = [asyncio.create_task(rig.chat(10 + n, worker=n % 2, takes=0.1)) for n in range(4)]
    rig.revive_worker(2)
    own = asyncio.create_task(rig.chat(20, worker=2, takes=0.1))
    answers = await asyncio.gather(*new, own)
    assert all(answer.is_complete and answer.status == 200 for answer in answers)
    diary = await rig.witness.diary()
    began = [e.at - killed_at for e in diary.all("begin") if e.at > killed_at]
    note(f"served again {began[0]:.2f} s after the kill, the last at {began[-1]:.2f} s")
    assert began[-1] < TTL + 5
    assert diary.peak == 2
    for task in dying:
        await leave(task)
    await rig.empty_within(1)
