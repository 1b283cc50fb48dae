"""Being rung: how a waiting thread or task is told, from any thread, that there is news."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Iterable

RINGS_AT_ONCE = 8
"""Subscribers rung per turn of an event loop; other tasks come between."""


class Alarm(ABC):
    """Wakes one subscriber, from any thread."""

    @abstractmethod
    def ring(self) -> None: ...


class ThreadAlarm(Alarm):
    """For a thread that waits."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ring(self) -> None:
        self._event.set()

    def wait(self, seconds: float | None) -> None:
        self._event.wait(seconds)
        self._event.clear()


class TaskAlarm(Alarm):
    """For a task of the loop that runs where it is made."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def ring(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed, and the task with it
            self.loop.call_soon_threadsafe(self._event.set)

    def ring_here(self) -> None:
        """Ring from the loop itself."""
        self._event.set()

    async def wait(self, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()
        self._event.clear()


def ring_all(alarms: Iterable[Alarm]) -> None:
    """Ring many, a few per turn of their loops, so that they do not hold up what else runs."""
    by_loop: defaultdict[asyncio.AbstractEventLoop, deque[TaskAlarm]] = defaultdict(deque)
    for alarm in alarms:
        if isinstance(alarm, TaskAlarm):
            by_loop[alarm.loop].append(alarm)
        else:
            alarm.ring()
    for loop, queue in by_loop.items():
        with contextlib.suppress(RuntimeError):  # as above
            loop.call_soon_threadsafe(_ring_some, loop, queue)


def _ring_some(loop: asyncio.AbstractEventLoop, queue: deque[TaskAlarm]) -> None:
    for _ in range(min(RINGS_AT_ONCE, len(queue))):
        queue.popleft().ring_here()
    if queue:
        loop.call_soon(_ring_some, loop, queue)
