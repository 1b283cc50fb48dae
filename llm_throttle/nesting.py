"""Who holds a slot while this code runs: so that nobody waits for a second one of the same kind."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar

from .lease import Lease

Taken = tuple[weakref.ref[Lease], "asyncio.Task[object] | None"]

_taken: ContextVar[tuple[Taken, ...]] = ContextVar("llm_throttle_taken", default=())
"""The leases taken in this context, and the task that took each. Known weakly and judged when
asked, so nothing has to reset it: a pool's thread may outlive what it once held."""


def holds_here(upstream: str) -> bool:
    """Whether this very task, or the code this thread runs for somebody, holds a slot already."""
    task = _current_task()
    return any(
        lease.upstream == upstream and task in (taker, None)
        for reference, taker in _taken.get()
        if (lease := reference()) is not None and lease.is_held and not lease.lost
    )


def note_taken(lease: Lease) -> None:
    """From now on, this task or thread is one that holds this lease."""
    others = [item for item in _others(lease) if (old := item[0]()) is not None and old.is_held]
    _taken.set((*others, (weakref.ref(lease), _current_task())))


def note_handed_over(lease: Lease) -> None:
    """The lease is a response body's now, and no longer that of the code that took it."""
    _taken.set(_others(lease))


def _others(lease: Lease) -> tuple[Taken, ...]:
    return tuple(item for item in _taken.get() if item[0]() is not lease)


@contextlib.contextmanager
def in_use(lease: Lease) -> Iterator[None]:
    """Around code of somebody else's that runs under a lease: a step of a response body."""
    before = _taken.get()
    note_taken(lease)
    try:
        yield
    finally:
        _taken.set(before)


def _current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None
