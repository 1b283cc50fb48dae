"""``admit`` and ``aadmit`` over both backends: what a caller gets, and what is left behind."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from llm_throttle import aadmit, admit
from llm_throttle.exceptions import LeaseLost, NestedAdmission, Refused
from llm_throttle.identity import Identity
from llm_throttle.retry import retry_after
from llm_throttle.scheduling.commands import Revoke, Snapshot
from llm_throttle.scheduling.decisions import Overview
from llm_throttle.scheduling.policy import TierPolicy
from llm_throttle.worker import current

from .conftest import GOLD, Room
from .waiting_room import eventually, is_empty, overview, settled

ANN = Identity("user:1", "gold")
BOB = Identity("user:2", "gold")


def test_a_slot_is_held_for_the_block_and_no_longer(room: Room) -> None:
    with admit("sim", identity=ANN) as lease:
        assert overview().in_flight == 1
        assert (lease.tier, len(lease.ticket)) == ("gold", 32)
        assert lease.waited < 1
    assert eventually(is_empty)


def test_an_upstream_that_has_no_policy_in_the_end_is_not_served(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row goes while it is asked for: publishing brings nothing into force any more."""
    monkeypatch.setattr(current().keeper, "publish", lambda upstream: None)
    with pytest.raises(Refused, match="unserviceable"), admit("going", identity=ANN):
        pass


def test_an_error_in_the_block_comes_out_and_frees_the_slot(room: Room) -> None:
    with pytest.raises(ValueError, match="bad model"), admit("sim", identity=ANN):
        raise ValueError("bad model")
    assert eventually(is_empty)


async def test_the_slot_is_handed_to_the_waiter_when_the_holder_leaves(room: Room) -> None:
    room(1)
    order: list[str] = []

    async def call(name: str, identity: Identity) -> None:
        async with aadmit("sim", identity=identity):
            order.append(name)
            await asyncio.sleep(0.05)

    first = asyncio.create_task(call("ann", ANN))
    await asyncio.sleep(0.02)
    await asyncio.gather(first, call("bob", BOB))
    assert order == ["ann", "bob"]
    assert await settled()


def test_threads_and_tasks_wait_in_the_same_line(room: Room) -> None:
    room(1, TierPolicy("gold", cap=1, wait_budget_ms=20_000, depth_per_user=100))
    now = running = 0
    lock = threading.Lock()

    def enter() -> None:
        nonlocal now, running
        with lock:
            now += 1
            running = max(running, now)

    def leave() -> None:
        nonlocal now
        with lock:
            now -= 1

    def in_thread(number: int) -> None:
        with admit("sim", identity=Identity(f"t{number}", "gold")):
            enter()
            time.sleep(0.005)
            leave()

    async def in_task(number: int) -> None:
        async with aadmit("sim", identity=Identity(f"a{number}", "gold")):
            enter()
            await asyncio.sleep(0.005)
            leave()

    async def tasks() -> None:
        await asyncio.gather(*map(in_task, range(20)))

    with ThreadPoolExecutor(20) as pool:
        done = [pool.submit(in_thread, number) for number in range(20)]
        asyncio.run(tasks())
        for future in done:
            future.result()
    assert running == 1
    assert eventually(is_empty)


def test_a_second_event_loop_in_the_same_process_is_served(room: Room) -> None:
    async def call() -> float:
        async with aadmit("sim", identity=ANN) as lease:
            return lease.waited

    for _ in range(3):
        assert asyncio.run(call()) < 1


def test_a_full_upstream_refuses_who_may_not_wait(room: Room) -> None:
    room(1)
    with admit("sim", identity=ANN):
        with pytest.raises(Refused) as refusal, admit("sim", identity=BOB, wait=0):
            pass
        assert refusal.value.reason == "wait_too_long"
        assert refusal.value.status_code == 503
        assert 1 <= refusal.value.retry_after <= 60
    assert eventually(is_empty)


async def test_the_wait_ends_with_the_budget(room: Room) -> None:
    room(1, TierPolicy("gold", cap=1, wait_budget_ms=150))

    async def wait_in_vain() -> None:
        async with aadmit("sim", identity=BOB):
            pass

    async with aadmit("sim", identity=ANN):
        started_at = time.monotonic()
        with pytest.raises(Refused) as refusal:
            await asyncio.create_task(wait_in_vain())
        assert refusal.value.reason == "wait_expired"
        assert 0.1 < time.monotonic() - started_at < 1.5
        assert overview().waiting == 0


def test_one_user_may_not_have_more_than_the_depth(room: Room) -> None:
    room(5, TierPolicy("gold", cap=5, depth_per_user=1))
    with admit("sim", identity=ANN), admit("sim", identity=BOB, wait=0):
        with pytest.raises(Refused) as refusal, admit("sim", identity=ANN, wait=0):
            pass
        assert (refusal.value.reason, refusal.value.status_code) == ("user_depth", 429)


def test_an_unknown_tier_is_refused_and_holds_nothing(room: Room) -> None:
    with pytest.raises(Refused) as refusal, admit("sim", identity=Identity("x", "nobody")):
        pass
    assert refusal.value.reason == "unserviceable"
    assert is_empty()


def test_a_lease_that_is_dropped_gives_its_slot_back(room: Room) -> None:
    admission = admit("sim", identity=ANN)
    admission.__enter__()
    del admission
    assert eventually(is_empty)


async def long_call() -> asyncio.Task[None]:
    """A task that holds a slot."""

    async def call() -> None:
        async with aadmit("sim", identity=ANN):
            await asyncio.sleep(30)

    task = asyncio.create_task(call())
    while not overview().holders:
        await asyncio.sleep(0.01)
    return task


async def test_an_operator_can_take_a_slot_back(room: Room) -> None:
    task = await long_call()
    [holder] = overview().holders
    await asyncio.to_thread(current().call, "sim", Revoke(holder.ticket))
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(task, 3)
    assert await settled()


async def test_a_cancelled_caller_is_cancelled_and_not_told_that_it_lost_its_lease(
    room: Room,
) -> None:
    task = await long_call()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await settled()


async def test_raising_the_capacity_wakes_those_who_wait(room: Room) -> None:
    tier = TierPolicy("gold", cap=9, wait_budget_ms=20_000, depth_per_user=100)
    room(1, tier)
    inside = 0
    leave = asyncio.Event()

    async def call(number: int) -> None:
        nonlocal inside
        async with aadmit("sim", identity=Identity(f"u{number}", "gold")):
            inside += 1
            await leave.wait()

    calls = [asyncio.create_task(call(number)) for number in range(6)]
    while overview().waiting < 5:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(room, 4, tier)
    async with asyncio.timeout(1):
        while inside < 4:
            await asyncio.sleep(0.005)
    assert overview().in_flight == 4
    leave.set()
    await asyncio.gather(*calls)


def test_nothing_is_left_in_the_snapshot_of_a_room_that_was_never_used(backend: str) -> None:
    answer = current().call("other", Snapshot())
    assert isinstance(answer, Overview)
    assert (answer.in_flight, answer.waiting, answer.holders) == (0, 0, ())


@pytest.mark.parametrize("retry_ms", [0, 1, 200, 999, 1000, 59_500, 600_000, 10**9])
@pytest.mark.parametrize("reason", ["tier_full", "user_depth", "paused", "shutting_down"])
def test_retry_after_is_a_whole_number_from_one_to_the_ceiling(reason, retry_ms) -> None:
    seen = {retry_after(reason, retry_ms) for _ in range(200)}
    assert all(isinstance(value, int) and 1 <= value <= 60 for value in seen)
    assert len(seen) > 1, "clients refused together must not all return together"


def test_retry_after_is_rounded_up_and_never_before_the_estimate() -> None:
    assert min(retry_after("tier_full", 4_001) for _ in range(200)) == 5


def test_a_moved_ticket_has_no_retry_after() -> None:
    assert retry_after("moved", 0) is None


def test_the_tiers_reservation_is_kept_for_it(room: Room) -> None:
    free = Identity("user:3", "free")
    with admit("sim", identity=free):
        with pytest.raises(Refused), admit("sim", identity=Identity("u4", "free"), wait=0):
            pass
        with admit("sim", identity=ANN, wait=0) as lease:
            assert lease.tier == GOLD.slug


def test_a_nested_admission_fails_at_once_instead_of_waiting_for_itself(room: Room) -> None:
    room(1)
    with admit("sim", identity=ANN):
        with pytest.raises(NestedAdmission, match="holds a slot of 'sim'"):
            admit("sim", identity=ANN).__enter__()
        assert overview().waiting == 0
    with admit("sim", identity=ANN):
        pass
