"""Sync code that runs for an event loop hears that its client has left.

Django cancels the request when an ASGI client disconnects. asgiref hands the cancellation on to
what the thread of a sync view runs in the loop (``async_to_sync``), and to nothing else: a thread
that waits on its own, or does not wait yet, is never told. So something that can be cancelled is
put where asgiref looks, for as long as there may be somebody to wait in vain.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from typing import Any, Self

from asgiref.sync import SyncToAsync


class Departure:
    """Stands among the tasks that asgiref cancels; ``when`` is done once it was."""

    def __init__(self) -> None:
        self.when: Future[None] = Future()

    @classmethod
    def here(cls) -> Self | None:
        """The one that this thread has been watching for since ``watch``."""
        return next((item for item in _cancelled_with_us() if isinstance(item, cls)), None)

    def cancel(self) -> None:
        if not self.when.done():
            self.when.set_result(None)

    def __await__(self) -> Generator[None, None, None]:
        """As a task that was cancelled: asgiref waits for the end of what it has cancelled."""
        raise asyncio.CancelledError
        yield

    def check(self) -> None:
        """Raise what a coroutine would meet."""
        if self.when.done():
            raise asyncio.CancelledError

    def wait(self, future: Future[Any], seconds: float) -> None:
        """Wait for a future for so long at the most; raises where the client leaves before."""
        wait({future, self.when}, seconds, FIRST_COMPLETED)
        if not future.done():
            self.check()


def watch() -> None:
    """From now on, notice that the client leaves, until ``noticed`` has ended.

    As early as there is a thread for the request: who leaves while it is authenticated has left.
    """
    if is_under_asgi() and Departure.here() is None:
        _cancelled_with_us().insert(0, Departure())


@contextmanager
def noticed() -> Iterator[Departure | None]:
    """Watch for the client during this block; None where there is no loop to hear it from.

    Not longer: of what asgiref could cancel it cancels the first, and that is then the code's own.
    """
    watch()
    departure = Departure.here()
    try:
        if departure is not None:
            departure.check()
        yield departure
    finally:
        if departure is not None:
            _cancelled_with_us().remove(departure)


def _cancelled_with_us() -> list[Any]:
    """What asgiref cancels when it is to cancel the sync code of this thread."""
    found: list[Any] | None = getattr(SyncToAsync.threadlocal, "task_context", None)
    return [] if found is None else found


def is_under_asgi() -> bool:
    """Whether this thread runs sync code for an event loop."""
    return event_loop() is not None


def event_loop() -> asyncio.AbstractEventLoop | None:
    """The running loop that this thread runs sync code for."""
    # A thread remembers the loop that it last worked for, and a child its parent's.
    loop = getattr(SyncToAsync.threadlocal, "main_event_loop", None)
    pid = getattr(SyncToAsync.threadlocal, "main_event_loop_pid", None)
    return loop if loop is not None and pid == os.getpid() and loop.is_running() else None
