"""The thread that keeps a worker alive in the eyes of the store."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from typing import TYPE_CHECKING

from .beats import Beats
from .conf import settings
from .exceptions import BackendDown
from .policies import retired
from .roster import Roster

if TYPE_CHECKING:
    from .worker import Worker

logger = logging.getLogger(__name__)

RETRY_BEATS = 0.25
"""A beat that failed is tried again so soon: until the first one is heard, a store that came back
does not even begin to recover, and it should serve again within 3 seconds."""

LEAVE_WITHIN_S = 0.002
"""A server that has sent its last byte ends at once: the store must have heard it by then."""

RETIRED_DIGEST = retired(0).digest


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
        self._is_leaving = False
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

    def leave(self) -> None:
        """Sign off at each upstream as soon as nothing is held there."""
        with self._wake:
            self._is_leaving = True
            self._wake.notify()

    def tick_after(self, roster: Roster, delay: float) -> None:
        with self._wake:
            heapq.heappush(self._ticks, (time.monotonic() + delay, next(self._count), roster))
            self._wake.notify()

    def _run(self) -> None:
        while (due := self._next_due()) is not None:
            for roster in due:
                roster.tick()
            if self._is_leaving:
                self._sign_off_where_done()
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
                if self._is_leaving:
                    self._wake.wait(min(wait, LEAVE_WITHIN_S))
                    return set(self._pop_due(time.monotonic()))
                self._wake.wait(wait)
        return None

    def _pop_due(self, now: float) -> list[Roster]:
        due = []
        while self._ticks and self._ticks[0][0] <= now:
            due.append(heapq.heappop(self._ticks)[2])
        return due

    def _sign_off_where_done(self) -> None:
        """In this thread, so that no beat comes after it."""
        with self._wake:
            to_tick = {roster for _, _, roster in self._ticks}
        for roster in self._worker.rosters:
            if roster.is_empty and roster not in to_tick:
                self._worker.sign_off(roster)

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
