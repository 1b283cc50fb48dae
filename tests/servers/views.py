"""One view of each kind, plain and streamed, that ends as the query says.

The upstream is named by the query too, so that cells of the table do not meet. What happens is
written into a list in the store: that a handler began, that the call under a body was closed, and
how many slots were held at that time.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from adrf.views import APIView as AsyncAPIView
from asgiref.sync import iscoroutinefunction, sync_to_async
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.utils.decorators import sync_and_async_middleware
from django.views import View
from django_redis import get_redis_connection
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from llm_throttle.admission import snapshot
from llm_throttle.guards import guard
from llm_throttle.identity import Caller
from llm_throttle.models import Upstream
from llm_throttle.rest_framework import EventStreamRenderer
from llm_throttle.views import ThrottledChatMixin

LONG_AGO = "Mon, 01 Jan 2024 00:00:00 GMT"
THINKS = 4.0
"""Seconds until the first byte, where a client is to leave before it."""

CHUNKS = {"go-on": 100, "hold": 10, "hold-long": 100}
"""How many a body has; otherwise one."""

PAUSE = 0.1
"""Seconds between two chunks; ten times as much in a long one."""


class Planned(Exception):
    """What a view or a body raises that is to fail."""


def flow_of(caller: Caller) -> str:
    if caller.is_signed_in:
        return f"user:{caller.user.pk}"
    return str(caller.request.headers.get("X-Flow", "somebody"))


def note(request: Any, what: str) -> None:
    upstream = request.GET["upstream"]
    in_flight = snapshot(upstream).in_flight
    get_redis_connection().rpush(f"notes:{upstream}", f"{what} {in_flight}")


def thinking_time(request: Any) -> float:
    return THINKS if request.GET["do"] == "think" else 0.0


def plain(request: Any, make: Any) -> Any:
    if request.GET["do"] == "raise":
        raise Planned
    response = make("done")
    response["Last-Modified"] = LONG_AGO
    return response


def stream(request: Any, body: Any) -> StreamingHttpResponse:
    if request.GET["do"] == "raise":
        raise Planned
    response = StreamingHttpResponse(body(request), content_type="text/event-stream")
    response["Last-Modified"] = LONG_AGO
    return response


def chunks(request: Any) -> Iterator[bytes]:
    try:
        time.sleep(thinking_time(request))
        yield b"data: one\n\n"
        if request.GET["do"] == "raise-in-body":
            raise Planned
        for _ in range(CHUNKS.get(request.GET["do"], 1)):
            time.sleep(PAUSE)
            yield b"data: more\n\n"
    finally:
        note(request, "closed")


async def async_chunks(request: Any) -> AsyncIterator[bytes]:
    try:
        await asyncio.sleep(thinking_time(request))
        yield b"data: one\n\n"
        if request.GET["do"] == "raise-in-body":
            raise Planned
        for _ in range(CHUNKS.get(request.GET["do"], 1)):
            await asyncio.sleep(PAUSE * (10 if request.GET["do"] == "hold-long" else 1))
            yield b"data: more\n\n"
    finally:
        await sync_to_async(note)(request, "closed")


def answer(request: Any, make: Any = HttpResponse) -> Any:
    note(request, "began")
    if "streamed" in request.path:
        return stream(request, chunks)
    time.sleep(thinking_time(request))
    return plain(request, make)


async def async_answer(request: Any, make: Any = HttpResponse) -> Any:
    await sync_to_async(note)(request, "began")
    if "streamed" in request.path:
        return stream(request, async_chunks)
    await asyncio.sleep(thinking_time(request))
    return plain(request, make)


class Chat(ThrottledChatMixin):
    @property
    def upstream(self) -> str:  # one view for all cells of the table
        return str(self.request.GET["upstream"])


class SyncChat(Chat, View):
    def get(self, request: HttpRequest) -> HttpResponse:
        return answer(request)

    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse(request.body)


class AsyncChat(Chat, View):
    async def get(self, request: HttpRequest) -> HttpResponse:
        if (await request.auser()).is_authenticated:
            await request.session.aset("chats", 1)  # written on the way out, by middleware
        return await async_answer(request)


class Rest:
    renderer_classes = (*APIView.renderer_classes, EventStreamRenderer)


class RestChat(Chat, Rest, APIView):
    def get(self, request: Any) -> Any:
        return answer(request, Response)

    def post(self, request: Any) -> Any:
        return Response(request.data)


class ChatViewSet(Chat, Rest, ViewSet):
    def list(self, request: Any) -> Any:
        return answer(request, Response)


class AsyncRestChat(Chat, Rest, AsyncAPIView):
    async def get(self, request: Any) -> Any:
        return await async_answer(request, Response)


@functools.wraps(answer)
def function_chat(request: HttpRequest) -> Any:
    """``@throttled`` takes the upstream's name; here it comes with the request."""
    return guard(answer, request.GET["upstream"])(request)


KINDS = {
    "sync": SyncChat.as_view(),
    "async": AsyncChat.as_view(),
    "DRF": RestChat.as_view(),
    "ViewSet": ChatViewSet.as_view({"get": "list"}),
    "adrf": AsyncRestChat.as_view(),
    "function": function_chat,
}


def set_capacity(request: HttpRequest) -> HttpResponse:
    upstream = Upstream.objects.get(slug=request.GET["upstream"])
    upstream.capacity = int(request.GET["capacity"])
    upstream.save()
    return HttpResponse(status=204)


@sync_and_async_middleware
def replaces_responses(get_response: Any) -> Any:
    """Sends another response in the place of the view's, where the request asks for it."""

    def replaced(request: HttpRequest, response: Any) -> Any:
        return HttpResponse("replaced") if request.GET.get("do") == "replace" else response

    async def async_middleware(request: HttpRequest) -> Any:
        return replaced(request, await get_response(request))

    def middleware(request: HttpRequest) -> Any:
        return replaced(request, get_response(request))

    return async_middleware if iscoroutinefunction(get_response) else middleware
