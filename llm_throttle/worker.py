"""This process as the store sees it: its rosters, its beat, its clean leave."""

from __future__ import annotations

import atexit
import contextlib
import heapq
import itertools
import logging
import os
import secrets
import socket
import threading
import time
from functools import partial

from .backends import Backend, Stamp, make_backend
from .beats import Beats
from .conf import settings
from .exceptions import BackendDown
from .policies import retired
from .policy_keeper import PolicyKeeper
from .roster import Roster
from .scheduling.commands import Command, Tick
from .scheduling.decisions import Answer
from .termination import before_sigterm

logger = logging.getLogger(__name__)

MAX_TICKS = 100
"""Ticks in a row for one command: far more than any backlog, so that a fault cannot spin."""

RETRY_BEATS = 0.25
"""A beat that failed is tried again so soon: until the first one is heard, a store that came back
does not even begin to recover, and it should serve again within 3 seconds."""

RETIRED_DIGEST = retired(0).digest


class Worker:
    """One OS process that serves requests. ``current()`` is the way to it."""

    def __init__(self, backend: Backend) -> None:
        self.id = secrets.token_hex(8)
        self.label = f"{socket.gethostname()}:{os.getpid()}"
        self.backend = backend
        self.keeper = PolicyKeeper(self.call, self.forget)
        self._beats: dict[str, Beats] = {}
        self._lock = threading.Lock()
        self._heart = Heart(self)
        self._hears_sigterm = False

    def __repr__(self) -> str:
        return f"<Worker {self.id} {self.label}: {self.rosters}>"

    @property
    def beats(self) -> list[Beats]:
        return list(self._beats.values())

    @property
    def rosters(self) -> list[Roster]:
        return [beats.roster for beats in self.beats]

    def roster(self, upstream: str) -> Roster:
        """What this worker holds and waits for at an upstream; the first call starts the beat."""
        beats = self._beats.get(upstream)
        if beats is not None:
            return beats.roster
        with self._lock:
            if upstream not in self._beats:
                roster = Roster(upstream, self.id, self.backend, self._heart.tick_after)
                self.backend.listen(upstream, self.id, roster.deliver)
                self._beats[upstream] = Beats(roster)
                self._heart.start()
                if not self._hears_sigterm:
                    self._hears_sigterm = True
                    before_sigterm(self.refuse_waiters)
            return self._beats[upstream].roster

    def call(self, upstream: str, command: Command) -> Answer:
        """Carry out a command that concerns no ticket of ours, and all the work it leaves.

        Raises ``BackendDown``.
        """
        reply = self.backend.call(upstream, Stamp(), command)
        answer = reply.answer
        for _ in range(MAX_TICKS):
            for notice in reply.notices:
                if notice.worker == self.id and upstream in self._beats:
                    self._beats[upstream].roster.deliver(notice)
            if not reply.has_more:
                break
            reply = self.backend.call(upstream, Stamp(), Tick())
        return answer

    def forget(self, upstream: str) -> None:
        """Stop beating at an upstream that has no row, unless some of its calls still run."""
        beats = self._beats.get(upstream)
        if beats is not None and beats.roster.is_empty:
            self.drop(beats.roster)

    def drop(self, roster: Roster) -> None:
        """Stop beating at an upstream that is no more."""
        with self._lock:
            self._beats.pop(roster.upstream, None)
            self.backend.unlisten(roster.upstream)

    def refuse_waiters(self) -> None:
        """Send everybody away who waits here, because this process is about to stop."""
        for roster in self.rosters:
            roster.refuse_waiters("shutting_down")

    def close(self) -> None:
        """Leave for good: the store hears it now and not by our silence."""
        self._heart.stop()
        self.keeper.stop()
        for roster in self.rosters:
            with contextlib.suppress(BackendDown):
                roster.sign_off()
        self.backend.close()


class Heart:
    """The thread that beats once per interval, and ticks when a drained slot is to be handed on.

    It is not the event loop's, so that a busy loop does not look like a dead worker.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._wake = threading.Condition()
        self._ticks: list[tuple[float, int, Roster]] = []
        self._count = itertools.count()
        self._next_beat = 0.0
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._is_failing = False

    def start(self) -> None:
        """Beat at once, and from now on."""
        with self._wake:
            self._next_beat = 0.0
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="llm-throttle-beat", daemon=True
                )
                self._thread.start()
            self._wake.notify()

    def stop(self) -> None:
        with self._wake:
            self._is_stopped = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def tick_after(self, roster: Roster, delay: float) -> None:
        with self._wake:
            heapq.heappush(self._ticks, (time.monotonic() + delay, next(self._count), roster))
            self._wake.notify()

    def _run(self) -> None:
        while (due := self._next_due()) is not None:
            for roster in due:
                roster.tick()
            if time.monotonic() >= self._next_beat:
                self._next_beat = time.monotonic() + settings.BEAT
                if not self._beat():
                    self._next_beat = time.monotonic() + settings.BEAT * RETRY_BEATS

    def _next_due(self) -> set[Roster] | None:
        """Wait for the next beat or tick; the rosters to tick, None when stopped."""
        with self._wake:
            while not self._is_stopped:
                now = time.monotonic()
                first_tick = self._ticks[0][0] if self._ticks else self._next_beat
                wait = min(self._next_beat, first_tick) - now
                if wait <= 0:
                    return set(self._pop_due(now))
                self._wake.wait(wait)
        return None

    def _pop_due(self, now: float) -> list[Roster]:
        due = []
        while self._ticks and self._ticks[0][0] <= now:
            due.append(heapq.heappop(self._ticks)[2])
        return due

    def _beat(self) -> bool:
        """One beat per roster; False where the store is out of reach.

        Nothing that goes wrong in one may end the beating.
        """
        is_heard = True
        for beats in self._worker.beats:
            try:
                self._beat_one(beats)
            except BackendDown as error:
                self._note_failure(error)
                is_heard = False
                break  # the others share the store, and its time-outs
            except Exception:
                logger.exception("A beat at %s failed; going on", beats.roster.upstream)
        for beats in self._worker.beats:
            beats.give_up_unconfirmed()
            beats.roster.give_back_unused(settings.START_GRACE)
            for lease in beats.roster.leases():
                lease.end_if_overdue(time.monotonic())
        return is_heard

    def _beat_one(self, beats: Beats) -> None:
        answer, roster = beats.beat(self._worker.label), beats.roster
        if answer.digest == RETIRED_DIGEST and roster.is_empty:
            self._worker.drop(roster)
            return
        if self._is_failing:
            self._is_failing = False
            logger.warning("The store answers again")
        self._worker.keeper.look_at(roster.upstream, answer.version, answer.digest)

    def _note_failure(self, error: BackendDown) -> None:
        if not self._is_failing:
            self._is_failing = True
            logger.warning("The store does not answer (%s); trying again", error)


_current: Worker | None = None
_current_lock = threading.Lock()


def current() -> Worker:
    """The worker that this process is, made on first use."""
    global _current
    with _current_lock:
        if _current is None:
            _current = Worker(make_backend())
        return _current


def reset(*, say_goodbye: bool = True) -> None:
    """Stop being a worker; the next use makes a new one."""
    global _current
    with _current_lock:
        worker, _current = _current, None
    if worker is not None and say_goodbye:
        worker.close()


def publish_edit(*, upstream: str, deleted: bool, version: int, **kwargs: object) -> None:
    """Bring an edit into force that was just committed; where that fails, a worker finds it."""
    keeper = current().keeper
    try:
        if deleted:
            keeper.retire(upstream, version)
        else:
            keeper.publish(upstream)
    except BackendDown as error:
        logger.warning("The policy of %s waits for the store: %s", upstream, error)


def _forget_parent() -> None:
    """In a forked child: threads, connections and tickets stay the parent's."""
    global _current, _current_lock
    parent, _current, _current_lock = _current, None, threading.Lock()
    for roster in parent.rosters if parent is not None else ():
        roster.disown()


os.register_at_fork(after_in_child=_forget_parent)
atexit.register(partial(reset))
