"""Clients of a chat over WebSocket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from channels.testing import WebsocketCommunicator

from llm_throttle.consumers import ThrottledChatConsumer


class Chat(ThrottledChatConsumer):
    upstream = "sim"
    ended: list[str] = []  # noqa: RUF012 - what the tests look at

    async def reply(self, message: dict[str, Any]) -> AsyncIterator[str]:
        try:
            for word in message.get("text", "").split():
                yield word
                await asyncio.sleep(message.get("pause", 0))
        finally:
            self.ended.append("closed")


class Someone:
    is_authenticated = True

    def __init__(self, pk: int) -> None:
        self.pk = pk


@asynccontextmanager
async def chat(pk: int = 1, query: str = "") -> AsyncIterator[WebsocketCommunicator]:
    Chat.ended.clear()
    socket = WebsocketCommunicator(Chat.as_asgi(), f"/ws/chat/?{query}")
    socket.scope["user"] = Someone(pk)
    connected, _ = await socket.connect()
    assert connected
    try:
        yield socket
    finally:
        await socket.disconnect()


async def hear(socket: WebsocketCommunicator, kind: str) -> dict[str, Any]:
    """The next message of a kind; those before it are passed over."""
    async with asyncio.timeout(3):
        while True:
            message = await socket.receive_json_from(timeout=3)
            if message["type"] == kind:
                return message
