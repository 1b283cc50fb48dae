"""A streamed response holds its slot to its end, its database connection not at all."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.contrib.auth.models import User
from django.core.asgi import get_asgi_application
from django.db import connection
from django.http import HttpResponse, StreamingHttpResponse
from django.test import AsyncClient, Client
from django.urls import path
from django.views import View
from rest_framework.authentication import BaseAuthentication
from rest_framework.views import APIView

from llm_throttle import aadmit, admit
from llm_throttle.admission import snapshot
from llm_throttle.exceptions import NestedAdmission
from llm_throttle.identity import Identity
from llm_throttle.models import Upstream
from llm_throttle.views import ThrottledChatMixin, throttled
from tests.waiting_room import eventually, is_empty

from .conftest import Complaints

EVENTS = "text/event-stream"


class Notes(list[str]):
    pass


NOTES = Notes()


def numbers() -> Iterator[bytes]:
    try:
        for number in range(1000):
            yield f"data: {number}\n\n".encode()
    finally:
        NOTES.append("closed")


@throttled("sim")
def endless(request: Any) -> StreamingHttpResponse:
    return StreamingHttpResponse(numbers(), content_type=request.GET.get("as", EVENTS))


def nesting() -> Iterator[bytes]:
    with admit("sim", identity=Identity("again", "free")):
        yield b"never"


async def async_nesting() -> AsyncIterator[bytes]:
    async with aadmit("sim", identity=Identity("again", "free")):
        yield b"never"


@throttled("sim")
def nests(request: Any) -> StreamingHttpResponse:
    return StreamingHttpResponse(nesting(), content_type=request.GET.get("as", EVENTS))


@throttled("sim")
async def async_nests(request: Any) -> StreamingHttpResponse:
    return StreamingHttpResponse(async_nesting(), content_type=request.GET.get("as", EVENTS))


class SlowToAuthenticate(BaseAuthentication):
    def authenticate(self, request: Any) -> None:
        NOTES.append("authenticating")
        time.sleep(0.3)


class Slow(ThrottledChatMixin, APIView):
    upstream = "sim"
    authentication_classes = (SlowToAuthenticate,)

    def get(self, request: Any) -> HttpResponse:
        NOTES.append("served")
        return HttpResponse()


class SlowStream(ThrottledChatMixin, APIView):
    upstream = "sim"

    def get(self, request: Any) -> StreamingHttpResponse:
        NOTES.append("served")
        time.sleep(0.2)
        return StreamingHttpResponse(numbers(), content_type=EVENTS)


class Plain(ThrottledChatMixin, View):
    upstream = "sim"

    def get(self, request: Any) -> HttpResponse:
        NOTES.append("served")
        return HttpResponse()


urlpatterns = [
    path("endless/", endless),
    path("nests/", nests),
    path("async-nests/", async_nests),
    path("slow/", Slow.as_view()),
    path("slow-stream/", SlowStream.as_view()),
    path("plain/", Plain.as_view()),
]


@pytest.fixture(autouse=True)
def urls(settings: Any, rows: Upstream) -> None:
    settings.ROOT_URLCONF = __name__
    NOTES.clear()


# Under WSGI


@pytest.mark.parametrize("kind", [EVENTS, "text/plain"])
def test_a_stream_that_nobody_reads_is_ended_while_its_server_cannot_send(
    kind: str, settings: Any, complaints: Complaints
) -> None:
    """The server is in ``send``, between two chunks: nobody asks the body for the next one."""
    settings.LLM_THROTTLE |= {"IDLE_STREAM": 0.4}
    response = Client().get(f"/endless/?as={kind}")
    body = iter(response)
    assert next(body) == b"data: 0\n\n"
    assert snapshot("sim").in_flight == 1
    assert eventually(lambda: snapshot("sim").in_flight == 0)
    assert NOTES == ["closed"]
    assert list(body) == []
    assert "idle" in repr(complaints)


def test_an_operator_ends_a_stream_at_its_next_chunk_or_before() -> None:
    from llm_throttle.scheduling.commands import Revoke
    from llm_throttle.worker import current

    body = iter(Client().get("/endless/"))
    next(body)
    [holder] = snapshot("sim").holders
    current().call("sim", Revoke(holder.ticket))
    assert eventually(is_empty)
    assert NOTES == ["closed"]
    assert list(body) == []


def test_a_stream_holds_no_database_connection(user: User) -> None:
    client = Client()
    client.force_login(user)
    body = iter(client.get("/endless/"))
    connection.ensure_connection()
    closed: list[int] = []
    connection_close = connection.close

    def close() -> None:
        closed.append(1)
        connection_close()

    connection.close = close
    try:
        next(body)
    finally:
        del connection.close
    assert closed, "given back when the first chunk is asked for, after all middleware"
    body.close() if hasattr(body, "close") else None


# Nested admission


@pytest.mark.parametrize("kind", [EVENTS, "text/plain"])
@pytest.mark.parametrize("url", ["/nests/", "/async-nests/"])
async def test_a_body_that_asks_for_a_second_slot_fails_at_once(url: str, kind: str) -> None:
    response = await AsyncClient().get(f"{url}?as={kind}")
    with pytest.raises(NestedAdmission):
        async for _ in response:
            pass
    assert await asyncio.to_thread(eventually, is_empty)


@pytest.mark.parametrize("kind", [EVENTS, "text/plain"])
def test_so_does_one_under_wsgi(kind: str) -> None:
    with pytest.raises(NestedAdmission):
        list(Client().get(f"/nests/?as={kind}"))
    assert eventually(is_empty)


# A client that leaves before its wait has begun


@pytest.mark.parametrize("url", ["/slow/", "/plain/"])
async def test_a_client_that_leaves_a_sync_view_is_not_waited_for(url: str, rows: Upstream) -> None:
    """Also where it leaves while it is authenticated, when there is no wait to cancel yet."""
    await sync_to_async(_lower)(rows)
    async with aadmit("sim", identity=Identity("holder", "gold")):
        client = await a_client(url)
        if url == "/slow/":
            await until_noted()
        else:
            assert await asyncio.to_thread(eventually, lambda: snapshot("sim").waiting == 1)
        await client.send_input({"type": "http.disconnect"})
        await asyncio.sleep(0.6 if url == "/slow/" else 0.2)
        assert snapshot("sim").waiting == 0
        await client.wait(2)
    assert await asyncio.to_thread(eventually, is_empty)
    assert "served" not in NOTES


async def test_a_response_that_is_dropped_frees_its_slot_though_its_view_lives_in_a_cycle() -> None:
    """The client leaves while the view makes its response, which is then nobody's."""
    gc.disable()
    try:
        client = await a_client("/slow-stream/")
        await until_noted()
        await client.send_input({"type": "http.disconnect"})
        await client.wait(2)
        assert await asyncio.to_thread(eventually, is_empty, 1.5)
    finally:
        gc.enable()


async def a_client(url: str) -> ApplicationCommunicator:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "path": url,
        "raw_path": url.encode(),
        "query_string": b"",
        "headers": [],
    }
    client = ApplicationCommunicator(get_asgi_application(), scope)
    await client.send_input({"type": "http.request", "body": b""})
    return client


async def until_noted() -> None:
    async with asyncio.timeout(3):
        while not NOTES:
            await asyncio.sleep(0.005)


def _lower(rows: Upstream) -> None:
    rows.capacity = 1
    rows.save()
