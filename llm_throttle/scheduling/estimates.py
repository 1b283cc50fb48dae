"""What recent holds and grants say about waits to come. Milliseconds, integers."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_HOLDS = 64
HOLD_MEMORY_MS = 300_000
REFRESH_MS = 500
"""Sorting the holds costs more than a decision; twice a second is as fresh as it needs to be."""

MEAN_OVER = 128
"""Holds that the mean is about: enough that a few long ones do not sway it, few enough that it
follows when the calls of an hour are others than those before."""

MIN_HOLDS = 20
"""Fewer are no ground to refuse anybody on."""

MEAN_SCALE = 256

BUCKET_MS = 10_000
BUCKETS = 6
MIN_GRANTS = 5
DEFAULT_GAP_MS = 1_000


@dataclass(slots=True)
class HoldTimes:
    """The last holds of an upstream: how long slots are kept."""

    recent: list[tuple[int, int]] = field(default_factory=list)
    count: int = 0
    p10: int = 0
    p50: int = 0
    scaled_mean: int = 0
    measured: int = 0
    refreshed_at: int = 0

    @property
    def mean(self) -> int:
        return self.scaled_mean // MEAN_SCALE

    def record(self, now: int, held_ms: int) -> None:
        self.recent.append((now, held_ms))
        del self.recent[:-MAX_HOLDS]
        self.measured = min(self.measured + 1, MEAN_OVER)
        self.scaled_mean += (held_ms * MEAN_SCALE - self.scaled_mean) // self.measured
        if self.count < MIN_HOLDS or now - self.refreshed_at >= REFRESH_MS:
            self._refresh(now)

    def is_telling(self, now: int) -> bool:
        """Whether enough is known, and it is not from long ago."""
        return self.count >= MIN_HOLDS and now - self.refreshed_at < HOLD_MEMORY_MS

    def _refresh(self, now: int) -> None:
        holds = sorted(held for at, held in self.recent if at > now - HOLD_MEMORY_MS)
        self.count = len(holds)
        self.refreshed_at = now
        self.p10, self.p50 = (holds[self.count * percent // 100] for percent in (10, 50))


@dataclass(slots=True)
class GrantRate:
    """How often a tier is granted a slot: counts in six buckets of ten seconds."""

    bucket: int = 0
    first_at: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * BUCKETS)

    def record(self, now: int) -> None:
        self._turn_to(now)
        if not any(self.counts):
            self.first_at = now
        self.counts[-1] += 1

    def gap_ms(self, now: int) -> int:
        """The mean time between two grants over the last minute; a default where too few."""
        self._turn_to(now)
        grants = sum(self.counts)
        if grants < MIN_GRANTS:
            return DEFAULT_GAP_MS
        span = min(now - self.first_at, (BUCKETS - 1) * BUCKET_MS + now % BUCKET_MS)
        return max(1, span // grants)

    def _turn_to(self, now: int) -> None:
        bucket = now // BUCKET_MS
        passed = min(bucket - self.bucket, BUCKETS)
        if passed > 0:
            self.counts = self.counts[passed:] + [0] * passed
        self.bucket = bucket
