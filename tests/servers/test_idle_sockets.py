"""Sockets that say nothing for long live on, with redis-py 8 and ``RedisPubSubChannelLayer``.

redis-py 8 gives up reading after 5 seconds, which ends every idle socket where a channel layer
waits by one long read. So this run takes a little longer than that; ``IDLE_SECONDS=600`` makes it
the ten minutes that are promised.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from .clients import SocketClient, over_socket, socket, watching
from .rig import Server, environment, seed, served_by

SECONDS = float(os.environ.get("IDLE_SECONDS", "7"))
KEEP_ALIVES = {"usual": 15.0, "none": 3600.0}
"""With none of ours the layer and the server are on their own."""

USERS = range(2, 5)
"""Each has a chat and a socket that shows positions, both idle; users 0 and 1 do something."""

UPSTREAM = "idle"
ENDLESS = 1_000_000  # words


@pytest.mark.timeout(SECONDS + 90)
async def test_idle_sockets_live_on(tmp_path: Path) -> None:
    line = f"{UPSTREAM}:1:3600:{round(SECONDS) + 90}"
    await asyncio.to_thread(seed, environment(tmp_path), "--sessions", str(USERS.stop), line)
    async with asyncio.TaskGroup() as group:
        for name, keep_alive in itertools.product(("uvicorn", "daphne"), KEEP_ALIVES):
            group.create_task(live_through(tmp_path, name, keep_alive))


async def live_through(directory: Path, name: str, keep_alive: str) -> None:
    throttle = {"KEEP_ALIVE": KEEP_ALIVES[keep_alive]}
    environ = environment(
        directory, SERVERS_PREFIX=f"{name}-{keep_alive}", SERVERS_THROTTLE=json.dumps(throttle)
    )
    async with AsyncExitStack() as stack:
        serving = served_by(name, environ, directory / f"{name}-{keep_alive}.log")
        server = await asyncio.to_thread(stack.enter_context, serving)
        idle = await opened(stack, server)
        speaker = await stack.enter_async_context(over_socket(server, UPSTREAM, 0, words=ENDLESS))
        await speaker.hears("token", 5)
        waiter = await stack.enter_async_context(over_socket(server, UPSTREAM, 1))
        await waiter.hears("position")
        await asyncio.sleep(SECONDS)
        heard = [len(client.heard) for client in idle["chats"] + idle["watchers"]]
        sys.stdout.write(f"{name}, keep-alives: {keep_alive}: {SECONDS:g} s, heard {heard}\n")
        expected = int(SECONDS / KEEP_ALIVES[keep_alive])
        for client in idle["chats"] + idle["watchers"]:
            assert {message["type"] for message in client.heard} <= {"keep_alive"}
            assert expected - 1 <= len(client.heard) <= expected
        await all_go_on(idle["chats"], idle["watchers"], speaker, waiter)
        assert server.complaints() == []


async def opened(stack: AsyncExitStack, server: Server) -> dict[str, list[SocketClient]]:
    chats = [socket(server, f"/ws/chat/{UPSTREAM}/", user) for user in USERS]
    watchers = [watching(server, UPSTREAM, user) for user in USERS]
    return {
        "chats": [await stack.enter_async_context(chat) for chat in chats],
        "watchers": [await stack.enter_async_context(watcher) for watcher in watchers],
    }


async def all_go_on(
    chats: list[SocketClient],
    watchers: list[SocketClient],
    speaker: SocketClient,
    waiter: SocketClient,
) -> None:
    for client in (*chats, speaker, waiter):
        await client.says("ring")
        await client.hears("rung", 5)
    for chat, watcher in zip(chats, watchers, strict=True):
        await chat.asks(words=30)
        ticket = (await chat.hears("position", 5))["ticket"]
        await watcher.hears("position", 5, ticket=ticket)
    await speaker.says("cancel")
    await waiter.hears("done", 5)
    for chat, watcher in zip(chats, watchers, strict=True):
        await chat.hears("done", 5)
        await watcher.hears("granted", 5)
