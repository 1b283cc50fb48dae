"""LEASE-02: work longer than the lease, a blocked loop, a worker that stood still. TTL 3 s."""

from __future__ import annotations

import asyncio
import time

from .rig import Rig, leave, note

TTL, BEAT, NOISE = 3.0, 0.75, 0.5
RIG = {"workers": 3, "users": 20, "throttle": {"WORKER_TTL": TTL, "BEAT": BEAT}}


async def capacity(rig: Rig, number: int) -> None:
    async with rig.operator() as operator:
        cells = {"cap": "", "wait_budget": 60, "queue_depth": 50}
        await operator.edit(every_tier=cells, capacity=number)
    await rig.witness.reset()


async def test_long_streams_and_blocked_loops_hold_to_their_end(rig: Rig) -> None:
    """(a) a stream of five leases' length; (b) a loop that stands still for longer than one."""
    await capacity(rig, 2)
    long = asyncio.create_task(rig.chat("long-0", worker=0, takes=5 * TTL))
    blocked = asyncio.create_task(
        rig.chat("blocked-1", worker=1, takes=2.0, path="/case/blocks/?seconds=5")
    )
    await rig.witness.until_in_flight(2)
    waiter = asyncio.create_task(rig.chat("waiter-2", worker=2, takes=0.1))
    answers = await asyncio.gather(long, blocked, waiter)
    assert all(answer.is_complete and answer.status == 200 for answer in answers), answers
    diary = await rig.witness.diary()
    assert diary.peak == 2
    assert (await rig.witness.stats())["refused_429"] == 0
    assert diary.at("begin", "client-waiter-2") >= diary.at("end", "client-blocked-1")
    await rig.empty_within(1)


async def test_a_worker_that_stood_still_learns_what_it_lost(rig: Rig) -> None:
    """(c) stopped for 10 s: one slot too many at the worst, and nobody new until that is over."""
    await capacity(rig, 2)
    frozen = asyncio.create_task(rig.chat("frozen-0", worker=0, takes=40))
    other = asyncio.create_task(rig.chat("other-1", worker=1, takes=11))
    await rig.witness.until_in_flight(2)
    asleep = asyncio.create_task(rig.chat("asleep-5", worker=0, takes=0.1))
    await rig.until_waiting(1)
    waiters = []
    for number, takes in ((2, 9), (3, 0.1)):
        waiter = rig.chat(f"waiter-{number}", worker=2, takes=takes)
        waiters.append(asyncio.create_task(waiter))
        await rig.until_waiting(number)
    rig.freeze_worker(0)
    frozen_at = time.monotonic()
    await rig.witness.until("begin", "client-waiter-2", 20)
    taken_over = time.monotonic() - frozen_at
    await asyncio.sleep(frozen_at + 10 - time.monotonic())
    rig.thaw_worker(0)
    thawed_at = time.monotonic()
    answer = await asyncio.wait_for(frozen, 3)
    told_after = time.monotonic() - thawed_at
    assert not answer.is_complete, "the old holder was stopped"
    assert all(a.is_complete for a in await asyncio.gather(other, *waiters, asleep))
    diary = await rig.witness.diary()
    note(
        f"taken over after {taken_over:.2f} s, told {told_after:.2f} s after the thaw, "
        f"peak {diary.peak}"
    )
    assert taken_over <= TTL + BEAT + NOISE
    assert diary.peak <= 3, "the slots of the one that stood still, and no more"
    over = [e for e in diary.all("begin") if e.in_flight > 2]
    assert [e.who for e in over] == ["client-waiter-2"]
    await rig.empty_within(1)
    await rig.admits_at_once()


async def test_a_frozen_workers_waiters_are_not_granted_behind_its_back(rig: Rig) -> None:
    """Stopped for less than a lease: its slots stay its own, its waiters keep their places."""
    await capacity(rig, 1)
    holder = asyncio.create_task(rig.chat("hold-1", worker=1, takes=2.0))
    await rig.witness.until_in_flight(1)
    asleep = asyncio.create_task(rig.chat("asleep-0", worker=0, takes=0.1))
    await rig.until_waiting(1)
    behind = asyncio.create_task(rig.chat("behind-2", worker=2, takes=0.1))
    await rig.until_waiting(2)
    rig.freeze_worker(0)
    await holder
    ended_at = time.monotonic()
    assert (await behind).is_complete
    passed_on = (await rig.witness.diary()).at("begin", "client-behind-2") - ended_at
    rig.thaw_worker(0)
    assert (await asleep).is_complete
    note(f"passed on {passed_on:.2f} s after the slot was free")
    assert passed_on < 2 * BEAT + BEAT + NOISE
    assert (await rig.witness.diary()).peak == 1
    await leave(asleep)
    await rig.empty_within(1)
