"""Response bodies turned into what their server can stream.

Under ASGI, Django would collect a sync body whole before it sends anything; ``ThreadedBody``
drives it chunk by chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import queue
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from typing import Any

from django.db import connections
from django.http import StreamingHttpResponse

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
