"""One thread and one connection carry all commands of a process to the store.

What has gathered while a batch was under way goes as the next batch. So requests share round
trips instead of competing for connections, a request that is cancelled leaves no half-read
connection behind, sync and async callers use the same wire, and no event loop owns anything
(docs/protocol.md has the measurements).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from llm_throttle.exceptions import BackendDown
from llm_throttle.scheduling.commands import Command
from llm_throttle.scheduling.decisions import Reply

from .base import Stamp
from .wire import Prepared, Wire

MAX_BATCH = 64
"""Enough to share a round trip, few enough that one batch holds the server for ~2 ms."""


@dataclass(slots=True)
class Errand:
    """A command on its way and the future that its sender holds and never cancels."""

    upstream: str
    stamp: Stamp
    command: Command
    future: Future[Reply] = field(default_factory=Future)


class Courier:
    """Carries errands in batches, from a daemon thread that starts with the first one.

    After a failure everything is refused with ``BackendDown`` for ``breaker_s`` seconds, so that
    an outage costs one timeout and not one per request.
    """

    def __init__(
        self,
        wire: Wire,
        prepare: Callable[[Errand, str], Prepared],
        conclude: Callable[[Errand, Any, Wire], Reply],
        breaker_s: float,
    ) -> None:
        self._wire = wire
        self._prepare = prepare
        self._conclude = conclude
        self._breaker_s = breaker_s
        self._closed_until = 0.0
        self._errands: deque[Errand] = deque()
        self._has_work = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def send(self, errand: Errand) -> Future[Reply]:
        with self._has_work:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="llm-throttle-courier", daemon=True
                )
                self._thread.start()
            self._errands.append(errand)
            self._has_work.notify()
        return errand.future

    def reopen(self) -> None:
        """Try again at once: the store has answered somebody else."""
        self._closed_until = 0.0

    def close(self) -> None:
        """Carry what is left, then stop."""
        with self._has_work:
            self._is_closing = True
            self._has_work.notify()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while batch := self._next_batch():
            try:
                self._carry(batch)
            except Exception as error:
                self._fail(batch, error)
        self._wire.close()

    def _next_batch(self) -> list[Errand]:
        with self._has_work:
            while not self._errands and not self._is_closing:
                self._has_work.wait()
            count = min(len(self._errands), MAX_BATCH)
            return [self._errands.popleft() for _ in range(count)]

    def _carry(self, batch: list[Errand]) -> None:
        if time.monotonic() < self._closed_until:
            raise BackendDown("The store did not answer a moment ago.")
        try:
            self._wire.connect()
            answers = self._wire.run([self._prepare(errand, self._wire.server) for errand in batch])
        except BackendDown:  # and not a refusal of ours, or a crowd would keep the breaker closed
            self._closed_until = time.monotonic() + self._breaker_s
            raise
        for errand, answer in zip(batch, answers, strict=True):
            if isinstance(answer, BackendDown):
                self._fail([errand], answer)
            else:
                errand.future.set_result(self._conclude(errand, answer, self._wire))

    def _fail(self, batch: list[Errand], error: Exception) -> None:
        for errand in batch:
            if not errand.future.done():
                errand.future.set_exception(error)
