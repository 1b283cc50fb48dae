"""This process as the store sees it: its rosters, its beat, its clean leave."""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import secrets
import socket
import threading
from multiprocessing.util import Finalize

from .backends import Backend, Stamp, make_backend
from .beats import Beats
from .disconnects import event_loop
from .exceptions import BackendDown
from .heart import Heart
from .policy_keeper import PolicyKeeper
from .roster import Roster
from .scheduling.commands import Command, Tick
from .scheduling.decisions import Answer
from .termination import before_sigterm

logger = logging.getLogger(__name__)

MAX_TICKS = 100
"""Ticks in a row for one command: far more than any backlog, so that a fault cannot spin."""


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
                hear_sigterm()
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
        """Stop beating at an upstream."""
        with self._lock:
            self._beats.pop(roster.upstream, None)
            self.backend.unlisten(roster.upstream)

    def leave(self) -> None:
        """Before this process stops: send away who waits, sign off when nobody holds a slot."""
        for roster in self.rosters:
            roster.refuse_waiters("shutting_down")
        self._heart.leave()

    def close(self) -> None:
        """Leave for good: the store hears it now and not by our silence."""
        self._heart.stop()
        self.keeper.stop()
        for roster in self.rosters:
            self.sign_off(roster)
        self.backend.close()

    def sign_off(self, roster: Roster) -> None:
        """Stop beating at an upstream, and tell the store that we do."""
        self.drop(roster)
        with contextlib.suppress(BackendDown):
            roster.sign_off()


_current: Worker | None = None
_current_lock = threading.Lock()


def current() -> Worker:
    """The worker that this process is, made on first use."""
    global _current
    with _current_lock:
        if _current is None:
            _current = Worker(make_backend())
            if multiprocessing.parent_process() is not None:  # such a child runs no ``atexit``
                Finalize(None, reset, exitpriority=0)
        return _current


def reset(*, say_goodbye: bool = True) -> None:
    """Stop being a worker; the next use makes a new one."""
    global _current
    with _current_lock:
        worker, _current = _current, None
    if worker is not None and say_goodbye:
        worker.close()


def hear_sigterm() -> None:
    """Leave in good order when this process is asked to stop.

    A silent end would cost those who start next a recovery until ``WORKER_TTL``. Exit handlers do
    not do: some servers end by the signal itself, or by ``os._exit``, which run none.
    """
    loop = event_loop()
    if loop is None:
        before_sigterm(_leave)
    else:  # the loop's thread may, as a rule, and this one may not
        loop.call_soon_threadsafe(before_sigterm, _leave)


def _leave() -> None:
    if _current is not None:
        _current.leave()


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
atexit.register(reset)
