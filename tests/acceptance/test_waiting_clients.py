"""Clients that wait in a stream or a socket: they leave, come back, and lose their worker."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect

from demo_project.load_client import CSRF_COOKIE, CSRF_TOKEN, SESSION_COOKIE, Answer, fetch

from .rig import Rig, leave

RIG = {"workers": 2, "users": 20}


@pytest.fixture(autouse=True)
async def one_slot(rig: Rig) -> None:
    async with rig.operator() as operator:
        await operator.edit(capacity=1, every_tier={"cap": ""})
    await rig.witness.set(capacity=1)
    await rig.witness.reset()


class EventClient:
    """A client that reads an event stream and remembers what it hears."""

    def __init__(self, rig: Rig, user: int, worker: int, ticket: str = "") -> None:
        self.heard: list[dict[str, Any]] = []
        self.changed = asyncio.Event()
        self.task = asyncio.create_task(self._read(rig, user, worker, ticket))

    async def _read(self, rig: Rig, user: int, worker: int, ticket: str) -> Answer:
        headers = {
            "Accept": "text/event-stream",
            "Content-Type": "application/json",
            "Cookie": f"{SESSION_COOKIE}={session(rig, user)}; {CSRF_COOKIE}={CSRF_TOKEN}",
            "X-CSRFToken": CSRF_TOKEN,
        }
        if ticket:
            headers["X-LLM-Throttle-Ticket"] = ticket
        body = json.dumps({"message": f"I am client-{user}. It takes 0.2 seconds."}).encode()
        return await fetch(
            rig.address(worker), "POST", "/chat/", headers=headers, body=body, on_event=self._hear
        )

    def _hear(self, event: dict[str, Any]) -> None:
        self.heard.append(event)
        self.changed.set()

    async def hears(self, kind: str, **fields: Any) -> dict[str, Any]:
        async with asyncio.timeout(10):
            while True:
                for event in self.heard:
                    if event["type"] == kind and fields.items() <= event.items():
                        return event
                if self.task.done():
                    raise AssertionError(self.heard)
                self.changed.clear()
                await self.changed.wait()


def session(rig: Rig, user: int) -> str:
    return rig.sessions["premium"][user]


@asynccontextmanager
async def held(rig: Rig, seconds: float) -> AsyncIterator[None]:
    """The slot is taken by a call of the first worker's."""
    holder = asyncio.create_task(rig.chat(0, takes=seconds))
    await rig.until(lambda overview: overview.in_flight == 1)
    yield
    await holder


@asynccontextmanager
async def socket(
    rig: Rig, user: int, worker: int, query: str = ""
) -> AsyncIterator[ClientConnection]:
    host, port = rig.address(worker)
    headers = {"Cookie": f"{SESSION_COOKIE}={session(rig, user)}", "Origin": f"http://{host}"}
    async with connect(
        f"ws://{host}:{port}/ws/chat/{query}", additional_headers=headers, close_timeout=1
    ) as connection:
        yield connection


async def hear(connection: ClientConnection, kind: str) -> dict[str, Any]:
    async with asyncio.timeout(10):
        while (message := json.loads(await connection.recv()))["type"] != kind:
            pass
    return dict(message)


async def test_who_leaves_the_stream_is_out_of_the_queue_at_once(rig: Rig) -> None:
    async with held(rig, 2):
        client = EventClient(rig, 1, 1)
        place = await client.hears("position", position=1)
        assert set(place) == {"type", "ticket", "upstream", "position", "ahead", "eta"}
        left_at = await leave(client.task)
        await rig.until_waiting(0, 1)
        assert time.monotonic() - left_at < 1
    assert not (await rig.witness.diary()).all("begin", "client-1")
    await rig.empty_within(1)


async def test_who_comes_back_at_another_worker_finds_its_place(rig: Rig) -> None:
    async with held(rig, 3):
        first = EventClient(rig, 3, 0)
        ticket = (await first.hears("position"))["ticket"]
        second = EventClient(rig, 4, 0)
        await second.hears("position", position=2)
        await leave(first.task)
        await second.hears("position", position=1)
        again = EventClient(rig, 3, 1, ticket)
        assert (await again.hears("position"))["ticket"] == ticket
    answers = await asyncio.gather(again.task, second.task)
    assert all(answer.is_complete for answer in answers)
    diary = await rig.witness.diary()
    assert diary.at("begin", "client-3") < diary.at("begin", "client-4")


async def test_the_place_outlives_the_worker(rig: Rig) -> None:
    """The worker is killed; its waiters come back to the other one, in their order."""
    async with held(rig, 6):  # by the first worker
        clients = []
        for place, user in enumerate((5, 6), 1):
            clients.append(EventClient(rig, user, 1))
            await clients[-1].hears("position", position=place)
        tickets = [(await client.hears("position"))["ticket"] for client in clients]
        rig.kill_worker(1)
        await asyncio.gather(*(client.task for client in clients))
        again = [EventClient(rig, 6, 0, tickets[1]), EventClient(rig, 5, 0, tickets[0])]
        await again[0].hears("position", ticket=tickets[1])
        await again[1].hears("position", ticket=tickets[0], position=1)
    assert all(answer.is_complete for answer in await asyncio.gather(*(c.task for c in again)))
    diary = await rig.witness.diary()
    assert diary.at("begin", "client-5") < diary.at("begin", "client-6")
    rig.revive_worker(1)
    await rig.empty_within(1)


async def test_a_socket_that_closes_while_it_waits_is_out_of_the_queue(rig: Rig) -> None:
    async with held(rig, 2):
        async with socket(rig, 7, 1) as connection:
            await connection.send(json.dumps({"type": "message", "message": "I am client-7."}))
            await hear(connection, "position")
        await rig.until_waiting(0, 1)
    await rig.empty_within(1)


async def test_a_socket_that_closes_while_it_is_replied_to_frees_its_slot(rig: Rig) -> None:
    async with socket(rig, 8, 1) as connection:
        message = "I am client-8. It takes 20.000 seconds."
        await connection.send(json.dumps({"type": "message", "message": message}))
        await hear(connection, "granted")
        await rig.witness.until("begin", "client-8")
    await rig.empty_within(1)
    assert (await rig.witness.diary()).all("end", "client-8")


async def test_a_socket_comes_back_with_its_ticket(rig: Rig) -> None:
    message = json.dumps({"type": "message", "message": "I am client-9. It takes 0.100 seconds."})
    async with held(rig, 2):
        async with socket(rig, 9, 0) as connection:
            await connection.send(message)
            ticket = (await hear(connection, "position"))["ticket"]
        await rig.until_waiting(0, 1)
        async with socket(rig, 9, 1, f"?ticket={ticket}") as connection:
            await connection.send(message)
            assert (await hear(connection, "granted"))["ticket"] == ticket
            await hear(connection, "done")
    await rig.empty_within(1)
