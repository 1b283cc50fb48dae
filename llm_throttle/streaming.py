"""Response bodies that own a lease: the slot ends with the body, however it ends.

An iterator *object*, because a generator's ``finally`` and ``response.close()`` each miss some
endings on real servers, and only together see all: the end, an error, a cancelled task while the
body is awaited or while a chunk is being sent, a body that is dropped or never started.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

from django.core.signals import request_finished
from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase

from .admission import TaskStopper
from .bodies import CLOSE_WITHIN, AsyncKeepAlive, KeepAlive, ThreadedBody, is_exhausted
from .conf import settings
from .exceptions import LeaseLost
from .lease import Lease

logger = logging.getLogger(__name__)

NEVER_STARTED = "never_started"


class AsyncLeasedStream:
    """An async body that holds a slot from its making to its end."""

    def __init__(self, body: AsyncIterator[Any], lease: Lease) -> None:
        self._body = body
        self._lease = lease
        self._loop = _running_loop()
        self._stop: TaskStopper | None = None
        self._closing: asyncio.Task[None] | None = None
        _be_held_by(self, lease, self._end)
        _close_unless_started.set(weakref.WeakMethod(self.close_unless_started))
        if self._loop is not None and (task := asyncio.current_task()) is not None:
            task.add_done_callback(_weakly(self._task_ended))

    def __aiter__(self) -> AsyncLeasedStream:
        return self

    async def __anext__(self) -> Any:
        if self._stop is None:
            self._start()
        self._lease.lift_limit()
        try:
            chunk = await anext(self._body)
        except StopAsyncIteration:
            self._lease.release()
            raise
        except BaseException as error:
            await self._finish()
            if self._was_stopped(error):
                raise StopAsyncIteration from error
            raise
        self._lease.limit(settings.IDLE_STREAM, "idle")
        return chunk

    async def aclose(self) -> None:
        await self._finish()

    def close(self) -> None:
        """For ``response.close()``, which Django calls in a thread or under the loop."""
        if not self._lease.is_held:
            return
        if self._is_exhausted or self._loop is None or self._loop.is_closed():
            self._lease.release(is_abnormal=True)
        else:
            self._loop.call_soon_threadsafe(self._start_closing)

    def close_unless_started(self) -> None:
        """For the end of the request, whose response may have been dropped on its way out."""
        if self._stop is None:
            self.close()

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        """The task that made the body was cut off before it, or another, came to send it."""
        if task.cancelled():
            self.close_unless_started()

    def _start(self) -> None:
        if not self._lease.is_held:
            raise LeaseLost(self._lease.lost or NEVER_STARTED)
        self._loop = asyncio.get_running_loop()
        self._stop = TaskStopper()

    def _end(self) -> None:
        """The slot is wanted back: stop whoever drives the body."""
        if self._stop is None:
            self.close()
        else:
            self._stop()

    def _was_stopped(self, error: BaseException) -> bool:
        return self._stop is not None and self._stop.was_ours(type(error))

    @property
    def _is_exhausted(self) -> bool:
        return is_exhausted(self._body)

    async def _finish(self) -> None:
        """Close the upstream call, then give the slot back; goes on when it is cancelled."""
        if self._is_exhausted:
            self._lease.release(is_abnormal=True)
            return
        await asyncio.shield(self._start_closing())

    def _start_closing(self) -> asyncio.Task[None]:
        if self._closing is None:
            assert self._loop is not None  # noqa: S101 - this runs in it
            self._closing = self._loop.create_task(self._close_then_release())
        return self._closing

    async def _close_then_release(self) -> None:
        try:
            async with asyncio.timeout(CLOSE_WITHIN):
                await self._body.aclose()  # type: ignore[attr-defined]  # see is_exhausted
        except Exception:
            logger.warning("Closing the body of %r failed", self._lease, exc_info=True)
        finally:
            self._lease.release(is_abnormal=True)


class LeasedStream:
    """A sync body that holds a slot from its making to its end."""

    def __init__(self, body: Iterator[Any], lease: Lease) -> None:
        self._body = body
        self._lease = lease
        self._has_started = False
        _be_held_by(self, lease, self._end)

    def __iter__(self) -> LeasedStream:
        return self

    def __next__(self) -> Any:
        if not self._has_started and not self._lease.is_held:
            raise LeaseLost(self._lease.lost or NEVER_STARTED)
        self._has_started = True
        self._lease.lift_limit()
        try:
            if self._lease.lost:
                raise StopIteration
            chunk = next(self._body)
        except StopIteration:
            self._finish(is_abnormal=bool(self._lease.lost))
            raise
        except BaseException:
            self._finish(is_abnormal=True)
            raise
        self._lease.limit(settings.IDLE_STREAM, "idle")
        return chunk

    def close(self) -> None:
        self._finish(is_abnormal=True)

    def _end(self) -> None:
        """The slot is wanted back: a running body sees it at its next chunk."""
        if not self._has_started:
            self.close()

    def _finish(self, *, is_abnormal: bool) -> None:
        if not self._lease.is_held:
            return
        try:
            close = getattr(self._body, "close", None)
            if close is not None:
                close()
        finally:
            self._lease.release(is_abnormal=is_abnormal)


def lend(response: StreamingHttpResponse, lease: Lease, *, is_asgi: bool) -> None:
    """Make a streaming response's body own the lease, and stream as its server can."""
    body = response._iterator  # type: ignore[attr-defined]  # streaming_content hides aclose()
    is_events = response.get("Content-Type", "").startswith("text/event-stream")
    if is_events:
        keep_unbuffered(response)
    if not (response.is_async or is_asgi):
        sync_body = KeepAlive(body, settings.KEEP_ALIVE) if is_events else body
        response.streaming_content = LeasedStream(sync_body, lease)
        return
    async_body = body if response.is_async else ThreadedBody(body)
    if is_events:
        async_body = AsyncKeepAlive(async_body, settings.KEEP_ALIVE)
    response.streaming_content = AsyncLeasedStream(async_body, lease)


def keep_unbuffered(response: HttpResponseBase) -> None:
    """Ask proxies and ``GZipMiddleware`` to pass events on as they come."""
    response.setdefault("X-Accel-Buffering", "no")
    response.setdefault("Cache-Control", "no-cache")
    response.setdefault("Content-Encoding", "identity")


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _be_held_by(stream: Any, lease: Lease, end: Callable[[], None]) -> None:
    """Let a body own a lease: it is told when the slot is wanted back, and frees it when dropped.

    The lease knows its body weakly. A cycle would keep a dropped response, and with it the slot,
    until the next garbage collection.
    """
    lease.on_end(_weakly(end))
    lease.limit(settings.START_GRACE, NEVER_STARTED)
    weakref.finalize(stream, lease.release, is_abnormal=True).atexit = False


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """The method, to be called for as long as its object is there."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        found = reference()
        if found is not None:
            found(*args)

    return call


_close_unless_started: ContextVar[weakref.WeakMethod[Callable[[], None]] | None] = ContextVar(
    "llm_throttle_close_unless_started", default=None
)
"""The last body made in this context, which is that of its request.

A client that leaves between the view and the first chunk (while a middleware awaits something)
is seen in different places: up to Django 6.0 the task is cancelled that ran the view; since 6.1
that task goes on, and only ``request_finished`` tells. What both miss, ``START_GRACE`` ends.
"""


def _request_finished(**kwargs: object) -> None:
    reference = _close_unless_started.get()
    close_unless_started = reference() if reference is not None else None
    if close_unless_started is not None:
        close_unless_started()


request_finished.connect(_request_finished, dispatch_uid="llm_throttle.streaming")
