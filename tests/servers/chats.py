"""Chats over sockets, events and plain requests, whose running calls are counted where they run.

The client says how long a reply is: after ``silence`` seconds come so many ``words``.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path
from django.views import View

from llm_throttle.admission import asnapshot
from llm_throttle.consumers import ThrottledChatConsumer
from llm_throttle.routing import websocket_urlpatterns

from .views import KINDS, Chat

PAUSE = 0.05
"""Seconds between two words."""

calls: Counter[str] = Counter()
"""Calls to each upstream that are under way in this process."""


async def call(upstream: str, silence: float, words: int) -> AsyncIterator[str]:
    calls[upstream] += 1
    try:
        await asyncio.sleep(silence)
        for number in range(words):
            yield f"{number} "
            await asyncio.sleep(PAUSE)
    finally:
        calls[upstream] -= 1


class SocketChat(ThrottledChatConsumer):
    """A chat with the upstream in its path, which also hears its channel layer."""

    upstream = "in the path"
    handlers = {**ThrottledChatConsumer.handlers, "ring": "hear_ring"}  # noqa: RUF012 - a constant

    async def connect(self) -> None:
        self.upstream = self.scope["url_route"]["kwargs"]["upstream"]
        await self.accept()

    def reply(self, message: dict[str, Any]) -> AsyncIterator[str]:
        return call(self.upstream, message.get("silence", 0), message.get("words", 1))

    async def hear_ring(self, message: dict[str, Any]) -> None:
        """Send something to oneself, by way of the channel layer."""
        await self.channel_layer.send(self.channel_name, {"type": "ring"})

    async def ring(self, event: dict[str, Any]) -> None:
        await self.say({"type": "rung"})


class EventChat(Chat, View):
    queue_events = True

    async def get(self, request: HttpRequest) -> StreamingHttpResponse:
        return StreamingHttpResponse(called(request), content_type="text/plain")

    async def post(self, request: HttpRequest) -> StreamingHttpResponse:
        return await self.get(request)


class PlainChat(Chat, View):
    """Answers when the whole reply is there."""

    async def get(self, request: HttpRequest) -> JsonResponse:
        return JsonResponse({"text": "".join([word async for word in called(request)])})


def called(request: HttpRequest) -> AsyncIterator[str]:
    order = request.GET
    return call(order["upstream"], float(order.get("silence", 0)), int(order.get("words", 1)))


async def state(request: HttpRequest) -> HttpResponse:
    """What the store believes, and what is so."""
    upstream = request.GET["upstream"]
    seen = await asnapshot(upstream)
    return JsonResponse(
        {"in_flight": seen.in_flight, "waiting": seen.waiting, "calls": calls[upstream]}
    )


urlpatterns = [
    path("chat/", EventChat.as_view()),
    path("chat/plain/", PlainChat.as_view()),
    path("chat/state/", state),
    path("chat/upload/", KINDS["DRF"]),
]
sockets = [path("ws/chat/<str:upstream>/", SocketChat.as_asgi()), *websocket_urlpatterns]
