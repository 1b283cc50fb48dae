"""Response bodies that own a lease: the slot ends with the body, however it ends.

An iterator *object*, because a generator's ``finally`` and ``response.close()`` each miss some
endings on real servers, and only together see all: the end, an error, a cancelled task while the
body is awaited or while a chunk is being sent, a body that is dropped or never started.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

from django.core.signals import request_finished
from django.http import HttpRequest, StreamingHttpResponse
from django.http.response import HttpResponseBase

from .bodies import CLOSE_WITHIN, Resources, ThreadedBody
from .conf import settings
from .disconnects import event_loop
from .exceptions import LeaseLost
from .keep_alive import AsyncKeepAlive, KeepAlive, is_exhausted
from .lease import Lease
from .nesting import in_use, note_taken
from .resources import agive_back_connections, give_back_connections
from .task_stopper import TaskStopper

logger = logging.getLogger(__name__)

NEVER_STARTED = "never_started"

UNCLOSED = "unclosed"
"""Why a lease ended whose upstream call could not be closed in time: it may run on uncounted."""


BREATHE_S = 0.01
"""A body that never awaits keeps the event loop to itself for so long at the most."""


class Fate:
    """Whether a body's own response went out, known also when the body is no more."""

    is_settled = False


class AsyncLeasedStream:
    """An async body that holds a slot from its making to its end."""

    def __init__(
        self, body: AsyncIterator[Any], lease: Lease, resources: Resources | None = None
    ) -> None:
        self._body = body
        self._lease = lease
        self._resources = resources or Resources()
        self.fate = Fate()
        self._loop = _running_loop()
        self._stop: TaskStopper | None = None
        self._closing: asyncio.Task[None] | None = None
        self._breathe_at = 0.0
        _be_held_by(self, lease, self._end)
        _close_unless_started.set(weakref.WeakMethod(self.close_unless_started))
        if self._loop is not None and (task := asyncio.current_task()) is not None:
            task.add_done_callback(_weakly(self._task_ended))

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

    def _task_ended(self, task: asyncio.Task[Any]) -> None:
        """The task that made the body was cut off before it, or another, came to send it."""
        if task.cancelled():
            self.close_unless_started()

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
        if (loop := event_loop()) is not None:  # in a sync view's thread
            loop.call_soon_threadsafe(_collect_later, loop, weakref.ref(stream))
    else:
        sync_body = KeepAlive(body, settings.KEEP_ALIVE) if is_events else body
        stream = LeasedStream(sync_body, lease, resources)
    response.streaming_content = stream
    if request is not None:
        _end_if_replaced(request, weakref.ref(stream), stream.fate)


def _end_if_replaced(
    request: HttpRequest, stream: weakref.ref[AsyncLeasedStream | LeasedStream], fate: Fate
) -> None:
    """Where a middleware sends another response in the place of ours, free the slot and say so.

    Django closes the request with the response that it has sent. Where the client has left
    instead, it closes neither.
    """
    close = request.close

    def close_and_tell() -> None:
        close()
        is_replaced = not fate.is_settled
        unsent = stream()
        if is_replaced and unsent is not None:  # REST framework's views hold their responses
            unsent.close()
        is_conditional = {"HTTP_IF_NONE_MATCH", "HTTP_IF_MODIFIED_SINCE"} & request.META.keys()
        if is_replaced and not is_conditional:  # 304 Not Modified is as it should be
            logger.warning(
                "The response that %s streams was replaced on its way out: the call that its slot "
                "was taken for is lost.",
                getattr(request.resolver_match, "_func_path", request.path),
            )

    request.close = close_and_tell  # type: ignore[method-assign]  # Django looks it up there


UNSTARTED_S = 0.4
"""A body that nobody has started for so long may be garbage that is not collected yet."""


def _collect_later(loop: asyncio.AbstractEventLoop, body: weakref.ref[AsyncLeasedStream]) -> None:
    loop.call_later(UNSTARTED_S, _collect_if_unstarted, loop, body)


def _collect_if_unstarted(
    loop: asyncio.AbstractEventLoop, body: weakref.ref[AsyncLeasedStream]
) -> None:
    """Free the slot of a response that was dropped and lives on in a cycle.

    REST framework's views hold their responses, and are held by their own requests. Where the
    client leaves before the first byte, only the garbage collector would find them, some time.
    """
    global _collected_at
    stream = body()
    if stream is None or stream.fate.is_settled:
        return
    del stream
    if loop.time() >= _collected_at + UNSTARTED_S:  # slow middleware may keep many waiting
        _collected_at = loop.time()
        gc.collect()
    _collect_later(loop, body)


_collected_at = 0.0


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


def close_unless_started(body: Any) -> None:
    """Have ``body.close_unless_started`` called when its request ends without its being sent."""
    _close_unless_started.set(weakref.WeakMethod(body.close_unless_started))
    drop = _weakly(body.close_unless_started)
    if _running_loop() is not None and (task := asyncio.current_task()) is not None:
        task.add_done_callback(lambda task: drop() if task.cancelled() else None)


def _request_finished(**kwargs: object) -> None:
    reference = _close_unless_started.get()
    close_unless_started = reference() if reference is not None else None
    if close_unless_started is not None:
        close_unless_started()


request_finished.connect(_request_finished, dispatch_uid="llm_throttle.streaming")
