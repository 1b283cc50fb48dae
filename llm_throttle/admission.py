"""``admit`` and ``aadmit``: ask for a slot, wait in line, hold a lease."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import Any

from asgiref.sync import sync_to_async

from .disconnects import Departure, noticed
from .exceptions import BackendDown, LeaseLost
from .identity import Caller, Identity, aidentify, identify
from .lease import Lease
from .nesting import note_handed_over
from .request import Block, Request, Steps, Wait
from .resources import agive_back_connections, give_back_connections
from .scheduling.commands import Snapshot
from .scheduling.decisions import Answer, Overview
from .sync_waiters import a_thread_may_wait
from .task_stopper import TaskStopper
from .worker import current

# The two ways of waiting


class NoThreadLeft(Exception):
    """As many threads of this process wait already as may."""


def run(request: Request) -> Lease:
    """Walk a request's steps, blocking this thread."""
    try:
        with noticed() as departure:
            return _walk_sync(request, request.steps(), departure)
    except NoThreadLeft as error:
        raise request.refusal("queue_full") from error


def _walk_sync(request: Request, steps: Steps, departure: Departure | None) -> Lease:
    try:
        step = next(steps)
        while True:
            try:
                answer = _take_sync(request, step, departure)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # a generator's return value has no type
    except BackendDown as error:
        raise request.refused_for(error) from error


def _take_sync(request: Request, step: Wait | Block, departure: Departure | None) -> Answer | None:
    if isinstance(step, Block):
        step.work()
        return None
    if step.seconds is None:
        return step.future.result()
    if departure is not None:
        departure.wait(step.future, step.seconds)
        return step.future.result() if step.future.done() else None
    with a_thread_may_wait(request) as may_wait, contextlib.suppress(TimeoutError):
        give_back_connections()
        if not may_wait:
            raise NoThreadLeft
        return step.future.result(step.seconds)
    return None


async def arun(request: Request) -> Lease:
    """Walk a request's steps, suspending this task."""
    steps = request.steps()
    try:
        step = next(steps)
        while True:
            try:
                answer = await _take_async(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # a generator's return value has no type
    except BackendDown as error:
        raise request.refused_for(error) from error


async def _take_async(step: Wait | Block) -> Answer | None:
    if isinstance(step, Block):
        if step.work is give_back_connections:
            await agive_back_connections()
        else:
            await sync_to_async(step.work)()
        return None
    if step.future.done():
        return step.future.result()
    try:
        async with asyncio.timeout(step.seconds):
            return await asyncio.wrap_future(step.future)
    except TimeoutError:
        return None


# The public entrances


class _Admission:
    """What the two kinds of block have in common."""

    def __init__(self, caller: Caller, identity: Identity | None, wait: float | None) -> None:
        self._caller = caller
        self._identity = identity
        self._wait = wait
        self._lease: Lease | None = None
        self._is_handed_over = False

    def hand_over(self) -> None:
        """Leave the lease to a response body, which outlives the block."""
        self._is_handed_over = True
        if self._lease is not None:
            note_handed_over(self._lease)


class Admission(_Admission, AbstractContextManager[Lease]):
    """``with admit(...) as lease``: the slot is held for the block."""

    def __enter__(self) -> Lease:
        identity = self._identity or identify(self._caller)
        self._lease = run(Request(self._caller.upstream, identity, self._wait))
        return self._lease

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._lease is not None  # noqa: S101 - with enters before it exits
        if self._is_handed_over:
            return
        self._lease.release(is_abnormal=kind is not None)
        if kind is None and self._lease.lost:
            raise LeaseLost(self._lease.lost)


class AsyncAdmission(_Admission, AbstractAsyncContextManager[Lease]):
    """``async with aadmit(...) as lease``: the slot is held for the block.

    Where the slot is wanted back, the block's task is cancelled and ``LeaseLost`` comes out.
    """

    _stop: TaskStopper | None = None

    async def __aenter__(self) -> Lease:
        identity = self._identity or await aidentify(self._caller)
        lease = await arun(Request(self._caller.upstream, identity, self._wait))
        self._lease, self._stop = lease, TaskStopper()
        try:
            lease.on_end(self._stop)
        except LeaseLost:
            lease.release()
            raise
        return lease

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        lease, stop = self._lease, self._stop
        assert lease is not None and stop is not None  # noqa: S101 - it entered
        if self._is_handed_over:
            return
        lease.on_end(None)
        lease.release(is_abnormal=kind is not None)
        if stop.was_ours(kind):
            raise LeaseLost(lease.lost) from error


def admit(
    upstream: str,
    *,
    user: Any = None,
    request: Any = None,
    scope: Mapping[str, Any] | None = None,
    identity: Identity | None = None,
    wait: float | None = None,
) -> Admission:
    """Hold a slot of ``upstream`` for a ``with`` block, after waiting in line where need be.

    ``user`` (or ``identity``, where the caller knows its own) says whose share it is; ``wait``
    shortens the tier's wait budget, in seconds (0 = do not queue). Entering raises ``Refused``,
    ``UnknownUpstream`` or ``ImproperlyConfigured``.
    """
    return Admission(Caller(upstream, user, request, scope), identity, wait)


def aadmit(
    upstream: str,
    *,
    user: Any = None,
    request: Any = None,
    scope: Mapping[str, Any] | None = None,
    identity: Identity | None = None,
    wait: float | None = None,
) -> AsyncAdmission:
    """``admit`` for ``async with``: nothing blocks the event loop while it waits."""
    return AsyncAdmission(Caller(upstream, user, request, scope), identity, wait)


def snapshot(upstream: str) -> Overview:
    """Who holds what and who waits at an upstream now, over all workers.

    Raises ``BackendDown``.
    """
    overview = current().call(upstream, Snapshot())
    assert isinstance(overview, Overview)  # noqa: S101 - a snapshot has no other answer
    return overview


async def asnapshot(upstream: str) -> Overview:
    """``snapshot`` for async callers."""
    return await sync_to_async(snapshot, thread_sensitive=False)(upstream)
