"""Over WebSocket: a chat that waits in line, and positions of one's own tickets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from channels.routing import URLRouter
from channels.testing import WebsocketCommunicator

from llm_throttle import aadmit
from llm_throttle.identity import Identity
from llm_throttle.models import Upstream
from llm_throttle.routing import websocket_urlpatterns
from llm_throttle.scheduling.policy import TierPolicy
from llm_throttle.worker import current

from .conftest import Room
from .socket_clients import Chat, Someone, chat, hear
from .waiting_room import ALONE, eventually, held, overview, settled

pytestmark = [
    pytest.mark.django_db,  # Channels looks after old connections before every message
    pytest.mark.usefixtures("flow_by_user"),
]


# Chats


async def test_a_message_is_replied_to_on_the_same_socket(room: Room) -> None:
    async with chat() as socket:
        await socket.send_json_to({"type": "message", "text": "good day"})
        heard = [await socket.receive_json_from() for _ in range(4)]
        assert [each["type"] for each in heard] == ["granted", "token", "token", "done"]
        assert [each.get("text") for each in heard[1:3]] == ["good", "day"]
        await socket.send_json_to({"type": "message", "text": "again"})
        await hear(socket, "done")
    assert await settled()


async def test_the_wait_is_told_and_ends_with_the_reply(room: Room) -> None:
    room(1, ALONE)
    async with chat() as socket:
        async with held():
            await socket.send_json_to({"type": "message", "text": "hello"})
            place = await hear(socket, "position")
            assert set(place) == {"type", "ticket", "upstream", "position", "ahead", "eta"}
            assert (place["position"], place["ahead"], place["upstream"]) == (1, 0, "sim")
        granted = await hear(socket, "granted")
        assert granted["ticket"] == place["ticket"]
        await hear(socket, "done")
    assert await settled()


async def test_cancel_works_at_once_while_waiting(room: Room) -> None:
    room(1, ALONE)
    async with held(), chat() as socket:
        await socket.send_json_to({"type": "message", "text": "hello"})
        await hear(socket, "position")
        await socket.send_json_to({"type": "cancel"})
        await hear(socket, "cancelled")
        assert await asyncio.to_thread(eventually, lambda: overview().waiting == 0)
        await socket.send_json_to({"type": "cancel"})
        assert (await hear(socket, "error"))["code"] == "idle"


async def test_cancel_works_at_once_while_streaming(room: Room) -> None:
    async with chat() as socket:
        await socket.send_json_to({"type": "message", "text": "a b c", "pause": 30})
        await hear(socket, "token")
        await socket.send_json_to({"type": "cancel"})
        await hear(socket, "cancelled")
        assert Chat.ended == ["closed"]
        assert await settled()
        await socket.send_json_to({"type": "message", "text": "next"})
        await hear(socket, "done")


async def test_a_second_message_is_answered_busy(room: Room) -> None:
    async with chat() as socket:
        await socket.send_json_to({"type": "message", "text": "a b", "pause": 30})
        await hear(socket, "token")
        await socket.send_json_to({"type": "message", "text": "c"})
        assert (await hear(socket, "error"))["code"] == "busy"
        assert overview().in_flight == 1
    assert await settled()


@pytest.mark.parametrize("pause", [0.05, 30])
async def test_a_closed_socket_frees_its_slot(room: Room, pause: float) -> None:
    async with chat() as socket:
        await socket.send_json_to({"type": "message", "text": "a " * 100, "pause": pause})
        await hear(socket, "token")
    assert await settled()
    assert Chat.ended == ["closed"]


async def test_a_socket_that_is_dropped_without_a_word_frees_its_slot(room: Room) -> None:
    """Some servers cancel the application and never call ``disconnect()``."""
    socket = WebsocketCommunicator(Chat.as_asgi(), "/ws/chat/")
    socket.scope["user"] = Someone(1)
    await socket.connect()
    await socket.send_json_to({"type": "message", "text": "a b", "pause": 30})
    await hear(socket, "token")
    socket.future.cancel()
    assert await settled()


async def test_a_client_that_drops_keeps_its_place(room: Room) -> None:
    room(1, ALONE)
    async with held():
        async with chat() as socket:
            await socket.send_json_to({"type": "message", "text": "hello"})
            ticket = (await hear(socket, "position"))["ticket"]
        assert await asyncio.to_thread(eventually, lambda: overview().waiting == 0)
        async with chat(query=f"ticket={ticket}") as socket:
            await socket.send_json_to({"type": "message", "text": "hello"})
            assert (await hear(socket, "position"))["ticket"] == ticket
        async with chat() as socket:
            await socket.send_json_to({"type": "message", "text": "hello", "ticket": ticket})
            assert (await hear(socket, "position"))["ticket"] == ticket
            await socket.send_json_to({"type": "cancel"})
            await hear(socket, "cancelled")
    assert await settled()


async def test_somebody_elses_ticket_is_refused_and_closes_the_socket(room: Room) -> None:
    room(1, ALONE)
    async with held(), chat(1) as mine, chat(2) as theirs:
        await mine.send_json_to({"type": "message", "text": "hello"})
        ticket = (await hear(mine, "position"))["ticket"]
        await theirs.send_json_to({"type": "message", "text": "hello", "ticket": ticket})
        assert (await hear(theirs, "refused"))["reason"] == "foreign_ticket"
        assert (await theirs.receive_output(1))["code"] == 4403
        assert overview().waiting == 1


async def test_the_other_tab_is_told_that_its_ticket_has_moved(room: Room) -> None:
    room(1, ALONE)
    async with held(), chat() as first, chat() as second:
        await first.send_json_to({"type": "message", "text": "hello"})
        ticket = (await hear(first, "position"))["ticket"]
        await second.send_json_to({"type": "message", "text": "hello", "ticket": ticket})
        refused = await hear(first, "refused")
        assert (refused["reason"], refused["status"], refused["retry_after"]) == (
            "moved",
            409,
            None,
        )
        assert (await hear(second, "position"))["ticket"] == ticket


async def test_a_silent_socket_is_kept_alive(room: Room, settings: Any) -> None:
    settings.LLM_THROTTLE |= {"KEEP_ALIVE": 0.1}
    async with chat() as socket:
        await socket.send_json_to({"type": "message", "text": "a b", "pause": 0.5})
        await hear(socket, "token")
        await hear(socket, "keep_alive")
        await hear(socket, "done")


async def test_a_socket_that_was_never_spoken_to_is_kept_alive(room: Room, settings: Any) -> None:
    settings.LLM_THROTTLE |= {"KEEP_ALIVE": 0.1}
    async with chat() as socket:
        for _ in range(2):
            await hear(socket, "keep_alive")


async def test_a_refusal_has_the_fields_of_a_problem(room: Room) -> None:
    room(1, TierPolicy("gold", cap=1, wait_budget_ms=100))
    async with held(), chat() as socket:
        await socket.send_json_to({"type": "message", "text": "hello"})
        refused = await hear(socket, "refused")
        assert refused["reason"] == "wait_expired"
        assert (refused["status"], refused["upstream"], refused["tier"]) == (503, "sim", "gold")
        assert 1 <= refused["retry_after"] <= 60 and refused["detail"]


async def test_a_reply_that_fails_is_told_and_frees_its_slot(room: Room) -> None:
    async with chat() as socket:
        await socket.send_json_to({"type": "message", "text": 5})
        assert (await hear(socket, "error"))["code"] == "failed"
        assert await settled()


async def test_an_unknown_upstream_is_told_and_closes_the_socket(backend: str) -> None:
    async with chat() as socket:
        await socket.send_json_to({"type": "message", "text": "hello"})
        assert (await hear(socket, "error"))["code"] == "unknown_upstream"
        assert (await socket.receive_output(1))["code"] == 4404


# Positions of one's own tickets


@asynccontextmanager
async def positions(
    scope: dict[str, Any], query: str = "", slug: str = "sim"
) -> AsyncIterator[WebsocketCommunicator]:
    application = URLRouter(websocket_urlpatterns)
    socket = WebsocketCommunicator(application, f"/ws/llm-throttle/{slug}/?{query}")
    socket.scope.update(scope)
    await socket.connect()
    try:
        yield socket
    finally:
        await socket.disconnect()


@asynccontextmanager
async def waiting(flow: str) -> AsyncIterator[asyncio.Task[None]]:
    """A request that waits, anywhere in the project."""
    before = overview().waiting

    async def call() -> None:
        async with aadmit("sim", identity=Identity(flow, "gold")):
            pass

    task = asyncio.create_task(call())
    while overview().waiting == before:
        await asyncio.sleep(0.01)
    try:
        yield task
    finally:
        task.cancel()


@pytest.fixture
def sim(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """The upstream is known by its row; its policy is the room's."""
    monkeypatch.setattr(Upstream.objects, "filter", lambda slug: Known(slug == "sim"))
    room(1, ALONE)


class Known:
    def __init__(self, is_known: bool) -> None:
        self.is_known = is_known

    async def aexists(self) -> bool:
        return self.is_known


async def test_a_user_sees_its_own_waiting_tickets_and_nobody_elses(sim: None) -> None:
    me = {"user": Someone(2)}
    async with held(), waiting("user:1"), waiting("user:2"), positions(me) as socket:
        place = await hear(socket, "position")
        assert (place["position"], place["ahead"]) == (2, 1)
        assert await socket.receive_nothing(1.2, 0.1)


async def test_a_ticket_is_told_when_it_is_let_in(sim: None) -> None:
    async with positions({"user": Someone(1)}) as socket:
        async with held(), waiting("user:1"):
            place = await hear(socket, "position")
        async with asyncio.timeout(3):
            last = await socket.receive_json_from(timeout=3)
        assert last["type"] in ("granted", "left") and last["ticket"] == place["ticket"]


async def test_a_guest_of_a_shared_address_sees_only_the_tickets_it_names(sim: None) -> None:
    guest = {"user": None}
    async with held(), waiting("ip:1"):
        [ticket] = [w for r in current().rosters for w in r.waiting]
        async with positions(guest) as socket:
            assert await socket.receive_nothing(0.5, 0.1)
            await socket.send_json_to({"type": "watch", "ticket": ticket})
            assert (await hear(socket, "position"))["ticket"] == ticket
        async with positions(guest, f"ticket={ticket}") as socket:
            assert (await hear(socket, "position"))["ticket"] == ticket


@pytest.mark.parametrize("is_by_session", [True, False])
async def test_a_guest_sees_what_waits_under_its_session(
    sim: None, monkeypatch: pytest.MonkeyPatch, is_by_session: bool
) -> None:
    async def aidentify(caller: Any) -> Identity:
        key = caller.session_key if is_by_session else None
        return Identity(f"guest:{key}" if key else "ip:1", "gold")

    monkeypatch.setattr("llm_throttle.consumers.aidentify", aidentify)
    session = type("Session", (), {"session_key": "abc"})()
    async with (
        held(),
        waiting("guest:abc" if is_by_session else "ip:1"),
        positions({"session": session}) as socket,
    ):
        if is_by_session:
            assert (await hear(socket, "position"))["position"] == 1
        else:
            assert await socket.receive_nothing(0.8, 0.1)


async def test_another_users_ticket_closes_the_socket(sim: None) -> None:
    async with held(), waiting("user:1"):
        [ticket] = [w for r in current().rosters for w in r.waiting]
        async with positions({"user": Someone(2)}, f"ticket={ticket}") as socket:
            assert (await hear(socket, "error"))["code"] == "foreign_ticket"
            assert (await socket.receive_output(1))["code"] == 4403


@pytest.mark.parametrize("ticket", ["0" * 32, "x", 7, None, "'; --"])
async def test_a_ticket_that_is_none_is_told(sim: None, ticket: Any) -> None:
    async with positions({"user": Someone(1)}) as socket:
        await asyncio.sleep(0.1)
        await socket.send_json_to({"type": "watch", "ticket": ticket})
        assert (await hear(socket, "error"))["code"] == "unknown_ticket"


async def test_positions_of_an_unknown_upstream_close_the_socket(sim: None) -> None:
    async with positions({"user": Someone(1)}, slug="none") as socket:
        assert (await hear(socket, "error"))["code"] == "unknown_upstream"
        assert (await socket.receive_output(1))["code"] == 4404
