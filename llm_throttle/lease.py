"""The right to hold a slot, from grant to release."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable

from .exceptions import LeaseLost
from .roster import Roster
from .signals import Event, lease_lost, released, reported

logger = logging.getLogger(__name__)


class Lease:
    """One held slot. Whoever uses it keeps it alive; a lease that is dropped is given back.

    ``waited`` is in seconds. ``lost`` says why the slot is wanted back (``revoked``: an operator
    or ``max_hold``; ``idle``, ``gone``, ``unconfirmed``, ``presumed_dead``), "" while all is well.
    """

    def __init__(self, roster: Roster, ticket: str, tier: str, waited: float) -> None:
        self.upstream = roster.upstream
        self.ticket = ticket
        self.tier = tier
        self.waited = waited
        self.lost = ""
        self._since = time.monotonic()
        self._lock = threading.Lock()
        self._on_end: Callable[[], None] | None = None
        self._overdue_at = math.inf
        self._overdue_reason = ""
        self._give_back = weakref.finalize(self, roster.release, ticket, is_abnormal=True)
        self._give_back.atexit = False
        self._roster = roster

    def __repr__(self) -> str:
        return f"<Lease {self.upstream} {self.tier} {self.ticket[:8]}{self.lost and ' lost'}>"

    @property
    def is_held(self) -> bool:
        return self._give_back.alive

    def release(self, *, is_abnormal: bool = False, reason: str = "") -> None:
        """Give the slot back; any further call does nothing. Never blocks, never raises."""
        if self._give_back.detach() is None:
            return
        self._roster.release(self.ticket, is_abnormal=is_abnormal)
        released.send_robust(type(self), event=self._event(reason or self.lost))

    def disown(self) -> None:
        """In a forked child: the slot is the parent's, who still holds it."""
        self.lost = "forked"
        self._give_back.detach()

    def report(self, status: int, retry_after: float | None = None) -> None:
        """Record what the provider answered: its HTTP status and, in seconds, its Retry-After."""
        event = self._event(f"upstream_{status}")
        reported.send_robust(type(self), event=event, status=status, retry_after=retry_after)

    def on_end(self, stop: Callable[[], None] | None) -> None:
        """Have ``stop`` called, from any thread, when the slot is wanted back.

        Raises ``LeaseLost`` where it is already.
        """
        with self._lock:
            if self.lost and stop is not None:
                raise LeaseLost(self.lost)
            self._on_end = stop

    def limit(self, seconds: float, reason: str) -> None:
        """Have the lease end for ``reason`` unless the limit is moved or lifted in time."""
        self._overdue_reason = reason
        self._overdue_at = time.monotonic() + seconds

    def lift_limit(self) -> None:
        self._overdue_at = math.inf

    def end_if_overdue(self, now: float) -> None:
        if now >= self._overdue_at:
            self.end(self._overdue_reason)

    def end(self, reason: str) -> None:
        """Want the slot back: stop the call that uses it. The slot is free when it has stopped."""
        with self._lock:
            if self.lost or not self.is_held:
                return
            self.lost = reason
            stop = self._on_end
        logger.warning("The lease %s at %s is lost: %s", self.ticket, self.upstream, reason)
        lease_lost.send_robust(type(self), event=self._event(reason))
        if stop is not None:
            stop()

    def _event(self, reason: str) -> Event:
        held_ms = int((time.monotonic() - self._since) * 1000)
        waited_ms = int(self.waited * 1000)
        return Event(self.upstream, self.ticket, self.tier, reason, waited_ms, held_ms)
