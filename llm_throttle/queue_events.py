"""``queue_events = True``: the wait itself as server-sent events, then what the handler answers.

The response begins before the slot is there, with ``position`` events; the handler runs when it
is granted, inside the response's body. So its status and headers come too late to be sent, and
what it raises becomes an ``error`` event.
"""

from __future__ import annotations

import asyncio
import codecs
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, closing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.core.exceptions import PermissionDenied
from django.core.signals import got_request_exception
from django.http import Http404, HttpResponse, StreamingHttpResponse
from django.http.response import HttpResponseBase

from . import messages
from .bodies import AsyncKeepAlive, KeepAlive, Resources, ThreadedBody
from .conf import settings
from .exceptions import Refused
from .lease import Lease
from .nesting import note_taken
from .positions import Position
from .request import Request
from .streaming import AsyncLeasedStream, LeasedStream, close_unless_started, keep_unbuffered
from .sync_waiters import a_thread_may_wait
from .waiting import AsyncWaiting, ThreadWaiting

logger = logging.getLogger(__name__)

COMMENT = b": keep-alive\n\n"
TICKET = re.compile(r"[0-9a-f]{32}")
PROBLEM_TYPES = ("application/problem+json", "application/json")


# What the client sends


def wants_problem(request: Any) -> bool:
    """Whether a refusal known in time is to be a plain response with its own status.

    Asked for by ``Accept``. ``EventSource`` cannot read one, and stops for good.
    """
    accepted = request.headers.get("Accept", "")
    return any(name in accepted for name in PROBLEM_TYPES)


def ticket_of(request: Any) -> str:
    """The ticket that a client comes back with, "" where there is none.

    In the header, in the query, or where ``EventSource`` puts it when it reconnects.
    """
    headers = request.headers
    named = headers.get("X-LLM-Throttle-Ticket") or request.GET.get("ticket")
    return as_ticket(named or headers.get("Last-Event-ID"))


def as_ticket(text: object) -> str:
    """The text if it looks like a ticket, else ""."""
    return text if isinstance(text, str) and TICKET.fullmatch(text) else ""


# What the client gets


@dataclass(frozen=True)
class Call:
    """A view's handler with its arguments, to be run when the slot is there."""

    handler: Callable[..., Any]
    request: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    take: Callable[[Lease], None]
    finish: Callable[..., Any] | None = None

    def run(self) -> HttpResponseBase:
        """The handler's response, made ready to be read."""
        return self._finished(self.handler(self.request, *self.args, **self.kwargs))

    async def arun(self) -> HttpResponseBase:
        if not iscoroutinefunction(self.handler):
            return await sync_to_async(self.run)()
        response = await self.handler(self.request, *self.args, **self.kwargs)
        return await sync_to_async(self._finished)(response)

    def _finished(self, response: Any) -> HttpResponseBase:
        if self.finish is not None:  # REST framework's renderers
            response = self.finish(self.request, response, *self.args, **self.kwargs)
        if hasattr(response, "render") and not response.is_rendered:
            response.render()
        if not isinstance(response, HttpResponseBase):
            raise TypeError(f"The view returned {response!r} and not a response.")
        return response


def as_response(body: AsyncQueueEvents | QueueEvents) -> StreamingHttpResponse:
    """A stream of events that nobody on the way should hold back."""
    response = StreamingHttpResponse(body, content_type="text/event-stream")
    keep_unbuffered(response)
    response["X-LLM-Throttle-Ticket"] = body.ticket
    response["X-LLM-Throttle-Tier"] = body.tier
    return response


def refused_response(refusal: Refused) -> HttpResponse:
    """A stream that is over before it begins."""
    response = HttpResponse(refused_event(refusal), content_type="text/event-stream")
    keep_unbuffered(response)
    return response


def position_event(news: Position) -> bytes:
    return messages.as_event(messages.position(news), id=news.ticket)


def refused_event(refusal: Refused) -> bytes:
    """The last event. Where the ticket has moved, the client must not come back with it."""
    id = "" if refusal.reason == "moved" else None
    return messages.as_event(messages.refused(refusal), id=id, retry_s=refusal.retry_after)


def lost_event(lease: Lease) -> bytes:
    return messages.as_event(
        messages.error("lease_lost", "The slot of this request was taken back.", lost=lease.lost)
    )


def error_event(error: Exception, request: Any) -> bytes:
    """What a handler raised, as far as it is the client's business."""
    if isinstance(error, Refused):
        return refused_event(error)
    status = _status_of(error)
    if status >= 500:
        logger.error("A throttled view failed: %s", request.path, exc_info=error)
        got_request_exception.send(sender=error_event, request=request)
    return _http_error(status, str(getattr(error, "detail", "")))


def _status_of(error: Exception) -> int:
    if isinstance(error, Http404):
        return 404
    if isinstance(error, PermissionDenied):
        return 403
    return int(getattr(error, "status_code", 500))


def _http_error(status: int, detail: str = "", **more: Any) -> bytes:
    phrase = HTTPStatus(status).phrase if status in set(HTTPStatus) else f"Status {status}"
    message = messages.error(f"http_{status}", detail or phrase, status=status, **more)
    return messages.as_event(message)


def content_event(response: Any) -> bytes:
    """A response that is no stream as one event: ``message``, or ``error`` from status 400."""
    text = response.content.decode(response.charset or "utf-8", errors="replace")
    if response.status_code >= 400:
        return _http_error(response.status_code, content=text)
    lines = "".join(f"data: {line}\n" for line in text.splitlines() or [""])
    return f"{lines}\n".encode()


def _is_events(response: HttpResponseBase) -> bool:
    return str(response.get("Content-Type", "")).startswith("text/event-stream")


class _Texts:
    """Chunks of any other body as ``token`` events; letters may be cut in two between chunks."""

    def __init__(self, response: HttpResponseBase) -> None:
        charset = response.charset or "utf-8"
        self._decoder = codecs.getincrementaldecoder(charset)(errors="replace")

    def event(self, chunk: Any) -> bytes:
        text = chunk if isinstance(chunk, str) else self._decoder.decode(chunk)
        return messages.as_event(messages.token(text)) if text else b""


async def _response_events(response: HttpResponseBase) -> AsyncIterator[Any]:
    if not response.streaming:
        yield content_event(response)
        return
    found = response._iterator  # type: ignore[attr-defined]  # streaming_content hides aclose()
    body = found if response.is_async else ThreadedBody(found)  # type: ignore[attr-defined]
    resources = Resources.of(response, found)  # type: ignore[arg-type]  # it is a streaming one
    texts = None if _is_events(response) else _Texts(response)
    try:
        async for chunk in body:
            if event := texts.event(chunk) if texts else chunk:
                yield event
    finally:
        if hasattr(body, "aclose"):
            await body.aclose()
        await resources.aclose()
    if texts:
        yield messages.as_event(messages.done())


def _sync_response_events(response: HttpResponseBase) -> Iterator[Any]:
    if not response.streaming:
        yield content_event(response)
        return
    body = response._iterator  # type: ignore[attr-defined]  # as above
    resources = Resources.of(response, body)  # type: ignore[arg-type]  # as above
    texts = None if _is_events(response) else _Texts(response)
    try:
        for chunk in body:
            if event := texts.event(chunk) if texts else chunk:
                yield event
    finally:
        if hasattr(body, "close"):
            body.close()
        resources.close()
    if texts:
        yield messages.as_event(messages.done())


# The bodies


class AsyncQueueEvents:
    """The body under ASGI: positions, then the handler's answer."""

    def __init__(self, waiting: AsyncWaiting, call: Call) -> None:
        self.ticket = waiting.request.ticket
        self.tier = waiting.request.identity.tier
        self._waiting = waiting
        self._call = call
        self._lease: Lease | None = None
        self._stream: AsyncLeasedStream | None = None
        self._loop = asyncio.get_running_loop()
        self._has_started = self._is_over = False
        close_unless_started(self)

    @classmethod
    async def open(cls, request: Request, call: Call) -> AsyncQueueEvents:
        """Ask for the slot. Raises ``Refused`` where that is known at once."""
        waiting = AsyncWaiting(request)
        try:
            await waiting.begin()
        except BaseException:
            waiting.close()
            raise
        return cls(waiting, call)

    def __aiter__(self) -> AsyncQueueEvents:
        return self

    async def __anext__(self) -> Any:
        self._has_started = True
        if self._is_over:
            raise StopAsyncIteration
        if self._stream is not None:
            return await self._next_of(self._stream)
        try:
            return await self._next_event()
        except Refused as refusal:
            self._is_over = True
            return refused_event(refusal)
        except BaseException:
            self._waiting.close()
            raise

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()
        else:
            self._waiting.close()

    def close(self) -> None:
        """For ``response.close()``, which Django calls in a thread or under the loop."""
        if self._stream is not None:
            self._stream.close()
        elif self._loop.is_closed():
            self._waiting.close()
        else:
            self._loop.call_soon_threadsafe(self._waiting.close)

    def close_unless_started(self) -> None:
        if not self._has_started:
            self.close()

    async def _next_event(self) -> bytes:
        news = await self._waiting.next(settings.KEEP_ALIVE)
        if news is not None:
            self._waiting.request.has_told = True
            return position_event(news)
        if self._waiting.lease is None:
            return COMMENT
        self._lease = lease = self._waiting.take_lease()
        answer = AsyncKeepAlive(self._answer(lease), settings.KEEP_ALIVE, lambda: note_taken(lease))
        self._stream = AsyncLeasedStream(answer, lease)
        return messages.as_event(messages.granted(lease))

    async def _next_of(self, stream: AsyncLeasedStream) -> Any:
        try:
            return await anext(stream)
        except StopAsyncIteration:
            self._is_over = True
            if self._lease is not None and self._lease.lost:
                return lost_event(self._lease)
            raise

    async def _answer(self, lease: Lease) -> AsyncIterator[Any]:
        self._call.take(lease)
        try:
            response = await self._call.arun()
            async with aclosing(_response_events(response)) as events:  # type: ignore[type-var]
                async for event in events:
                    yield event
        except Exception as error:
            yield error_event(error, self._call.request)


class QueueEvents:
    """The body under WSGI. The wait occupies its thread; that the client has left is seen when
    something is sent, so by the next keep-alive.
    """

    def __init__(self, waiting: ThreadWaiting, call: Call) -> None:
        self.ticket = waiting.request.ticket
        self.tier = waiting.request.identity.tier
        self._waiting = waiting
        self._call = call
        self._lease: Lease | None = None
        self._stream: LeasedStream | None = None
        self._seat: AbstractContextManager[bool] | None = None
        self._is_over = False

    @classmethod
    def open(cls, request: Request, call: Call) -> QueueEvents:
        """Ask for the slot. Raises ``Refused`` where that is known at once."""
        waiting = ThreadWaiting(request)
        body = cls(waiting, call)
        try:
            waiting.begin()
            if waiting.is_queued:
                body._sit_down()
        except BaseException:
            body.close()
            raise
        body.ticket = request.ticket
        return body

    def _sit_down(self) -> None:
        """Count this thread among those that wait."""
        self._seat = a_thread_may_wait(self._waiting.request)
        if not self._seat.__enter__():
            raise self._waiting.request.refusal("queue_full")

    def _stand_up(self) -> None:
        if self._seat is not None:
            self._seat.__exit__(None, None, None)
            self._seat = None

    def __iter__(self) -> QueueEvents:
        return self

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        if self._stream is not None:
            return self._next_of(self._stream)
        try:
            return self._next_event()
        except Refused as refusal:
            self._is_over = True
            self._stand_up()
            return refused_event(refusal)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._stand_up()
        if self._stream is not None:
            self._stream.close()
        else:
            self._waiting.close()

    def _next_event(self) -> bytes:
        news = self._waiting.next(settings.KEEP_ALIVE)
        if news is not None:
            self._waiting.request.has_told = True
            return position_event(news)
        if self._waiting.lease is None:
            return COMMENT
        self._stand_up()
        self._lease = lease = self._waiting.take_lease()
        self._stream = LeasedStream(KeepAlive(self._answer(lease), settings.KEEP_ALIVE), lease)
        return messages.as_event(messages.granted(lease))

    def _next_of(self, stream: LeasedStream) -> Any:
        try:
            return next(stream)
        except StopIteration:
            self._is_over = True
            if self._lease is not None and self._lease.lost:
                return lost_event(self._lease)
            raise

    def _answer(self, lease: Lease) -> Iterator[Any]:
        self._call.take(lease)
        try:
            with closing(_sync_response_events(self._call.run())) as events:  # type: ignore[type-var]
                yield from events
        except Exception as error:
            yield error_event(error, self._call.request)
