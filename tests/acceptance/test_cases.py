"""Faults that people met in systems of this kind, over two server workers."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from demo_project.load_client import CSRF_TOKEN

from .rig import Rig, leave, note, scaled

RIG = {"workers": 2, "users": 20}

STATUS = {
    # by Django's view, by REST framework's
    "value": (500, 500),
    "missing": (404, 404),
    "denied": (403, 403),
    "parse": (500, 400),
    "invalid": (500, 400),
}


async def limits(rig: Rig, capacity: int, **cells: Any) -> None:
    async with rig.operator() as operator:
        empty = {"cap": "", "depth_per_user": 8, "queue_depth": 200, "wait_budget": 60}
        await operator.edit(every_tier=empty | cells, capacity=capacity)
    await rig.witness.reset()


@pytest.mark.parametrize("view", ["", "sync/", "drf/"])
async def test_an_error_before_the_call_keeps_its_status_and_frees_the_slot(
    rig: Rig, view: str
) -> None:
    """LEAK-01."""
    await limits(rig, 2)
    for how, by in STATUS.items():
        path = f"/case/fails/{view}?how={how}"
        answers = await asyncio.gather(*(rig.chat(n, worker=n, path=path) for n in range(5)))
        assert [answer.status for answer in answers] == [by[view == "drf/"]] * 5, how
    await rig.admits_at_once()
    await rig.empty_within(1)
    assert (await rig.witness.stats())["served"] == 1


@pytest.mark.parametrize("path", ["/chat/", "/case/endless/", "/case/endless/?type=text/plain"])
async def test_a_user_who_cuts_a_stream_may_come_again(rig: Rig, path: str) -> None:
    """LEAK-03, and with a body that never awaits between its chunks."""
    await limits(rig, 3, depth_per_user=1)
    at_once, slowest = 0, 0.0
    for number in range(scaled(50)):
        head = await cut(rig, path, number)
        assert head.startswith(b"HTTP/1.1 200"), head
        left_at = time.monotonic()
        again = await rig.chat(f"again-{number % 20}", worker=number + 1, takes=0)
        at_once += again.status == 200
        while again.status == 429 and time.monotonic() < left_at + 1:
            again = await rig.chat(f"again-{number % 20}", worker=number + 1, takes=0)
        assert again.status == 200, (again, again.reason)
        slowest = max(slowest, time.monotonic() - left_at)
    note(f"{path}: {at_once} of {scaled(50)} came in at the first try, all within {slowest:.2f} s")
    await rig.empty_within(1)


async def cut(rig: Rig, path: str, number: int) -> bytes:
    """Read the beginning of a stream, then close the connection; what came of it."""
    host, port = rig.address(number)
    body = json.dumps({"message": f"I am client-{number}. It takes 0.6 seconds."}).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        f"Host: {host}:{port}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"Cookie: sessionid={rig.sessions['premium'][number % 20]}; csrftoken={CSRF_TOKEN}",
        f"X-CSRFToken: {CSRF_TOKEN}",
        "",
        "",
    )
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write("\r\n".join(lines).encode() + body)
        async with asyncio.timeout(10):
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.read(1000)
    finally:
        writer.transport.abort()
    return head


async def test_a_flood_by_one_user_holds_up_nobody_else(rig: Rig) -> None:
    """QUEUE-03."""
    await limits(rig, 2, depth_per_user=100)
    flood = [
        asyncio.create_task(rig.chat(f"a{n}-0", tier="free", worker=n, takes=0.15))
        for n in range(60)
    ]
    await rig.until(lambda seen: seen.waiting >= 50)
    came_at = time.monotonic()
    assert (await rig.chat("b-1", tier="free", takes=0.15)).is_complete
    began = (await rig.witness.diary()).at("begin", "client-b-1")
    between = [e for e in (await rig.witness.diary()).all("begin") if came_at < e.at < began]
    note(f"{len(between)} of the flood were served before the one")
    assert len(between) <= 3, "one turn of the flooding user, and those let in meanwhile"
    for task in flood:
        await leave(task)
    await rig.empty_within(1)


async def test_five_floods_hold_up_five_single_users_by_a_turn_each(rig: Rig) -> None:
    await limits(rig, 2, depth_per_user=100)
    floods = [
        asyncio.create_task(rig.chat(f"a{n}-{user}", tier="free", worker=n, takes=0.15))
        for n in range(15)
        for user in range(5)
    ]
    await rig.until(lambda seen: seen.waiting >= 60)
    came_at = time.monotonic()
    singles = [
        asyncio.create_task(rig.chat(f"b-{user}", tier="free", worker=user, takes=0.15))
        for user in range(10, 15)
    ]
    assert all(answer.is_complete for answer in await asyncio.gather(*singles))
    diary = await rig.witness.diary()
    for user in range(10, 15):
        began = diary.at("begin", f"client-b-{user}")
        between = [e for e in diary.all("begin") if came_at < e.at < began]
        assert len(between) <= 10 + 3, "a turn per active user, and those let in meanwhile"
    for task in floods:
        await leave(task)
    await rig.empty_within(1)


async def test_paying_traffic_without_pause_does_not_starve_a_free_user(rig: Rig) -> None:
    await limits(rig, 2, depth_per_user=100)
    crowd = [
        asyncio.create_task(rig.chat(f"p{n}-{n % 20}", worker=n, takes=0.05)) for n in range(120)
    ]
    await rig.until(lambda seen: seen.waiting >= 90)
    came_at = time.monotonic()
    assert (await rig.chat("f-0", tier="free", takes=0.05)).is_complete
    diary = await rig.witness.diary()
    began = diary.at("begin", "client-f-0")
    between = [e for e in diary.all("begin") if came_at < e.at < began]
    bound = -(-(100 + 10 + 3 + 1) // 3) + 4
    note(f"{len(between)} paying calls went by, {bound} may")
    assert len(between) <= bound
    for task in crowd:
        await leave(task)
    await rig.empty_within(1)
