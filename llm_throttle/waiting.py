"""A request's wait for those who speak while they wait: what is new comes out on the way.

``admit`` waits silently. A ``Waiting`` walks the same steps, and in between it hands out where
the request stands, so that one task or thread both waits and tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from asgiref.sync import sync_to_async

from .alarms import TaskAlarm, ThreadAlarm
from .exceptions import BackendDown
from .lease import Lease
from .positions import Position
from .request import Block, Request, Wait
from .watching import Subscription, watch
from .worker import current

SOON_S = 60.0
"""The longest that one wait for an alarm lasts; nothing depends on it."""


class Waiting:
    """One request's wait. ``lease`` is there when it has ended well; ``Refused`` is raised else.

    Whoever drops it has left the queue. Its two ways of waiting are below.
    """

    def __init__(self, request: Request, alarm: TaskAlarm | ThreadAlarm) -> None:
        self.request = request
        self.lease: Lease | None = None
        self._alarm_of_any_kind = alarm
        self._steps = request.steps()
        self._step: Wait | Block | None = None
        self._due_at: float | None = None
        self._subscription: Subscription | None = None
        self._advance(partial(next, self._steps))

    @property
    def is_queued(self) -> bool:
        """Whether it waits in line, and not for a first answer."""
        waiter, step = self.request.waiter, self._step
        return waiter is not None and isinstance(step, Wait) and step.future is waiter.outcome

    def news(self) -> Position | None:
        """Where it stands, if that is new. Only for those who wait in line."""
        if self._subscription is None or self._subscription.tickets != {self.request.ticket}:
            self._watch()
        assert self._subscription is not None  # noqa: S101 - it was made just now
        found = [each for each in self._subscription.take() if isinstance(each, Position)]
        return found[0] if found else None

    def take_lease(self) -> Lease:
        """Take over what was granted."""
        lease, self.lease = self.lease, None
        assert lease is not None  # noqa: S101 - whoever calls has looked
        return lease

    def close(self) -> None:
        """Leave the queue, or give back what was granted; keeps the place if the client knows."""
        self._unwatch()
        self._steps.close()
        if self.lease is not None:
            self.lease.release(is_abnormal=True)

    def cancel(self) -> None:
        """Leave for good."""
        self.request.has_told = False
        self.close()

    def _watch(self) -> None:
        self._unwatch()
        roster = current().roster(self.request.upstream)
        self._subscription = watch(roster).subscribe(
            self._alarm_of_any_kind, ticket=self.request.ticket
        )

    def _unwatch(self) -> None:
        if self._subscription is not None:
            self._subscription.close()
            self._subscription = None

    # -- Steps --------------------------------------------------------------------------------

    def _advance(self, move: Callable[[], Wait | Block]) -> None:
        """Make one move; what it waits for next rings the alarm."""
        self._due_at = None
        try:
            self._step = move()
        except StopIteration as end:
            self._step, self.lease = None, end.value
            self._unwatch()
            return
        except BackendDown as error:
            self._step = None
            raise self.request.refused_for(error) from error
        except BaseException:
            self._step = None
            raise
        if isinstance(self._step, Wait):
            if self._step.seconds is not None:
                self._due_at = time.monotonic() + self._step.seconds
            alarm = self._alarm_of_any_kind
            self._step.future.add_done_callback(lambda _: alarm.ring())

    def _settle(self, step: Wait) -> bool:
        """Go on where a step is answered or overdue; False where it has to be waited for."""
        if step.future.done():
            error = step.future.exception()
            if error is not None:
                self._advance(partial(self._steps.throw, error))
            else:
                self._advance(partial(self._steps.send, step.future.result()))
        elif self._due_at is not None and time.monotonic() >= self._due_at:
            self._advance(partial(self._steps.send, None))
        else:
            return False
        return True

    def _seconds_left(self, until: float) -> float:
        end = until if self._due_at is None else min(until, self._due_at)
        return min(SOON_S, max(0.0, end - time.monotonic()))


class AsyncWaiting(Waiting):
    """A wait in a task; it must be made and used in one loop."""

    def __init__(self, request: Request) -> None:
        self._alarm = TaskAlarm()
        super().__init__(request, self._alarm)

    async def begin(self) -> None:
        """Wait for the first answer: granted or queued."""
        await self._go_on()
        while not (self.lease or self.is_queued):
            await self._alarm.wait(self._seconds_left(time.monotonic() + SOON_S))
            await self._go_on()

    async def next(self, seconds: float) -> Position | None:
        """What is new; None when the wait has ended, or ``seconds`` have passed."""
        until = time.monotonic() + seconds
        while True:
            await self._go_on()
            if self.lease is not None:
                return None
            if self.is_queued and (news := self.news()):
                return news
            if time.monotonic() >= until:
                return None
            await self._alarm.wait(self._seconds_left(until))

    async def _go_on(self) -> None:
        while self._step is not None:
            if isinstance(self._step, Block):
                await self._do(self._step)
            elif not self._settle(self._step):
                return

    async def _do(self, step: Block) -> None:
        try:
            await sync_to_async(step.work)()
        except BaseException as error:
            self._advance(partial(self._steps.throw, error))
        else:
            self._advance(partial(self._steps.send, None))


class ThreadWaiting(Waiting):
    """A wait that blocks its thread."""

    def __init__(self, request: Request) -> None:
        self._alarm = ThreadAlarm()
        super().__init__(request, self._alarm)

    def begin(self) -> None:
        """Wait for the first answer: granted or queued."""
        self._go_on()
        while not (self.lease or self.is_queued):
            self._alarm.wait(self._seconds_left(time.monotonic() + SOON_S))
            self._go_on()

    def next(self, seconds: float) -> Position | None:
        """What is new; None when the wait has ended, or ``seconds`` have passed."""
        until = time.monotonic() + seconds
        while True:
            self._go_on()
            if self.lease is not None:
                return None
            if self.is_queued and (news := self.news()):
                return news
            if time.monotonic() >= until:
                return None
            self._alarm.wait(self._seconds_left(until))

    def _go_on(self) -> None:
        while self._step is not None:
            if isinstance(self._step, Block):
                self._do(self._step)
            elif not self._settle(self._step):
                return

    def _do(self, step: Block) -> None:
        try:
            step.work()
        except BaseException as error:
            self._advance(partial(self._steps.throw, error))
        else:
            self._advance(partial(self._steps.send, None))
