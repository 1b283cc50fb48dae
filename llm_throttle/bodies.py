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
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from typing import Any

from django.db import connections
from django.http import StreamingHttpResponse

COMMENT = b": keep-alive\n"
"""A comment of the event-stream format: every client ignores it, wherever a line begins."""

END = object()
"""What stands for the end of a body; a future cannot carry ``StopIteration``."""

CLOSE_WITHIN = 2.0
"""Seconds that closing the upstream call may take before its slot is given back regardless."""


class Resources:
    """What a streaming response closes at its end beside its body: files, calls of an SDK.

    They are closed once, by whoever owns the body and before its slot is given back.
    """

    def __init__(self, closers: list[Callable[[], Any]] | None = None) -> None:
        self._closers = closers or []

    @classmethod
    def of(cls, response: StreamingHttpResponse, body: Any) -> Resources:
        """Take over what this response would close; the body itself is its owner's affair."""
        found: list[Any] = response._resource_closers  # type: ignore[attr-defined]  # Django's own
        theirs = [closer for closer in found if closer != getattr(body, "close", None)]
        found.clear()
        return cls(theirs)

    def __bool__(self) -> bool:
        return bool(self._closers)

    def close(self) -> list[Coroutine[Any, Any, Any]]:
        """Close all; what is left to await: an async SDK's clients are closed by coroutines."""
        results = [self._closers.pop()() for _ in list(self._closers)]
        return [result for result in results if inspect.iscoroutine(result)]

    async def aclose(self) -> None:
        await asyncio.gather(*self.close())


class Pulse:
    """Says what may be sent while a body of events is silent."""

    def __init__(self) -> None:
        self._tail = b"\n\n"

    def heard(self, chunk: Any) -> None:
        last = chunk[-2:].encode() if isinstance(chunk, str) else bytes(chunk[-2:])
        self._tail = (self._tail + last)[-2:]

    def comment(self) -> bytes | None:
        """A comment, and the end of its block between two events; None in the midst of a line."""
        if not self._tail.endswith(b"\n"):
            return None
        return COMMENT + b"\n" if self._tail == b"\n\n" else COMMENT


class BodyThread:
    """Drives one sync body in a thread of its own, so that a silent one can be waited for.

    A daemon: a body that hangs must not keep the process from ending. The thread ends with the
    body, which it closes whatever its end.
    """

    def __init__(self, body: Iterator[Any], owner: object) -> None:
        self._body = body
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self.has_ended = False
        run = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run, args=(self._work,), name="llm-throttle-body", daemon=True
        )
        # Whoever drops a body that it has begun, without closing it, must not leave a thread.
        weakref.finalize(owner, self.close).atexit = False

    def next(self) -> Future[Any]:
        """The next chunk, or ``END``."""
        return self._put(self._next)

    def close(self) -> Future[Any]:
        """Close the body, after the chunk that it is at, and end the thread."""
        return self._put(self._close)

    def _put(self, job: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self.has_ended:
                future.set_result(END)
                return future
            if not self._thread.is_alive():
                self._thread.start()
            self._jobs.put((job, future))
        return future

    def _work(self) -> None:
        while not self.has_ended:
            self._do(*self._jobs.get())
        while not self._jobs.empty():
            self._jobs.get()[1].set_result(END)
        connections.close_all()

    def _do(self, job: Callable[[], Any], future: Future[Any]) -> None:
        try:
            result = job()
        except BaseException as error:  # handed on to whoever waits for the chunk
            self._end()
            future.set_exception(error)
        else:
            if result is END:
                self._end()
            future.set_result(result)

    def _end(self) -> None:
        with self._lock:
            self.has_ended = True

    def _next(self) -> Any:
        try:
            chunk = next(self._body, END)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to tell
                self._close()
            raise
        return self._close() if chunk is END else chunk

    def _close(self) -> object:
        close = getattr(self._body, "close", None)
        if close is not None:
            close()
        return END


class ThreadedBody:
    """A sync body as an async one."""

    def __init__(self, body: Iterator[Any]) -> None:
        self._thread = BodyThread(body, self)

    @property
    def is_exhausted(self) -> bool:
        return self._thread.has_ended

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
    """An async body of server-sent events that is never silent for longer than ``interval``.

    One task drives the body from its first chunk to its closing: time limits, task groups and
    cancel scopes that stay open across a ``yield`` belong to the task that entered them.
    """

    def __init__(
        self,
        body: AsyncIterator[Any],
        interval: float,
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        self._body = body
        self._interval = interval
        self._on_start = on_start  # called in that task
        self._pulse = Pulse()
        self._asked: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()
        self._next: asyncio.Future[Any] | None = None
        self._driver: asyncio.Task[None] | None = None
        self._is_cancelled = False

    @property
    def is_exhausted(self) -> bool:
        if self._driver is None:
            return is_exhausted(self._body)
        return self._driver.done()

    def __aiter__(self) -> AsyncKeepAlive:
        return self

    async def __anext__(self) -> Any:
        if self._next is None:
            self._next = self._ask()
        while True:
            try:
                done, _ = await asyncio.wait({self._next}, timeout=self._interval)
            except BaseException:
                self._cancel()
                raise
            if done:
                chunk, self._next = self._next.result(), None
                if chunk is END:
                    raise StopAsyncIteration
                self._pulse.heard(chunk)
                return chunk
            if comment := self._pulse.comment():
                return comment

    def _ask(self) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._driver is None:
            self._driver = asyncio.create_task(self._drive())
        if self._is_cancelled or self._driver.done():
            future.set_result(END)
        else:
            self._asked.put_nowait(future)
        return future

    def _cancel(self) -> None:
        """Stop the body where it is; nobody waits for its chunk any more."""
        if self._next is not None and not self._next.cancel() and not self._next.cancelled():
            self._next.exception()  # heard, so that nobody complains of it
        self._next = None
        if self._driver is not None and not self._is_cancelled:
            self._is_cancelled = True
            self._driver.cancel()

    async def _drive(self) -> None:
        asked: asyncio.Future[Any] | None = None
        last: Any = END
        self._on_start()
        try:
            while True:
                asked = await self._asked.get()
                chunk = await anext(self._body, END)
                if chunk is END:
                    break
                _settle(asked, chunk)
        except Exception as error:
            if asked is None or asked.done():
                raise
            last = error
        finally:
            await self._close()
        _settle(asked, last)

    async def _close(self) -> None:
        close = getattr(self._body, "aclose", None)
        if close is not None:
            await close()

    async def aclose(self) -> None:
        if self._driver is None:
            await self._close()
            return
        self._cancel()
        try:
            await asyncio.wait({self._driver})
        except asyncio.CancelledError:
            self._driver.cancel()  # it hangs in its clean-up
            raise
        if not self._driver.cancelled() and (error := self._driver.exception()) is not None:
            raise error


def _settle(future: asyncio.Future[Any], result: Any) -> None:
    """Answer a future unless whoever asked has gone."""
    if future.done():
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def is_exhausted(body: AsyncIterator[Any]) -> bool:
    """Whether closing a body would do nothing: its own clean-up has run, or it has none."""
    if isinstance(body, AsyncKeepAlive | ThreadedBody):
        return body.is_exhausted
    if inspect.isasyncgen(body):
        return body.ag_frame is None
    return not hasattr(body, "aclose")


class KeepAlive:
    """A sync body of server-sent events that is never silent for longer than ``interval``."""

    def __init__(self, body: Iterator[Any], interval: float) -> None:
        self._thread = BodyThread(body, self)
        self._interval = interval
        self._pulse = Pulse()
        self._next: Future[Any] | None = None

    def __iter__(self) -> KeepAlive:
        return self

    def __next__(self) -> Any:
        if self._next is None:
            self._next = self._thread.next()
        while not wait({self._next}, self._interval).done:
            if comment := self._pulse.comment():
                return comment
        chunk, self._next = self._next.result(), None
        if chunk is END:
            raise StopIteration
        self._pulse.heard(chunk)
        return chunk

    def close(self) -> None:
        """Close the body; one that hangs is left to its thread after a while.

        Raises ``TimeoutError`` where it does.
        """
        self._thread.close().result(CLOSE_WITHIN)
