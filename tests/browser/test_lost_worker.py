"""A server worker goes while people wait at it: they go on at another, each at its place."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from playwright.async_api import expect

from demo_project.children import Child
from demo_project.stack import Setup, Stack

from .people import NEXT, SECOND, Enter, door, empty_room, enter, running, store

__all__ = ["door", "empty_room", "enter"]  # fixtures

SECOND_IN_LINE = "You are 2nd in the pro line"
IN_LINE = re.compile("^You are")
WORKER_TTL = 4.0
"""Seconds until the slot of a killed worker's call is free again: four beats, the least."""


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def stack() -> AsyncIterator[Stack]:
    """One worker and one slot; each test leaves the worker that its people have gone to."""
    setup = Setup(workers=1, capacity=1, users=1)
    async with running(setup, WORKER_TTL=WORKER_TTL) as stack:
        yield stack


@pytest.mark.parametrize("transport", ["sse", "socket"])
@pytest.mark.parametrize("end", [Child.kill, Child.terminate], ids=["killed", "stopped"])
async def test_waiters_go_on_at_another_worker_with_their_places(
    stack: Stack, enter: Enter, end: Callable[[Child], None], transport: str
) -> None:
    holder, first, second = [await enter("premium"), await enter("pro"), await enter("pro", 1)]
    if end is Child.kill:  # a server that stops closes sockets at once, with the reply
        await holder.choose(transport)
    await holder.take_the_slot()
    for person, takes, place in ((first, 3, NEXT), (second, 1, SECOND_IN_LINE)):
        await person.choose(transport)
        await person.ask(takes=takes)
        await person.sees_place(place)
    tickets = [await first.ticket(), await second.ticket()]

    old = stack.workers[0]
    new = stack._start_worker(2)
    new.wait_until_ready()
    stack.workers = [new]
    end(old)
    await expect(second.standing).to_have_text("Connection lost", timeout=5 * SECOND)

    if end is Child.terminate:  # who is asked to stop lets replies go on for a while
        await expect(holder.talk.locator(".streaming")).to_be_visible()

    # Both are back before the slot is free. A stopped worker gives its waiters up: who is back
    # before the one ahead is told to be next, and is told nothing worse when that one comes.
    await second.sees_place(SECOND_IN_LINE if end is Child.kill else IN_LINE, 8)
    await first.sees_place(NEXT, 8)
    assert (await store(stack))["waiting"] == 2  # nobody stands in line twice
    if end is Child.terminate:
        await holder.page.close()
    await first.sees_reply(WORKER_TTL + 15)
    await second.sees_place(NEXT)
    await first.stop()
    await second.sees_reply(15)
    assert [await first.granted_ticket(), await second.granted_ticket()] == tickets
    if end is Child.kill:
        await expect(holder.talk.locator(".problem")).to_contain_text("broke off")
