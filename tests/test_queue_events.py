"""``queue_events``: the wait as a stream, then the answer, over both kinds of server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.middleware.gzip import GZipMiddleware
from django.test import AsyncRequestFactory, RequestFactory

from llm_throttle import admit
from llm_throttle.identity import Identity
from llm_throttle.rest_framework import EventStreamRenderer
from llm_throttle.scheduling.policy import TierPolicy

from .conftest import Room
from .event_views import Chat, RestChat, SyncChat, events, parse, post, read, view_of
from .waiting_room import ALONE, eventually, held, is_empty, overview, settled

HASTY = TierPolicy("gold", cap=1, wait_budget_ms=300)
FULL = TierPolicy("gold", cap=1, wait_budget_ms=20_000, queue_depth=0)

pytestmark = pytest.mark.usefixtures("flow_by_header")


# The way through


async def test_a_free_slot_is_granted_at_once_and_the_body_follows(room: Room) -> None:
    response = await post()
    assert response["Content-Type"] == "text/event-stream"
    assert (response["X-Accel-Buffering"], response["Cache-Control"]) == ("no", "no-cache")
    names, data, _ = zip(*await read(response), strict=True)
    assert names == ("granted", "message", "message")
    assert data[0]["ticket"] == response["X-LLM-Throttle-Ticket"]
    assert [each.get("text") for each in data[1:]] == ["Hel", "lo"]
    assert await settled()


async def test_a_waiter_is_told_where_it_stands_and_that_it_moves(room: Room) -> None:
    room(1, ALONE)
    async with held():
        first, second = await post(**{"X-Flow": "a"}), await post(**{"X-Flow": "b"})
        stream = aiter(second.streaming_content)
        name, data, id = parse(await anext(stream))
        assert (name, data["position"], data["ahead"]) == ("position", 2, 1)
        assert data["ticket"] == id == second["X-LLM-Throttle-Ticket"]
        assert set(data) == {"type", "ticket", "upstream", "position", "ahead", "eta"}
    reading = asyncio.create_task(read(first))
    names = [parse(chunk)[0] async for chunk in stream]
    assert names[-3:] == ["granted", "message", "message"]
    assert [name for name, _, _ in await reading][-1] == "message"
    assert await settled()


async def test_silence_is_broken_by_comments_in_both_phases(room: Room, settings: Any) -> None:
    settings.LLM_THROTTLE |= {"KEEP_ALIVE": 0.1}
    room(1, ALONE)
    view = view_of(lambda: events(["a", "b"], pause=0.35))
    async with held():
        response = await post(view)
        stream = aiter(response.streaming_content)
        names = [parse(await anext(stream))[0] for _ in range(5)]
        assert names.count("comment") >= 3 and names.count("position") >= 1
    names = [parse(chunk)[0] async for chunk in stream]
    assert names[names.index("granted") :].count("comment") >= 4


async def test_a_slow_handler_is_kept_alive(room: Room, settings: Any) -> None:
    settings.LLM_THROTTLE |= {"KEEP_ALIVE": 0.05}

    class Slow(Chat):
        async def post(self, request: HttpRequest) -> Any:
            await asyncio.sleep(0.2)
            return JsonResponse({"reply": "hello"})

    names = [name for name, _, _ in await read(await post(Slow))]
    assert names[0] == "granted" and names[-1] == "message"
    assert names.count("comment") >= 2


async def test_compression_holds_nothing_back(room: Room) -> None:
    async def get_response(request: HttpRequest) -> Any:
        return await Chat.as_view()(request)

    request = AsyncRequestFactory().post("/", headers={"Accept-Encoding": "gzip"})
    response = await GZipMiddleware(get_response)(request)
    assert [name for name, _, _ in await read(response)] == ["granted", "message", "message"]


# Refusals


async def test_a_refusal_known_at_once_is_an_event_in_a_stream(room: Room) -> None:
    room(1, FULL)
    async with held():
        response = await post()
        name, data, _ = parse(response.content)
        assert (response.status_code, name, data["reason"]) == (200, "refused", "tier_full")
        assert response["Content-Type"] == "text/event-stream"
        assert data["type"] == "refused" and 1 <= data["retry_after"] <= 60


@pytest.mark.parametrize(
    "accept", ["application/json", "text/event-stream, application/problem+json"]
)
async def test_a_refusal_known_at_once_is_a_response_where_asked_for(
    room: Room, accept: str
) -> None:
    room(1, FULL)
    async with held():
        response = await post(Accept=accept)
        assert (response.status_code, response["Content-Type"]) == (429, "application/problem+json")
        assert response["Retry-After"] == str(json.loads(response.content)["retry_after"])


async def test_a_refusal_in_rest_framework_has_its_shape(room: Room) -> None:
    room(1, FULL)

    class Streaming(RestChat):
        renderer_classes = (*RestChat.renderer_classes, EventStreamRenderer)

    async with held():
        request = AsyncRequestFactory().post("/", headers={"Accept": "application/json"})
        response = await sync_to_async(Streaming.as_view())(request)
        assert (response.status_code, response.data["reason"]) == (429, "tier_full")


async def test_a_refusal_after_the_wait_is_the_last_event(room: Room) -> None:
    room(1, HASTY)
    async with held():
        response = await post(Accept="application/json")
        *_, (name, data, _) = await read(response)
        assert (name, data["reason"], data["status"]) == ("refused", "wait_expired", 503)
    assert await settled()


async def test_a_refusal_tells_event_source_when_to_come_back(room: Room) -> None:
    room(1, FULL)
    async with held():
        content = (await post()).content
        seconds = parse(content)[1]["retry_after"]
        assert f"retry: {seconds * 1000}\n".encode() in content


# Leaving and coming back


async def test_who_leaves_while_waiting_is_out_of_the_queue(room: Room) -> None:
    room(1, ALONE)
    async with held():
        response = await post()
        stream = response._iterator
        await anext(stream)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.05)
        reading.cancel()
        assert await asyncio.to_thread(eventually, lambda: overview().waiting == 0)
    assert await settled()


async def test_a_response_that_is_dropped_is_out_of_the_queue(room: Room) -> None:
    room(1, ALONE)
    async with held():
        response = await post()
        assert overview().waiting == 1
        del response
        assert await asyncio.to_thread(eventually, lambda: overview().waiting == 0)


async def test_a_response_that_is_closed_unread_is_out_of_the_queue(room: Room) -> None:
    room(1, ALONE)
    async with held():
        response = await post()
        response.close()
        assert await asyncio.to_thread(eventually, lambda: overview().waiting == 0)


async def test_who_leaves_while_streaming_frees_the_slot(room: Room) -> None:
    response = await post(view_of(lambda: events(["a", "b"], pause=30)))
    stream = response._iterator
    assert [parse(await anext(stream))[0] for _ in range(2)] == ["granted", "message"]
    reading = asyncio.create_task(anext(stream))
    await asyncio.sleep(0.05)
    reading.cancel()
    assert await settled()


@pytest.mark.parametrize("how", ["X-LLM-Throttle-Ticket", "Last-Event-ID", "query"])
async def test_who_comes_back_with_its_ticket_finds_its_place(room: Room, how: str) -> None:
    room(1, ALONE)
    async with held():
        first = await post()
        ticket = parse(await anext(first._iterator))[1]["ticket"]
        second = await post(**{"X-Flow": "b"})
        await first._iterator.aclose()
        headers, query = ({}, f"?ticket={ticket}") if how == "query" else ({how: ticket}, "")
        request = AsyncRequestFactory().post(f"/{query}", headers=headers)
        again = await Chat.as_view()(request)
        assert again["X-LLM-Throttle-Ticket"] == ticket
        assert parse(await anext(again._iterator))[1]["position"] == 1
        await again._iterator.aclose()
        await second._iterator.aclose()


async def test_the_other_tab_is_told_that_the_ticket_has_moved(room: Room) -> None:
    room(1, ALONE)
    async with held():
        first = await post()
        stream = aiter(first.streaming_content)
        ticket = parse(await anext(stream))[1]["ticket"]
        second = await post(**{"X-LLM-Throttle-Ticket": ticket})
        chunk = [chunk async for chunk in stream][-1]
        name, data, id = parse(chunk)
        assert (name, data["reason"], data["status"]) == ("refused", "moved", 409)
        assert data["retry_after"] is None and b"\nid: \n" in chunk and not id
        await second._iterator.aclose()


async def test_somebody_elses_ticket_is_refused(room: Room) -> None:
    room(1, ALONE)
    async with held():
        first = await post()
        ticket = parse(await anext(first._iterator))[1]["ticket"]
        theirs = {"X-LLM-Throttle-Ticket": ticket, "X-Flow": "b"}
        name, data, _ = parse((await post(**theirs)).content)
        assert (name, data["reason"], data["status"]) == ("refused", "foreign_ticket", 403)
        response = await post(Accept="application/json", **theirs)
        assert response.status_code == 403
        await first._iterator.aclose()


# Sync views


def test_a_sync_view_under_wsgi_waits_in_the_stream(room: Room) -> None:
    room(1, ALONE)
    holder = admit("sim", identity=Identity("user:0", "gold"))
    holding, end = threading.Event(), threading.Event()

    def hold() -> None:
        with holder:
            holding.set()
            end.wait(5)

    thread = threading.Thread(target=hold)
    thread.start()
    holding.wait(5)
    response = SyncChat.as_view()(RequestFactory().post("/"))
    stream: Iterator[bytes] = iter(response.streaming_content)
    assert parse(next(stream))[1]["position"] == 1
    end.set()
    names = [parse(chunk)[0] for chunk in stream]
    assert names[-3:] == ["granted", "message", "message"]
    thread.join()
    assert eventually(is_empty)


def test_a_sync_view_that_is_closed_while_it_waits_leaves_the_queue(room: Room) -> None:
    room(1, ALONE)
    with admit("sim", identity=Identity("user:0", "gold")):
        thread = threading.Thread(target=_open_and_close)
        thread.start()
        thread.join()
        assert eventually(lambda: overview().waiting == 0)


def _open_and_close() -> None:
    response = SyncChat.as_view()(RequestFactory().post("/"))
    next(iter(response.streaming_content))
    response.close()


def test_the_waiting_threads_of_a_sync_server_are_bounded(room: Room, settings: Any) -> None:
    settings.LLM_THROTTLE |= {"SYNC_WAITERS": 1}
    room(1, ALONE)
    refusals = []

    def ask() -> None:
        first = SyncChat.as_view()(RequestFactory().post("/"))
        second = SyncChat.as_view()(RequestFactory().post("/", headers={"X-Flow": "b"}))
        refusals.append(parse(second.content))
        first.close()
        third = SyncChat.as_view()(RequestFactory().post("/", headers={"X-Flow": "c"}))
        assert parse(next(iter(third.streaming_content)))[0] == "position"
        third.close()

    with admit("sim", identity=Identity("user:0", "gold")):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    [(name, data, _)] = refusals
    assert (name, data["reason"]) == ("refused", "queue_full")


async def test_a_sync_view_under_asgi_streams_and_is_cancelled(room: Room) -> None:
    room(1, ALONE)
    async with held():
        request = AsyncRequestFactory().post("/")
        response = await sync_to_async(SyncChat.as_view())(request)
        assert response.is_async
        stream = aiter(response.streaming_content)
        assert parse(await anext(stream))[0] == "position"
    assert [parse(chunk)[0] async for chunk in stream][-3:] == ["granted", "message", "message"]


async def test_an_async_view_under_wsgi_says_what_is_wrong(room: Room) -> None:
    with pytest.raises(ImproperlyConfigured, match="sync view"):
        await Chat.as_view()(RequestFactory().post("/"))


def test_a_head_request_gets_no_events(room: Room) -> None:
    class Plain(SyncChat):
        def head(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse()

    response = Plain.as_view()(RequestFactory().head("/"))
    assert response.status_code == 200 and not response.streaming
