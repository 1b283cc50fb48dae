"""``queue_events = True``: the wait itself as server-sent events, then what the handler answers.

The response begins before the slot is there, with ``position`` events; the handler runs when it
is granted, inside the response's body (``response_events``).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, aclosing, closing
from typing import Any

from django.http import HttpResponse, StreamingHttpResponse

from . import messages
from .conf import settings
from .exceptions import Refused
from .keep_alive import AsyncKeepAlive, KeepAlive
from .lease import Lease
from .nesting import note_taken
from .request import Request
from .response_events import Call, error_event, response_events, sync_response_events
from .streaming import AsyncLeasedStream, LeasedStream, keep_unbuffered
from .sync_waiters import a_thread_may_wait
from .unsent import close_unless_started
from .waiting import AsyncWaiting, ThreadWaiting

COMMENT = b": keep-alive\n\n"
PROBLEM_TYPES = ("application/problem+json", "application/json")


def wants_problem(request: Any) -> bool:
    """Whether a refusal known in time is to be a plain response with its own status.

    Asked for by ``Accept``. ``EventSource`` cannot read one, and stops for good.
    """
    accepted = request.headers.get("Accept", "")
    return any(name in accepted for name in PROBLEM_TYPES)


def as_response(body: AsyncQueueEvents | QueueEvents) -> StreamingHttpResponse:
    """A stream of events that nobody on the way should hold back."""
    response = StreamingHttpResponse(body, content_type="text/event-stream")
    keep_unbuffered(response)
    response["X-LLM-Throttle-Ticket"] = body.ticket
    response["X-LLM-Throttle-Tier"] = body.tier
    return response


def refused_response(refusal: Refused) -> HttpResponse:
    """A stream that is over before it begins."""
    response = HttpResponse(messages.refused_event(refusal), content_type="text/event-stream")
    keep_unbuffered(response)
    return response


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
            return messages.refused_event(refusal)
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
            return messages.position_event(news)
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
                return messages.as_event(messages.lease_lost(self._lease))
            raise

    async def _answer(self, lease: Lease) -> AsyncIterator[Any]:
        self._call.take(lease)
        try:
            response = await self._call.arun()
            async with aclosing(response_events(response)) as events:
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
            return messages.refused_event(refusal)
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
            return messages.position_event(news)
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
                return messages.as_event(messages.lease_lost(self._lease))
            raise

    def _answer(self, lease: Lease) -> Iterator[Any]:
        self._call.take(lease)
        try:
            with closing(sync_response_events(self._call.run())) as events:
                yield from events
        except Exception as error:
            yield error_event(error, self._call.request)
