"""Response bodies that own a lease: the slot ends with the body, however it ends.

An iterator *object*, because a generator's ``finally`` and ``response.close()`` each miss some
endings on real servers, and only together see all: the end, an error, a cancelled task while the
body is awaited or while a chunk is being sent, a body that is dropped or never started.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from django.http import StreamingHttpResponse
from django.http.response import HttpResponseBase

from .bodies import CLOSE_WITHIN, Resources, ThreadedBody
from .conf import settings
from .exceptions import LeaseLost
from .keep_alive import AsyncKeepAlive, KeepAlive, is_exhausted
from .lease import Lease
from .nesting import in_use, note_taken
from .resources import agive_back_connections, give_back_connections
from .task_stopper import TaskStopper
from .unsent import (
    Fate,
    close_unless_started,
    collect_unless_started,
    end_if_replaced,
    running_loop,
    weakly,
)

logger = logging.getLogger(__name__)

NEVER_STARTED = "never_started"

UNCLOSED = "unclosed"
"""Why a lease ended whose upstream call could not be closed in time: it may run on uncounted."""


BREATHE_S = 0.01
"""A body that never awaits keeps the event loop to itself for so long at the most."""


class AsyncLeasedStream:
    """An async body that holds a slot from its making to its end."""

    def __init__(
        self, body: AsyncIterator[Any], lease: Lease, resources: Resources | None = None
    ) -> None:
        self._body = body
        self._lease = lease
        self._resources = resources or Resources()
        self.fate = Fate()
        self._loop = running_loop()
        self._stop: TaskStopper | None = None
        self._closing: asyncio.Task[None] | None = None
        self._breathe_at = 0.0
        _be_held_by(self, lease, self._end)
        close_unless_started(self)

    def __aiter__(self) -> AsyncLeasedStream:
        return self

    async def __anext__(self) -> Any:
        is_first = self._stop is None
        if is_first:
            self._start()
        self._lease.lift_limit()
        try:
            if is_first:  # and no sooner: on the way out, middleware has used them again
                await agive_back_connections()
            await self._breathe()
            with in_use(self._lease):
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

    async def _breathe(self) -> None:
        """Let the loop turn now and then, also where the body and the server never await.

        Else no other request would be served, and nobody would see that the client has gone.
        """
        now = time.monotonic()
        if now >= self._breathe_at:
            await asyncio.sleep(0)
            self._breathe_at = now + BREATHE_S

    async def aclose(self) -> None:
        await self._finish()

    def close(self) -> None:
        """For ``response.close()``, which Django calls in a thread or under the loop."""
        self.fate.is_settled = True
        has_loop = self._loop is not None and not self._loop.is_closed()
        if has_loop and self._lease.is_held and not self._is_exhausted:
            self._loop.call_soon_threadsafe(self._start_closing)  # type: ignore[union-attr]  # has_loop
            return
        for unfinished in self._resources.close():
            if has_loop:
                asyncio.run_coroutine_threadsafe(unfinished, self._loop)  # type: ignore[arg-type]  # ditto
            else:
                unfinished.close()
        self._lease.release(is_abnormal=True)

    def close_unless_started(self) -> None:
        """For the end of the request, whose response may have been dropped on its way out."""
        if self._stop is None:
            self.close()

    def _start(self) -> None:
        if not self._lease.is_held:
            raise LeaseLost(self._lease.lost or NEVER_STARTED)
        self.fate.is_settled = True
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
        if self._is_exhausted and not self._resources:
            self._lease.release(is_abnormal=True)
            return
        await asyncio.shield(self._start_closing())

    def _start_closing(self) -> asyncio.Task[None]:
        if self._closing is None:
            assert self._loop is not None  # noqa: S101 - this runs in it
            self._closing = self._loop.create_task(self._close_then_release())
        return self._closing

    async def _close_then_release(self) -> None:
        reason = ""
        try:
            async with asyncio.timeout(CLOSE_WITHIN):
                if not self._is_exhausted:
                    await self._body.aclose()  # type: ignore[attr-defined]  # see is_exhausted
                await self._resources.aclose()
        except Exception as error:
            reason = _why_unclosed(error, self._lease)
        finally:
            self._lease.release(is_abnormal=True, reason=reason)


class LeasedStream:
    """A sync body that holds a slot from its making to its end."""

    def __init__(
        self, body: Iterator[Any], lease: Lease, resources: Resources | None = None
    ) -> None:
        self._body = body
        self._lease = lease
        self._resources = resources or Resources()
        self.fate = Fate()
        self._has_started = False
        self._running = threading.Lock()
        _be_held_by(self, lease, self._end)

    def __iter__(self) -> LeasedStream:
        return self

    def __next__(self) -> Any:
        if not self._has_started:
            self._start()
        self._lease.lift_limit()
        try:
            with self._running, in_use(self._lease):
                if not self._lease.is_held or self._lease.lost:
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

    def _start(self) -> None:
        if not self._lease.is_held:
            raise LeaseLost(self._lease.lost or NEVER_STARTED)
        self.fate.is_settled = True
        self._has_started = True
        give_back_connections()

    def close(self) -> None:
        self.fate.is_settled = True
        self._finish(is_abnormal=True)

    def _end(self) -> None:
        """The slot is wanted back: a running body sees it at its next chunk, any other ends here.

        A server that cannot send (its client reads no more) never asks for a next chunk.
        """
        threading.Thread(target=self.close, name="llm-throttle-closing", daemon=True).start()

    def _finish(self, *, is_abnormal: bool) -> None:
        with self._running:
            if not self._lease.is_held:
                return
            reason = ""
            try:
                close = getattr(self._body, "close", None)
                if close is not None:
                    close()
                for unfinished in self._resources.close():
                    unfinished.close()  # nobody can await it here
            except Exception as error:
                reason = _why_unclosed(error, self._lease)
            finally:
                self._lease.release(is_abnormal=is_abnormal, reason=reason)


def _why_unclosed(error: Exception, lease: Lease) -> str:
    """Tell that closing failed; a reason where the upstream call may have outlived it."""
    if not isinstance(error, TimeoutError):
        logger.warning("Closing the body of %r failed", lease, exc_info=error)
        return ""
    logger.warning("The call under %r could not be closed within %s s", lease, CLOSE_WITHIN)
    return UNCLOSED


def lend(
    response: StreamingHttpResponse, lease: Lease, *, is_asgi: bool, request: Any = None
) -> None:
    """Make a streaming response's body own the lease, and stream as its server can."""
    body = response._iterator  # type: ignore[attr-defined]  # streaming_content hides aclose()
    resources = Resources.of(response, body)
    is_events = response.get("Content-Type", "").startswith("text/event-stream")
    if is_events:
        keep_unbuffered(response)
    stream: AsyncLeasedStream | LeasedStream
    if response.is_async or is_asgi:
        async_body = body if response.is_async else ThreadedBody(body)
        if is_events:
            async_body = AsyncKeepAlive(async_body, settings.KEEP_ALIVE, lambda: note_taken(lease))
        stream = AsyncLeasedStream(async_body, lease, resources)
        collect_unless_started(stream)
    else:
        sync_body = KeepAlive(body, settings.KEEP_ALIVE) if is_events else body
        stream = LeasedStream(sync_body, lease, resources)
    response.streaming_content = stream
    if request is not None:
        end_if_replaced(request, stream)


def keep_unbuffered(response: HttpResponseBase) -> None:
    """Ask proxies and ``GZipMiddleware`` to pass events on as they come."""
    response.setdefault("X-Accel-Buffering", "no")
    response.setdefault("Cache-Control", "no-cache")
    response.setdefault("Content-Encoding", "identity")


def _be_held_by(stream: Any, lease: Lease, end: Callable[[], None]) -> None:
    """Let a body own a lease: it is told when the slot is wanted back, and frees it when dropped.

    The lease knows its body weakly. A cycle would keep a dropped response, and with it the slot,
    until the next garbage collection.
    """
    lease.on_end(weakly(end))
    lease.limit(settings.START_GRACE, NEVER_STARTED)
    weakref.finalize(stream, lease.release, is_abnormal=True).atexit = False
