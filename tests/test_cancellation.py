"""Giving up at every moment: nobody eats a wake-up, nobody leaves a slot behind."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from llm_throttle import aadmit, admit
from llm_throttle.admission import snapshot
from llm_throttle.exceptions import Refused
from llm_throttle.identity import Identity
from llm_throttle.lease import Lease
from llm_throttle.scheduling.policy import TierPolicy
from llm_throttle.worker import current

from .conftest import Room
from .waiting_room import ALONE, eventually, is_empty, settled


def who(number: int) -> Identity:
    return Identity(f"user:{number}", "gold")


@pytest.mark.parametrize("how", ["budget", "abort"])
async def test_each_of_many_who_give_up_as_the_slot_frees_has_one_outcome(
    room: Room, how: str
) -> None:
    """RACE-01: 200 waiters whose budget or client ends within 5 ms of the holder's end."""
    room(1, ALONE)
    moment = asyncio.get_running_loop().time() + 0.6
    running = most = 0

    async def call(number: int) -> str:
        nonlocal running, most
        wait = moment - asyncio.get_running_loop().time() + random.uniform(-0.005, 0.005)
        try:
            admission = aadmit("sim", identity=who(number), wait=wait if how == "budget" else None)
            async with asyncio.timeout(None if how == "budget" else wait), admission:
                running += 1
                most = max(most, running)
                try:
                    await asyncio.sleep(0)
                finally:
                    running -= 1
                return "served"
        except Refused as refusal:
            return refusal.reason
        except TimeoutError:
            return "aborted"

    async with aadmit("sim", identity=who(0)):
        calls = [asyncio.create_task(call(number)) for number in range(1, 201)]
        await asyncio.sleep(moment - asyncio.get_running_loop().time())
    outcomes = await asyncio.gather(*calls)
    assert set(outcomes) <= {"served", "wait_expired", "wait_too_long", "aborted"}
    assert most <= 1
    assert await settled()
    async with aadmit("sim", identity=who(999)) as lease:
        assert lease.waited < 0.5


def test_threads_whose_budget_ends_as_the_slot_frees_have_one_outcome_each(room: Room) -> None:
    room(1, ALONE)
    moment = time.monotonic() + 0.5
    outcomes: list[str] = []

    def call(number: int) -> None:
        wait = moment - time.monotonic() + random.uniform(-0.005, 0.005)
        try:
            with admit("sim", identity=who(number), wait=wait):
                outcomes.append("served")
        except Refused as refusal:
            outcomes.append(refusal.reason)

    with admit("sim", identity=who(0)):
        threads = [threading.Thread(target=call, args=(number,)) for number in range(1, 41)]
        for thread in threads:
            thread.start()
        time.sleep(max(0, moment - time.monotonic()))
    for thread in threads:
        thread.join()
    assert len(outcomes) == 40
    assert set(outcomes) <= {"served", "wait_expired", "wait_too_long"}
    assert eventually(is_empty)


async def test_a_waiter_cancelled_in_the_tick_of_its_wake_up_passes_it_on(room: Room) -> None:
    """RACE-02: release, and cancel the first waiter before the loop turns."""
    room(1, ALONE)
    for _ in range(30):
        served: list[int] = []

        async def call(number: int, served: list[int] = served) -> None:
            async with aadmit("sim", identity=who(number)):
                served.append(number)

        holder = aadmit("sim", identity=who(0))
        await holder.__aenter__()
        calls = []
        for number in (1, 2, 3):
            calls.append(asyncio.create_task(call(number)))
            while snapshot("sim").waiting < number:
                await asyncio.sleep(0.001)
        await holder.__aexit__(None, None, None)
        calls[0].cancel()
        await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
        assert served in ([2, 3], [1, 2, 3])
    assert await settled()


async def test_random_cancels_in_threads_and_tasks_lose_no_slot(room: Room) -> None:
    room(2, TierPolicy("gold", cap=2, wait_budget_ms=20_000, depth_per_user=100))
    most = running = 0
    lock = threading.Lock()

    def step(change: int) -> None:
        nonlocal running, most
        with lock:
            running += change
            most = max(most, running)

    async def call(number: int) -> None:
        async with aadmit("sim", identity=who(number % 17)):
            step(1)
            try:
                await asyncio.sleep(random.uniform(0, 0.002))
            finally:
                step(-1)

    def call_sync(number: int) -> None:
        try:
            with admit("sim", identity=who(number % 17), wait=random.uniform(0, 0.05)):
                step(1)
                time.sleep(random.uniform(0, 0.002))
                step(-1)
        except Refused:
            pass

    async def cancelled(number: int) -> None:
        task = asyncio.create_task(call(number))
        await asyncio.sleep(random.uniform(0, 0.02))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    for wave in range(10):
        start = wave * 60
        await asyncio.gather(
            *(cancelled(start + number) for number in range(40)),
            *(call(start + 40 + number) for number in range(12)),
            *(asyncio.to_thread(call_sync, start + 52 + number) for number in range(8)),
            return_exceptions=True,
        )
    assert most <= 2
    assert await settled()


async def test_a_slow_store_loses_no_release_to_a_cancelled_clean_up(
    room: Room, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LEAK-05: the client leaves around the release, the handler is cancelled twice."""
    room(3, TierPolicy("gold", cap=3, wait_budget_ms=20_000, depth_per_user=100))
    if backend == "redis":
        courier = current().backend._courier
        carry = courier._carry

        def slowly(batch):
            time.sleep(0.05)
            carry(batch)

        monkeypatch.setattr(courier, "_carry", slowly)

    async def call(number: int) -> None:
        async with aadmit("sim", identity=who(number)):
            await asyncio.sleep(0.02)

    async def cut_off(number: int) -> bool:
        task = asyncio.create_task(call(number))
        await asyncio.sleep(number % 25 * 0.012)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()
        [result] = await asyncio.gather(task, return_exceptions=True)
        return isinstance(result, asyncio.CancelledError) or result is None

    for start in range(0, 200, 10):
        assert all(await asyncio.gather(*(cut_off(start + number) for number in range(10))))
    assert await settled()


async def test_releases_made_while_the_store_is_away_are_made_up_for(
    room: Room, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "locmem":
        pytest.skip("a store in the process cannot be away")
    from llm_throttle.backends.wire import Wire
    from llm_throttle.exceptions import BackendDown

    async with aadmit("sim", identity=who(1)):
        execute = Wire.execute

        def refuse(self, commands):
            raise BackendDown("away")

        monkeypatch.setattr(Wire, "execute", refuse)
    await asyncio.sleep(0.5)
    monkeypatch.setattr(Wire, "execute", execute)
    assert await settled()


def test_a_late_or_repeated_release_frees_nobody_elses_slot(room: Room) -> None:
    """RACE-04: a lease that was taken back is released late, and again."""
    room(1, ALONE)
    admission = admit("sim", identity=who(1))
    lease: Lease = admission.__enter__()
    roster = current().roster("sim")
    assert roster.held[lease.ticket].lease is not None
    from llm_throttle.scheduling.commands import Release, Revoke

    current().call("sim", Revoke(lease.ticket, force=True))
    assert eventually(lambda: lease.lost == "revoked")
    with admit("sim", identity=who(2)):
        for _ in range(3):
            lease.release()
            roster.ask(Release(lease.ticket)).result(2)
            assert snapshot("sim").in_flight == 1
        with pytest.raises(Refused), admit("sim", identity=who(3), wait=0):
            pass
    assert eventually(is_empty)
