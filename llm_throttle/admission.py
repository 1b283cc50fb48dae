"""``admit`` and ``aadmit``: ask for a slot, wait in line, hold a lease.

The way of one request is written once, as a generator that says what it waits for; the sync and
the async caller below differ only in how they wait. It does nothing but bookkeeping when it is
interrupted, so that a cancelled request has left the queue before its exception goes on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import math
import os
import random
import secrets
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from asgiref.sync import AsyncToSync, SyncToAsync, async_to_sync, sync_to_async

from .conf import settings
from .exceptions import BackendDown, ForeignTicket, LeaseLost, NestedAdmission, Refused
from .identity import Caller, Identity, aidentify, identify
from .lease import Lease
from .roster import Roster, Waiter
from .scheduling import decisions
from .scheduling.commands import Positions, Snapshot
from .scheduling.decisions import Answer, Overview
from .signals import Event, granted, refused
from .sync_waiters import a_thread_may_wait
from .worker import current

ATTEMPTS = 5
"""Times one request asks again because a beat overtook it or the store forgot it."""

LOOK_AGAIN_S = 0.25
"""Seconds between two looks for a ticket while the store recovers."""

TOP_SHARE = 2 / 3
"""The part of the longest Retry-After that estimates may fill; the rest is for spreading."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A step that waits for a future, for ``seconds`` at the longest (None = as it takes)."""

    future: Future[Answer]
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Block:
    """A step that may block: it reads the database."""

    work: Callable[[], object]


Steps = Generator[Wait | Block, Answer | None, Lease]


Taken = tuple[weakref.ref[Lease], "asyncio.Task[object] | None"]

_taken: ContextVar[tuple[Taken, ...]] = ContextVar("llm_throttle_taken", default=())
"""The leases taken in this context, and the task that took each. Known weakly and judged when
asked, so nothing has to reset it: a pool's thread may outlive what it once held."""


def _holds_here(upstream: str) -> bool:
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


class Request:
    """One request's way to a slot.

    ``ticket`` is one to come back with, "" for a new one. ``is_known`` says that the client will
    be told its ticket, and ``has_told`` that it was: then its place is kept when it leaves.
    """

    def __init__(
        self,
        upstream: str,
        identity: Identity,
        wait: float | None = None,
        *,
        ticket: str = "",
        is_known: bool = False,
    ) -> None:
        self.upstream = upstream
        self.identity = identity
        self.waiter: Waiter | None = None
        self.has_told = False
        self._wait_ms = None if wait is None else max(0, int(wait * 1000))
        self._since = time.monotonic()
        self._is_known = is_known
        self._returns_with = ticket

    @property
    def ticket(self) -> str:
        return self.waiter.ticket if self.waiter else self._returns_with

    @property
    def waited(self) -> float:
        return time.monotonic() - self._since

    def steps(self) -> Steps:
        """Ask, wait, and come out with a lease, or raise ``Refused``."""
        self._check_nesting()
        worker = current()
        roster = worker.roster(self.upstream)
        for _ in range(ATTEMPTS):
            waiter = self._new_waiter()
            try:
                answer = yield from self._ask(roster, waiter)
                lease = self._use(roster, waiter, answer)
            except BaseException:
                roster.abandon(waiter, keep_place=self.has_told)
                raise
            if lease is not None:
                note_taken(lease)
                return lease
            if isinstance(answer, decisions.NeedPolicy):
                yield Block(lambda: worker.keeper.publish(self.upstream))
            elif self._returns_with:
                yield from self._look_for_ticket(roster)
        raise self.refusal("backend_down")

    def _check_nesting(self) -> None:
        """Never wait for a slot while holding one of the same upstream: all could do so at once."""
        if self._wait_ms != 0 and _holds_here(self.upstream):
            raise NestedAdmission(
                f"This code holds a slot of {self.upstream!r} and asks for another, which can "
                "wait for ever. Use the lease it has, or ask with wait=0."
            )

    def _new_waiter(self) -> Waiter:
        ticket = self._returns_with or secrets.token_hex(16)
        self.waiter = Waiter(ticket, self.identity.tier, self.identity.flow, self._is_known)
        return self.waiter

    def _look_for_ticket(self, roster: Roster) -> Generator[Wait, Any, None]:
        """Find out why a ticket could not be taken over: try again, or go on with a new one.

        Raises ``ForeignTicket``.
        """
        while self._returns_with:
            answer = yield Wait(roster.ask(Positions((self._returns_with,))))
            assert isinstance(answer, decisions.Places)  # noqa: S101 - it has no other answer
            if answer.places:
                if answer.places[0].flow != self.identity.flow:
                    raise ForeignTicket(self.upstream)
                return
            if not answer.is_recovering:
                self._returns_with = ""
            else:  # its first worker may still bring it back
                yield Wait(Future(), LOOK_AGAIN_S)

    def _ask(self, roster: Roster, waiter: Waiter) -> Generator[Wait | Block, Any, Answer]:
        """Ask and, if queued, wait to the end of it."""
        left_ms = None
        if self._wait_ms is not None:
            left_ms = max(0, self._wait_ms - int(self.waited * 1000))
        if self._returns_with:
            roster.attach(waiter)
        else:
            roster.enqueue(waiter, left_ms)
        answer = yield Wait(waiter.answer)
        if not isinstance(answer, decisions.Queued):
            return answer  # type: ignore[no-any-return]  # what a generator is sent has no type
        yield Block(give_back_connections)
        outcome = yield Wait(waiter.outcome, max(0.0, waiter.deadline - time.monotonic()))
        if outcome is None:
            outcome = yield from self._give_up(roster, waiter)
        return outcome  # type: ignore[no-any-return]  # as above

    def _give_up(self, roster: Roster, waiter: Waiter) -> Generator[Wait, Any, Answer]:
        """Leave at the end of the budget, unless a grant was faster."""
        left = roster.leave(waiter, has_expired=True)
        if left is None:
            return decisions.Granted(waiter.ticket)
        if left is waiter.outcome:  # another request took the ticket over just now
            return (yield Wait(left))  # type: ignore[no-any-return]  # as above
        try:
            done = yield Wait(left)
        except BackendDown:
            done = None
        retry_ms = done.after_ms if isinstance(done, decisions.Done) else 0
        return decisions.Refused("wait_expired", retry_ms)

    def _use(self, roster: Roster, waiter: Waiter, answer: Answer) -> Lease | None:
        """A lease on what was granted; None where it has to be asked for again."""
        if isinstance(answer, decisions.Refused):
            raise self.refusal(answer.reason, answer.retry_ms)
        if not isinstance(answer, decisions.Granted):
            return None
        lease = Lease(roster, waiter.ticket, waiter.tier, self.waited)
        if not roster.start(waiter.ticket, lease):
            lease.release()
            return None
        granted.send_robust(Request, event=self._event())
        return lease

    def refusal(self, reason: str, retry_ms: int = 0) -> Refused:
        """What the caller is told, and the listeners."""
        if reason != "moved":
            refused.send_robust(Request, event=self._event(reason))
        return Refused(
            reason,
            upstream=self.upstream,
            tier=self.identity.tier,
            retry_after=retry_after(reason, retry_ms),
            ticket=self.ticket,
        )

    def refused_for(self, error: BackendDown) -> Refused:
        """The refusal that an unreachable store is to the caller."""
        refusal = self.refusal("backend_down")
        refusal.__cause__ = error
        return refusal

    def _event(self, reason: str = "") -> Event:
        waited_ms = int(self.waited * 1000)
        return Event(self.upstream, self.ticket, self.identity.tier, reason, waited_ms)


def retry_after(reason: str, retry_ms: int) -> int | None:
    """When to come back, in whole seconds from 1 to ``RETRY_AFTER_MAX``; None = never.

    Rounded up and spread at random, so that those refused together do not return together.
    """
    if reason == "moved":
        return None
    ceiling = int(settings.RETRY_AFTER_MAX)
    seconds = max(1, math.ceil(min(_estimate(reason, retry_ms), ceiling * TOP_SHARE)))
    spread = random.randint(0, max(1, seconds // 2))  # noqa: S311 - spreading, not secrecy
    return max(1, min(seconds + spread, ceiling))


def _estimate(reason: str, retry_ms: int) -> float:
    """Seconds until it may be worth while to come back."""
    if retry_ms:
        return retry_ms / 1000
    fixed = {
        "paused": settings.RETRY_AFTER_PAUSED,
        "unserviceable": settings.RETRY_AFTER_PAUSED,
        "backend_down": settings.BREAKER_INTERVAL,
        "shutting_down": 1,
    }
    return float(fixed.get(reason, settings.RETRY_AFTER_DEFAULT))


def give_back_connections() -> bool:
    """Hold no database connection while waiting; False where a transaction needs one."""
    from django.db import connections

    found = list(connections.all(initialized_only=True))
    for connection in found:
        if not connection.in_atomic_block:
            connection.close()
    return not any(connection.in_atomic_block for connection in found)


async def agive_back_connections() -> None:
    """Hold neither a database connection nor, under ASGI, a thread while waiting.

    There, each request has a thread of its own for the sync code that it meets (its session's
    queries, say), and would keep it to its end. The next sync code gets a new one.
    """
    context = SyncToAsync.thread_sensitive_context.get(None)
    threads = SyncToAsync.context_to_thread_executor
    is_ours = context is not None and getattr(AsyncToSync.executors, "current", None) is None
    if is_ours and context not in threads:
        return
    is_idle = await sync_to_async(give_back_connections)()
    if is_idle and is_ours and context and getattr(context, "_executor", None) is None:
        thread = threads.pop(context, None)
        if thread is not None:
            thread.shutdown(wait=False)


# The two ways of waiting


class NoThreadLeft(Exception):
    """As many threads of this process wait already as may."""


def run(request: Request) -> Lease:
    """Walk a request's steps, blocking this thread."""
    try:
        return _walk_sync(request, request.steps())
    except NoThreadLeft as error:
        raise request.refusal("queue_full") from error


def _walk_sync(request: Request, steps: Steps) -> Lease:
    answer: Answer | None = None
    try:
        step = next(steps)
        while True:
            try:
                answer = _take_sync(step)
            except BaseException as error:
                step = steps.throw(error)
            else:
                step = steps.send(answer)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]  # a generator's return value has no type
    except BackendDown as error:
        raise request.refused_for(error) from error


def _take_sync(step: Wait | Block) -> Answer | None:
    if isinstance(step, Block):
        step.work()
        return None
    if step.seconds is None:
        return step.future.result()
    if is_under_asgi():
        return async_to_sync(_take_async)(step)
    with a_thread_may_wait() as may_wait, contextlib.suppress(concurrent.futures.TimeoutError):
        if not may_wait:
            raise NoThreadLeft
        return step.future.result(step.seconds)
    return None


def is_under_asgi() -> bool:
    """Whether this thread runs sync code for an event loop.

    A wait through that loop is cancelled when the client leaves; one in this thread is not.
    """
    # A thread remembers the loop that it last worked for, and a child its parent's.
    loop = getattr(SyncToAsync.threadlocal, "main_event_loop", None)
    pid = getattr(SyncToAsync.threadlocal, "main_event_loop_pid", None)
    return loop is not None and pid == os.getpid() and loop.is_running()


async def arun(request: Request) -> Lease:
    """Walk a request's steps, suspending this task."""
    return await _walk_async(request, request.steps())


async def _walk_async(request: Request, steps: Steps) -> Lease:
    answer: Answer | None = None
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


class Admission(AbstractContextManager[Lease]):
    """``with admit(...) as lease``: the slot is held for the block."""

    def __init__(self, make_request: Callable[[], Request]) -> None:
        self._make_request = make_request
        self._lease: Lease | None = None
        self._is_handed_over = False

    def hand_over(self) -> None:
        """Leave the lease to a response body, which outlives the block."""
        self._is_handed_over = True
        if self._lease is not None:
            note_handed_over(self._lease)

    def __enter__(self) -> Lease:
        self._lease = run(self._make_request())
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


class AsyncAdmission(AbstractAsyncContextManager[Lease]):
    """``async with aadmit(...) as lease``: the slot is held for the block.

    Where the slot is wanted back, the block's task is cancelled and ``LeaseLost`` comes out.
    """

    def __init__(self, caller: Caller, identity: Identity | None, wait: float | None) -> None:
        self._caller = caller
        self._identity = identity
        self._wait = wait
        self._lease: Lease | None = None
        self._stop: TaskStopper | None = None
        self._is_handed_over = False

    def hand_over(self) -> None:
        """Leave the lease to a response body, which outlives the block."""
        self._is_handed_over = True
        if self._lease is not None:
            note_handed_over(self._lease)

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
    caller = Caller(upstream, user, request, scope)
    return Admission(lambda: Request(upstream, identity or identify(caller), wait))


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
