"""What one worker says to the store at one upstream: every word numbered, every answer heard."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future, InvalidStateError
from typing import Any

from .backends import Backend, Stamp
from .scheduling.commands import Command
from .scheduling.decisions import Answer, Notice, Reply


def settle(future: Future[Any], result: Any) -> None:
    """Answer a future that its owner may have cancelled or answered meanwhile."""
    try:
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result)
    except InvalidStateError:
        pass


class Dialogue(ABC):
    """Signs commands with the worker's id and a seq that goes up, and takes in the replies.

    Commands are signed and sent under the lock, so that the order of seqs is that of sending.
    """

    def __init__(self, upstream: str, worker: str, backend: Backend) -> None:
        self.upstream = upstream
        self.lock = threading.RLock()
        self._worker = worker
        self._backend = backend
        self._seq = 0
        self._acked = 0

    @abstractmethod
    def deliver(self, notice: Notice) -> None:
        """Take in what the store says of one of our tickets."""

    @abstractmethod
    def tick_after(self, seconds: float) -> None:
        """See to it that the store is ticked."""

    def say(self, command: Command) -> tuple[int, Future[Answer]]:
        """Send a command; its seq, and its answer when there is one."""
        answer: Future[Answer] = Future()

        def heard(reply: Future[Reply]) -> None:
            error = reply.exception()
            settle(answer, error or self._heard(stamp, reply.result()))

        with self.lock:
            stamp = self.sign()
            self._backend.submit(self.upstream, stamp, command).add_done_callback(heard)
        return stamp.seq, answer

    def ask(self, command: Command) -> Future[Answer]:
        """Send a command; its answer when there is one."""
        return self.say(command)[1]

    def sign(self) -> Stamp:
        """The stamp of what is said next."""
        with self.lock:
            self._seq += 1
            return Stamp(self._worker, self._seq, self._acked)

    def call(self, stamp: Stamp, command: Command) -> Answer:
        """Send a command that was signed before, and wait for its answer.

        Raises ``BackendDown``.
        """
        return self._heard(stamp, self._backend.call(self.upstream, stamp, command))

    def know_workers(self, workers: tuple[str, ...]) -> None:
        """Have the inboxes of these known, so that grants reach them in one step."""
        self._backend.know_workers(self.upstream, workers)

    def disown(self) -> None:
        """In a forked child: some thread of the parent may hold the lock."""
        self.lock = threading.RLock()

    def _heard(self, stamp: Stamp, reply: Reply) -> Answer:
        """Take in a reply: it was received, it brings news, it may leave work to do."""
        with self.lock:
            self._acked = max(self._acked, stamp.seq)
        for notice in reply.notices:
            if notice.worker == self._worker:
                self.deliver(notice)
        if reply.has_more:
            self.tick_after(0)
        return reply.answer
