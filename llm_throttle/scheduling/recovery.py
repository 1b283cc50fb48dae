"""Recovery: while the store may have forgotten, nothing new is granted (PROTOCOL §5)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Timing:
    """The durations that workers and store agree on, in milliseconds.

    ``recovery_ms`` 0 switches recovery off (one process cannot forget alone); ``blind_ms`` is
    how long it lasts where nobody is known who could be waited for.
    """

    beat_ms: int = 1_000
    worker_ttl_ms: int = 10_000
    recovery_ms: int = 1_500
    blind_ms: int = 3_500

    @property
    def suspect_ms(self) -> int:
        """A worker that was silent for longer is suspect."""
        return 2 * self.beat_ms


@dataclass(slots=True)
class Recovery:
    """Who is waited for, and who has told all it knows."""

    since: int
    awaited: set[str] = field(default_factory=set)
    heard: set[str] = field(default_factory=set)

    def expect(self, workers: Iterable[str]) -> None:
        self.awaited.update(workers)

    def earliest_end(self, timing: Timing) -> int:
        return self.since + (timing.recovery_ms if self.awaited else timing.blind_ms)

    def latest_end(self, timing: Timing) -> int:
        return self.since + timing.worker_ttl_ms

    def is_over(self, now: int, timing: Timing) -> bool:
        if now >= self.latest_end(timing):
            return True
        return now >= self.earliest_end(timing) and self.awaited <= self.heard
