"""People at the chats of ``chats.py``, over a socket or over events.

What is asked is the same over both: so many ``words`` after ``silence`` seconds.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol
from urllib.parse import urlencode

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from demo_project.load_client import SESSION_COOKIE, parse_event
from demo_project.serving import LOOPBACK

from .rig import Connection, get, request

AT_ONCE = 1.0
"""Seconds within which somebody is told, or something is free, where the machine is not busy."""

LONG = 10_000
"""Words of a reply that does not end by itself."""

Message = dict[str, Any]


class Place(Protocol):
    """Where to connect: a server, or a proxy in front of it."""

    port: int


def strained(seconds: float) -> float:
    """So long; as many times longer as the machine has more to do than processors."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


class Listener:
    """Hears messages as they come; each is kept with the time it came (``heard_at``)."""

    def __init__(self, messages: AsyncIterator[Message]) -> None:
        self.heard: list[Message] = []
        self._passed = 0
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._listen(messages))
        self._task.add_done_callback(lambda _: self._news.set())

    async def _listen(self, messages: AsyncIterator[Message]) -> None:
        async for message in messages:
            self.heard.append(message | {"heard_at": time.monotonic()})
            self._news.set()

    async def hears(self, kind: str, within: float = AT_ONCE, **fields: Any) -> Message:
        """The next message like this; those before it are passed over."""
        try:
            async with asyncio.timeout(strained(within)):
                while True:
                    for message in self.heard[self._passed :]:
                        self._passed += 1
                        if message["type"] == kind and fields.items() <= message.items():
                            return message
                    assert not self._task.done(), f"over before {kind} {fields}: {self.heard}"
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"not in {within} s: {kind} {fields}: {self.heard}") from None

    def all(self, kind: str) -> list[Message]:
        """What it has heard of a kind, from the beginning."""
        return [message for message in self.heard if message["type"] == kind]

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class SocketClient(Listener):
    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        super().__init__(_messages(connection))

    async def says(self, kind: str, **fields: Any) -> None:
        await self.connection.send(json.dumps({"type": kind, **fields}))

    async def asks(self, **order: Any) -> None:
        await self.says("message", **order)

    def drop(self) -> None:
        """Be gone without a word."""
        self.connection.transport.abort()


async def _messages(connection: ClientConnection) -> AsyncIterator[Message]:
    try:
        while True:
            yield json.loads(await connection.recv())
    except ConnectionClosed as error:
        yield {"type": "closed", "code": error.rcvd.code if error.rcvd else None}


async def _events(connection: Connection) -> AsyncIterator[Message]:
    """Comments are messages too, of the type ``comment``."""
    await connection.head()
    unread = b""
    while piece := await connection.chunk():
        *blocks, unread = (unread + piece).split(b"\n\n")
        for block in blocks:
            yield parse_event(block) or {"type": "comment"}


def unread(place: Place, path: str, user: int) -> Any:
    """A connection that is read when its user asks for a message, and no sooner.

    Leaving the block closes it politely. It sends no pings: only the server has it alive.
    """
    headers = session(user) | {"Origin": "http://localhost"}
    address = f"ws://{LOOPBACK}:{place.port}{path}"
    return connect(
        address, additional_headers=headers, ping_interval=None, close_timeout=1, max_queue=1
    )


@asynccontextmanager
async def socket(place: Place, path: str, user: int) -> AsyncIterator[SocketClient]:
    async with unread(place, path, user) as connection:
        client = SocketClient(connection)
        yield client
        await client.stop()


@asynccontextmanager
async def over_socket(
    place: Place, upstream: str, user: int, ticket: str = "", **order: Any
) -> AsyncIterator[SocketClient]:
    """Somebody who asks as soon as the socket is open."""
    query = f"?ticket={ticket}" if ticket else ""
    async with socket(place, f"/ws/chat/{upstream}/{query}", user) as client:
        await client.asks(**order)
        yield client


@asynccontextmanager
async def over_events(
    place: Place, upstream: str, user: int, ticket: str = "", **order: Any
) -> AsyncIterator[Listener]:
    """Leaving the block closes the connection without a word."""
    named = {"ticket": ticket} if ticket else {}
    query = urlencode({"upstream": upstream, **named, **order})
    headers = session(user) | {"Accept-Encoding": "gzip"}
    async with request(place, f"/chat/?{query}", headers=headers) as connection:
        client = Listener(_events(connection))
        yield client
        await client.stop()


@asynccontextmanager
async def holding(place: Place, upstream: str) -> AsyncIterator[SocketClient]:
    """A reply that has a slot until the block is left, or it is cancelled."""
    async with over_socket(place, upstream, 0, words=LONG) as client:
        await client.hears("token")
        yield client


def watching(place: Place, upstream: str, user: int) -> Any:
    """Somebody who looks where their own requests stand."""
    return socket(place, f"/ws/llm-throttle/{upstream}/", user)


def session(user: int) -> dict[str, str]:
    return {"Cookie": f"{SESSION_COOKIE}=session-{user:04}"}


async def until(place: Place, upstream: str, within: float = AT_ONCE, **counts: int) -> None:
    """Return when the server counts so many ``in_flight``, ``waiting``, ``calls`` under way."""
    give_up_at = time.monotonic() + strained(within)
    while True:
        answer = await get(place, f"/chat/state/?upstream={upstream}")
        seen = json.loads(answer.body)
        if counts.items() <= seen.items():
            return
        assert time.monotonic() < give_up_at, f"after {within} s not {counts}: {seen}"
        await asyncio.sleep(0.02)
