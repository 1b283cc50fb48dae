"""Edits in the real admin, over HTTP, while some hold slots and others wait."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import pytest

from demo_project.load_client import Answer

from .rig import Rig, leave, note

RIG = {"workers": 3, "users": 40, "throttle": {"POLICY_MAX_AGE": 2.0}, "atomic": (2,)}
ADMIN = 2  # under ATOMIC_REQUESTS; nobody chats there
ON_POSTGRES = True
"""There a transaction that is held open holds nobody up who reads."""
BEAT = 1.0

Calls = list[asyncio.Task[Answer]]


@pytest.fixture(autouse=True)
async def five_slots(rig: Rig) -> None:
    cells = {"cap": "", "reserved": 0, "queue_depth": 50}
    await edit(rig, capacity=5, is_paused=False, every_tier=cells)
    await rig.witness.reset()


async def edit(rig: Rig, **values: Any) -> float:
    """Save the form; when the answer was there."""
    async with rig.operator(ADMIN) as operator:
        await operator.edit(**values)
    return time.monotonic()


async def hold(rig: Rig, numbers: Sequence[int], takes: float) -> Calls:
    """Clients who get their slots at once."""
    calls = [
        asyncio.create_task(rig.chat(n, worker=n % 2, takes=takes, timeout=60)) for n in numbers
    ]
    await rig.witness.until_in_flight(len(numbers))
    return calls


async def wait_in_line(rig: Rig, numbers: Sequence[int], **options: Any) -> Calls:
    """Clients who queue, in this order."""
    calls: Calls = []
    before = (await asyncio.to_thread(rig.look)).waiting
    for number in numbers:
        calls.append(asyncio.create_task(rig.chat(number, worker=number % 2, **options)))
        await rig.until_waiting(before + len(calls))
    return calls


async def everyone_leaves(*calls: asyncio.Task[Answer]) -> None:
    for call in calls:
        await leave(call)


def all_complete(answers: Sequence[Answer]) -> bool:
    return all(answer.is_complete and answer.status == 200 for answer in answers)


async def test_raising_wakes_waiters_at_once(rig: Rig) -> None:
    holders = await hold(rig, range(5), 6)
    waiters = await wait_in_line(rig, range(5, 11), takes=6)
    saved_at = await edit(rig, capacity=9)
    await rig.witness.until_in_flight(9, 5)
    diary = await rig.witness.diary()
    woken = [entry.at - saved_at for entry in diary.all("begin")][5:]
    note(f"woken {max(woken):.3f} s after the answer to the edit")
    assert len(woken) == 4
    assert max(woken) < 1
    assert diary.peak == 9
    await everyone_leaves(*holders, *waiters)
    await rig.empty_within(1)


async def test_lowering_cuts_no_stream_and_lets_nobody_in_until_there_is_room(rig: Rig) -> None:
    """CONF-03: 5 hold, the limit goes to 2, to 0, and to 4."""
    holders = [
        asyncio.create_task(rig.chat(n, worker=n % 2, takes=2.0 + 0.4 * n)) for n in range(5)
    ]
    await rig.witness.until_in_flight(5)
    waiters = await wait_in_line(rig, range(5, 15), takes=1)
    lowered_at = await edit(rig, capacity=2)
    await asyncio.gather(*holders[:4])
    await rig.witness.until("begin", "client-5", 2)
    to_zero_at = await edit(rig, capacity=0)
    answers = await asyncio.gather(*holders)
    await rig.witness.until_in_flight(0)
    await asyncio.sleep(1.2)  # nobody may come in, not even by a beat
    diary = await rig.witness.diary()
    assert all_complete(answers), "running streams are not cut"
    low = [e for e in diary.all("begin") if lowered_at < e.at < to_zero_at]
    assert low
    assert max(e.in_flight for e in low) <= 2
    assert not [e for e in diary.all("begin") if e.at > to_zero_at]
    raised_at = await edit(rig, capacity=4)
    await rig.witness.until_in_flight(4, 5)
    assert time.monotonic() - raised_at < 1
    assert all_complete(await asyncio.gather(*waiters))
    assert (await rig.witness.diary()).peak == 5
    await rig.empty_within(1)


@pytest.mark.parametrize("cell", ["cap", "reserved", "queue_depth", "depth_per_user"])
async def test_a_tiers_cell_is_in_force_at_the_next_decision(rig: Rig, cell: str) -> None:
    holders = await hold(rig, range(3), 5)
    match cell:
        case "cap":
            await edit(rig, tiers={"premium": {"cap": 3}})
            [waiter] = await wait_in_line(rig, [7], takes=5)
            await edit(rig, tiers={"premium": {"cap": 4}})
            await rig.witness.until("begin", "client-7", 1)
            await leave(waiter)
        case "reserved":
            await edit(rig, tiers={"premium": {"cap": ""}, "pro": {"reserved": 2}})
            [waiter] = await wait_in_line(rig, [7], takes=5)
            await edit(rig, tiers={"pro": {"reserved": 0}})
            await rig.witness.until("begin", "client-7", 1)
            await leave(waiter)
        case "queue_depth":
            await edit(rig, capacity=3, tiers={"premium": {"queue_depth": 1, "cap": 3}})
            [waiter] = await wait_in_line(rig, [7])
            assert (await rig.chat(8)).reason == "tier_full"
            await leave(waiter)
        case "depth_per_user":
            await edit(rig, tiers={"premium": {"depth_per_user": 1}})
            assert (await rig.chat("again-0", worker=1)).reason == "user_depth"
            await edit(rig, tiers={"premium": {"depth_per_user": 8}})
            assert (await rig.chat("again-0", worker=1, takes=0.1)).is_complete
    await everyone_leaves(*holders)
    await rig.empty_within(1)


async def test_pause_lets_nobody_in_and_resume_lets_them_in_again(rig: Rig) -> None:
    holders = await hold(rig, range(5), 3)
    waiters = await wait_in_line(rig, range(5, 8), takes=0.1)
    paused_at = await edit(rig, is_paused=True)
    refused = await rig.chat(20, worker=1)
    assert (refused.status, refused.reason) == (503, "paused")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert all_complete(await asyncio.gather(*holders))
    await asyncio.sleep(1.2)
    assert not [e for e in (await rig.witness.diary()).all("begin") if e.at > paused_at]
    done = [waiter for waiter in waiters if waiter.done()]
    assert {waiter.result().reason for waiter in done} <= {"paused"}
    resumed_at = await edit(rig, is_paused=False)
    answers = await asyncio.gather(*waiters)
    assert all(answer.is_complete for answer in answers)
    began = [e.at for e in (await rig.witness.diary()).all("begin") if e.at > paused_at]
    assert len(began) == len(waiters) - len(done)
    assert all(at - resumed_at < 1 for at in began)
    await rig.admits_at_once()
    await rig.empty_within(1)


@pytest.mark.parametrize("capacity", [1, 9])
async def test_an_edit_counts_when_it_is_committed_and_not_before(rig: Rig, capacity: int) -> None:
    """CONF-01: the save is held open for 2 s; meanwhile the keepers read the rows again."""
    holders = await hold(rig, range(5), 8)
    waiters = await wait_in_line(rig, range(5, 8), takes=8)
    seen = []
    async with rig.operator() as operator:
        saving = asyncio.create_task(operator.hold_edit(capacity, 2.5, "commit"))
        while not saving.done():
            seen.append((time.monotonic(), (await asyncio.to_thread(rig.look)).capacity))
            await asyncio.sleep(0.05)
        committed_at = float(json.loads((await saving).body)["at"])
    assert {number for at, number in seen if at < committed_at} == {5}
    await rig.until(lambda overview: overview.capacity == capacity, 1)
    early = [e for e in (await rig.witness.diary()).all("begin")[5:] if e.at < committed_at]
    assert not early
    if capacity > 5:
        await rig.witness.until_in_flight(8, 1)
    for _ in range(20):  # it stays so, whoever looks at the rows
        await asyncio.sleep(0.1)
        assert (await asyncio.to_thread(rig.look)).capacity == capacity
    await everyone_leaves(*holders, *waiters)
    await rig.empty_within(1)


async def test_a_rolled_back_edit_does_nothing(rig: Rig) -> None:
    holders = await hold(rig, range(5), 8)
    waiters = await wait_in_line(rig, range(5, 8))
    async with rig.operator() as operator:
        before = await asyncio.to_thread(rig.look)
        answer = await operator.hold_edit(9, 0.5, "rollback")
        assert answer.status == 200, answer
    await asyncio.sleep(2 * BEAT + 1)  # the keepers have looked at the rows since
    after = await asyncio.to_thread(rig.look)
    assert (after.capacity, after.version, after.digest) == (5, before.version, before.digest)
    assert (after.in_flight, after.waiting) == (5, 3)
    await everyone_leaves(*holders, *waiters)
    await rig.empty_within(1)


async def test_the_admin_works_without_the_store(rig: Rig) -> None:
    rig.store.kill()
    started_at = time.monotonic()
    await edit(rig, capacity=7)
    took = time.monotonic() - started_at
    rig.store.start()
    returned_at = time.monotonic()
    await rig.until(lambda overview: overview.capacity == 7, 5)
    note(
        f"saved in {took:.2f} s without the store, in force "
        f"{time.monotonic() - returned_at:.2f} s after its return"
    )
    assert took < 4
    await rig.until(lambda overview: not overview.is_recovering, 5)
    await rig.admits_at_once()


async def test_waiters_of_a_deleted_tier_get_an_answer(rig: Rig) -> None:
    holders = await hold(rig, range(5), 4)
    waiters = await wait_in_line(rig, range(5, 8), tier="pro")
    async with rig.operator(ADMIN) as operator:
        await operator.delete_tier("pro")
    deleted_at = time.monotonic()
    answers = await asyncio.gather(*waiters)
    assert {answer.reason for answer in answers} == {"unserviceable"}
    assert time.monotonic() - deleted_at < 1
    assert all_complete(await asyncio.gather(*holders))
    demoted = await rig.chat(30, tier="pro", takes=0.1)
    assert demoted.headers["x-llm-throttle-tier"] == "free", "the default for those signed in"
    await rig.empty_within(1)


async def test_waiters_of_a_deleted_upstream_get_an_answer_and_nothing_is_left(rig: Rig) -> None:
    holders = await hold(rig, range(5), 2)
    waiters = await wait_in_line(rig, range(5, 8))
    async with rig.operator(ADMIN) as operator:
        await operator.delete_upstream()
    answers = await asyncio.gather(*waiters)
    assert {answer.reason for answer in answers} == {"unserviceable"}
    assert all_complete(await asyncio.gather(*holders))
    late = await rig.chat(9)
    assert (late.status, late.reason) == (503, "unserviceable")
    await asyncio.sleep(2 * BEAT)
    left = await asyncio.to_thread(rig.keys)
    assert not left
