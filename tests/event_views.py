"""Views with ``queue_events``, and how their streams are read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from django.http import HttpRequest, StreamingHttpResponse
from django.test import AsyncRequestFactory
from django.views import View
from rest_framework.response import Response
from rest_framework.views import APIView

from llm_throttle.views import ThrottledChatMixin


class Chat(ThrottledChatMixin, View):
    upstream = "sim"
    queue_events = True
    answer: Callable[[], Any] = staticmethod(lambda: events(["Hel", "lo"]))

    async def post(self, request: HttpRequest) -> Any:
        self.lease.report(200)
        return self.answer()

    get = post


class SyncChat(ThrottledChatMixin, View):
    upstream = "sim"
    queue_events = True
    answer: Callable[[], Any] = staticmethod(lambda: sync_events(["Hel", "lo"]))

    def post(self, request: HttpRequest) -> Any:
        return self.answer()


class RestChat(ThrottledChatMixin, APIView):
    upstream = "sim"
    queue_events = True
    authentication_classes = ()
    permission_classes = ()

    def post(self, request: Any) -> Response:
        return Response({"reply": "hello"})


def token(text: str) -> bytes:
    return f'data: {{"type": "token", "text": "{text}"}}\n\n'.encode()


def events(texts: list[str], pause: float = 0) -> StreamingHttpResponse:
    async def body() -> AsyncIterator[bytes]:
        for text in texts:
            yield token(text)
            await asyncio.sleep(pause)

    return StreamingHttpResponse(body(), content_type="text/event-stream")


def sync_events(texts: list[str]) -> StreamingHttpResponse:
    return StreamingHttpResponse(map(token, texts), content_type="text/event-stream")


Event = tuple[str, dict[str, Any], str]


def parse(chunk: bytes | str) -> Event:
    text = chunk.decode() if isinstance(chunk, bytes) else chunk
    name, data, id = "message", "", ""
    if text.startswith(":"):
        return "comment", {}, ""
    for line in text.splitlines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            data += value
        elif field == "id":
            id = value
    return name, json.loads(data) if data else {}, id


def view_of(answer: Callable[[], Any]) -> type[Chat]:
    return type("Other", (Chat,), {"answer": staticmethod(answer)})


async def post(view: Any = Chat, **headers: str) -> Any:
    return await view.as_view()(AsyncRequestFactory().post("/", headers=headers))


async def read(response: Any) -> list[Event]:
    return [parse(chunk) async for chunk in response.streaming_content]


async def answered(answer: Callable[[], Any]) -> list[Event]:
    """What a view with this answer says after the grant."""
    first, *rest = await read(await post(view_of(answer)))
    assert first[0] == "granted"
    return rest
