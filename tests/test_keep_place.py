"""Coming back with a ticket: at its place, once, and only its owner."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from llm_throttle.backends import make_backend
from llm_throttle.exceptions import ForeignTicket, Refused
from llm_throttle.identity import Identity
from llm_throttle.request import Request
from llm_throttle.waiting import AsyncWaiting
from llm_throttle.worker import Worker, current

from .conftest import Room
from .waiting_room import ALONE, eventually, held, overview, settled


def who(flow: str) -> Identity:
    return Identity(flow, "gold")


async def wait_in_line(flow: str, ticket: str = "") -> AsyncWaiting:
    waiting = AsyncWaiting(Request("sim", who(flow), ticket=ticket, is_known=True))
    await waiting.begin()
    return waiting


async def told(waiting: AsyncWaiting) -> Any:
    """Its position, which its client then knows with its ticket."""
    async with asyncio.timeout(3):
        while (news := await waiting.next(3)) is None:
            pass
    waiting.request.has_told = True
    return news


async def granted(waiting: AsyncWaiting) -> Any:
    async with asyncio.timeout(5):
        while waiting.lease is None:
            await waiting.next(1)
    return waiting.take_lease()


async def becomes(**counts: int) -> bool:
    def is_so() -> bool:
        seen = overview()
        return all(getattr(seen, name) == count for name, count in counts.items())

    return await asyncio.to_thread(eventually, is_so)


@pytest.fixture
def _one_slot(room: Room) -> None:
    room(1, ALONE)


pytestmark = pytest.mark.usefixtures("_one_slot")


async def test_who_comes_back_in_time_finds_its_place() -> None:
    async with held():
        ann, bob = await wait_in_line("ann"), await wait_in_line("bob")
        ticket = (await told(ann)).ticket
        assert (await told(bob)).position == 2
        ann.close()
        assert await becomes(waiting=1)
        ann = await wait_in_line("ann", ticket)
        news = await told(ann)
        assert (news.ticket, news.position) == (ticket, 1)
    lease = await granted(ann)
    assert lease.ticket == ticket
    lease.release()
    (await granted(bob)).release()
    assert await settled()


async def test_who_was_never_told_its_ticket_keeps_no_place() -> None:
    async with held():
        ann = await wait_in_line("ann")
        ticket = ann.request.ticket
        ann.close()
        again = await wait_in_line("ann", ticket)
        assert again.request.ticket != ticket
        again.close()


async def test_who_gives_up_keeps_no_place() -> None:
    async with held():
        ann = await wait_in_line("ann")
        ticket = (await told(ann)).ticket
        ann.cancel()
        again = await wait_in_line("ann", ticket)
        assert again.request.ticket != ticket
        again.close()


async def test_a_place_is_kept_no_longer_than_the_grace(room: Room) -> None:
    room(1, ALONE, grace_ms=300)
    async with held():
        ann = await wait_in_line("ann")
        ticket = (await told(ann)).ticket
        ann.close()
        await asyncio.sleep(0.6)
        again = await wait_in_line("ann", ticket)
        assert again.request.ticket != ticket
        again.close()


async def test_two_tabs_with_one_ticket_are_one_place() -> None:
    async with held():
        first = await wait_in_line("ann")
        ticket = (await told(first)).ticket
        second = await wait_in_line("ann", ticket)
        with pytest.raises(Refused) as refusal:
            await first.next(3)
        assert (refusal.value.reason, refusal.value.status_code) == ("moved", 409)
        assert refusal.value.retry_after is None
        first.close()
        assert await becomes(waiting=1)
        assert (await told(second)).ticket == ticket
    lease = await granted(second)
    first.close()
    assert lease.is_held and overview().in_flight == 1
    lease.release()
    assert await settled()


async def test_somebody_elses_ticket_is_refused() -> None:
    async with held():
        ann = await wait_in_line("ann")
        ticket = (await told(ann)).ticket
        with pytest.raises(ForeignTicket) as refusal:
            await wait_in_line("bob", ticket)
        assert (refusal.value.status_code, refusal.value.reason) == (403, "foreign_ticket")
        assert overview().waiting == 1
        await ann.next(0.1)
        assert ann.is_queued
        ann.close()


@pytest.mark.parametrize("ticket", ["0" * 32, "f" * 32])
async def test_an_unknown_ticket_is_a_new_request(ticket: str) -> None:
    async with held():
        ann = await wait_in_line("ann", ticket)
        assert ann.request.ticket != ticket and ann.is_queued
        ann.close()
    assert await settled()


async def test_a_ticket_that_was_let_in_is_a_new_request() -> None:
    ann = await asyncio.create_task(wait_in_line("ann"))  # as another request would be
    again = await wait_in_line("ann", ann.request.ticket)
    assert again.is_queued and again.request.ticket != ann.request.ticket
    ann.close()
    again.close()
    assert await settled()


async def test_a_worker_that_stops_keeps_the_places_of_those_who_know() -> None:
    async with held():
        ann = await wait_in_line("ann")
        ticket = (await told(ann)).ticket
        current().roster("sim").refuse_waiters("shutting_down")
        with pytest.raises(Refused, match="shutting_down"):
            await ann.next(3)
        ann.close()
        ann = await wait_in_line("ann", ticket)
        assert ann.request.ticket == ticket
        ann.close()


async def test_a_grant_that_nobody_takes_up_is_given_back(settings: Any) -> None:
    settings.LLM_THROTTLE |= {"START_GRACE": 0.3}
    async with held():
        ann = await wait_in_line("ann")  # and nobody looks after it any more
    assert await settled()
    lease = await granted(ann)
    assert lease.is_held
    lease.release()


# On another worker


@pytest.fixture
def elsewhere(backend: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Another worker at the same store."""
    if backend == "locmem":
        pytest.skip("there is no other worker")
    other = Worker(make_backend())
    yield other
    for roster in other.rosters:
        roster.sign_off()
    other._heart.stop()


async def move_to(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("request", "waiting"):
        monkeypatch.setattr(f"llm_throttle.{module}.current", lambda: worker)


async def test_who_comes_back_on_another_worker_finds_its_place(
    elsewhere: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with held():
        ann, bob = await wait_in_line("ann"), await wait_in_line("bob")
        ticket = (await told(ann)).ticket
        await told(bob)
        ann.close()
        await becomes(waiting=1)
        await move_to(elsewhere, monkeypatch)
        ann = await wait_in_line("ann", ticket)
        news = await told(ann)
        assert (news.ticket, news.position) == (ticket, 1)
        bob.close()
    lease = await granted(ann)
    assert lease.ticket == ticket
    lease.release()
    assert await settled()


async def test_the_tab_on_the_other_worker_ends_the_one_here(
    elsewhere: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with held():
        first = await wait_in_line("ann")
        ticket = (await told(first)).ticket
        await move_to(elsewhere, monkeypatch)
        second = await wait_in_line("ann", ticket)
        with pytest.raises(Refused, match="moved"):
            async with asyncio.timeout(3):
                while True:
                    await first.next(1)
        first.close()
        assert await becomes(waiting=1)
        second.close()
    assert await settled()
