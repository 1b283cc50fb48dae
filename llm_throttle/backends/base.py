"""What every backend offers: carry out one command, now or soon, and pass on the news."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from llm_throttle.scheduling.commands import Call, Command
from llm_throttle.scheduling.decisions import Notice, Reply
from llm_throttle.scheduling.recovery import Timing


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a worker signs a command with (``Call`` without the clock and the server)."""

    worker: str = ""
    seq: int = 0
    acked: int = 0

    def call(self, now_ms: int = 0, server: str = "") -> Call:
        return Call(now_ms, self.worker, self.seq, self.acked, server)


Listener = Callable[[Notice], None]


class Backend(ABC):
    """Where the shared state lives.

    ``submit`` and ``call`` do the same. ``submit`` never blocks: it answers a future, so that
    sync code waits for it, async code awaits it and clean-up code does neither; nobody may cancel
    that future. ``call`` uses the calling thread and a connection of its own, for beats and
    commands. Both fail with ``BackendDown`` where the store does not answer in time. The hooks
    that do nothing here are for stores outside of the process.
    """

    def __init__(self, timing: Timing) -> None:
        self.timing = timing

    @abstractmethod
    def submit(self, upstream: str, stamp: Stamp, command: Command) -> Future[Reply]: ...

    @abstractmethod
    def call(self, upstream: str, stamp: Stamp, command: Command) -> Reply: ...

    def listen(self, upstream: str, worker: str, listener: Listener) -> None:
        """Pass on the news for this worker that no answer of its own brings."""

    def unlisten(self, upstream: str) -> None:
        """No longer wait for news of an upstream."""

    def know_workers(self, upstream: str, workers: Iterable[str]) -> None:
        """Take note of the workers that are alive at an upstream."""

    def close(self) -> None:
        """Stop threads and connections."""
