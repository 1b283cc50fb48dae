"""Bodies of server-sent events that are never silent for long.

A silent stream is cut off by proxies, and under WSGI nobody would notice that its client has gone:
these send a comment now and then.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

from .bodies import CLOSE_WITHIN, END, BodyThread, ThreadedBody

COMMENT = b": keep-alive\n"
"""A comment of the event-stream format: every client ignores it, wherever a line begins."""


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
