"""Response bodies turned into what their server can stream: in a thread, with signs of life.

Under ASGI, Django would collect a sync body whole before it sends anything; ``ThreadedBody``
drives it chunk by chunk. A body of server-sent events that is silent for long is cut off by
proxies, and under WSGI nobody would notice that its client has gone; the ``KeepAlive`` bodies
send a comment now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from typing import Any

from django.db import connections

COMMENT = b": keep-alive\n\n"
"""A comment of the event-stream format: every client ignores it."""

END = object()
"""What the thread answers at the end of a body; a future cannot carry ``StopIteration``."""

CLOSE_WITHIN = 2.0
"""Seconds that closing the upstream call may take before its slot is given back regardless."""


class BodyThread:
    """Drives one sync body in a thread of its own, so that a silent one can be waited for.

    A daemon: a body that hangs must not keep the process from ending.
    """

    def __init__(self, body: Iterator[Any]) -> None:
        self._body = body
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._is_closed = False
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._work,), name="llm-throttle-body", daemon=True
        )

    def next(self) -> Future[Any]:
        """The next chunk, or ``END``."""
        if not self._thread.is_alive():
            self._thread.start()
        return self._put(lambda: next(self._body, END))

    def close(self) -> Future[Any]:
        """Close the body, after the chunk that it is at, and end the thread."""
        close: Callable[[], Any] = getattr(self._body, "close", lambda: None)
        if not self._thread.is_alive():
            self._thread.start()
        done = self._put(close)
        self._jobs.put(None)
        return done

    def _put(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._jobs.put((job, future))
        return future

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future = item
            try:
                future.set_result(job())
            except BaseException as error:  # handed on to whoever waits for the chunk
                future.set_exception(error)
        connections.close_all()


class ThreadedBody:
    """A sync body as an async one."""

    def __init__(self, body: Iterator[Any]) -> None:
        self._thread = BodyThread(body)

    def __aiter__(self) -> ThreadedBody:
        return self

    async def __anext__(self) -> Any:
        chunk = await asyncio.wrap_future(_uncancelled(self._thread.next()))
        if chunk is END:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        await asyncio.wrap_future(_uncancelled(self._thread.close()))


def _uncancelled(future: Future[Any]) -> Future[Any]:
    """A future that may be cancelled without the thread's own being so."""
    copy: Future[Any] = Future()

    def hand_on(done: Future[Any]) -> None:
        if copy.set_running_or_notify_cancel():
            error = done.exception()
            if error is not None:
                copy.set_exception(error)
            else:
                copy.set_result(done.result())

    future.add_done_callback(hand_on)
    return copy


class AsyncKeepAlive:
    """An async body of server-sent events that is never silent for longer than ``interval``."""

    def __init__(self, body: AsyncIterator[Any], interval: float) -> None:
        self._body = body
        self._interval = interval
        self._next: asyncio.Task[Any] | None = None

    def __aiter__(self) -> AsyncKeepAlive:
        return self

    async def __anext__(self) -> Any:
        if self._next is None:
            self._next = asyncio.ensure_future(_next_or_end(self._body))
        try:
            done, _ = await asyncio.wait({self._next}, timeout=self._interval)
        except BaseException:
            self._next.cancel()
            raise
        if not done:
            return COMMENT
        chunk, self._next = self._next.result(), None
        if chunk is END:
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        if self._next is not None:
            self._next.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await self._next
        close = getattr(self._body, "aclose", None)
        if close is not None:
            await close()


def is_exhausted(body: AsyncIterator[Any]) -> bool:
    """Whether closing a body would do nothing: its own clean-up has run, or it has none."""
    if isinstance(body, AsyncKeepAlive):
        return body._next is None and is_exhausted(body._body)
    if inspect.isasyncgen(body):
        return body.ag_frame is None
    return not hasattr(body, "aclose")


async def _next_or_end(body: AsyncIterator[Any]) -> Any:
    return await anext(body, END)


class KeepAlive:
    """A sync body of server-sent events that is never silent for longer than ``interval``."""

    def __init__(self, body: Iterator[Any], interval: float) -> None:
        self._thread = BodyThread(body)
        self._interval = interval
        self._next: Future[Any] | None = None

    def __iter__(self) -> KeepAlive:
        return self

    def __next__(self) -> Any:
        if self._next is None:
            self._next = self._thread.next()
        try:
            chunk = self._next.result(self._interval)
        except TimeoutError:
            if not self._next.done():
                return COMMENT
            raise
        self._next = None
        if chunk is END:
            raise StopIteration
        return chunk

    def close(self) -> None:
        """Close the body; one that hangs is left to its thread after a while."""
        with contextlib.suppress(TimeoutError):
            self._thread.close().result(CLOSE_WITHIN)
