"""Clients that leave at every moment of a chat, under uvicorn, judged by the provider."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import pytest

from .rig import Rig, leave, scaled

RIG = {"workers": 2, "users": 60}
ROUNDS = scaled(20)
SERVICE = 0.4


@pytest.fixture(autouse=True)
async def one_slot(rig: Rig) -> None:
    async with rig.operator() as operator:
        await operator.edit(capacity=1, every_tier={"cap": ""})
    await rig.witness.set(capacity=1)
    await rig.witness.reset()


def other(number: int) -> str:
    return ("anthropic", "openai")[number % 2]


@pytest.mark.parametrize("moment", ["queued", "unsent", "thinking", "streaming", "last 50 ms"])
async def test_a_client_leaves(rig: Rig, moment: str) -> None:
    """The call is closed before the slot is handed on, and the next waiter has it within 1 s."""
    chance = random.Random(moment)
    delays = []
    for number in range(ROUNDS):
        gone, next_one = f"gone-{number}", f"next-{number + 30}"
        await rig.until(lambda overview: not overview.in_flight)
        at = await LEAVE[moment](rig, gone, next_one, number, chance)
        diary = await rig.witness.diary()
        began = diary.at("begin", f"client-{next_one}")
        if moment in ("queued", "unsent"):
            assert not diary.all("begin", f"client-{gone}"), "nobody was there to be served"
        else:
            assert diary.at("end", f"client-{gone}") < began
        delays.append(began - at)
    stats = await rig.witness.stats()
    assert (stats["peak"], stats["refused_429"]) == (1, 0)
    assert max(delays) < 1, delays
    await rig.empty_within(1)
    await rig.admits_at_once()


async def leave_queued(
    rig: Rig, gone: str, next_one: str, number: int, chance: random.Random
) -> float:
    """When the holder leaves, the one in front in line has left before."""
    holder = asyncio.create_task(rig.chat(f"hold-{number}", takes=20))
    await rig.witness.until("begin", f"client-hold-{number}")
    leaving = asyncio.create_task(rig.chat(gone, worker=number))
    await rig.until_waiting(1)
    waiting = asyncio.create_task(rig.chat(next_one, worker=number + 1, takes=0.05))
    await rig.until_waiting(2)
    await leave(leaving)
    await rig.until_waiting(1)
    at = await leave(holder)
    await served(waiting)
    return at


async def leave_unsent(
    rig: Rig, gone: str, next_one: str, number: int, chance: random.Random
) -> float:
    """The view has returned, a middleware has not: no body will ever be started."""
    leaving = asyncio.create_task(rig.chat(gone, worker=number, path="/chat/?dawdle=20"))
    await rig.until(lambda overview: overview.in_flight == 1)
    waiting = asyncio.create_task(rig.chat(next_one, worker=number + 1, takes=0.05))
    await rig.until_waiting(1)
    at = await leave(leaving)
    await served(waiting)
    return at


async def leave_thinking(
    rig: Rig, gone: str, next_one: str, number: int, chance: random.Random
) -> float:
    leaving = asyncio.create_task(rig.chat(gone, worker=number, takes=20, sdk=other(number)))
    await rig.witness.until("begin", f"client-{gone}")
    waiting = asyncio.create_task(rig.chat(next_one, worker=number + 1, takes=0.05))
    await rig.until_waiting(1)
    at = await leave(leaving)
    await served(waiting)
    return at


async def leave_streaming(
    rig: Rig, gone: str, next_one: str, number: int, chance: random.Random
) -> float:
    speaks = asyncio.Event()
    leaving = asyncio.create_task(
        rig.chat(
            gone, worker=number, takes=0.8, sdk=other(number), on_event=lambda event: speaks.set()
        )
    )
    await rig.witness.until("begin", f"client-{gone}")
    waiting = asyncio.create_task(rig.chat(next_one, worker=number + 1, takes=0.05))
    await speaks.wait()
    await rig.until_waiting(1)
    at = await leave(leaving)
    await served(waiting)
    return at


async def leave_at_the_end(
    rig: Rig, gone: str, next_one: str, number: int, chance: random.Random
) -> float:
    leaving = asyncio.create_task(rig.chat(gone, worker=number, takes=SERVICE, sdk=other(number)))
    await rig.witness.until("begin", f"client-{gone}")
    ends_at = (await rig.witness.diary()).at("begin", f"client-{gone}") + SERVICE
    waiting = asyncio.create_task(rig.chat(next_one, worker=number + 1, takes=0.05))
    await asyncio.sleep(ends_at - chance.uniform(0, 0.05) - time.monotonic())
    at = await leave(leaving)
    await served(waiting)
    return at


async def served(waiting: asyncio.Task[Any]) -> None:
    answer = await waiting
    assert answer.is_complete, (answer, answer.events)
    assert answer.status == 200, answer.body


LEAVE = {
    "queued": leave_queued,
    "unsent": leave_unsent,
    "thinking": leave_thinking,
    "streaming": leave_streaming,
    "last 50 ms": leave_at_the_end,
}


async def test_half_of_a_thousand_clients_leave_at_random(rig: Rig) -> None:
    async with rig.operator() as operator:
        await operator.edit(capacity=5, every_tier={"cap": ""})
    await rig.witness.set(capacity=5)
    chance = random.Random(7)
    numbers = iter(range(scaled(1000)))
    complete: list[bool] = []

    async def client(user: int) -> None:
        for number in numbers:
            call = asyncio.create_task(
                rig.chat(
                    number,
                    user=user,
                    worker=number,
                    takes=chance.uniform(0.05, 0.15),
                    sdk=other(number),
                )
            )
            patience = chance.uniform(0, 1.5) if number % 2 else None
            done, _ = await asyncio.wait({call}, timeout=patience)
            if done:
                complete.append(call.result().is_complete and call.result().status == 200)
            else:
                await leave(call)

    await asyncio.gather(*map(client, range(50)))
    stats = await rig.witness.stats()
    assert stats["peak"] <= 5
    assert stats["refused_429"] == 0
    assert all(complete)
    assert len(complete) >= scaled(1000) // 2
    await rig.empty_within(1)
    await rig.admits_at_once()
