"""The flows of waiting clients over real sockets, on both servers and with both channel layers.

With the in-memory layer there is one process, with its waiting room in memory too.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llm_throttle.watching import LULL_S

from .clients import (
    AT_ONCE,
    LONG,
    SocketClient,
    holding,
    over_events,
    over_socket,
    session,
    unread,
    until,
    watching,
)
from .rig import Server, environment, request, seed, served_by

LAYERS = {"RedisPubSubChannelLayer": "", "InMemoryChannelLayer": "1"}
TRANSPORTS = {"socket": over_socket, "events": over_events}
LINES = [f"line-{number}" for number in range(30)]
USERS = 5
FOUND_WITHIN = LULL_S + AT_ONCE
"""Seconds until a newcomer is shown to who watches already, where nothing has moved for a while."""


@dataclass
class Line:
    """The line in front of one slot, which a test has to itself."""

    server: Server
    upstream: str
    transport: str

    def chat(self, user: int, **order: Any) -> AbstractAsyncContextManager[Any]:
        """Somebody who asks at once."""
        return TRANSPORTS[self.transport](self.server, self.upstream, user, **order)

    def is_held(self) -> AbstractAsyncContextManager[SocketClient]:
        return holding(self.server, self.upstream)

    async def until(self, **counts: int) -> None:
        await until(self.server, self.upstream, **counts)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sockets")
    patient = [f"{slug}:1:60" for slug in LINES]
    impatient = [f"impatient-{transport}:1:1" for transport in TRANSPORTS]
    seed(environment(directory), "--sessions", str(USERS), *patient, *impatient)
    return directory


@pytest.fixture(
    scope="module",
    params=itertools.product(("uvicorn", "daphne"), LAYERS),
    ids=lambda combination: ", ".join(combination),
)
def server(request: pytest.FixtureRequest, directory: Path) -> Iterator[Server]:
    name, layer = request.param
    environ = environment(directory, SERVERS_PREFIX=name, SERVERS_ALONE=LAYERS[layer])
    with served_by(name, environ, directory / f"{name}-{layer}.log") as server:
        server.lines = iter(LINES)
        yield server


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def line(server: Server, transport: str) -> Line:
    return Line(server, next(server.lines), transport)


@pytest.fixture
def socket_line(server: Server) -> Line:
    return Line(server, next(server.lines), "socket")


# Waiting and being served


async def test_positions_appear_at_once_and_move_when_a_slot_frees(line: Line) -> None:
    async with line.is_held() as holder, line.chat(1, words=LONG) as first:
        place = await first.hears("position", position=1, ahead=0)
        async with line.chat(2) as second:
            await second.hears("position", position=2, ahead=1)
            await holder.says("cancel")
            assert (await first.hears("granted"))["ticket"] == place["ticket"]
            await second.hears("position", position=1, ahead=0)


async def test_the_reply_follows_on_the_same_connection(line: Line) -> None:
    async with line.is_held() as holder, line.chat(1, words=3) as client:
        place = await client.hears("position")
        await holder.says("cancel")
        granted = await client.hears("granted")
        assert (granted["ticket"], granted["tier"]) == (place["ticket"], "any")
        await client.hears("done")
        assert [token["text"] for token in client.all("token")] == ["0 ", "1 ", "2 "]
    await line.until(in_flight=0, waiting=0, calls=0)


async def test_a_refusal_says_when_to_come_back(server: Server, transport: str) -> None:
    impatient = Line(server, f"impatient-{transport}", transport)
    async with impatient.is_held(), impatient.chat(1) as client:
        await client.hears("position")
        refused = await client.hears("refused", within=1 + AT_ONCE)
        assert (refused["reason"], refused["status"]) == ("wait_expired", 503)
        assert 1 <= refused["retry_after"] <= 60
        await impatient.until(waiting=0, in_flight=1)


# Giving up and leaving


async def test_cancel_gives_the_place_up(socket_line: Line) -> None:
    async with socket_line.is_held(), socket_line.chat(1) as client:
        ticket = (await client.hears("position"))["ticket"]
        await client.says("cancel")
        await client.hears("cancelled")
        await socket_line.until(waiting=0)
        await client.asks(ticket=ticket)
        assert (await client.hears("position"))["ticket"] != ticket


async def test_cancel_ends_the_call_and_the_socket_goes_on(socket_line: Line) -> None:
    async with socket_line.chat(1, words=LONG) as client:
        await client.hears("token")
        await client.says("cancel")
        await client.hears("cancelled")
        await socket_line.until(in_flight=0, calls=0)
        await client.asks()
        await client.hears("done")


async def test_who_closes_while_waiting_leaves_the_line(line: Line) -> None:
    async with line.is_held():
        async with line.chat(1) as client:
            await client.hears("position")
        await line.until(waiting=0, in_flight=1, calls=1)
    await line.until(in_flight=0, waiting=0, calls=0)


async def test_who_closes_during_the_reply_ends_the_call_and_frees_the_slot(line: Line) -> None:
    async with line.chat(1, words=LONG) as client:
        await client.hears("token")
    await line.until(in_flight=0, calls=0)


async def test_who_closes_during_a_silence_ends_the_call_and_frees_the_slot(line: Line) -> None:
    async with line.chat(1, silence=60) as client:
        await client.hears("granted")
        await line.until(in_flight=1, calls=1)
    await line.until(in_flight=0, calls=0)


async def test_a_socket_that_drops_without_a_word_is_noticed(socket_line: Line) -> None:
    async with socket_line.chat(1, words=LONG) as speaker, socket_line.chat(2) as waiter:
        await speaker.hears("token")
        await waiter.hears("position")
        waiter.drop()
        await socket_line.until(waiting=0, in_flight=1)
        speaker.drop()
        await socket_line.until(in_flight=0, calls=0)


async def test_who_comes_back_with_the_ticket_finds_its_place(line: Line) -> None:
    async with line.is_held() as holder:
        async with line.chat(1) as client:
            ticket = (await client.hears("position"))["ticket"]
        await line.until(waiting=0)
        async with line.chat(2) as other:
            await other.hears("position", ahead=0)
            async with line.chat(1, ticket=ticket, words=LONG) as again:
                place = await again.hears("position", position=1, ahead=0)
                assert place["ticket"] == ticket
                await other.hears("position", ahead=1)
                await holder.says("cancel")
                assert (await again.hears("granted"))["ticket"] == ticket
            await other.hears("done")


async def test_who_does_not_read_misses_steps_and_never_the_last_one(socket_line: Line) -> None:
    """WS-01: thirty steps forward and the turn itself come to a socket that nobody reads."""
    server, upstream = socket_line.server, socket_line.upstream
    async with (
        socket_line.is_held() as holder,
        AsyncExitStack() as stack,
        unread(server, f"/ws/chat/{upstream}/", 1) as client,
    ):
        ahead = [await stack.enter_async_context(socket_line.chat(1)) for _ in range(30)]
        for one in ahead:
            await one.hears("position")
        began_at = time.monotonic()
        await client.send(json.dumps({"type": "message", "words": 1}))
        await socket_line.until(waiting=31)
        for one in ahead:
            await one.says("cancel")
            await one.hears("cancelled")
            await asyncio.sleep(0.05)
        await holder.says("cancel")
        await socket_line.until(in_flight=0, waiting=0)
        rounds = (time.monotonic() - began_at) / 0.5
        heard = [json.loads(await client.recv())]
        while heard[-1]["type"] != "done":
            heard.append(json.loads(await client.recv()))
        *places, granted, token, _ = (each for each in heard if each["type"] != "keep_alive")
        assert [granted["type"], token["type"]] == ["granted", "token"]
        assert {place["type"] for place in places} == {"position"}
        assert places[-1]["position"] < places[0]["position"]
        assert len(places) <= min(15, rounds + 2), "merged, and not one for each step"


# Beside a request


async def test_a_socket_shows_where_a_plain_request_waits(socket_line: Line) -> None:
    """To those whose request it is, whether they began to look before or after it came."""
    server, upstream = socket_line.server, socket_line.upstream
    path = f"/chat/plain/?upstream={upstream}&words=30"
    async with (
        socket_line.is_held() as holder,
        watching(server, upstream, 1) as early,
        request(server, path, headers=session(1)) as connection,
    ):
        ticket = (await early.hears("position", FOUND_WITHIN, position=1, ahead=0))["ticket"]
        async with (
            watching(server, upstream, 1) as late,
            watching(server, upstream, 2) as stranger,
        ):
            await late.hears("position", ticket=ticket)
            assert stranger.heard == []
            await stranger.says("watch", ticket=ticket)
            await stranger.hears("closed", code=4403)
            await holder.says("cancel")
            await late.hears("granted", ticket=ticket)
        await early.hears("granted", ticket=ticket)
        answer = await connection.head()
        assert answer.headers["x-llm-throttle-ticket"] == ticket
        assert json.loads((await connection.rest()).body)["text"].endswith(" 29 ")


async def test_a_plain_request_that_leaves_is_told_as_left(socket_line: Line) -> None:
    server, upstream = socket_line.server, socket_line.upstream
    async with socket_line.is_held(), watching(server, upstream, 1) as watcher:
        async with request(server, f"/chat/plain/?upstream={upstream}", headers=session(1)):
            ticket = (await watcher.hears("position", FOUND_WITHIN))["ticket"]
        await watcher.hears("left", ticket=ticket)


# The layer and the log


async def test_the_channel_layer_is_heard_in_line_and_during_a_reply(socket_line: Line) -> None:
    async with socket_line.is_held() as holder, socket_line.chat(1) as client:
        await client.hears("position")
        for speaker in (client, holder):
            await speaker.says("ring")
            await speaker.hears("rung")


def test_nothing_complains(server: Server) -> None:
    assert server.complaints() == []
