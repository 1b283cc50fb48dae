"""A server worker goes while people wait at it: they go on at another, each at its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from playwright.async_api import expect

from demo_project.children import Child
from demo_project.stack import Setup, Stack

from .conftest import NewContext, OpenPage
from .people import NEXT, SECOND, enter_by, running, store

WORKER_TTL = 10  # seconds until the slot of a killed worker's call is free again


@pytest.fixture
def stack() -> Iterator[Stack]:
    """One worker, one slot, held for 20 s: another worker is up before it is free again."""
    with running(Setup(workers=1, capacity=1, service=20.0, jitter=0.0, users=1)) as stack:
        yield stack


@pytest.mark.parametrize("transport", ["sse", "socket"])
@pytest.mark.parametrize("end", [Child.kill, Child.terminate], ids=["killed", "stopped"])
async def test_waiters_go_on_at_another_worker_with_their_places(
    stack: Stack,
    open_page: OpenPage,
    new_context: NewContext,
    end: Callable[[Child], None],
    transport: str,
) -> None:
    enter = enter_by(stack, open_page, new_context)
    holder, first, second = [await enter("premium"), await enter("pro"), await enter("pro", 1)]
    for person in (holder, first, second):
        await person.choose(transport)
        await person.ask()
        await expect(person.talk.locator(".facts, .line.known").first).to_be_visible()
    await first.sees_place(NEXT)
    await second.sees_place("You are 2nd in the pro line")
    tickets = [await first.ticket(), await second.ticket()]

    old = stack.workers[0]
    new = stack._start_worker(2)
    new.wait_until_ready()
    stack.workers = [new]
    end(old)
    await expect(second.standing).to_have_text("Connection lost", timeout=5 * SECOND)

    if end is Child.kill:  # the slot is not free yet
        await second.sees_place("You are 2nd in the pro line", 8)
        await first.sees_place(NEXT, 8)
        assert (await store(stack))["waiting"] == 2  # nobody stands in line twice
    await first.sees_reply(WORKER_TTL + 15)
    await second.sees_place(NEXT)
    await first.stop()
    await second.sees_reply(15)
    assert [await first.granted_ticket(), await second.granted_ticket()] == tickets
    if end is Child.kill:  # who is asked to stop lets replies go on for a while
        await expect(holder.talk.locator(".problem")).to_contain_text("broke off")
