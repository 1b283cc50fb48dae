"""Stop a task from outside, and know one's own cancellation from everybody else's."""

from __future__ import annotations

import asyncio
import contextlib


class TaskStopper:
    """Cancels the task that made it, from any thread, and tells its own cancellation apart."""

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None  # noqa: S101 - coroutines run in tasks
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._cancelling = task.cancelling()
        self._has_cancelled = False

    def __call__(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has closed, and the task with it
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if not self._task.done():
            self._has_cancelled = True
            self._task.cancel()

    def was_ours(self, kind: type[BaseException] | None) -> bool:
        """Whether this exception is our cancellation and nobody else's; then take it back."""
        if not self._has_cancelled:
            return False
        is_only_ours = self._task.uncancel() <= self._cancelling
        return is_only_ours and kind is not None and issubclass(kind, asyncio.CancelledError)
