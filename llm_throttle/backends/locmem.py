"""One process: the Scheduler itself, behind a lock."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import replace

from llm_throttle.scheduling.commands import Command
from llm_throttle.scheduling.decisions import Reply
from llm_throttle.scheduling.recovery import Timing
from llm_throttle.scheduling.scheduler import Scheduler

from .base import Backend, Stamp


class LocMemBackend(Backend):
    """The waiting rooms of this process. They cannot forget alone, so nothing ever recovers."""

    def __init__(self, timing: Timing) -> None:
        super().__init__(replace(timing, recovery_ms=0, blind_ms=0))
        self._lock = threading.Lock()
        self._rooms: defaultdict[str, Scheduler] = defaultdict(self._new_room)

    def submit(self, upstream: str, stamp: Stamp, command: Command) -> Future[Reply]:
        future: Future[Reply] = Future()
        future.set_result(self.call(upstream, stamp, command))
        return future

    def call(self, upstream: str, stamp: Stamp, command: Command) -> Reply:
        with self._lock:
            room = self._rooms[upstream]
            reply = room.apply(stamp.call(time.monotonic_ns() // 1_000_000), command)
            if room.is_abandoned:
                del self._rooms[upstream]
        return reply

    def _new_room(self) -> Scheduler:
        return Scheduler(timing=self.timing)
